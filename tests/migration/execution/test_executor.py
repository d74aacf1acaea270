"""Execution of plans over the memory bus, in virtual time, with ranks that follow the protocol and some that
do not."""

import asyncio
import signal
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from bus import BusError, Declined, Message
from bus.config import BusConfig
from bus.memory import MemoryBroker, MemoryBus
from bus.nats import NatsBus
from fleet.experts import ExpertId
from fleet.facts.engines import EngineLeft
from fleet.facts.migrations import MigrationAborted, MigrationCommitted, MigrationPlanned, MigrationStaged
from fleet.handover import ProtocolState, RankState
from fleet.placement import Placement
from fleet.requests.handovers import AbortHandover, CommitHandover, ProposeHandover
from fleet.requests.plans import ApplyPlan, MigrateExpert, RollBack
from migration.model.plan import replay
from tests.migration.builders import joined
from tests.migration.executor_fixture import (
    CONFIG,
    FIRST,
    SUBJECTS,
    apply,
    ask,
    at_rest,
    engine,
    in_words,
    key,
    leading,
    log,
    replicating,
)
from tests.migration.fake_ranks import Ranks

ONE = ["Planned", "Staged", "1@1", "Committed"]


@pytest.mark.looptime
async def test_a_plan_of_three_handovers_is_carried_out_and_told_in_order() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus) as service:
        accepted = await apply(bus, replicating())
        assert (accepted.handovers, accepted.copies, accepted.bytes) == (3, 3, 3 * 384)
        assert accepted.what[0] == "layer 0: expert 0 from rank 0 to rank 1"
        await asyncio.sleep(5)
        assert ranks.served == [0, 1, 2, 3]
        assert ranks.placement == replay(FIRST, replicating())[-1]
        assert service.placements.engines()["a"].placement == ranks.placement
        assert at_rest(broker, ranks)
        entries = await log(bus)
        assert in_words(entries) == ["1@0", *ONE, "Staged", "1@2", "Committed", "Staged", "1@3", "Committed"]
        assert [entry.last for entry in entries if isinstance(entry, MigrationCommitted)] == [
            False,
            False,
            True,
        ]
        assert all(len(entry.pulls) == 2 for entry in entries if isinstance(entry, MigrationStaged))
        exposed = service.metrics.exposition().decode()
        assert 'handovers_total{fault="",outcome="committed"} 3.0' in exposed
        assert 'handovers_pending{engine="a"} 0.0' in exposed
        assert 'cells{engine="a",state="free"} 8.0' in exposed
        assert "roost_migration_leader 1.0" in exposed


@pytest.mark.looptime
async def test_one_expert_is_brought_to_a_rank_on_request_and_brought_back_by_a_rollback() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus):
        await ask(bus, MigrateExpert(engine="a", layer=1, expert=2, rank=1, move=True))
        await asyncio.sleep(3)
        assert ranks.placement.holders(ExpertId(1, 2)) == [1]
        await ask(bus, RollBack(engine="a"))
        await asyncio.sleep(3)
        assert ranks.served == [0, 1, 2]
        assert (ranks.placement.replicas_on_rank == FIRST.replicas_on_rank).all()
        with pytest.raises(Declined, match="no plan 'that' of which anything was committed"):
            await ask(bus, RollBack(engine="a", plan="that"))


@pytest.mark.looptime
async def test_a_plan_for_another_epoch_is_refused_and_so_is_nonsense() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus):
        await apply(bus, replicating(handovers=2))
        await asyncio.sleep(3)
        with pytest.raises(Declined, match="plan is for epoch 0, the engine serves 2; plan anew"):
            await apply(bus, replicating())
        with pytest.raises(Declined, match="no engine 'b' with experts is present; there are: a"):
            await apply(bus, replicating(), "b")
        with pytest.raises(Declined, match="no request for this subject"):
            await ask(bus, EngineLeft(engine="a", worker_id=1, reason="x"))
        with pytest.raises(Declined, match="this is no plan"):
            await ask(bus, ApplyPlan(engine="a", plan=b"{}"))
        assert in_words(await log(bus))[-1] == "Committed"
        assert ranks.served == [0, 1, 2]


