"""The whole engine on the demo model against transformers: prefix reuse, chunks, preemption,
log-probabilities; one, two and four ranks."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.batching.sampling import Sampling
from engine_adapter.config import EmbeddedConfig
from engine_adapter.embedded.engine import EmbeddedEngine
from engine_adapter.engine import EngineFailed
from engine_adapter.serving.generation import AnswerDelta

ROOT = Path(__file__).resolve().parents[3]
CHECKPOINT = ROOT / "deploy/demo_model/checkpoint"
MAX_RANKS = 4
NEW = 64
TEXT = (
    "def encode(self, text):\n    return [ord(letter) for letter in text]\n\nDie Datei wird gelesen. #include"
    " <stdio.h>\n" * 4
).encode()
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
        """Each id of the answer is the most likely one behind those before it; where two are within 1e-3
        either will do."""
        logits = self.logits([*prompt, *answer])[len(prompt) - 1 : -1]
        for row, token in zip(logits, answer, strict=True):
            runner_up, best = np.partition(row, -2)[-2:]
            assert int(row.argmax()) == token or (best - runner_up <= 1e-3 and row[token] >= runner_up)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@asynccontextmanager
async def engine_of(
    rank: int = 0, run_directory: Path | None = None, **settings: Any
) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(EmbeddedConfig(checkpoint=CHECKPOINT, **settings), rank, run_directory)
    await engine.start()
    running = asyncio.create_task(engine.run(), name=f"rank {rank} under test")
    await asyncio.sleep(0)
    try:
        yield engine
    finally:
        running.cancel()
        await asyncio.wait([running])


async def ask(
    engine: EmbeddedEngine, prompt: Sequence[int], max_tokens: int = NEW, **more: Any
) -> AnswerDelta:
    whole = AnswerDelta()
    async for delta in await engine.submit(
        GenerationRequest(prompt=list(prompt), max_tokens=max_tokens, **{"ignore_eos": True} | more)
    ):
        whole.absorb(delta)
    return whole


async def test_log_probabilities_are_those_of_transformers(oracle: Oracle) -> None:
    prompt = PROMPTS[7]
    async with engine_of() as engine:
        whole = await ask(engine, prompt, 16, sampling=Sampling(temperature=0.0, logprobs=5))
    expected = torch.log_softmax(
        torch.tensor(oracle.logits([*prompt, *whole.token_ids])[len(prompt) - 1 : -1]), dim=-1
    ).numpy()
    for row, scored in zip(expected, whole.scored, strict=True):
        assert scored.logprobs.chosen == pytest.approx(row[scored.token], abs=1e-4)
        assert [value for _, value in scored.logprobs.top] == pytest.approx(
            np.sort(row)[::-1][:5].tolist(), abs=1e-4
        )
        assert [value for _, value in scored.logprobs.top] == pytest.approx(
            [row[token] for token, _ in scored.logprobs.top], abs=1e-4
        )


async def test_an_idle_engine_sleeps(oracle: Oracle) -> None:
    async with engine_of() as engine:
        await ask(engine, PROMPTS[3], 4)
        began, used = time.monotonic(), time.process_time()
        await asyncio.sleep(1.5)
        assert (time.process_time() - used) / (time.monotonic() - began) < 0.03


async def test_a_rank_that_stops_takes_the_others_with_it_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (
        EmbeddedEngine(EmbeddedConfig(checkpoint=CHECKPOINT, ranks=2, kv_blocks=64), rank, tmp_path)
        for rank in range(2)
    )
    await asyncio.gather(first.start(), second.start())
    runs = [
        asyncio.create_task(engine.run(), name=f"rank {rank}") for rank, engine in enumerate((first, second))
    ]
    assert len((await ask(second, PROMPTS[4], 5)).token_ids) == 5
    runs[0].cancel()
    with pytest.raises(EngineFailed, match="rank 0 of this engine stopped"):
        await asyncio.wait_for(runs[1], 3)
    with pytest.raises(asyncio.CancelledError):
        await runs[0]
    (line,) = [one for one in caplog.records if "rank 1 " in one.getMessage()]
    assert line.getMessage().startswith("rank 1 ends: rank 0 of this engine stopped")
    assert not line.exc_info  # a stop is no fault: ranks that are stopped together seldom stop at one moment


class RankProcess:
    """A process that serves one rank after another; see engine_process.py."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).parents[1] / "engine_process.py")]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT)},
        )

    def order(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def read_message(self, key: str) -> Any:
        assert self.process.stdout is not None
        message = json.loads(self.process.stdout.readline())
        assert key in message, message
        return message[key]

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class RankPool:
    """Rank processes for one engine after another: a process starts for longer than a rank that it serves."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._idle = [
            RankProcess() for _ in range(MAX_RANKS)
        ]  # all at once: they import torch while the oracle is loaded

    @contextmanager
    def engine(self, ranks: int, **settings: Any) -> Iterator[list[RankProcess]]:
        """A running engine, one process per rank. Processes that were killed, or that saw the test fail, are
        not used again."""
        taken = [self._idle.pop(0) if self._idle else RankProcess() for _ in range(ranks)]
        with ExitStack() as on_failure:
            for process in taken:
                on_failure.callback(process.end)
            job = {
                "run_directory": mkdtemp(dir=self._folder),
                "settings": {"checkpoint": str(CHECKPOINT), "ranks": ranks, **settings},
            }
            report(taken, "ready", start=[{"rank": rank, **job} for rank in range(ranks)])
            yield taken
            dead = [process for process in taken if process.process.poll() is not None]
            alive = [process for process in taken if process not in dead]
            report(alive, "stopped", stop=[None] * len(alive))
            on_failure.pop_all()
        for process in dead:
            process.end()
        self._idle += alive

    def end(self) -> None:
        for process in self._idle:
            process.end()


def report(processes: Sequence[RankProcess], reply: str, **orders: Sequence[Any]) -> list[Any]:
    """Give each process its order, then hear each one's reply."""
    ((name, details),) = orders.items()
    for process, detail in zip(processes, details, strict=True):
        process.order(**{name: detail})
    return [process.read_message(reply) for process in processes]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    pool = RankPool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.end()


def answers_of(ranks: Sequence[RankProcess], turn: int = 1) -> list[dict[str, Any]]:
    """All prompts at once, spread over the ranks, the last ones first when turn is -1; the answers in the
    order of the prompts."""
    shares = [PROMPTS[rank :: len(ranks)] for rank in range(len(ranks))]
    report(ranks, "begun", ask=[{"prompts": share[::turn], "max_tokens": NEW} for share in shares])
    by_rank = [rank.read_message("answers")[::turn] for rank in ranks]
    return [by_rank[at % len(ranks)][at // len(ranks)] for at in range(len(PROMPTS))]


BUDGET = 37
"""tokens of a step: most prompts are longer"""
FEW = {1: 200, 2: 105, 4: 52}
"""KV blocks by ranks: room for the prompts of a rank, not for all of their continuations"""


def settings_for(way: str, ranks: int) -> dict[str, Any]:
    return {
        "at once": {},
        "in chunks": {"max_batch_tokens": BUDGET, "max_running": 32},
        "with few pages": {"kv_blocks": FEW[ranks], "max_batch_tokens": 128, "max_running": 24},
    }[way]


WAYS = ("at once", "in chunks", "with few pages")


@pytest.mark.parametrize(
    ("ranks", "way"),
    [
        *(pytest.param(1, way, marks=pytest.mark.slow) for way in WAYS),
        (2, "with few pages"),
        *(pytest.param(2, way, marks=pytest.mark.slow) for way in WAYS[:2]),
        *(pytest.param(4, way, marks=pytest.mark.slow) for way in WAYS),
    ],
)
def test_twenty_prompts_together_continue_for_64_tokens_as_transformers_does(
    pool: RankPool, oracle: Oracle, ranks: int, way: str
) -> None:
    with pool.engine(ranks, **settings_for(way, ranks)) as processes:
        fresh = answers_of(processes)
        work = report(processes, "work", work=[None] * ranks)
        again = answers_of(processes, turn=-1)
    for prompt, first, second in zip(PROMPTS, fresh, again, strict=True):
        for answer in (first, second):
            assert len(answer["ids"]) == NEW
            oracle.assert_greedy(prompt, answer["ids"])
    # what the way is about did happen
    assert not any(answer["cached"] for answer in fresh)
    for answers in (fresh, again):
        assert any(answer["preemptions"] for answer in answers) == (way == "with few pages")
    if way == "with few pages":
        assert any(answer["cached"] for answer in again), (
            "the prompts that come first in the second turn were the last in the first"
        )
    else:
        assert [answer["cached"] for answer in again] == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
    if way == "at once":
        assert [rank["max_sequences"] for rank in work] == [len(PROMPTS) // ranks] * ranks
    if way == "in chunks":
        assert all(rank["batch_tokens"] == BUDGET and rank["unfinished"] > 10 for rank in work)


def test_two_ranks_serve_sleep_go_over_to_an_epoch_and_fail_as_one(pool: RankPool, oracle: Oracle) -> None:
    with pool.engine(2, kv_blocks=256) as (first, second):
        # only rank 1 has work; rank 0 takes part with empty batches
        (_,) = report([second], "begun", ask=[{"prompts": [PROMPTS[9]], "max_tokens": NEW}])
        oracle.assert_greedy(PROMPTS[9], second.read_message("answers")[0]["ids"])
        # nobody has work
        for share in report([first, second], "cpu", cpu=[1.5, 1.5]):
            assert share < 0.03
        # both go over to the next epoch, one after the other says that it is ready
        assert report([first], "waits", ready_for=[1]) == [0]
        assert report([second], "waits", ready_for=[1]) == [0]
        assert report([first, second], "epoch", epoch=[None, None]) == [1, 1]
        # one is ready for the next, the other is lost
        assert report([second], "waits", ready_for=[2]) == [1]
        report([second], "begun", ask=[{"prompts": [PROMPTS[2]], "max_tokens": 2000}])
        first.process.kill()
        began = time.monotonic()
        assert "rank 1" in second.read_message("failed")
        assert time.monotonic() - began < 1.0
        second.order(epoch=None)
        assert "rank 1" in second.read_message("failed")
        first.process.wait(10)
