"""Persistent state of the control loop, written by leaders that may have been replaced meanwhile."""

import asyncio

import msgspec
import pytest

from bus import BusError, ClaimLost
from bus.memory import MemoryBroker, MemoryBus
from migration.control_loop.state_store import StateStore
from migration.loop_state.persistent_state import EngineMemory, LoopMemory

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
        self.remembering = StateStore(self.bus, KEY, self._standing)

    async def _standing(self) -> None:
        if not self.leads.is_set():
            self.asked_again.set()
        await self.leads.wait()


async def stored(broker: MemoryBroker) -> LoopMemory:
    claim = await MemoryBus(broker).read_claim(KEY)
    assert claim is not None
    return msgspec.json.decode(claim.value, type=LoopMemory)


def trusting(trust: float) -> EngineMemory:
    return EngineMemory(worker_id=1, trust=trust)


async def test_a_former_leader_that_was_slow_does_not_erase_what_its_successor_acknowledged() -> None:
    broker = MemoryBroker()
    former, successor = Leader(broker), Leader(broker)
    await former.remembering.keep(LoopMemory(engines={"e": trusting(0.9)}))
    former.bus.through.clear()
    former.bus.waiting.clear()
    writing = asyncio.create_task(former.remembering.keep(LoopMemory(engines={"e": trusting(0.1)})))
    await former.bus.waiting.wait()  # stopped between the check of the lead and the answer
    former.leads.clear()
    await successor.remembering.read()
    await successor.remembering.steer(paused=True, reason="an incident", at=5.0)
    former.bus.through.set()
    async with asyncio.timeout(5):
        await former.asked_again.wait()
    assert not writing.done()
    assert await stored(broker) == LoopMemory(
        paused=True, paused_reason="an incident", paused_at=5.0, engines={"e": trusting(0.9)}
    )
    writing.cancel()  # like all tasks of a leader, once another service leads
    await asyncio.wait([writing])
    assert (await stored(broker)).paused


async def test_what_a_predecessor_wrote_after_its_successor_read_is_merged() -> None:
    broker = MemoryBroker()
    former, successor = Leader(broker), Leader(broker)
    await former.remembering.keep(LoopMemory(engines={"a": trusting(0.9), "b": trusting(0.8)}))
    await successor.remembering.read()
    memory = (
        former.remembering.memory.steered(True, "an incident", 5.0)
        .remembering("a", trusting(0.2))
        .remembering("b", trusting(0.3))
    )
    await former.remembering.keep(memory)  # late, but acknowledged
    await successor.remembering.keep(successor.remembering.memory.remembering("b", trusting(0.5)))
    merged = await stored(broker)
    assert (merged.paused, merged.paused_reason, merged.paused_at) == (True, "an incident", 5.0)
    assert (merged.engine("a").trust, merged.engine("b").trust) == (
        0.2,
        0.5,
    ), "what both changed is the successor's"
    assert successor.remembering.memory == merged


async def test_a_write_of_ones_own_whose_answer_was_lost_is_no_change_of_somebody_else() -> None:
    broker = MemoryBroker()
    leader = Leader(broker)
    await leader.remembering.keep(LoopMemory(engines={"e": trusting(0.9)}))
    leader.bus.loses_answers = True
    with pytest.raises(BusError, match="no answer"):
        await leader.remembering.steer(paused=True, reason="tried", at=5.0)
    assert (await stored(broker)).paused
    leader.bus.loses_answers = False
    await leader.remembering.keep()  # the operator was told that the change has no effect
    assert not (await stored(broker)).paused


async def test_a_lost_store_is_written_anew_and_a_key_that_never_rests_is_an_error() -> None:
    broker = MemoryBroker()
    leader = Leader(broker)
    await leader.remembering.keep(LoopMemory(engines={"e": trusting(0.9)}))
    broker.set_claim(KEY, None, broker.claimed(KEY).revision)  # type: ignore[union-attr]
    await leader.remembering.check()
    await leader.remembering.keep()
    assert (await stored(broker)).engine("e").trust == 0.9

    class Restless(SlowBus):
        async def claim(self, key: str, value: bytes, revision: int | None = None) -> int:
            raise ClaimLost("changed again")

    restless = StateStore(Restless(broker), KEY, _at_once)
    with pytest.raises(BusError, match="changed 5 times"):
        await restless.steer(paused=True, reason="", at=1.0)


async def _at_once() -> None:
    """Return at once: no other service can be the leader."""