@pytest.mark.looptime
async def test_a_second_plan_for_an_engine_is_refused_by_naming_the_first() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus):
        ranks.stage_seconds = 1.0
        accepted = await apply(bus, replicating())
        with pytest.raises(
            Declined, match=rf"engine 'a' is carrying out plan {accepted.plan} \(handover 1 of 3\)"
        ):
            await apply(bus, replicating())
        both = await asyncio.gather(
            apply(bus, replicating()), apply(bus, replicating()), return_exceptions=True
        )
        assert all(isinstance(one, Declined) for one in both)


@pytest.mark.looptime
async def test_of_two_plans_at_the_same_time_one_is_taken() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus):
        both = await asyncio.gather(
            apply(bus, replicating()), apply(bus, replicating()), return_exceptions=True
        )
        assert sum(isinstance(one, Declined) for one in both) == 1
        await asyncio.sleep(5)
        assert ranks.served == [0, 1, 2, 3]
        assert in_words(await log(bus)).count("Planned") == 1


@pytest.mark.looptime
async def test_several_engines_are_conducted_at_once() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(engine(broker, worker_id, name))
            for worker_id, name in enumerate("abc", start=1)
        ]
        await stack.enter_async_context(leading(bus))
        for ranks, name in zip(engines, "abc", strict=True):
            ranks.stage_seconds = 1.5
            await apply(bus, replicating(), name)
        await asyncio.sleep(6)
        assert [ranks.served for ranks in engines] == [[0, 1, 2, 3]] * 3


@pytest.mark.looptime
async def test_a_rank_that_cannot_stage_ends_the_plan_and_the_next_one_is_taken() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus) as service:
        ranks.fails[1] = "rank 0 sent other bytes than it promised", "checksum"
        first = await apply(bus, replicating())
        await asyncio.sleep(3)
        (aborted,) = [entry for entry in await log(bus) if isinstance(entry, MigrationAborted)]
        assert (aborted.reason, aborted.fault, aborted.rank, aborted.epoch) == (
            "rank 0 sent other bytes than it promised",
            "checksum",
            1,
            1,
        )
        assert ranks.served == [0]
        assert at_rest(broker, ranks)
        assert (
            'handovers_total{fault="checksum",outcome="aborted"} 1.0' in service.metrics.exposition().decode()
        )
        ranks.fails.clear()
        second = await apply(bus, replicating())
        assert second.plan == f"{first.plan}-2"
        await asyncio.sleep(3)
        assert ranks.served == [0, 1, 2, 3]


@pytest.mark.looptime
async def test_a_silent_rank_is_waited_for_until_the_deadline_and_then_told_of_the_abort_until_it_hears() -> (
    None
):
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus):
        ranks.stage_seconds = 0.5
        await apply(bus, replicating())
        await ranks.commands_to(ProposeHandover)
        ranks.silent.add(1)
        await asyncio.sleep(20)
        assert "Aborted" not in in_words(await log(bus))
        assert ranks.standing[0].state is RankState.SERVING, "whoever hears the abort obeys"
        ranks.silent.clear()
        await asyncio.sleep(2)
        (aborted,) = [entry for entry in await log(bus) if isinstance(entry, MigrationAborted)]
        assert aborted.fault == "overdue"
        assert "did not" in aborted.reason
        assert at_rest(broker, ranks)


@pytest.mark.looptime
async def test_engines_that_take_part_in_no_handovers_are_refused_with_their_own_words() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus):
        ranks.unable = "this engine's experts cannot be moved"
        with pytest.raises(
            Declined, match="rank 0 takes part in no handover: this engine's experts cannot be moved"
        ):
            await apply(bus, replicating())
        ranks.unable = ""
        ranks.silent = {0, 1}
        with pytest.raises(Declined, match="rank 0 does not answer"):
            await apply(bus, replicating())
        assert in_words(await log(bus)) == ["1@0"]


