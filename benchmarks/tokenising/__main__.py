"""Tokenising as the router does it: the next turn of a conversation beside its whole text, and prompts per
second by number of workers.

Texts are Python's own reference topics. `wide` is a byte-level BPE of 16,000 tokens with the pattern of
Llama-3, trained on other topics than those sent; `demo` is the demo model's tokenizer, whose tokens are
bytes: its whole text costs hardly more than rendering it. A conversation alternates between users and
assistants, and each turn is rendered by a chat template, in processor time. Ids are compared with those of
the whole text in every turn. Throughput is through `router.bodies`: threads for prompts beyond
`long_prompt_characters`, processes for bodies beyond `large_body_bytes`. All prompts are new to them.

    python -m benchmarks.tokenising --quick
"""

import asyncio
import io
import json
import os
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pydoc_data import topics
from typing import NamedTuple

import typer
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, trainers

from benchmarks.rig.report import AsJson, Check, Quick, Report, Target, median
from deploy.demo_model import checkpoint_path
from router.bodies.reader import BodyReader
from router.bodies.tasks import PromptBounds
from router.config import RouterConfig
from router.tokenization.segment_cache import SegmentCache
from router.tokenization.tokenizer import ModelTokenizer
from router.tokenization.tokenizer_registry import TokenizerRegistry

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "<|start|>assistant\n"
)
WORDS = 150
"""words of a message"""
PROMPT_CHARACTERS, LARGE_CHARACTERS = 60_000, 200_000
"""of a prompt for a thread and for a process"""
ROOM = PromptBounds(10**9, 1)
LATE = 16
"""turn of which the target speaks"""
LATE_LIMIT, TWO_WORKERS = 0.25, 1.5
CACHE_BYTES = 32 * 1024 * 1024


def texts() -> tuple[list[str], list[str]]:
    """Return words to train with, and words to send."""
    named = sorted(topics.topics.items())
    return tuple(  # type: ignore[return-value]
        [word for _, text in named[half::2] for word in text.split(" ")] for half in (0, 1)
    )


def archive(tokenizer: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as files:
        files.writestr("tokenizer.json", tokenizer)
        files.writestr("tokenizer_config.json", json.dumps({"chat_template": TEMPLATE}))
    return packed.getvalue()


def wide(words: list[str]) -> bytes:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=16_000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(words)], trainer)
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in ("<|start|>", "<|end|>")])
    return archive(tokenizer.to_str())


def demo() -> bytes:
    return archive((checkpoint_path() / "tokenizer.json").read_text())


# Turns


class Turn(NamedTuple):
    """Processor microseconds to render and tokenise one turn, whole and with the turns before it known; its
    tokens.
    """

    whole: float
    reused: float
    tokens: int


def conversation(packed: bytes, words: list[str], turns: int, cache: SegmentCache) -> Iterator[Turn]:
    """Play one conversation. Raises RuntimeError if reuse changes an id."""
    knowing, fresh = ModelTokenizer.from_archive(packed, cache), ModelTokenizer.from_archive(packed)
    messages = []
    for at in range(2 * turns - 1):
        content = " ".join(words[at * WORDS : (at + 1) * WORDS])
        messages.append({"role": "assistant" if at % 2 else "user", "content": content})
        if at % 2 == 0:
            began = time.thread_time()
            found = knowing.encode_rendered(knowing.render(messages))
            between = time.thread_time()
            expected = fresh.encode_rendered(fresh.render(messages))
            ended = time.thread_time()
            if found != expected:
                raise RuntimeError(f"turn {at // 2 + 1} has other ids than its whole text")
            yield Turn(1e6 * (ended - between), 1e6 * (between - began), len(found))


def played(packed: bytes, words: list[str], turns: int, conversations: int) -> list[Turn]:
    """Return the median of each turn over conversations that share one cache."""
    cache, step = SegmentCache(CACHE_BYTES), 2 * turns * WORDS
    if len(words) < conversations * step:
        raise ValueError(f"{len(words)} words are too few for {conversations} conversations")
    starts = range(0, conversations * step, step)
    each = [list(conversation(packed, words[at : at + step], turns, cache)) for at in starts]
    return [
        Turn(*(median([getattr(turn, name) for turn in same]) for name in Turn._fields))
        for same in zip(*each, strict=True)
    ]


