"""The order in which a worker joins and leaves a deployment. Time is virtual."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine_adapter.dynamo.card import WorkerCard, card_of
from engine_adapter.dynamo.membership import DynamoFailed, DynamoMembership, RequestHandler
from engine_adapter.dynamo.worker import DynamoWorker
from engine_adapter.engine import EngineFailed, RankLoad
from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.model.config import SimulatedConfig
from tests.engine_adapter.dynamo.request_builders import FakeContext, request

pytestmark = pytest.mark.looptime


class LinkLog:
    """Connection that writes down what is asked of it."""

    instance_id = 7

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.handler: RequestHandler | None = None

    async def open_publishers(self, ranks: range, block_size: int) -> None:
        self.calls.append(("publish", list(ranks), block_size))

    def publish_kv(self, rank: int, events: list[dict[str, Any]]) -> None:
        self.calls.append(("kv", rank, [event["type"] for event in events]))

    def publish_load(self, rank: int, load: RankLoad) -> None:
        self.calls.append(("load", rank, load.used_blocks))

    async def register(self, card: WorkerCard) -> None:
        self.calls.append("register")

    async def serve(self, handler: RequestHandler, model: str) -> None:
        self.calls.append(("serve", model))
        self.handler = handler

    async def ended(self) -> None:
        raise DynamoFailed("lost its lease")

    async def withdraw(self) -> None:
        self.calls.append("withdraw")

    async def close(self) -> None:
        self.calls.append("close")


class Joined:
    """A worker of two ranks with its connection. It is a member after `enter`."""

    def __init__(self, tmp_path: Path, all_idle: Any = None) -> None:
        self.engine = SimulatedEngine(SimulatedConfig(ranks=2))
        ranks = dict(enumerate(self.engine.ranks))
        card = card_of(
            self.engine.ranks[0].description, tmp_path, ranks=2, max_running=8, engine="e", worker_id=1
        )
        self.link = LinkLog()
        self.membership = DynamoMembership(self.link, DynamoWorker(ranks, {}), ranks, card, 3.0, all_idle)
        self._runs = [asyncio.create_task(rank.run(), name="a rank under test") for rank in self.engine.ranks]

    async def answer(self, **changes: Any) -> Any:
        """Begin a request, and return the rest of its answer."""
        assert self.link.handler is not None
        chunks = self.link.handler(request(**changes), FakeContext())
        await anext(chunks)
        return chunks

    async def end(self) -> None:
        for run in self._runs:
            run.cancel()
        await asyncio.wait(self._runs)


async def test_it_leaves_discovery_before_it_waits_for_its_streams(tmp_path: Path) -> None:
    joined = Joined(tmp_path)
    await joined.membership.open()
    await joined.membership.__aenter__()
    chunks = await joined.answer(max_tokens=20)
    leaving = asyncio.create_task(joined.membership.__aexit__(None, None, None), name="leaves")
    await asyncio.sleep(0.01)
    assert joined.link.calls == [("publish", [0, 1], 16), "register", ("serve", "demo"), "withdraw"]
    rest = [chunk async for chunk in chunks]
    assert rest[-1]["finish_reason"] == "length"
    await leaving
    assert joined.link.calls[-1] == "close"
    await joined.end()


async def test_it_waits_for_the_ranks_of_other_processes_and_no_longer_than_it_may(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def never_idle() -> None:
        asked.set()
        await asyncio.Event().wait()

    joined = Joined(tmp_path, never_idle)
    await joined.membership.open()
    began = asyncio.get_running_loop().time()
    async with joined.membership:
        pass
    assert asked.is_set()
    assert asyncio.get_running_loop().time() - began == pytest.approx(3.0, abs=0.01)
    assert joined.link.calls[-2:] == ["withdraw", "close"]
    await joined.end()


async def test_what_is_open_when_the_time_is_over_is_left_to_other_workers(tmp_path: Path) -> None:
    joined = Joined(tmp_path)
    await joined.membership.open()
    async with joined.membership:
        chunks = await joined.answer(max_tokens=2000)
    assert not any(rank.take_facts().load.running for rank in joined.engine.ranks)
    with pytest.raises(EngineFailed, match="time for open requests is over"):
        async for _ in chunks:
            pass
    assert joined.link.calls[-1] == "close"
    await joined.end()


async def test_facts_are_published_from_the_opening_on_by_rank(tmp_path: Path) -> None:
    joined = Joined(tmp_path)
    await joined.membership.open()
    async with joined.membership:
        async for _ in await joined.answer(dp_rank=1):
            pass
        for rank, one in enumerate(joined.engine.ranks):
            joined.membership.report(rank, one.take_facts())
    assert [call for call in joined.link.calls if call[0] in ("kv", "load")] == [
        ("load", 0, 0),
        ("kv", 1, ["stored"]),
        ("load", 1, 2),
    ]
    await joined.end()


async def test_the_end_of_the_runtime_is_an_error_with_its_reason(tmp_path: Path) -> None:
    joined = Joined(tmp_path)
    await joined.membership.open()
    async with joined.membership:
        with pytest.raises(DynamoFailed, match="lost its lease"):
            await joined.membership.failed()
    await joined.end()
