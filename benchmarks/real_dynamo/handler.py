"""Processor time of the handler of `roost router --dynamo` alone, beside that of an empty one: with warm
caches, and with caches that something else has used in between, as the other processes of a deployment do.

It is the smallest program that shows why Roost's latency over an empty router is not smaller
(`benchmarks.real_dynamo.router`). It needs no Dynamo: workers, discovery and events are those of the tests,
and their items cost next to nothing.

    python -m benchmarks.real_dynamo.handler --quick
"""

import asyncio
import gc
import inspect
import logging
import os
import random
import statistics
import time
import typing
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import numpy as np
import typer
import uvloop

from benchmarks.rig.report import AsJson, Check, Quick, Report
from tests.router.dynamo.fake_workers import FakeCalls, FakeContext, dynamo_fleet

WORKERS, TOKENS, ITEMS = 4, 700, 8
_PAUSE_SECONDS = 0.004
"""between requests: events, log lines and periodic work have their turn, and are not counted"""
_SWEPT_BYTES = 8 << 20
"""four times the second-level cache of the machine that this was written on"""
Handler = Callable[[Any, Any], AsyncIterator[Any]]


class HandlerTime(NamedTuple):
    """Median microseconds of processor time for a request: until its worker is called, and in all."""

    called: float
    whole: float


class Times(NamedTuple):
    """Times of a handler with warm and with cold caches."""

    warm: HandlerTime
    cold: HandlerTime


class _Elsewhere:
    """Work of other processes: it leaves the caches without a line of the handler."""

    def __init__(self) -> None:
        self._memory = np.zeros(_SWEPT_BYTES, np.uint8)
        self._source = inspect.getsource(typing)

    def work(self) -> None:
        """Write to all of the memory, and run much code once."""
        self._memory[::64] += 1
        compile(self._source, "other", "exec")
        self._memory[::64] += 1


class _Workers(FakeCalls):
    """Workers whose items come one by one, each in a turn of its own. State: when one was called last, in
    processor seconds.
    """

    called_at = 0.0

    async def call(self, worker: Any, body: dict[str, Any], context: Any) -> AsyncIterator[Any]:
        self.called_at = time.thread_time()
        return self._answer()

    async def _answer(self) -> AsyncIterator[Any]:
        for at in range(ITEMS):
            await asyncio.sleep(0)
            yield {"token_ids": [at], "finish_reason": "length" if at == ITEMS - 1 else None}

    async def pass_on(self, body: Any, context: Any) -> AsyncIterator[Any]:
        """Be an empty handler."""
        async for item in await self.call(None, body, context):
            yield item

    async def seconds(self, handler: Handler, body: Any) -> tuple[float, float]:
        """Return the processor time of a request until its worker is called, and in all."""
        began = time.thread_time()
        async for _ in handler(body, FakeContext()):
            pass
        return self.called_at - began, time.thread_time() - began


async def measured(requests: int) -> dict[str, Times]:
    """Return the times of the empty handler and of Roost's, in turns."""
    chance, elsewhere, workers = random.Random(1), _Elsewhere(), _Workers()
    async with dynamo_fleet(*range(1, WORKERS + 1), calls=workers) as fleet:
        gc.collect()
        gc.freeze()  # as a router does after its start
        handlers: dict[str, Handler] = {"empty": workers.pass_on, "roost": fleet.door.handle}
        found: dict[tuple[str, bool], list[tuple[float, float]]] = {
            (name, cold): [] for name in handlers for cold in (False, True)
        }
        for _ in range(requests):
            for (name, cold), times in found.items():
                body = _body(chance)
                if cold:
                    elsewhere.work()
                else:
                    await workers.seconds(handlers[name], body)
                times.append(await workers.seconds(handlers[name], body))
                await asyncio.sleep(_PAUSE_SECONDS)
    medians = {
        key: HandlerTime(*(1e6 * statistics.median(part) for part in zip(*times, strict=True)))
        for key, times in found.items()
    }
    return {name: Times(medians[name, False], medians[name, True]) for name in handlers}


def _log_to(stream: Any) -> None:
    """Write the lines of requests to a stream, as a router does."""
    access = logging.getLogger("roost.access")
    access.handlers, access.propagate = [logging.StreamHandler(stream)], False
    access.setLevel(logging.INFO)


def _body(chance: random.Random) -> dict[str, Any]:
    return {
        "model": "tiny",
        "token_ids": chance.choices(range(16_000), k=TOKENS),
        "stop_conditions": {"max_tokens": ITEMS, "stop": None},
        "sampling_options": {"temperature": 1.0},
        "routing": {},
    }


def main(quick: bool = Quick, as_json: bool = AsJson, check: bool = Check) -> None:
    """Measure the handler without Dynamo."""
    with open(os.devnull, "w") as nowhere:
        _log_to(nowhere)
        found = uvloop.run(measured(100 if quick else 1000))
    report = Report(
        f"processor time for a request of {TOKENS} tokens and {ITEMS} items, {WORKERS} workers",
        ["handler", "caches", "until its worker is called, us", "in all, us"],
    )
    for name, times in found.items():
        for caches, took in zip(Times._fields, times, strict=True):
            report.add(name, caches, *took)
    report.finish(as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