@pytest.mark.looptime
async def test_what_ranks_publish_may_all_be_lost_and_answers_tell() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus):
        ranks.mute = True
        await apply(bus, replicating())
        await asyncio.sleep(10)
        assert ranks.served == [0, 1, 2, 3]


@pytest.mark.looptime
async def test_a_handover_waits_for_cells_that_drain_and_what_has_no_room_at_all_is_refused() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus) as service:
        ranks.free, ranks.draining = 0, 1
        await apply(bus, replicating())
        await asyncio.sleep(1.5)
        assert not any(isinstance(command, ProposeHandover) for _, command in ranks.commands)
        exposed = service.metrics.exposition().decode()
        for words in (
            'handovers_pending{engine="a"} 3.0',
            'layers_pending{engine="a"} 1.0',
            'state="draining"} 2.0',
        ):
            assert words in exposed
        assert 'plan_age_seconds{engine="a"} 0.0' not in exposed
        ranks.free, ranks.draining = 1, 0
        await asyncio.sleep(3)
        assert ranks.served == [0, 1, 2, 3]
        ranks.free = 0
        with pytest.raises(
            Declined, match="rank 0 has no free cell to bring an expert into: 0 are in quarantine, 0 drain"
        ):
            await ask(bus, MigrateExpert(engine="a", layer=1, expert=0, rank=1))


# Engine loss


@pytest.mark.looptime
@pytest.mark.parametrize("last_command", [ProposeHandover, CommitHandover, AbortHandover])
async def test_an_engine_that_dies_in_any_phase_ends_the_plan_and_its_next_life_begins_where_the_log_says(
    last_command: type[Message],
) -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus) as service:
        if last_command is AbortHandover:
            ranks.fails[0] = "no room", "room"
        await apply(bus, replicating())
        await ranks.commands_to(last_command)
        ranks.kill()
        await asyncio.sleep(2)
        decided = last_command is CommitHandover
        second = (
            Placement(replay(FIRST, replicating())[0].expert_of_slot, experts=8, ranks=2, epoch=1)
            if decided
            else FIRST
        )
        async with engine(broker, 2, placement=second) as reborn:
            await asyncio.sleep(3)
            entries = await log(bus)
            assert "Aborted" in in_words(entries)
            assert ("1@1" in in_words(entries)) == decided
            assert sum(isinstance(entry, MigrationAborted) for entry in entries) == 1
            assert service.placements.engines()["a"].epoch == second.epoch
            standing = key(broker)
            assert standing is not None
            assert standing.state == "idle"
            await ask(bus, MigrateExpert(engine="a", layer=1, expert=0, rank=1))
            await asyncio.sleep(3)
            assert reborn.served == [second.epoch, second.epoch + 1]


@pytest.mark.looptime
async def test_an_engine_that_left_ends_its_plan() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus) as service:
        ranks.stage_seconds = 1.0
        await apply(bus, replicating())
        await asyncio.sleep(0.3)
        await bus.record(SUBJECTS.membership("a"), EngineLeft(engine="a", worker_id=1, reason="stopped"))
        await asyncio.sleep(2)
        (aborted,) = [entry for entry in await log(bus) if isinstance(entry, MigrationAborted)]
        assert aborted.fault == "engine-gone"
        assert b'{engine="a"' not in service.metrics.exposition()


