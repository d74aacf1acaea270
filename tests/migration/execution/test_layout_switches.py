"""Switches of layout over the memory bus, in virtual time, with ranks that follow the protocol."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from bus import Bus, Declined, Message
from bus.memory import MemoryBroker, MemoryBus
from fleet.experts import ModelShape
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.migrations import MigrationAborted, MigrationCommitted, MigrationPlanned
from fleet.facts.placements import PlacementCommitted
from fleet.layout import KV_PAGE_SECONDS, TP_EP, Layout, experts_tp, tp
from fleet.placement import Placement, linear, with_attention, with_rows
from fleet.requests.handovers import CommitHandover, ProposeHandover
from fleet.requests.plans import ApplyPlan, MigrateExpert, RollBack, SetLayout
from migration.config import MigrationConfig
from migration.planning.layout_switch import switch
from migration.planning.staging_capacity import StagingRoom
from migration.service import MigrationService
from tests.migration.builders import joined
from tests.migration.executor_fixture import (
    CONFIG,
    SUBJECTS,
    ask,
    at_rest,
    leading,
    log,
)
from tests.migration.fake_ranks import Ranks

SHAPE = ModelShape(layers=3, experts=8, top_k=2, hidden=16, expert_intermediate=8)
FIRST = linear(layers=3, experts=8, ranks=2, slots_per_rank=6)
PART = SHAPE.expert_bytes // 2
LAYER = 8 * PART
"""bytes that one layer moves between its two ranks, and as many within them"""
PACED = replace(CONFIG, budget_bytes=2 * LAYER, budget_seconds=60.0)
"""permits two layers a minute"""


@asynccontextmanager
async def engine(broker: MemoryBroker, placement: Placement = FIRST, **fields: Any) -> AsyncIterator[Ranks]:
    """Yield an engine that has joined, whose ranks can turn layers over."""
    bus = MemoryBus(broker)
    ranks = Ranks(bus, SUBJECTS, placement, free=6)
    about = {"shape": SHAPE, "unshardable": "", **fields}
    async with ranks.serving():
        await bus.record(SUBJECTS.membership("a"), joined(1, "a", placement, **about))
        yield ranks


async def refusal(bus: Bus, request: Message) -> str:
    with pytest.raises(Declined) as refused:
        await bus.request(SUBJECTS.migrate, request, 20)
    return str(refused.value)


def every(now: bool = True, **fields: Any) -> SetLayout:
    return SetLayout(engine="a", sharded=(0, 1, 2), now=now, **fields)


async def planned(bus: Bus) -> list[MigrationPlanned]:
    return [entry for entry in await log(bus) if isinstance(entry, MigrationPlanned)]


@pytest.mark.looptime
async def test_an_engine_changes_to_experts_tp_and_back_one_layer_at_a_time() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus) as service:
        accepted = await ask(bus, every())
        assert (accepted.handovers, accepted.bytes, accepted.copies) == (3, 3 * LAYER, 3 * 8)
        await asyncio.sleep(5)
        assert ranks.served == [0, 1, 2, 3]
        assert service.placements.engines()["a"].layout.sharded == (0, 1, 2)
        proposed = [one for rank, one in ranks.commands if isinstance(one, ProposeHandover) and rank == 0]
        assert [one.placement.sharded for one in proposed] == [(0,), (0, 1), (0, 1, 2)]
        assert not any(one.copies for one in proposed), "what is read follows from the forms"
        (entry,) = await planned(bus)
        assert (entry.to_sharded, entry.to_whole, entry.paced) == ((0, 1, 2), (), False)
        done = [one for one in await log(bus) if isinstance(one, MigrationCommitted)]
        assert [one.bytes for one in done] == [LAYER] * 3
        await ask(bus, SetLayout(engine="a", sharded=(1,), now=True))
        await asyncio.sleep(5)
        assert ranks.placement.sharded == (1,)
        assert np.array_equal(ranks.placement.expert_of_slot[[0, 2]], FIRST.expert_of_slot[[0, 2]])
        assert at_rest(broker, ranks)


async def report_pages(bus: Bus, *used: int) -> None:
    """Report the KV pages in use of the first ranks."""
    publisher = bus.publisher(SUBJECTS.kv_metrics)
    for rank, pages in enumerate(used):
        await publisher.publish(KvMetrics(worker_id=1, dp_rank=rank, kv_used_blocks=pages, running=2))
    await asyncio.sleep(0.1)


@pytest.mark.looptime
async def test_an_engine_changes_to_tp_and_back_and_a_rollback_restores_each() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    shape = msgspec.structs.replace(SHAPE, heads=4, kv_heads=2)
    fields = {"shape": shape, "tp_refusal": "", "kv_block_bytes": 1000}
    async with engine(broker, **fields) as ranks, leading(bus) as service:
        await report_pages(bus, 10, 30)
        accepted = await ask(bus, every(attention="tp"))
        assert (accepted.handovers, accepted.bytes) == (4, 3 * LAYER)
        assert accepted.what[-1] == "attention becomes tensor-parallel"
        assert accepted.switch is not None
        assert accepted.switch.kv is not None
        assert (accepted.switch.kv.pages, accepted.switch.kv.bytes) == (40, 40 * 500)
        assert accepted.switch.kv.seconds == pytest.approx(30 * 500 / CONFIG.rank_bytes_per_second)
        assert accepted.switch.kv.rounds == 2
        last = 2 * 500 / CONFIG.rank_bytes_per_second
        assert accepted.switch.kv.pause_seconds == pytest.approx(last + 40 * KV_PAGE_SECONDS)
        await asyncio.sleep(6)
        assert ranks.placement.layout == service.placements.engines()["a"].layout == tp(3)
        proposed = [one for rank, one in ranks.commands if isinstance(one, ProposeHandover) and rank == 0]
        assert [one.placement.attention for one in proposed] == ["dp"] * 3 + ["tp"]
        assert (await planned(bus))[0].attention == "tp"
        (committed,) = [
            one.message
            async for one in bus.replay(SUBJECTS.placements("a"), latest=True, follow=False)
            if isinstance(one.message, PlacementCommitted)
        ]
        assert (committed.layout, committed.placement.attention) == (tp(3), "tp")
        assert "are sharded, and attention is tensor-parallel, already" in await refusal(
            bus, every(attention="tp")
        )
        await report_pages(bus, 40)
        back = await ask(bus, SetLayout(engine="a", sharded=(1,), now=True))
        assert back.what[0] == "attention becomes data-parallel"
        assert back.switch is not None
        assert back.switch.kv is not None
        assert (back.switch.kv.pages, back.switch.kv.bytes) == (40, 40 * 500)
        await asyncio.sleep(6)
        assert ranks.placement.layout == Layout("dp", (1,))
        second = (await planned(bus))[1].plan
        await ask(bus, RollBack(engine="a", plan=second))
        await asyncio.sleep(6)
        assert ranks.placement.layout == tp(3)
        await ask(bus, RollBack(engine="a", plan=(await planned(bus))[0].plan))
        await asyncio.sleep(6)
        assert ranks.placement.sharded == ()
        assert np.array_equal(ranks.placement.expert_of_slot, FIRST.expert_of_slot)
        assert at_rest(broker, ranks)


@pytest.mark.looptime
async def test_only_the_attention_changes_where_layers_need_not_turn_over_and_no_cell_is_free() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    first = with_rows(FIRST, dict.fromkeys(range(3)), epoch=0)
    async with engine(broker, first, tp_refusal="", layout=experts_tp(3)) as ranks, leading(bus):
        ranks.free = 0
        accepted = await ask(bus, every(attention="tp"))
        assert (accepted.handovers, accepted.bytes) == (1, 0)
        assert accepted.switch is not None
        assert (accepted.switch.kv, accepted.switch.cells) == (None, 0)
        await asyncio.sleep(4)
        assert ranks.placement.layout == tp(3)
        await ask(bus, RollBack(engine="a"))
        await asyncio.sleep(4)
        assert ranks.placement == with_attention(first, "dp", epoch=2)


@pytest.mark.looptime
async def test_a_switch_and_a_migration_exclude_each_other_and_a_rollback_restores_what_was() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus):
        await ask(bus, MigrateExpert(engine="a", layer=1, expert=2, rank=1, move=True))
        assert "carrying out plan" in await refusal(bus, every())
        await asyncio.sleep(2)
        moved = ranks.placement
        await ask(bus, every())
        move = MigrateExpert(engine="a", layer=1, expert=0, rank=1)
        assert "carrying out plan" in await refusal(bus, move)
        await asyncio.sleep(5)
        assert "all layers of engine 'a' are sharded" in await refusal(bus, move)
        await ask(bus, SetLayout(engine="a", sharded=(1,), now=True))
        await asyncio.sleep(5)
        assert "layer 1 is sharded" in await refusal(bus, move)
        await ask(bus, msgspec.structs.replace(move, layer=0))
        await asyncio.sleep(2)
        first = (await planned(bus))[1].plan
        await ask(bus, RollBack(engine="a", plan=first))
        await asyncio.sleep(8)
        assert ranks.placement.sharded == ()
        assert np.array_equal(ranks.placement.replicas_on_rank, moved.replicas_on_rank)
        assert at_rest(broker, ranks)


@pytest.mark.looptime
async def test_a_coordinator_that_ends_amid_a_switch_is_followed_by_one_that_ends_it() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks:
        async with leading(bus):
            await ask(bus, every())
            await ranks.commands_to(CommitHandover)
        async with leading(MemoryBus(broker)) as service:
            await asyncio.sleep(8)
            assert ranks.placement.sharded == (0, 1, 2)
            assert service.placements.engines()["a"].placement == ranks.placement
            assert ranks.served == [0, 1, 2, 3]


@pytest.mark.looptime
async def test_a_switch_that_is_given_up_stays_where_it_is_and_can_be_continued() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus):
        await ask(bus, every())
        await ranks.commands_to(CommitHandover)
        ranks.fails[1] = ("a part does not compare", "checksum")
        await asyncio.sleep(5)
        done = len(ranks.placement.sharded)
        assert isinstance((await log(bus))[-1], MigrationAborted)
        assert 1 <= done < 3
        ranks.fails.clear()
        again = await ask(bus, every())
        assert again.handovers == 3 - done
        await asyncio.sleep(5)
        assert ranks.placement.sharded == (0, 1, 2)


@pytest.mark.looptime
async def test_without_now_handovers_wait_for_the_byte_budget() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus, PACED):
        accepted = await ask(bus, every(now=False))
        assert accepted.switch is not None
        assert accepted.switch.budget_seconds == pytest.approx(60.0), (
            "the third layer waits until the first two count no more"
        )
        await asyncio.sleep(20)
        assert ranks.served == [0, 1, 2]
        move = MigrateExpert(engine="a", layer=2, expert=0, rank=1)
        assert "which waits for the byte budget" in await refusal(bus, move)
        await asyncio.sleep(50)
        assert ranks.served == [0, 1, 2, 3]
        assert (await planned(bus))[0].paced


@asynccontextmanager
async def waiting_switch(
    broker: MemoryBroker, config: MigrationConfig = PACED
) -> AsyncIterator[tuple[Ranks, MigrationService]]:
    """Yield an engine whose switch of three layers waits for the byte budget, after the first two of them."""
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus, config) as service:
        await ask(bus, every(now=False))
        await asyncio.sleep(20)
        assert ranks.served == [0, 1, 2]
        yield ranks, service


@pytest.mark.looptime
async def test_now_hastens_a_switch_that_waits_for_the_byte_budget() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with waiting_switch(broker) as (ranks, _):
        accepted = await ask(bus, every())
        assert accepted.handovers == 1
        assert "waits for the byte budget after 2 of 3 handovers, is replaced" in accepted.what[0]
        await asyncio.sleep(5)
        assert ranks.served == [0, 1, 2, 3]
        first, second = await planned(bus)
        (ended,) = [entry for entry in await log(bus) if isinstance(entry, MigrationAborted)]
        assert (ended.plan, ended.fault) == (first.plan, "replaced")
        assert ended.reason == f"replaced by plan {second.plan}"
        assert at_rest(broker, ranks)


@pytest.mark.looptime
async def test_a_switch_that_waits_is_replaced_by_another_or_rolled_back() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with waiting_switch(broker) as (ranks, _):
        await ask(bus, SetLayout(engine="a", sharded=(1, 2)))
        await asyncio.sleep(30)
        assert ranks.placement.sharded == (0, 1), "the other waits for the same budget"
        await ask(bus, RollBack(engine="a", plan=(await planned(bus))[0].plan))
        await asyncio.sleep(5)
        assert ranks.placement.sharded == ()
        assert np.array_equal(ranks.placement.replicas_on_rank, FIRST.replicas_on_rank)
        assert at_rest(broker, ranks)


@pytest.mark.looptime
async def test_setting_the_layout_that_is_served_ends_a_switch_that_waits() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with waiting_switch(broker) as (ranks, _):
        served, move = (
            SetLayout(engine="a", sharded=(0, 1)),
            MigrateExpert(engine="a", layer=2, expert=0, rank=1),
        )
        expected = await ask(bus, msgspec.structs.replace(served, dry_run=True))
        assert "which waits for the byte budget" in await refusal(bus, move), "a dry run changes nothing"
        assert await ask(bus, served) == expected
        assert expected.handovers == 0
        (plan,) = await planned(bus)
        last = (await log(bus))[-1]
        assert isinstance(last, MigrationAborted)
        assert (last.plan, last.fault, last.reason) == (plan.plan, "replaced", "ended by an operator")
        await asyncio.sleep(100)
        assert ranks.served == [0, 1, 2]
        await ask(bus, move)


@pytest.mark.looptime
async def test_rolling_back_a_switch_that_has_changed_nothing_ends_it_and_undoes_no_plan_before_it() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus, replace(PACED, budget_bytes=LAYER)):
        await ask(bus, SetLayout(engine="a", sharded=(0,)))
        await asyncio.sleep(5)
        await ask(bus, SetLayout(engine="a", sharded=(0, 1)))
        await asyncio.sleep(5)
        accepted = await ask(bus, RollBack(engine="a"))
        assert (accepted.plan, accepted.handovers) == ((await planned(bus))[1].plan, 0)
        await asyncio.sleep(100)
        assert ranks.placement.sharded == (0,)


@pytest.mark.looptime
async def test_requests_that_are_refused_leave_a_switch_that_waits_alone() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with waiting_switch(broker) as (ranks, _):
        assert "layer 3 does not exist" in await refusal(bus, SetLayout(engine="a", sharded=(3,)))
        assert "no plan 'nothing'" in await refusal(bus, RollBack(engine="a", plan="nothing"))
        await ask(bus, SetLayout(engine="a", sharded=(), now=True, dry_run=True))
        ranks.free = 3
        assert "needs 4 free cells" in await refusal(bus, SetLayout(engine="a", sharded=(), now=True))
        ranks.free = 6
        await asyncio.sleep(60)
        assert ranks.served == [0, 1, 2, 3]
        assert len(await planned(bus)) == 1


@pytest.mark.looptime
async def test_a_budget_of_0_holds_a_switch_until_there_is_one_again() -> None:
    broker = MemoryBroker()
    async with waiting_switch(broker) as (ranks, service):
        service.reconfigure(replace(PACED, budget_bytes=0))
        await asyncio.sleep(200)
        assert ranks.served == [0, 1, 2]
        service.reconfigure(PACED)
        await asyncio.sleep(5)
        assert ranks.served == [0, 1, 2, 3]


async def random_requests(
    bus: Bus, ranks: Ranks, random: np.random.Generator, *, attends: float = 0.0
) -> Counter[str]:
    """Send switches and rollbacks while handovers run, while the budget is awaited, and as the waits end.
    Return the number of answers of each kind. attends: share of the requests that are for tensor-parallel
    attention."""
    answers = Counter[str]()
    for _ in range(25):
        ranks.stage_seconds = float(random.choice([0.05, 0.5]))
        chosen = tuple(np.flatnonzero(random.random(3) < 0.5).tolist())
        request = (
            RollBack(engine="a")
            if random.random() < 0.2
            else SetLayout(engine="a", sharded=chosen, now=bool(random.random() < 0.3))
        )
        if attends and random.random() < attends:
            request = every(now=bool(random.random() < 0.3), attention="tp")
        try:
            what = (await ask(bus, request)).what
        except Declined as declined:
            answers["busy" if "carrying out plan" in str(declined) else "refused"] += 1
        else:
            answers["replaced" if any("is replaced" in line for line in what) else "accepted"] += 1
        await asyncio.sleep(float(random.choice([0.0, random.random(), 1 + 2 * random.random()])))
    return answers


@pytest.mark.looptime
async def test_requests_at_any_moment_of_paced_switches_leave_one_plan_at_a_time() -> None:
    answers = Counter[str]()
    for seed in range(6):
        broker = MemoryBroker()
        bus = MemoryBus(broker)
        async with engine(broker) as ranks, leading(bus, replace(PACED, budget_seconds=2.0)) as service:
            answers += await random_requests(bus, ranks, np.random.default_rng(seed))
            await asyncio.sleep(60)
            assert at_rest(broker, ranks)
            assert service.placements.engines()["a"].placement == ranks.placement
            assert ranks.served == list(range(len(ranks.served))), "every epoch was served once"
            running = ""
            for entry in await log(bus):
                match entry:
                    case MigrationPlanned():
                        assert not running, f"plan {entry.plan} began while {running} was under way"
                        running = entry.plan
                    case MigrationCommitted() | MigrationAborted():
                        assert entry.plan == running
                        running = "" if isinstance(entry, MigrationAborted) or entry.last else running
            assert not running
    assert min(answers[kind] for kind in ("replaced", "accepted", "busy")) >= 5, answers


@pytest.mark.looptime
async def test_without_a_byte_budget_a_switch_needs_now() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus, replace(CONFIG, budget_bytes=0)):
        assert "planner.budget_bytes is 0" in await refusal(bus, every(now=False))
        expected = (await ask(bus, every(dry_run=True))).switch
        assert expected is not None
        assert expected.budget_seconds is None
        await ask(bus, every())
        await asyncio.sleep(5)
        assert ranks.placement.sharded == (0, 1, 2)


@pytest.mark.looptime
async def test_a_dry_run_says_bytes_by_link_seconds_and_cells_and_does_nothing() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    config = replace(CONFIG, node_bytes_per_second=1000.0)
    async with engine(broker, nodes=("x", "y")) as ranks, leading(bus, config):
        accepted = await ask(bus, every(dry_run=True))
        found = accepted.switch
        assert found is not None
        assert found.bytes_by_link == {"local": 3 * LAYER, "same-node": 0, "cross-node": 3 * LAYER}
        assert found.seconds == pytest.approx(3 * (LAYER / 2 / 1000 + 0.05), rel=1e-3)
        assert (found.measured, found.cells, found.free) == (False, 4, 6)
        await asyncio.sleep(2)
        assert ranks.served == [0]
        assert await planned(bus) == []
        await ask(bus, SetLayout(engine="a", sharded=(0,), now=True))
        await asyncio.sleep(2)
        measured = (await ask(bus, every(dry_run=True))).switch
        assert measured is not None
        assert measured.measured
        assert measured.seconds == pytest.approx(2 * (LAYER / 2 / (384 / 0.01) + 0.05), rel=1e-3)


@pytest.mark.looptime
async def test_requests_at_any_moment_of_switches_of_attention_leave_every_epoch_a_legal_layout() -> None:
    attentions = Counter[str]()
    for seed in range(6):
        broker = MemoryBroker()
        bus = MemoryBus(broker)
        async with (
            engine(broker, tp_refusal="") as ranks,
            leading(bus, replace(PACED, budget_seconds=2.0)) as service,
        ):
            await random_requests(bus, ranks, np.random.default_rng(seed), attends=0.4)
            await asyncio.sleep(60)
            assert at_rest(broker, ranks)
            assert service.placements.engines()["a"].placement == ranks.placement
            before = FIRST
            async for one in bus.replay(SUBJECTS.placements("a"), follow=False):
                assert isinstance(one.message, PlacementCommitted)
                now = Placement.from_record(one.message.placement)
                assert one.message.layout == now.layout, "stated alike in both"
                if now.attention != before.attention:
                    attentions[now.attention] += 1
                    assert now == with_attention(before, now.attention, epoch=before.epoch + 1)
                before = now
            assert before == ranks.placement
    assert min(attentions["tp"], attentions["dp"]) >= 5, attentions


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("fields", "free", "words"),
    [
        ({"unshardable": "its agent does not turn layers over"}, 6, "its agent does not turn layers over"),
        ({"layout": TP_EP}, 6, "attention is tensor-parallel"),
        ({"shape": msgspec.structs.replace(SHAPE, expert_intermediate=7)}, 6, "size 7 do not divide"),
        ({}, 3, "needs 4 free cells to turn a layer over, and one has only 3"),
    ],
)
async def test_a_switch_that_an_engine_cannot_make_is_refused_with_the_reason(
    fields: dict[str, Any], free: int, words: str
) -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker, **fields) as ranks, leading(bus):
        ranks.free = free
        assert words in await refusal(bus, every())
        plan = switch(FIRST, (0,), StagingRoom(np.zeros(2, np.intp), SHAPE.expert_bytes)).plan
        if free == 6:
            assert words in await refusal(bus, ApplyPlan(engine="a", plan=msgspec.json.encode(plan)))
        assert ranks.served == [0]


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "cannot change its attention: its agent does not change its attention"),
        (
            {"tp_refusal": "", "shape": msgspec.structs.replace(SHAPE, heads=3)},
            "3 attention heads do not divide among 2 ranks",
        ),
        ({"tp_refusal": "", "unshardable": "its agent is old"}, "cannot turn layers over: its agent is old"),
    ],
)
async def test_attention_that_an_engine_cannot_have_is_refused_before_anything_changes(
    fields: dict[str, Any], words: str
) -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker, **fields) as ranks, leading(bus):
        assert words in await refusal(bus, every(attention="tp"))
        assert ranks.served == [0]


@pytest.mark.looptime
async def test_layers_that_do_not_exist_and_layouts_that_are_there_already_are_refused() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker), leading(bus):
        nothing = SetLayout(engine="a", sharded=())
        assert "all layers are whole already" in await refusal(bus, nothing)
        assert "layer 3 does not exist" in await refusal(bus, SetLayout(engine="a", sharded=(3,)))
