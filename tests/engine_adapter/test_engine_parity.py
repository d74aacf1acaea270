"""The whole engine on the demo model against transformers: prefix reuse, chunks, preemption, log-probabilities, and two ranks."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_adapter.config import EmbeddedConfig
from engine_adapter.embedded.answers import Delta, GenerationRequest
from engine_adapter.embedded.engine import EmbeddedEngine
from engine_adapter.embedded.sampling import Sampling
from engine_adapter.engine import EngineFailed

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "deploy/demo_model/checkpoint"
NEW = 64
TEXT = ("def encode(self, text):\n    return [ord(letter) for letter in text]\n\nDie Datei wird gelesen. #include <stdio.h>\n" * 4).encode()
PROMPTS = [list(TEXT[3 * one : 3 * one + 1 + 13 * one]) for one in range(20)]
"""20 prompts of 1 to 248 tokens"""


class Oracle:
    """transformers' own logits behind every position of a sequence: fp32 [positions, vocabulary]."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # two threads wait for each other on a shared machine
        self._model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        key = tuple(tokens)
        if key not in self._known:
            with torch.inference_mode():
                self._known[key] = self._model(torch.tensor([key])).logits[0].numpy()
        return self._known[key]

    def assert_greedy(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Each id of the answer is the most likely one behind those before it; where two are within 1e-3 either will do."""
        logits = self.logits([*prompt, *answer])[len(prompt) - 1 : -1]
        for row, token in zip(logits, answer, strict=True):
            runner_up, best = np.partition(row, -2)[-2:]
            assert int(row.argmax()) == token or (best - runner_up <= 1e-3 and row[token] >= runner_up)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@asynccontextmanager
async def engine_of(rank: int = 0, run_directory: Path | None = None, **settings: Any) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(EmbeddedConfig(checkpoint=CHECKPOINT, **settings), rank, run_directory)
    await engine.start()
    running = asyncio.create_task(engine.run(), name=f"rank {rank} under test")
    await asyncio.sleep(0)
    try:
        yield engine
    finally:
        running.cancel()
        await asyncio.wait([running])


async def ask(engine: EmbeddedEngine, prompt: Sequence[int], max_tokens: int = NEW, **more: Any) -> Delta:
    whole = Delta()
    async for delta in await engine.submit(GenerationRequest(prompt=list(prompt), max_tokens=max_tokens, **{"ignore_eos": True} | more)):
        whole.absorb(delta)
    return whole


async def ask_all(engine: EmbeddedEngine) -> list[Delta]:
    return await asyncio.gather(*(ask(engine, prompt) for prompt in PROMPTS))


@pytest.mark.parametrize(
    ("settings", "preempts"),
    [({}, False), ({"max_batch_tokens": 37, "max_running": 32}, False), ({"kv_blocks": 60, "max_batch_tokens": 128, "max_running": 24}, True)],
    ids=["at once", "in small chunks", "with few pages"],
)
async def test_twenty_prompts_together_continue_for_64_tokens_as_transformers_does(oracle: Oracle, settings: dict[str, Any], preempts: bool) -> None:
    async with engine_of(**settings) as engine:
        fresh, again = await ask_all(engine), await ask_all(engine)
    for prompt, first, second in zip(PROMPTS, fresh, again, strict=True):
        oracle.assert_greedy(prompt, first.token_ids)
        oracle.assert_greedy(prompt, second.token_ids)
        if not preempts:
            assert second.outcome is not None
            assert second.outcome.cached_tokens == (len(prompt) - 1) // 16 * 16
    assert any(answer.outcome is not None and answer.outcome.preemptions for answer in fresh) == preempts


async def test_log_probabilities_are_those_of_transformers(oracle: Oracle) -> None:
    prompt = PROMPTS[7]
    async with engine_of() as engine:
        whole = await ask(engine, prompt, 16, sampling=Sampling(temperature=0.0, logprobs=5))
    expected = torch.log_softmax(torch.tensor(oracle.logits([*prompt, *whole.token_ids])[len(prompt) - 1 : -1]), dim=-1).numpy()
    for row, scored in zip(expected, whole.scored, strict=True):
        assert scored.logprobs.chosen == pytest.approx(row[scored.token], abs=1e-4)
        assert [value for _, value in scored.logprobs.top] == pytest.approx(np.sort(row)[::-1][:5].tolist(), abs=1e-4)
        assert [value for _, value in scored.logprobs.top] == pytest.approx([row[token] for token, _ in scored.logprobs.top], abs=1e-4)


async def test_an_idle_engine_sleeps(oracle: Oracle) -> None:
    async with engine_of() as engine:
        await ask(engine, PROMPTS[3], 4)
        began, used = time.monotonic(), time.process_time()
        await asyncio.sleep(1.5)
        assert (time.process_time() - used) / (time.monotonic() - began) < 0.03


async def test_a_rank_that_stops_takes_the_others_with_it_and_says_so(tmp_path: Path) -> None:
    first, second = (EmbeddedEngine(EmbeddedConfig(checkpoint=CHECKPOINT, ranks=2, kv_blocks=64), rank, tmp_path) for rank in range(2))
    await asyncio.gather(first.start(), second.start())
    runs = [asyncio.create_task(engine.run(), name=f"rank {rank}") for rank, engine in enumerate((first, second))]
    assert len((await ask(second, PROMPTS[4], 5)).token_ids) == 5
    runs[0].cancel()
    with pytest.raises(EngineFailed, match="rank 0 of this engine stopped"):
        await asyncio.wait_for(runs[1], 3)
    with pytest.raises(asyncio.CancelledError):
        await runs[0]


class RankProcess:
    """A rank in a process of its own; see engine_process.py."""

    def __init__(self, job: Path, rank: int) -> None:
        command = [sys.executable, str(Path(__file__).with_name("engine_process.py")), str(job), str(rank)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})

    def order(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def hear(self, key: str) -> Any:
        assert self.process.stdout is not None
        message = json.loads(self.process.stdout.readline())
        assert key in message, message
        return message[key]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def two_ranks(folder: Path) -> Iterator[list[RankProcess]]:
    job = folder / "job.json"
    job.write_text(json.dumps({"checkpoint": str(CHECKPOINT), "run_directory": str(folder), "settings": {"ranks": 2, "kv_blocks": 256}}))
    with ExitStack() as stack:
        ranks = [RankProcess(job, rank) for rank in range(2)]
        for rank in ranks:
            stack.callback(rank.stop)
        for rank in ranks:
            rank.hear("ready")
        yield ranks


def test_two_ranks_serve_sleep_and_fail_as_one(tmp_path: Path, oracle: Oracle) -> None:
    """One story, so that the processes start once."""
    with two_ranks(tmp_path) as (first, second):
        # only rank 1 has work; rank 0 takes part with empty batches
        second.order(ask={"prompt": PROMPTS[9], "max_tokens": NEW})
        assert second.hear("begun")
        oracle.assert_greedy(PROMPTS[9], second.hear("ids"))
        # both have work
        for rank, prompt in ((first, PROMPTS[5]), (second, PROMPTS[12])):
            rank.order(ask={"prompt": prompt, "max_tokens": NEW})
        for rank, prompt in ((first, PROMPTS[5]), (second, PROMPTS[12])):
            assert rank.hear("begun")
            oracle.assert_greedy(prompt, rank.hear("ids"))
        # nobody has work
        for rank in (first, second):
            rank.order(cpu=1.5)
        for rank in (first, second):
            assert rank.hear("cpu") < 0.03
        # one is lost
        second.order(ask={"prompt": PROMPTS[2], "max_tokens": 2000})
        assert second.hear("begun")
        first.process.kill()
        began = time.monotonic()
        assert "rank 1" in second.hear("failed")
        assert time.monotonic() - began < 1.0