@pytest.mark.looptime
async def test_an_engine_that_falls_silent_forever_ends_its_plan_but_never_a_decided_one() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus) as service:
        await asyncio.sleep(2)
        ranks.stage_seconds = 1.0
        await apply(bus, replicating())
        await asyncio.sleep(0.5)
        ranks.kill()
        await asyncio.sleep(15)
        (aborted,) = [entry for entry in await log(bus) if isinstance(entry, MigrationAborted)]
        assert aborted.fault == "overdue"
    broker, bus = MemoryBroker(), None
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus) as service:
        await asyncio.sleep(2)
        await apply(bus, replicating())
        await ranks.commands_to(CommitHandover)
        ranks.alive = False
        await asyncio.sleep(60)
        assert in_words(await log(bus))[-1] == "Staged"
        assert 'commit_overdue{engine="a"} 1.0' in service.metrics.exposition().decode()
        ranks.alive = True
        await asyncio.sleep(5)
        assert ranks.served == [0, 1, 2, 3]
        assert 'commit_overdue{engine="a"} 0.0' in service.metrics.exposition().decode()


# The bus


@pytest.mark.looptime
@pytest.mark.parametrize("begins", [0.02, 0.08, 0.3])
async def test_while_the_bus_is_away_nothing_is_commanded_and_afterwards_the_plan_goes_on(
    begins: float,
) -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus):
        ranks.stage_seconds = 0.05
        await apply(bus, replicating())
        await asyncio.sleep(begins)
        broker.reachable = False
        await asyncio.sleep(1.5)
        commands = len(ranks.commands)
        await asyncio.sleep(40)
        assert len(ranks.commands) == commands
        broker.reachable = True
        await asyncio.sleep(15)
        assert at_rest(broker, ranks)
        entries = await log(bus)
        assert in_words(entries)[-1] in ("Committed", "Aborted")
        assert len(set(map(str, entries))) == len(entries)
        assert in_words(entries).count("Planned") == 1


@pytest.mark.looptime
async def test_a_server_that_lost_its_store_is_outbid_by_no_rank_and_what_ranks_have_open_is_ended() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus):
        ranks.standing = [
            ProtocolState(RankState.STAGED, 0, token=900, handover=70, concluded=69),
            ProtocolState(RankState.SERVING, 0, token=901, concluded=69),
        ]
        await apply(bus, replicating())
        await asyncio.sleep(8)
        assert ranks.served == [0, 1, 2, 3]
        assert all(standing.token == 902 and standing.concluded == 73 for standing in ranks.standing)
        standing = key(broker)
        assert standing is not None
        assert standing.token == 902


@pytest.mark.looptime
async def test_ranks_that_serve_what_the_log_does_not_know_end_the_plan_with_what_to_do() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus):
        ranks.standing = [standing._replace(served=5) for standing in ranks.standing]
        await apply(bus, replicating())
        await asyncio.sleep(3)
        (aborted,) = [entry for entry in await log(bus) if isinstance(entry, MigrationAborted)]
        assert aborted.reason == "rank 0 serves epoch 5, but the log says 0: restart its engine"


# Several services


@pytest.mark.looptime
async def test_a_second_service_stands_by_and_takes_over_when_the_first_ends() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks:
        async with leading(MemoryBus(broker)) as first:
            async with leading(bus) as second:
                assert b"roost_migration_leader 1.0" in first.metrics.exposition()
                assert b"roost_migration_leader 0.0" in second.metrics.exposition()
                await apply(bus, replicating(handovers=1))
                await asyncio.sleep(2)
                assert ranks.served == [0, 1]
        async with leading(bus) as second:
            await ask(bus, MigrateExpert(engine="a", layer=1, expert=0, rank=1))
            await asyncio.sleep(2)
            assert ranks.served == [0, 1, 2]
            assert b"roost_migration_leader 1.0" in second.metrics.exposition()
            assert in_words(await log(bus)).count("1@0") == 1


