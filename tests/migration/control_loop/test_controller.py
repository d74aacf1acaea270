"""Automatic operation of the migration service over the memory bus, in virtual time, with ranks that follow
the protocol."""

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from bus import BusError, Declined
from bus.memory import MemoryBroker, MemoryBus
from bus.protocol import codec
from fleet.facts.demand import PopularityShifted
from fleet.facts.engines import ConfigChanged, EngineLeft
from fleet.facts.migrations import (
    LoopFigures,
    MigrationAborted,
    MigrationCommitted,
    MigrationPlanned,
    PlanEvaluated,
)
from fleet.facts.placements import HomesPublished
from fleet.layout import tp
from fleet.requests.control_loop import EngineLoop, SetLoopState
from fleet.requests.demand import DescribeProfile
from fleet.requests.plans import DescribePlan, MigrateExpert, PlanDescribed, RollBack, SetLayout
from migration.config import MigrationConfig
from migration.control_loop import controller
from migration.control_loop.context import LoopContext
from migration.execution.executor import PlanExecutor
from migration.loop_state.persistent_state import decoded
from migration.model.plan import Handover
from migration.model.plan import planned as planned_of
from migration.model.plan_record import PlanRecord
from migration.planning import operator_plans
from migration.requests import plan_queries
from migration.service import MigrationService
from tests.migration.builders import leading
from tests.migration.control_loop_fixture import (
    CONFIG,
    EVEN,
    FIRST,
    SHAPE,
    SKEWED,
    SUBJECTS,
    Flight,
    copied,
    engine_of,
    flight,
    loop,
    own,
    recorded,
    steer,
    verdicts,
)


def serving(
    broker: MemoryBroker, config: MigrationConfig = CONFIG
) -> AbstractAsyncContextManager[MigrationService]:
    return leading(MemoryBus(broker), config)


def by_another(planned: MigrationPlanned, discount: float) -> PlanEvaluated:
    """Verdict recorded by a previous leader."""
    nothing = LoopFigures(remote_ranks=0.0, local=0.0, balance=0.0, step_seconds=0.0)
    about: dict[str, Any] = {
        "engine": planned.engine,
        "worker_id": planned.worker_id,
        "plan": planned.plan,
        "epoch": 1,
    }
    return PlanEvaluated(
        verdict="kept",
        predicted_before=nothing,
        predicted_after=nothing,
        plan_discount=discount,
        reason="so",
        **about,
    )


def context_of(service: MigrationService) -> LoopContext:
    assert service.controller is not None
    return service.controller.context


def executor_of(service: MigrationService) -> PlanExecutor:
    return context_of(service).executor


SHIFT = PopularityShifted(
    model="m",
    version=1,
    settled=False,
    divergence=0.3,
    threshold=0.1,
    layers=(0, 1),
    traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
)


@pytest.mark.looptime
async def test_a_plan_that_pays_is_carried_out_and_judged_with_nobody_touching_it() -> None:
    broker = MemoryBroker()
    async with flight(broker) as world, serving(broker) as service:
        planned = await world.until(MigrationPlanned)
        assert (planned.origin, planned.policy, planned.base_epoch) == ("planner", "roost", 0)
        assert planned.before.balance < planned.after.balance
        assert planned.before.step_seconds > planned.after.step_seconds
        world.balance = 0.9
        evaluation = await world.until(PlanEvaluated)
        assert evaluation.verdict == "kept", evaluation
        assert evaluation.realised > 0.4
        assert evaluation.epoch == world.ranks.served[-1] == planned.handovers
        shown = await engine_of(world.bus)
        assert shown.plans[0].outcome == "kept"
        assert shown.plans[0].measured_after == evaluation.measured_after
        assert shown.measured is not None
        assert shown.layers is not None
        assert shown.at_start is not None
        assert shown.at_start.balance == pytest.approx(0.5, rel=0.02)
        assert (shown.spent_bytes, shown.moved_bytes) == (planned.bytes, planned.bytes)
        assert shown.epoch == planned.handovers
        exposed = service.metrics.exposition().decode()
        for line in (
            'verdicts_total{verdict="kept"} 1.0',
            f'spent_bytes{{engine="a"}} {float(planned.bytes)}',
            "paused 0.0",
            'layer_balance{engine="a",layer="1"}',
        ):
            assert f"roost_loop_{line}" in exposed


@pytest.mark.looptime
@pytest.mark.parametrize(
    "config",
    [replace(CONFIG, automatic=False), replace(CONFIG, policy="reweight")],
    ids=["by hand", "reweight"],
)
async def test_where_it_is_not_to_move_anything_by_itself_nothing_is_copied(config: MigrationConfig) -> None:
    broker = MemoryBroker()
    async with flight(broker) as world, serving(broker, config):
        await world.last(25)
        assert await copied(world.bus) == 0
        assert await own(world.bus) == []
        shown = await engine_of(world.bus)
        assert shown.decided
        assert ("planner.automatic is off" in shown.decided) == (not config.automatic)


