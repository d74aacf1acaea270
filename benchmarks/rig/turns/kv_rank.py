"""A rank that holds long answers open and keeps prefixes as ordered, answers short requests beside them, and
writes a diary of all.

    python -m benchmarks.rig.turns.kv_rank JOB RANK

JOB is as for `flip_rank`. After `ready`, each line of standard input is an `Order`, answered with `done` once
it is carried out. When standard input ends, the rank stops.
"""

import asyncio
import sys
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.rig.engine_ranks import DONE
from benchmarks.rig.flip_rank import Diary, Job, serving
from deploy.process import alongside
from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.embedded.engine import EmbeddedEngine
from engine_adapter.engine import RankFacts, RankLoad
from engine_adapter.serving.generation import AnswerStream
from fleet.blocks import BLOCK_SIZE

PROBES_PER_SECOND = 3.0
PROBE_PROMPT, PROBE_NEW = 8, 4
"""tokens: less than a page, so that nothing of it is kept"""
KEPT_PAGES = 16
"""pages of one kept prefix, at most"""
LOOK_SECONDS = 0.02


class Hold(msgspec.Struct, frozen=True, tag=True):
    """Give up all long answers, and begin new ones, each with a random prompt of its own."""

    answers: int
    prompt: int
    """tokens"""
    new: int
    """tokens of an answer"""


class Keep(msgspec.Struct, frozen=True, tag=True):
    """Compute random prefixes until so many KV pages are in use, those of open answers included. A rank that
    owns no requests at present computes none."""

    pages: int


class Save(msgspec.Struct, frozen=True, tag=True):
    """Write the diary to RANK.npz beside JOB. All ranks do so before the first one stops, because the others
    end with it."""


Order = Hold | Keep | Save


@dataclass(slots=True)
class KvDiary(Diary):
    """Diary with short requests, by their ends."""

    asked: list[float] = field(default_factory=list)
    """time of a short request"""
    first: list[float] = field(default_factory=list)
    """seconds until its first token"""


class MeteredEngine(EmbeddedEngine):
    """Engine that keeps the load that its agent reported last."""

    load: RankLoad | None = None

    def take_facts(self) -> RankFacts:
        facts = super().take_facts()
        self.load = facts.load
        return facts


class Requests:
    """Requests of one rank."""

    def __init__(self, engine: MeteredEngine, diary: KvDiary, rank: int, tasks: asyncio.TaskGroup) -> None:
        self._engine = engine
        self._diary = diary
        self._rank = rank
        self._dice = np.random.default_rng(rank)
        self._tasks = tasks
        self._numbers = count()
        self._held: list[AnswerStream] = []
        self._reading: set[asyncio.Task[None]] = set()

    async def carry_out(self, order: Hold | Keep) -> None:
        """Return once the order is carried out."""
        if isinstance(order, Hold):
            await self._hold(order)
        else:
            await self._keep(order.pages)

    async def probe(self) -> None:
        """Ask short things at random moments, forever."""
        while True:
            await asyncio.sleep(self._dice.exponential(1 / PROBES_PER_SECOND))
            self._read_on(self._ask())

    def stop(self) -> None:
        """Read no more answers."""
        for task in self._reading:
            task.cancel()

    async def _hold(self, order: Hold) -> None:
        for one in self._held:
            one.cancel()
        self._held = [await self._submit(order.prompt, order.new) for _ in range(order.answers)]
        begun = [asyncio.Event() for _ in self._held]
        for one, event in zip(self._held, begun, strict=True):
            self._read_on(self._read(one, event))
        for event in begun:
            await event.wait()

    async def _read(self, answer: AnswerStream, begun: asyncio.Event) -> None:
        number, last = next(self._numbers), 0.0
        async for _ in answer:
            last = self._diary.note_token(number, last)
            begun.set()

    async def _keep(self, pages: int) -> None:
        if self._engine.placement.attention == "tp" and self._rank:
            return
        while (used := await self._used()) < pages:
            lacking = min(pages - used, KEPT_PAGES)
            await (await self._submit(lacking * BLOCK_SIZE, 1)).rest()

    async def _used(self) -> int:
        """Pages in use now."""
        self._engine.load = None
        while self._engine.load is None:  # noqa: ASYNC110  # the agent asks for it at intervals
            await asyncio.sleep(LOOK_SECONDS)
        return self._engine.load.used_blocks

    async def _ask(self) -> None:
        asked, first = time.monotonic(), 0.0
        async for _ in await self._submit(PROBE_PROMPT, PROBE_NEW):
            first = first or time.monotonic() - asked
        self._diary.asked.append(asked)
        self._diary.first.append(first)

    def _read_on(self, reading: Coroutine[Any, Any, None]) -> None:
        task = self._tasks.create_task(reading)
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)

    async def _submit(self, prompt: int, new: int) -> AnswerStream:
        tokens = self._dice.integers(32, 127, prompt).tolist()
        return await self._engine.submit(GenerationRequest(prompt=tokens, max_tokens=new, ignore_eos=True))


async def serve(job: Job, folder: Path, rank: int) -> None:
    """Carry out orders until standard input ends."""
    diary = KvDiary()
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(serving(job, folder, rank, diary, MeteredEngine))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        requests = Requests(engine, diary, rank, tasks)
        await stack.enter_async_context(alongside(requests.probe(), f"short requests of rank {rank}"))
        _say(b"ready\n")
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = msgspec.json.decode(line, type=Order)
            if isinstance(order, Save):
                diary.save(folder / f"{rank}.npz")
            else:
                await requests.carry_out(order)
            _say(DONE)
        requests.stop()


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.flush()


if __name__ == "__main__":
    path = Path(sys.argv[1])
    asyncio.run(serve(msgspec.json.decode(path.read_bytes(), type=Job), path.parent, int(sys.argv[2])))