@pytest.mark.looptime
async def test_a_service_that_was_stopped_for_long_finds_itself_replaced_and_commands_nothing() -> None:
    broker = MemoryBroker()
    stopped = Stoppable(broker)
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(stopped) as first, leading(bus):
        ranks.stage_seconds = 0.3
        await apply(bus, replicating())
        await asyncio.sleep(0.1)
        stopped.running.clear()
        await asyncio.sleep(10)
        tokens = {
            command.token
            for _, command in ranks.commands
            if isinstance(command, ProposeHandover | CommitHandover | AbortHandover)
        }
        stopped.running.set()
        await asyncio.sleep(10)
        assert b"roost_migration_leader 0.0" in first.metrics.exposition()
        assert b'{engine="a"' not in first.metrics.exposition(), "it knows of them no more"
        later = [
            command.token
            for _, command in ranks.commands
            if isinstance(command, ProposeHandover | CommitHandover | AbortHandover)
        ]
        assert set(later) == tokens
        assert at_rest(broker, ranks)
        assert ranks.served == [0]
        assert in_words(await log(bus))[:3] == [
            "1@0",
            "Planned",
            "Aborted",
        ], "what the first was just writing when it was stopped may come late"


class Stoppable(MemoryBus):
    """Client whose process is stopped while `running` is not set: its calls wait."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.running = asyncio.Event()
        self.running.set()

    async def _wait_connected(self, seconds: float | None) -> None:
        await self.running.wait()
        await super()._wait_connected(seconds)


@pytest.mark.looptime
async def test_history_is_found_in_the_log_again() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker):
        async with leading(bus) as service:
            accepted = await apply(bus, replicating())
            await asyncio.sleep(5)
        async with leading(bus) as service:
            history = service.demand._engines[1].history
            assert (history.plan, history.epoch) == (accepted.plan, 3)
            assert (history.base == FIRST.expert_of_slot).all()
            assert (history.moved[0, :3] > float("-inf")).all()


# Stored plans


@pytest.mark.looptime
async def test_a_plan_is_gone_on_with_though_the_join_of_its_engine_was_pushed_out_of_the_log() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)

    async def describe(request: Message) -> Message:
        return joined(1, "a", ranks.placement)

    async with engine(broker) as ranks, bus.serve(SUBJECTS.describe_engine("a", 1), describe):
        async with leading(bus):
            await apply(bus, replicating())
        broker._log = [entry for entry in broker._log if entry.subject != SUBJECTS.membership("a")]
        async with leading(bus):
            await asyncio.sleep(10)
            assert ranks.served == [0, 1, 2, 3]
            assert in_words(await log(bus))[-1] == "Committed"
            assert at_rest(broker, ranks)


@pytest.mark.looptime
async def test_a_plan_is_stored_while_it_is_under_way_and_no_longer() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, engine(broker, 2, "b") as others, leading(bus):
        tokenizer = await bus.put_blob(b"tokenizer")
        ranks.stage_seconds, others.stage_seconds = 0.05, 0.5
        await asyncio.gather(apply(bus, replicating()), apply(bus, replicating(), "b"))
        assert len(broker.blobs) == 3, "equal plans of two engines are stored twice"
        await asyncio.sleep(0.8)
        assert ranks.served == [0, 1, 2, 3]
        assert others.served != [0, 1, 2, 3]
        assert len(broker.blobs) == 2
        await asyncio.sleep(5)
        assert others.served == [0, 1, 2, 3]
        assert set(broker.blobs) == {tokenizer}
        await ask(bus, RollBack(engine="a"))
        await asyncio.sleep(5)
        assert (ranks.placement.replicas_on_rank == FIRST.replicas_on_rank).all(), (
            "what is over can be rolled back nevertheless"
        )
        assert set(broker.blobs) == {tokenizer}


@pytest.mark.looptime
async def test_plans_that_a_predecessor_left_stored_are_dropped_and_one_that_is_under_way_goes_on() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks:
        left = []
        async with leading(bus):
            for expert in (0, 1):
                await ask(bus, MigrateExpert(engine="a", layer=1, expert=expert, rank=1))
                left += [(digest, content) for digest, content in broker.blobs.items()]
                await asyncio.sleep(5)
            assert not broker.blobs
            broker.blobs.update(left)
            ranks.stage_seconds = 1.0
            await ask(bus, RollBack(engine="a"))
        async with leading(bus):
            await asyncio.sleep(0.1)
            assert not at_rest(broker, ranks)
            assert len(broker.blobs) == 3, "first things first"
            await asyncio.sleep(10)
            assert ranks.served == [0, 1, 2, 3]
            assert not broker.blobs
        broker.blobs.update(left)
        async with leading(bus):
            await asyncio.sleep(1)
            assert not broker.blobs


@pytest.mark.looptime
async def test_a_store_without_room_holds_no_plan_up(caplog: pytest.LogCaptureFixture) -> None:
    broker = MemoryBroker(config=BusConfig(blobs_bytes=100))
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus):
        await apply(bus, replicating())
        await asyncio.sleep(5)
        assert ranks.served == [0, 1, 2, 3]
        assert "the blob store is full" in caplog.text
        assert [entry.blob for entry in await log(bus) if isinstance(entry, MigrationPlanned)] == [""]


class Grudging(MemoryBus):
    """Bus that cannot delete anything while `grudges` is set."""

    grudges = True

    async def drop_blob(self, digest: str) -> None:
        if self.grudges:
            raise BusError("no answer in time")
        await super().drop_blob(digest)


@pytest.mark.looptime
async def test_what_cannot_be_dropped_is_dropped_when_the_next_plan_is_over_and_holds_nothing_up() -> None:
    broker = MemoryBroker()
    bus = Grudging(broker)
    async with engine(broker) as ranks, leading(bus):
        for expert in (0, 1):
            assert len(broker.blobs) == expert
            await ask(bus, MigrateExpert(engine="a", layer=1, expert=expert, rank=1))
            bus.grudges = expert == 0
            await asyncio.sleep(5)
        assert ranks.served == [0, 1, 2]
        assert not broker.blobs


# Lost answers of the store


class Forgetful(MemoryBus):
    """Bus that loses the answer to every nth write. Of these writes, every second one arrives."""

    def __init__(self, broker: MemoryBroker, every: int) -> None:
        super().__init__(broker)
        self.every, self.writes = every, 0

    async def record(self, subject: str, message: Message) -> None:
        if not self._loses():
            return await super().record(subject, message)
        if self.writes // self.every % 2:
            await super().record(subject, message)
        raise BusError("no answer")

    async def claim(self, key: str, value: bytes, revision: int | None = None) -> int:
        if not self._loses():
            return await super().claim(key, value, revision)
        if self.writes // self.every % 2:
            await super().claim(key, value, revision)
        raise BusError("no answer")

    def _loses(self) -> bool:
        self.writes += 1
        return self.writes > 3 and self.writes % self.every == 0


@pytest.mark.looptime
@pytest.mark.parametrize("every", [2, 3, 5])
async def test_lost_answers_of_the_store_change_nothing(every: int) -> None:
    broker = MemoryBroker()
    bus = Forgetful(broker, every)
    async with engine(broker) as ranks, leading(bus):
        await apply(bus, replicating())
        await asyncio.sleep(60)
        assert ranks.served == [0, 1, 2, 3]
        assert in_words(await log(bus)) == [
            "1@0",
            *ONE,
            "Staged",
            "1@2",
            "Committed",
            "Staged",
            "1@3",
            "Committed",
        ]


# Death of the coordinator


class Mortal(MemoryBus):
    """Client whose process ends at its nth call: before it has any effect, or right after it."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.dies_at: tuple[int, bool] | None = None
        self.calls = 0

    async def _life(self, *, after: bool) -> None:
        if not after:
            self.calls += 1
        if self.dies_at is not None and (self.calls, after) >= self.dies_at:
            await asyncio.Event().wait()

    async def record(self, subject: str, message: Message) -> None:
        await self._life(after=False)
        await super().record(subject, message)
        await self._life(after=True)

    async def claim(self, key: str, value: bytes, revision: int | None = None) -> int:
        await self._life(after=False)
        found = await super().claim(key, value, revision)
        await self._life(after=True)
        return found

    async def request(self, subject: str, message: Message, seconds: float = 2.0) -> Message:
        await self._life(after=False)
        answer = await super().request(subject, message, seconds)
        await self._life(after=True)
        return answer


