"""Long prompts are tokenised in as many threads as the settings name."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from router.bodies.reader import BodyReader
from router.bodies.tasks import PromptBounds
from router.config import RouterConfig
from router.tokenization.segment_cache import Segments
from router.tokenization.tokenizer import ModelTokenizer
from router.tokenization.tokenizer_registry import TokenizerRegistry
from tests.router.router_fixture import bpe

TEMPLATE = "{{ messages[0]['content'] }}"


class Meeting(ModelTokenizer):
    """Encodes only once as many threads encode as the barrier waits for."""

    barrier: threading.Barrier

    def encode_segments(self, segments: Segments) -> list[int]:
        self.barrier.wait(10)
        return super().encode_segments(segments)


@pytest.mark.parametrize("threads", [1, 3])
async def test_as_many_prompts_are_tokenised_at_once_as_there_are_threads(threads: int) -> None:
    tokenizer = Meeting(bpe(257), {}, TEMPLATE)
    tokenizer.barrier = threading.Barrier(threads)
    config = RouterConfig(tokenizer_threads=threads, long_prompt_characters=100)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "word " * 100}]}).encode()
    with ThreadPoolExecutor(1) as loading:
        registry = TokenizerRegistry(loading, lambda digest, reason: None)
        async with BodyReader(config, registry) as reader:

            async def ids(client: str) -> list[list[int]]:
                decoded = await reader.read(client, "chat", body)
                return await reader.ids(client, decoded, tokenizer, "d", PromptBounds(10_000, 1))

            found = await asyncio.gather(*(ids(str(at)) for at in range(2 * threads)))
    assert found == [[tokenizer.encode_bare("word " * 100)]] * (2 * threads)