# Throughput


def bodies(words: list[str], characters: int, count: int) -> list[bytes]:
    """Return chat requests with one message each, whose text is not in another's order."""
    made = []
    for at in range(count):
        turned = words[at * 97 :: 3] + words[at * 31 :: 2] + words[::-1]
        content = " ".join(turned)[:characters]
        made.append(json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode())
    return made


async def rate(packed: bytes, requests: list[bytes], config: RouterConfig) -> float:
    """Return prompts per second through the router's threads or processes."""
    with ThreadPoolExecutor(1) as loading:
        registry = TokenizerRegistry(loading, lambda digest, reason: None, config.segment_cache_bytes)
        await registry.add("d", packed)
        tokenizer = registry.get("d")
        assert tokenizer is not None
        async with BodyReader(config, registry) as reader:

            async def tokenise(at: int) -> int:
                client = str(at)
                decoded = await reader.read(client, "chat", requests[at])
                (ids,) = await reader.ids(client, decoded, tokenizer, "d", ROOM)
                return len(ids)

            workers = max(config.large_body_processes, config.tokenizer_threads)
            await asyncio.gather(*map(tokenise, range(workers)))  # processes start and load
            began = time.perf_counter()
            await asyncio.gather(*map(tokenise, range(workers, len(requests))))
            return (len(requests) - workers) / (time.perf_counter() - began)


def workers_config(kind: str, workers: int) -> RouterConfig:
    if kind == "threads":
        return RouterConfig(tokenizer_threads=workers, segment_cache_bytes=0)
    return RouterConfig(
        large_body_processes=workers, tokenizer_threads=1, segment_cache_bytes=0, large_bodies_waiting=4096
    )


def counts() -> list[int]:
    cores = os.cpu_count() or 1
    return [count for count in (1, 2, 4, 8, 16) if count <= max(cores, 2)]


async def throughput(packed: bytes, words: list[str], quick: bool, report: Report) -> dict[str, float]:
    """Return by kind of worker how much faster two are than one."""
    gained: dict[str, float] = {}
    for kind, characters in (("threads", PROMPT_CHARACTERS), ("processes", LARGE_CHARACTERS)):
        requests = bodies(words, characters, 24 if quick else 96)
        rates: dict[int, list[float]] = {count: [] for count in counts()}
        for _ in range(3):
            for count in counts():
                rates[count].append(await rate(packed, requests, workers_config(kind, count)))
        found = {count: median(each) for count, each in rates.items()}
        shown = ", ".join(f"{count}: {each:.1f}/s ({each / found[1]:.2f}x)" for count, each in found.items())
        report.notes.append(f"new prompts of {characters:,} characters by {kind}: {shown}")
        gained[kind] = found[2] / found[1]
    return gained


def main(quick: bool = Quick, as_json: bool = AsJson, check: bool = Check) -> None:
    """Measure turns of conversations, and throughput by workers."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as in the router
    training, sent = texts()
    kinds = {"wide": wide(training), "demo": demo()}
    report = Report(
        f"turns of {WORDS} words, us to render and tokenise",
        ["tokenizer, turn", "tokens", "whole", "with the turns before known", "share"],
    )
    for name, packed in kinds.items():
        turns = played(packed, sent, LATE, 3 if quick else 6)
        shares = {at: turns[at - 1].reused / turns[at - 1].whole for at in (1, 2, 4, 8, LATE)}
        for at, share in shares.items():
            turn = turns[at - 1]
            report.add(f"{name}, {at}", int(turn.tokens), turn.whole, turn.reused, share)
        if name == "wide":
            said = f"turn {LATE} of a conversation over its whole text"
            report.targets.append(Target(said, shares[LATE], LATE_LIMIT, at_least=False))
    for kind, gain in asyncio.run(throughput(kinds["wide"], sent, quick, report)).items():
        report.targets.append(Target(f"two {kind} over one", gain, TWO_WORKERS))
    report.notes.append(f"load average {os.getloadavg()[0]:.1f}")
    report.finish(as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