async def dies(at: int, *, after: bool, handovers: int) -> int:
    """End a coordinator at its nth call and start another. Returns the number of calls of an undisturbed
    run."""
    broker = MemoryBroker()
    mortal, bus = Mortal(broker), MemoryBus(broker)
    async with engine(broker) as ranks:
        async with leading(mortal):
            mortal.dies_at = None if not at else (mortal.calls + at, after)
            requesting = asyncio.create_task(apply(bus, replicating(handovers=handovers)))
            calls = mortal.calls
            await asyncio.sleep(3)
            calls = mortal.calls - calls
            async with leading(bus):
                await asyncio.wait([requesting])
                await asyncio.sleep(10)
                entries = await log(bus)
                words = in_words(entries)
                assert at_rest(broker, ranks), words
                assert words == ["1@0"] or words[-1] in ("Committed", "Aborted"), words
                assert len(set(words) - {"Staged", "Committed"}) == len(
                    [report for report in words if report not in ("Staged", "Committed")]
                ), words
                assert [int(report[2:]) for report in words if report.startswith("1@")] == ranks.served
                kinds = [
                    (type(entry), getattr(entry, "handover", None), getattr(entry, "number", None))
                    for entry in entries
                    if "Placement" not in type(entry).__name__
                ]
                assert len(set(kinds)) == len(kinds), words
                if words[-1] == "Committed":
                    assert ranks.served == list(range(handovers + 1))
            requesting.exception()
    return calls