@pytest.mark.looptime
async def test_a_pause_outlives_the_service_and_what_operators_ask_for_is_still_done() -> None:
    broker = MemoryBroker()
    async with flight(broker) as world:
        async with serving(broker) as service:
            shown = await steer(world.bus, paused=True, reason="a demonstration")
            assert (shown.paused, shown.paused_reason, shown.paused_at is None) == (
                True,
                "a demonstration",
                False,
            )
            await world.last(25)
            assert "it is paused (a demonstration)" in (await engine_of(world.bus)).decided
            assert b"roost_loop_paused 1.0" in service.metrics.exposition()
        async with serving(broker):
            assert (await loop(world.bus)).paused_reason == "a demonstration"
            await world.last(25)
            assert await own(world.bus) == []
            await world.bus.request(
                SUBJECTS.migrate, MigrateExpert(engine="a", layer=1, expert=2, rank=3), 20
            )
            await world.last(5)
            assert world.ranks.served[-1] > 0
            shown = await steer(world.bus, paused=False)
            assert (shown.paused, shown.paused_reason, shown.paused_at) == (False, "", None)
            await world.until(MigrationPlanned, 20, after=1)
            assert len(await own(world.bus)) == 1


@pytest.mark.looptime
async def test_a_plan_that_pays_is_not_begun_any_more_where_somebody_pauses_at_the_last_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = MemoryBroker()
    async with flight(broker) as world, serving(broker) as service:
        executor = executor_of(service)
        survey, calls = executor.survey, 0

        async def meanwhile(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            await steer(world.bus, paused=True)
            return await survey(*arguments)

        monkeypatch.setattr(executor, "survey", meanwhile)
        await world.last(25)
        assert calls == 1
        assert await own(world.bus) == []


@pytest.mark.looptime
@pytest.mark.parametrize("when", ["while it is stored", "between two attempts to record it"])
async def test_a_plan_begins_no_more_once_a_pause_was_acknowledged(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    broker = MemoryBroker()
    async with flight(broker) as world, serving(broker) as service:
        executor, calls = executor_of(service), 0
        store, record = executor.log.store, MemoryBus.record

        async def storing(*arguments: Any) -> str:
            nonlocal calls
            if not calls:
                calls += 1
                await steer(world.bus, paused=True)
            return await store(*arguments)

        async def recording(bus: MemoryBus, subject: str, message: Any) -> None:
            nonlocal calls
            if isinstance(message, MigrationPlanned) and not calls:
                calls += 1
                await steer(world.bus, paused=True)
                raise BusError("no answer in time")
            await record(bus, subject, message)

        if when == "while it is stored":
            monkeypatch.setattr(executor.log, "store", storing)
        else:
            monkeypatch.setattr(MemoryBus, "record", recording)
        await world.last(25)
        assert calls == 1
        assert await own(world.bus) == []
        assert (executor._plans, executor._traces) == ({}, {})
        await steer(world.bus, paused=False)
        await world.until(MigrationCommitted, 40)


@pytest.mark.looptime
async def test_an_engine_that_leaves_while_its_verdict_is_taken_up_harms_nobody() -> None:
    broker = MemoryBroker()
    async with flight(broker) as world, serving(broker, replace(CONFIG, evaluation_seconds=100.0)) as service:
        await world.until(MigrationCommitted)
        (planned,) = await own(world.bus)
        await asyncio.gather(
            world.bus.record(SUBJECTS.membership("a"), EngineLeft(engine="a", worker_id=1, reason="stopped")),
            world.bus.record(SUBJECTS.migrations("a"), by_another(planned, 0.5)),
        )
        await asyncio.sleep(10)
        assert (await loop(world.bus)).engines == ()
        assert service.controller is not None
        assert service.controller.plan_discount("a") == pytest.approx(0.5, abs=0.01)


@pytest.mark.looptime
async def test_of_engines_that_come_and_go_a_bounded_number_is_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(controller, "MAX_ENGINES", 2)
    broker = MemoryBroker()
    async with serving(broker) as service:
        for number in range(4):
            async with flight(broker, name=f"e{number}", worker_id=10 + number) as world:
                await asyncio.sleep(2)
                assert (await engine_of(world.bus)).engine == f"e{number}"
                await world.bus.record(
                    SUBJECTS.membership(world.name),
                    EngineLeft(engine=world.name, worker_id=world.worker_id, reason="stopped"),
                )
                await asyncio.sleep(2)
        assert len(executor_of(service).log.plans.engines) == 2


@pytest.mark.looptime
async def test_a_pause_that_cannot_be_made_durable_is_refused_and_does_not_hold() -> None:
    broker = MemoryBroker()
    async with flight(broker) as world, serving(broker) as service:
        with pytest.raises(Declined, match="send a SetLoopState, a DescribeLoop"):
            await world.bus.request(SUBJECTS.loop, DescribeProfile(model="m"))
        controller = service.controller
        assert controller is not None
        broker.reachable = False
        answer = await controller.answer(SetLoopState(paused=True))
        assert "has no effect" in str(answer)
        assert not controller.described().paused
        broker.reachable = True
        assert (await steer(world.bus, paused=True)).paused


@pytest.mark.looptime
async def test_a_pause_that_the_server_lost_is_stored_again() -> None:
    broker = MemoryBroker()
    async with flight(broker) as world:
        async with serving(broker):
            await steer(world.bus, paused=True, reason="so")
            claim = broker.claimed(SUBJECTS.loop_key)
            assert claim is not None
            await world.bus.release(SUBJECTS.loop_key, claim.revision)
            await asyncio.sleep(40)
        async with serving(broker):
            assert (await loop(world.bus)).paused_reason == "so"
        claim = broker.claimed(SUBJECTS.loop_key)
        assert claim is not None
        await world.bus.claim(SUBJECTS.loop_key, b"nonsense", claim.revision)
        async with serving(broker):
            assert not (await loop(world.bus)).paused
            assert (await steer(world.bus, paused=True)).paused


@pytest.mark.looptime
async def test_plans_of_its_own_keep_to_the_budget_of_the_interval_also_across_a_restart() -> None:
    broker = MemoryBroker()
    most = 3 * SHAPE.expert_bytes
    config = replace(
        CONFIG,
        policy="uniform",
        budget_bytes=most,
        budget_seconds=600.0,
        cooldown_seconds=1.0,
        min_gain=0.0,
    )
    async with flight(broker) as world:
        async with serving(broker, config):
            planned = await world.until(MigrationPlanned)
            assert 0 < planned.bytes <= most
            await world.until(PlanEvaluated)
            assert (await engine_of(world.bus)).spent_bytes == planned.bytes
        async with serving(broker, config) as service:
            world.rates = SKEWED[::-1].copy()
            assert (await engine_of(world.bus)).spent_bytes == planned.bytes
            await world.last(45)
            assert await copied(world.bus) <= most
            service.reconfigure(replace(config, budget_seconds=0.01))
            await world.last(20)
            assert await copied(world.bus) > most


@pytest.mark.looptime
async def test_a_plan_that_did_harm_is_rolled_back_and_its_experts_rest_also_after_a_restart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker = MemoryBroker()
    config = replace(CONFIG, cooldown_seconds=15.0, evaluation_seconds=22.0)
    async with flight(broker) as world:
        async with serving(broker, config) as service:
            planned = await world.until(MigrationPlanned)
            assert planned.origin == "planner"
            assert planned.copies > 0
            world.rates, world.balance, world.step_seconds = EVEN, 0.3, 4e-3
            evaluation = await world.until(PlanEvaluated)
            assert evaluation.verdict == "harmful", evaluation
            assert evaluation.realised < 0
            assert evaluation.plan_discount < 1.0
            back = await world.until(MigrationPlanned, 20, after=1)
            assert (back.origin, back.policy, back.base_epoch) == ("rollback", "roost", evaluation.epoch)
            await world.last(5)
            assert (world.ranks.placement.replicas_on_rank == FIRST.replicas_on_rank).all()
            shown = await engine_of(world.bus)
            assert shown.plan_discount == pytest.approx(evaluation.plan_discount, abs=0.01)
            assert shown.resting > 0
            assert [plan.outcome for plan in shown.plans] == ["committed", "harmful"]
            assert "was not rolled back" not in caplog.text, "once is enough"
            answer = await world.bus.request(SUBJECTS.describe_plan, DescribePlan(engine="a"), 20)
            assert isinstance(answer, PlanDescribed)
            assert msgspec.json.decode(answer.record, type=PlanRecord).plan_discount == pytest.approx(
                evaluation.plan_discount, abs=0.01
            )
            assert b'roost_loop_verdicts_total{verdict="harmful"} 1.0' in service.metrics.exposition()
            world.rates, world.balance, world.step_seconds = SKEWED, 0.5, 2e-3
            await world.last(20)
            assert (await engine_of(world.bus)).resting > 0, "longer than what was merely moved"
        async with serving(broker, config):
            shown = await engine_of(world.bus)
            assert shown.resting > 0
            assert shown.plan_discount == pytest.approx(evaluation.plan_discount, abs=0.05)


HARSH = replace(CONFIG, cooldown_seconds=3.0, evaluation_seconds=22.0)


async def carried_out(world: Flight) -> MigrationPlanned:
    """Run an automatic plan to its end; its placement is harmful from now on."""
    planned = await world.until(MigrationPlanned)
    assert isinstance(planned, MigrationPlanned)
    await world.until(MigrationCommitted, after=planned.handovers - 1)
    world.rates, world.balance, world.step_seconds = EVEN, 0.3, 4e-3
    return planned


async def rolled_back(world: Flight) -> EngineLoop:
    """Wait until the harmful plan is rolled back and its experts cool down."""
    for _ in range(40):
        await world.last(1)
        if (world.ranks.placement.replicas_on_rank == FIRST.replicas_on_rank).all():
            break
    else:
        raise AssertionError(await engine_of(world.bus))
    await world.last(3)
    shown = await engine_of(world.bus)
    assert shown.resting > 0
    assert "rolled back yet" not in shown.decided
    (evaluation,) = await verdicts(world.bus)
    assert evaluation.verdict == "harmful"
    return shown


@pytest.mark.looptime
async def test_a_rollback_that_was_given_up_is_tried_again_and_till_then_nothing_is_held_where_it_does_harm() -> (
    None
):
    broker = MemoryBroker()
    async with flight(broker) as world, serving(broker, HARSH):
        await carried_out(world)
        world.ranks.fails = {2: ("its memory is full", "memory")}
        await world.until(MigrationAborted, 60)
        await world.last(2)
        shown = await engine_of(world.bus)
        assert "did harm, and is not rolled back yet: that was given up: " in shown.decided
        assert shown.resting == 0
        world.ranks.fails = {}
        shown = await rolled_back(world)
        assert [plan.origin for plan in shown.plans] == ["rollback", "rollback", "planner"]


def step_by_step(*arguments: Any) -> Any:
    """Make the rollback plan with one handover per step."""
    placement = arguments[0]
    steps = [
        step for handover in operator_plans.restoring_plan(*arguments).handovers for step in handover.steps
    ]
    return planned_of(
        placement,
        [Handover(epoch=placement.epoch + at, steps=(step,)) for at, step in enumerate(steps, 1)],
        reason="so",
    )


@pytest.mark.looptime
async def test_a_rollback_that_was_given_up_on_its_way_is_gone_on_with_and_all_that_it_brought_back_rests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("migration.requests.operator_commands.restoring_plan", step_by_step)
    broker = MemoryBroker()
    async with flight(broker) as world, serving(broker, HARSH):
        planned = await carried_out(world)
        made, world.ranks.stage_seconds = world.ranks.placement, 1.5
        await world.until(MigrationCommitted, 60, after=planned.handovers + 1)
        world.ranks.fails = {2: ("its memory is full", "memory")}
        await world.until(MigrationAborted, 60)
        await world.last(4)
        shown = await engine_of(world.bus)
        assert shown.epoch >= planned.handovers + 2
        assert "did harm, and is not rolled back yet" in shown.decided
        assert shown.resting == 0, "but for what was just moved, and that is over"
        world.ranks.fails, world.ranks.stage_seconds = {}, 0.05
        shown = await rolled_back(world)
        assert [plan.origin for plan in shown.plans] == ["rollback", "rollback", "planner"]
        claim = broker.claimed(SUBJECTS.loop_key)
        assert claim is not None
        (harm,) = decoded(claim.value).memory.engine("a").harms
        cells = harm.resting()
        assert cells is not None
        assert (cells == (made.replicas_on_rank != FIRST.replicas_on_rank).any(axis=1)).all()


@pytest.mark.looptime
async def test_a_rollback_that_was_just_proposed_when_its_planner_ended_is_begun_anew_by_the_next() -> None:
    broker = MemoryBroker()
    async with flight(broker) as world:
        async with serving(broker, HARSH):
            await carried_out(world)
            world.ranks.stage_seconds = 5.0
            back = await world.until(MigrationPlanned, 60, after=1)
            assert back.origin == "rollback"
        async with serving(broker, HARSH):
            world.ranks.stage_seconds = 0.05
            await rolled_back(world)
        assert len(await recorded(world.bus, MigrationAborted)) == 1


@pytest.mark.looptime
@pytest.mark.parametrize("reason", ["silent", "full"])
async def test_what_cannot_be_rolled_back_now_is_rolled_back_later_and_nothing_else_is_begun_before(
    reason: str,
) -> None:
    broker = MemoryBroker()
    async with flight(broker) as world, serving(broker, HARSH):
        await carried_out(world)
        if reason == "silent":
            world.ranks.silent.add(1)
        else:
            world.ranks.free = 0
        await world.until(PlanEvaluated, 60)
        world.rates = SKEWED[::-1].copy()
        await world.last(15)
        decided = (await engine_of(world.bus)).decided
        assert "did harm, and is not rolled back yet: " in decided
        assert ("rank 1" if reason == "silent" else "has no free cell") in decided
        assert len(await recorded(world.bus, MigrationPlanned)) == 1
        world.rates = EVEN
        await world.last(12)
        world.ranks.silent, world.ranks.free = set(), 4
        shown = await rolled_back(world)
        assert [plan.origin for plan in shown.plans] == ["rollback", "planner"]


@pytest.mark.looptime
async def test_a_rollback_that_fails_for_ever_is_left_to_people_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("migration.loop_state.engine_loop.MAX_ROLLBACK_ATTEMPTS", 2)
    broker = MemoryBroker()
    async with flight(broker) as world, serving(broker, HARSH):
        await carried_out(world)
        world.ranks.fails = {2: ("its memory is full", "memory")}
        await world.until(PlanEvaluated, 60)
        await world.last(60)
        assert [planned.origin for planned in await recorded(world.bus, MigrationPlanned)][:3] == [
            "planner",
            "rollback",
            "rollback",
        ]
        assert (
            len(
                [
                    planned
                    for planned in await recorded(world.bus, MigrationPlanned)
                    if planned.origin == "rollback"
                ]
            )
            == 2
        )
        assert "gave up after 2 attempts; use roost rollback" in (await engine_of(world.bus)).decided


@pytest.mark.looptime
async def test_what_an_operator_asked_for_in_vain_keeps_nothing_from_being_judged() -> None:
    broker = MemoryBroker()
    async with flight(broker) as world, serving(broker, HARSH):
        await carried_out(world)
        world.ranks.fails, world.ranks.stage_seconds = {3: ("its memory is full", "memory")}, 1.5
        await world.bus.request(SUBJECTS.migrate, MigrateExpert(engine="a", layer=0, expert=4, rank=3), 20)
        await world.last(1)
        assert await verdicts(world.bus) == await recorded(world.bus, MigrationAborted) == [], (
            "it may yet change something"
        )
        await world.until(MigrationAborted, 20)
        world.ranks.fails, world.ranks.stage_seconds = {}, 0.05
        await world.until(PlanEvaluated, 60)
        shown = await rolled_back(world)
        assert [plan.origin for plan in shown.plans] == ["rollback", "operator", "planner"]


@pytest.mark.looptime
async def test_what_did_harm_stays_while_it_is_paused_and_that_is_told() -> None:
    broker = MemoryBroker()
    async with flight(broker) as world, serving(broker, replace(CONFIG, evaluation_seconds=22.0)):
        await world.until(MigrationCommitted)
        await steer(world.bus, paused=True)
        world.rates, world.balance, world.step_seconds = EVEN, 0.3, 4e-3
        assert (await world.until(PlanEvaluated)).verdict == "harmful"
        await world.last(2)
        assert (
            "was not rolled back: automatic plans were off at that time"
            in (await engine_of(world.bus)).decided
        )
        await world.last(8)
        assert len(await recorded(world.bus, MigrationPlanned)) == 1


@pytest.mark.looptime
async def test_what_got_worse_with_the_traffic_alone_is_no_harm() -> None:
    broker = MemoryBroker()
    async with flight(broker) as world, serving(broker):
        await world.until(MigrationPlanned)
        world.balance, world.step_seconds = 0.3, 4e-3
        evaluation = await world.until(PlanEvaluated)
        assert evaluation.verdict == "kept", evaluation
        assert "no better as it was before" in evaluation.reason


@pytest.mark.looptime
async def test_one_plan_is_judged_before_the_next_is_made_and_by_nothing_where_others_move_experts() -> None:
    broker = MemoryBroker()
    async with (
        flight(broker) as world,
        serving(broker, replace(CONFIG, evaluation_seconds=100.0, cooldown_seconds=1.0)),
    ):
        await world.until(MigrationPlanned)
        await world.until(MigrationCommitted)
        world.rates = SKEWED[::-1].copy()
        await world.last(25)
        assert len(await own(world.bus)) == 1
        assert "not evaluated yet" in (await engine_of(world.bus)).decided
        await world.bus.request(SUBJECTS.migrate, RollBack(engine="a"), 20)
        evaluation = await world.until(PlanEvaluated, 5)
        assert evaluation.verdict == "unknown"
        assert "others moved experts meanwhile" in evaluation.reason
        assert evaluation.plan_discount == 1.0


@pytest.mark.looptime
async def test_a_plan_is_not_judged_once_layers_have_changed_their_form() -> None:
    broker = MemoryBroker()
    async with (
        flight(broker, unshardable="") as world,
        serving(broker, replace(CONFIG, evaluation_seconds=40.0)),
    ):
        await world.until(MigrationPlanned)
        await world.until(MigrationCommitted)
        await world.last(5)
        await world.bus.request(SUBJECTS.migrate, SetLayout(engine="a", sharded=(0,), now=True), 20)
        evaluation = await world.until(PlanEvaluated, 60)
        assert evaluation.verdict == "unknown"
        assert "layers changed their form meanwhile" in evaluation.reason
        assert evaluation.measured_after is None
        assert evaluation.plan_discount == 1.0
        assert world.ranks.placement.sharded == (0,)


@pytest.mark.looptime
async def test_a_successor_judges_what_its_predecessor_began_by_what_that_had_measured() -> None:
    broker = MemoryBroker()
    async with flight(broker) as world:
        async with serving(broker):
            await world.until(MigrationPlanned)
            before = (await engine_of(world.bus)).measured
            assert before is not None
        world.balance = 0.9
        async with serving(broker):
            evaluation = await world.until(PlanEvaluated)
            assert evaluation.verdict == "kept"
            assert evaluation.measured_before.balance == pytest.approx(before.balance, rel=0.05)
            assert evaluation.measured_after.balance == pytest.approx(0.9, rel=0.02)
            assert evaluation.realised > 0.4
            shown = await engine_of(world.bus)
            assert shown.at_start is not None
            assert shown.at_start.balance == pytest.approx(0.5, rel=0.02)
        async with serving(broker):
            await world.last(30)
            assert len(await verdicts(world.bus)) == 1


@pytest.mark.looptime
async def test_a_shift_is_answered_before_the_cycle_comes_round_and_in_its_own_trace() -> None:
    broker = MemoryBroker()
    config = replace(CONFIG, cycle_seconds=500.0, window_seconds=60.0)
    async with flight(broker) as world, serving(broker, config):
        voice = world.bus.publisher(SUBJECTS.shifts)
        world.rates = EVEN
        await world.last(20)
        assert (await engine_of(world.bus)).decided == ""
        world.rates = SKEWED
        await voice.publish(SHIFT)
        planned = await world.until(MigrationPlanned, 40)
        assert planned.traceparent == SHIFT.traceparent


@pytest.mark.looptime
async def test_a_shift_while_a_plan_is_being_judged_is_answered_and_that_plan_stays_unknown() -> None:
    broker = MemoryBroker()
    config = replace(CONFIG, evaluation_seconds=200.0, cooldown_seconds=1.0)
    async with flight(broker) as world, serving(broker, config):
        await world.until(MigrationPlanned)
        await world.until(MigrationCommitted)
        world.rates = SKEWED[::-1].copy()
        await world.bus.publisher(SUBJECTS.shifts).publish(SHIFT)
        await world.until(MigrationPlanned, 60, after=1)
        (evaluation,) = await verdicts(world.bus)
        assert (evaluation.verdict, evaluation.plan_discount) == ("unknown", 1.0)
        assert "demand shifted" in evaluation.reason


@pytest.mark.looptime
@pytest.mark.parametrize("reason", ["silent", "paused"])
async def test_a_plan_that_was_not_followed_after_a_shift_is_judged_as_ever(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    broker = MemoryBroker()
    config = replace(CONFIG, evaluation_seconds=30.0, cooldown_seconds=1.0)
    async with flight(broker) as world, serving(broker, config) as service:
        planned = await world.until(MigrationPlanned)
        await world.until(MigrationCommitted, after=planned.handovers - 1)
        executor = executor_of(service)
        survey, calls = executor.survey, 0

        async def meanwhile(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if reason == "paused":
                await steer(world.bus, paused=True)
            return await survey(*arguments)

        monkeypatch.setattr(executor, "survey", meanwhile)
        if reason == "silent":
            world.ranks.silent.add(1)
        world.rates = SKEWED[::-1].copy()
        await world.bus.publisher(SUBJECTS.shifts).publish(SHIFT)
        evaluation = await world.until(PlanEvaluated, 60)
        assert calls > 0, "a plan would have followed"
        assert evaluation.verdict != "unknown", evaluation


@pytest.mark.looptime
async def test_a_plan_is_not_carried_out_where_popularity_shifted_while_it_was_thought_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = MemoryBroker()
    async with flight(broker) as world, serving(broker) as service:
        decide, shifts = context_of(service).plan_queries.decide, 0

        async def meanwhile(*arguments: Any) -> Any:
            nonlocal shifts
            found = await decide(*arguments)
            if found.plan is not None and not shifts:
                shifts += 1
                await world.bus.publisher(SUBJECTS.shifts).publish(SHIFT)
                await asyncio.sleep(0.1)
            return found

        monkeypatch.setattr(context_of(service).plan_queries, "decide", meanwhile)
        planned = await world.until(MigrationPlanned)
        assert planned.traceparent == SHIFT.traceparent, "the first one was of before the shift"
        assert len(await own(world.bus)) == 1


@pytest.mark.looptime
async def test_shifts_one_after_another_cost_a_thought_now_and_then() -> None:
    broker = MemoryBroker()
    config = replace(CONFIG, cycle_seconds=1000.0)
    async with flight(broker) as world, serving(broker, config) as service:
        voice = world.bus.publisher(SUBJECTS.shifts)
        world.rates = EVEN
        for _ in range(40):
            await voice.publish(SHIFT)
            await world.last(1)
        (line,) = [
            line
            for line in service.metrics.exposition().decode().splitlines()
            if line.startswith("roost_planner_plan_seconds_count")
        ]
        assert 2 <= float(line.split()[1]) <= 9


async def homes_of(bus: MemoryBus, published_homes: list[HomesPublished]) -> None:
    async with bus.subscribe(SUBJECTS.homes) as subscription:
        async for received in subscription:
            assert isinstance(received.message, HomesPublished)
            published_homes.append(received.message)


def plans_with_homes(monkeypatch: pytest.MonkeyPatch) -> NDArray[np.float32]:
    """Give every plan homes that are valid after it; returns these homes."""
    shares = np.full((2, 4), 0.25, np.float32)

    def with_homes(*arguments: Any) -> Any:
        found = decide(*arguments)
        after = None if found.plan is None else found.homes._replace(share=shares, clusters=9, note="near")
        return found._replace(homes_after=after)

    decide = plan_queries.decide
    monkeypatch.setattr("migration.requests.plan_queries.decide", with_homes)
    return shares


@pytest.mark.looptime
async def test_homes_are_planned_anew_as_soon_as_a_plan_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    plans_with_homes(monkeypatch)
    broker = MemoryBroker()
    published: list[HomesPublished] = []
    async with flight(broker) as world, serving(broker, replace(CONFIG, cycle_seconds=25.0)):
        listening = asyncio.create_task(homes_of(MemoryBus(broker), published))
        world.ranks.stage_seconds = 4.0
        planned = await world.until(MigrationPlanned, 60)
        await world.last(1)
        (*_, early) = published
        assert (early.epoch, early.clusters) == (planned.handovers, 9)
        await world.until(MigrationCommitted, after=planned.handovers - 1)
        await world.last(1)
        assert published[-1].version > early.version
        assert (published[-1].epoch, published[-1].clusters) == (planned.handovers, 0)
        listening.cancel()


@pytest.mark.looptime
@pytest.mark.parametrize("fails", [False, True], ids=["committed", "aborted"])
async def test_homes_of_a_plan_are_said_for_its_last_epoch_and_taken_back_where_it_is_given_up(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    shares = plans_with_homes(monkeypatch)
    broker = MemoryBroker()
    published_homes: list[HomesPublished] = []
    async with flight(broker) as world, serving(broker):
        listening = asyncio.create_task(homes_of(MemoryBus(broker), published_homes))
        world.ranks.stage_seconds = 4.0
        if fails:
            world.ranks.fails = {2: ("its memory is full", "memory")}
        planned = await world.until(MigrationPlanned)
        await world.last(1)
        early = published_homes[-1]
        assert (early.epoch, early.clusters, early.count, early.homes) == (
            planned.handovers,
            9,
            2,
            shares.astype("<f4").tobytes(),
        )
        assert early.version > published_homes[-2].version
        assert published_homes[-2].epoch == 0
        await world.until(MigrationAborted if fails else MigrationCommitted, 60)
        await world.last(2)
        shown = await engine_of(world.bus)
        if fails:
            assert (published_homes[-1].epoch, published_homes[-1].homes) == (0, b"")
            assert published_homes[-1].version > early.version
            assert shown.homes == 0
            assert "given up" in shown.decided or "aborted" in shown.plans[0].outcome
        else:
            assert published_homes[-1].epoch == planned.handovers
        listening.cancel()


@pytest.mark.looptime
async def test_plans_that_are_given_up_one_after_another_are_tried_ever_less_often() -> None:
    broker = MemoryBroker()
    async with flight(broker) as world, serving(broker):
        world.ranks.fails = {2: ("its memory is full", "memory")}
        await world.last(90)
        assert 2 <= len(await recorded(world.bus, MigrationAborted)) <= 4
        assert "the last plan was aborted, and the next waits" in (await engine_of(world.bus)).decided
        assert world.ranks.served == [0]
        assert await verdicts(world.bus) == []


@pytest.mark.looptime
async def test_settings_are_taken_all_or_none_while_it_runs_and_that_is_recorded() -> None:
    broker = MemoryBroker()
    async with flight(broker) as world, serving(broker, replace(CONFIG, policy="reweight")) as service:
        await world.last(25)
        assert await own(world.bus) == []
        published_homes = await service.reload(lambda: replace(CONFIG, cycle_seconds=5.0))
        assert published_homes.changed == {
            "policy": ('"reweight"', '"roost"'),
            "cycle_seconds": ("6.0", "5.0"),
        }
        await world.until(MigrationPlanned, 20)
        refused = await service.reload(lambda: replace(CONFIG, budget_bytes=1, lease_seconds=9.0))
        assert "lease_seconds (now 3.0, asked for 9.0)" in str(refused.refused)

        def broken() -> MigrationConfig:
            return replace(CONFIG, cycle_seconds=-1.0)

        assert "cycle_seconds must be" in str((await service.reload(broken)).refused)
        shown = await loop(world.bus)
        assert (shown.policy, shown.cycle_seconds, shown.budget_bytes) == ("roost", 5.0, CONFIG.budget_bytes)
        audit = [one.message async for one in world.bus.replay(SUBJECTS.config("planner"), follow=False)]
        assert [isinstance(one, ConfigChanged) and one.refused is None for one in audit] == [
            True,
            False,
            False,
        ]
        assert b'roost_planner_reloads_total{outcome="refused"} 2.0' in service.metrics.exposition()


@pytest.mark.looptime
async def test_a_defect_in_thinking_of_one_engine_does_not_hold_up_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(view: Any, *arguments: Any) -> Any:
        if view.engine == "b":
            raise ZeroDivisionError("a defect")
        return decide(view, *arguments)

    decide = plan_queries.decide
    monkeypatch.setattr("migration.requests.plan_queries.decide", broken)
    broker = MemoryBroker()
    async with (
        flight(broker) as world,
        flight(broker, name="b", worker_id=2) as other,
        serving(broker) as service,
    ):
        for _ in range(45):
            await other.speak()
            await world.last(1)
        assert len(await own(world.bus)) == 1
        assert await recorded(world.bus, MigrationPlanned, "b") == []
        assert b'refusals_total{reason="failed"}' in service.metrics.exposition()
        assert [engine.engine for engine in (await loop(world.bus)).engines] == ["a", "b"]


@pytest.mark.looptime
async def test_an_engine_whose_experts_are_sharded_is_measured_and_left_alone_beside_one_that_is_planned_for() -> (
    None
):
    broker = MemoryBroker()
    sharded = Flight(broker, "t", 2)
    sharded.remote_ranks = 0.0
    async with flight(broker) as world, serving(broker) as service:
        await sharded.join(layout=tp(SHAPE.layers))
        for _ in range(25):
            await sharded.speak()
            await world.last(1)
        assert len(await own(world.bus)) == 1
        _, shown = (await loop(world.bus)).engines
        assert (shown.engine, shown.plans, shown.homes) == ("t", (), 0)
        assert "sharded over all ranks" in shown.decided
        assert shown.measured is not None
        assert shown.measured.step_seconds == pytest.approx(2e-3, rel=0.02)
        assert shown.measured.remote_ranks == 0
        assert b'refusals_total{reason="failed"}' not in service.metrics.exposition()


@pytest.mark.looptime
async def test_a_verdict_stamped_by_a_clock_that_is_ahead_does_not_keep_us_from_learning() -> None:
    broker = MemoryBroker()
    async with flight(broker) as world, serving(broker, replace(CONFIG, evaluation_seconds=100.0)):
        await world.until(MigrationCommitted)
        (planned,) = await own(world.bus)
        subject, topic = SUBJECTS.migrations("a"), "event"

        def record(verdict: PlanEvaluated, ahead: float) -> None:
            broker.deliver(
                subject, codec.seal(1, 1, time.time() + ahead, topic, codec.encode(topic, verdict))
            )

        record(by_another(planned, 0.5), 1e6)
        await asyncio.sleep(1)
        assert (await engine_of(world.bus)).plan_discount == pytest.approx(0.5, abs=0.01)
        other = msgspec.structs.replace(planned, plan="another")
        await world.bus.record(subject, other)
        # Stamps are cut to milliseconds, and less than one may have passed on the wall clock meanwhile.
        record(by_another(other, 0.25), 1e-3)
        await asyncio.sleep(1)
        assert (await engine_of(world.bus)).plan_discount == pytest.approx(0.25, abs=0.01)


@pytest.mark.looptime
async def test_measurements_that_cannot_be_are_counted_and_change_nothing() -> None:
    broker = MemoryBroker()
    async with flight(broker) as world, serving(broker) as service:
        voice = world.bus.publisher(SUBJECTS.dispatched(world.name))
        for wrong in (
            {"rank": 7},
            {"steps": 0},
            {"balance": (1.0,)},
            {"local": (1e9, 0.0)},
            {"remote_ranks": (float("nan"), 0.0)},
            {"tokens": -1},
        ):
            await voice.publish(
                world.measured(0, **{key: value for key, value in wrong.items() if key != "rank"})
                if "rank" not in wrong
                else world.measured(7)
            )
        await asyncio.sleep(1)
        exposed = service.metrics.exposition().decode()
        assert 'rejected_total{reason="shape"} 2.0' in exposed
        assert 'rejected_total{reason="demand"} 4.0' in exposed
        assert (await engine_of(world.bus)).measured is None
