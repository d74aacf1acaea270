"""Persistent state of the control loop, written by leaders that may have been replaced meanwhile."""

import asyncio

import msgspec
import pytest

from bus import BusError, ClaimLost
from bus.memory import MemoryBroker, MemoryBus
from migration.control_loop.state_store import StateStore
from migration.loop_state.persistent_state import EngineMemory, LoopMemory, decoded

KEY = "migration.loop"


class SlowBus(MemoryBus):
    """Bus whose claims wait until they are released. `loses_answers`: claims are stored, but the answer is
    lost."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.through = asyncio.Event()
        self.through.set()
        self.waiting = asyncio.Event()
        self.loses_answers = False

    async def claim(self, key: str, value: bytes, revision: int | None = None) -> int:
        self.waiting.set()
        await self.through.wait()
        stored = await super().claim(key, value, revision)
        if self.loses_answers:
            raise BusError("no answer, so it may or may not be ours")
        return stored


class Leader:
    """State store of one service, which is the leader while `leads` is set."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.bus = SlowBus(broker)
        self.leads = asyncio.Event()
        self.leads.set()
        self.asked_again = asyncio.Event()
        self.state_store = StateStore(self.bus, KEY, self._until_leading)

    async def keep(self, memory: LoopMemory) -> None:
        self.state_store.memory = memory
        await self.state_store.keep()

    async def _until_leading(self) -> None:
        if not self.leads.is_set():
            self.asked_again.set()
        await self.leads.wait()


async def stored(broker: MemoryBroker) -> LoopMemory:
    claim = await MemoryBus(broker).read_claim(KEY)
    assert claim is not None
    return decoded(claim.value).memory


def discounted(discount: float) -> EngineMemory:
    return EngineMemory(worker_id=1, plan_discount=discount)


async def test_a_former_leader_that_was_slow_does_not_erase_what_its_successor_acknowledged() -> None:
    broker = MemoryBroker()
    former, successor = Leader(broker), Leader(broker)
    await former.keep(LoopMemory(engines={"e": discounted(0.9)}))
    former.bus.through.clear()
    former.bus.waiting.clear()
    writing = asyncio.create_task(former.keep(LoopMemory(engines={"e": discounted(0.1)})))
    await former.bus.waiting.wait()  # stopped between the check of the lead and the answer
    former.leads.clear()
    await successor.state_store.read()
    await successor.state_store.pause(paused=True, reason="an incident", at=5.0)
    former.bus.through.set()
    async with asyncio.timeout(5):
        await former.asked_again.wait()
    assert not writing.done()
    assert await stored(broker) == LoopMemory(
        paused=True, paused_reason="an incident", paused_at=5.0, engines={"e": discounted(0.9)}
    )
    writing.cancel()  # like all tasks of a leader, once another service leads
    await asyncio.wait([writing])
    assert (await stored(broker)).paused


async def test_what_a_predecessor_wrote_after_its_successor_read_is_merged() -> None:
    broker = MemoryBroker()
    former, successor = Leader(broker), Leader(broker)
    await former.keep(LoopMemory(engines={"a": discounted(0.9), "b": discounted(0.8)}))
    await successor.state_store.read()
    memory = (
        former.state_store.memory.with_pause(True, "an incident", 5.0)
        .with_engine("a", discounted(0.2))
        .with_engine("b", discounted(0.3))
    )
    await former.keep(memory)  # late, but acknowledged
    successor.state_store.change("b", discounted(0.5))
    await successor.state_store.keep()
    merged = await stored(broker)
    assert (merged.paused, merged.paused_reason, merged.paused_at) == (True, "an incident", 5.0)
    assert (merged.engine("a").plan_discount, merged.engine("b").plan_discount) == (
        0.2,
        0.5,
    ), "what both changed is the successor's"
    assert successor.state_store.memory == merged


async def test_a_write_of_ones_own_whose_answer_was_lost_is_no_change_of_somebody_else() -> None:
    broker = MemoryBroker()
    leader = Leader(broker)
    await leader.keep(LoopMemory(engines={"e": discounted(0.9)}))
    leader.bus.loses_answers = True
    with pytest.raises(BusError, match="no answer"):
        await leader.state_store.pause(paused=True, reason="tried", at=5.0)
    assert (await stored(broker)).paused
    leader.bus.loses_answers = False
    await leader.state_store.keep()  # the operator was told that the change has no effect
    assert not (await stored(broker)).paused


async def test_a_lost_store_is_written_anew_and_a_key_that_never_rests_is_an_error() -> None:
    broker = MemoryBroker()
    leader = Leader(broker)
    await leader.keep(LoopMemory(engines={"e": discounted(0.9)}))
    broker.set_claim(KEY, None, broker.claimed(KEY).revision)  # type: ignore[union-attr]
    await leader.state_store.check()
    await leader.state_store.keep()
    assert (await stored(broker)).engine("e").plan_discount == 0.9

    class Restless(SlowBus):
        async def claim(self, key: str, value: bytes, revision: int | None = None) -> int:
            raise ClaimLost("changed again")

    restless = StateStore(Restless(broker), KEY, _at_once)
    with pytest.raises(BusError, match="changed 5 times"):
        await restless.pause(paused=True, reason="", at=1.0)


async def test_invalid_step_times_of_layouts_are_dropped_alone_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They begin anew from the calibration. A pause by an operator is nothing that may be forgotten."""
    broker = MemoryBroker()
    memory = LoopMemory(paused=True, paused_reason="an incident", paused_at=5.0)
    content = msgspec.json.decode(
        msgspec.json.encode(memory.with_engine("a", discounted(0.4)).with_engine("b", discounted(0.3)))
    )
    content["engines"]["a"]["curves"] = {"key": "of an engine that is not one"}
    await MemoryBus(broker).claim(KEY, msgspec.json.encode(content))
    leader = Leader(broker)
    await leader.state_store.read()
    found = leader.state_store.memory
    assert (found.paused, found.paused_reason, found.paused_at) == (True, "an incident", 5.0)
    assert found.engine("a") == discounted(0.4)
    assert found.engine("b") == discounted(0.3)
    (said,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert "step times of the layouts of engine a" in said


async def _at_once() -> None:
    """Return at once: no other service can be the leader."""