@pytest.mark.looptime
async def test_a_coordinator_that_ends_at_any_of_its_calls_is_followed_by_one_that_ends_what_it_began() -> (
    None
):
    calls = await dies(0, after=False, handovers=1)
    assert calls > 10
    for at in range(1, calls + 1):
        await dies(at, after=bool(at % 2), handovers=1)


@pytest.mark.slow
@pytest.mark.looptime
async def test_plans_of_three_handovers_survive_the_end_of_their_coordinator_at_any_call() -> None:
    calls = await dies(0, after=False, handovers=3)
    for at in range(1, calls + 1):
        for after in (False, True):
            await dies(at, after=after, handovers=3)


async def test_over_nats_a_plan_is_carried_out_though_the_server_is_killed(nats_server: Any) -> None:
    config = BusConfig(record_seconds=1.0, request_seconds=0.5, reconnect_max_seconds=0.2)
    bus, theirs = [await NatsBus.connect(nats_server.url, SUBJECTS, config) for _ in range(2)]
    ranks = Ranks(theirs, SUBJECTS, FIRST)
    try:
        async with ranks.serving():
            await theirs.record(SUBJECTS.membership("a"), joined(1, "a", FIRST))
            async with leading(bus, replace(CONFIG, stage_seconds=60.0)):
                ranks.stage_seconds = 0.2
                await apply(bus, replicating())
                await ranks.commands_to(ProposeHandover)
                nats_server.stop(signal.SIGKILL)
                await asyncio.to_thread(nats_server.start)
                async with asyncio.timeout(30):
                    while in_words(entries := await log(bus)).count("Committed") < 3:  # noqa: ASYNC110 the log is elsewhere
                        await asyncio.sleep(0.1)
                assert ranks.served == [0, 1, 2, 3]
                assert in_words(entries) == [
                    "1@0",
                    *ONE,
                    "Staged",
                    "1@2",
                    "Committed",
                    "Staged",
                    "1@3",
                    "Committed",
                ]
    finally:
        await bus.close()
        await theirs.close()
