"""Operator routes about the fleet: `GET /v1/status`, and `GET /v1/engines/{engine}/plan`."""

from collections.abc import Mapping
from typing import NamedTuple

from bus import BusError, BusTimeout, Declined
from fleet.arrays import IntArray
from fleet.completions import ApiError
from fleet.requests.plans import DescribePlan, PlanDescribed
from router.api.fleet_record import EngineRecord, FleetRecord, TargetRecord
from router.fleet_state.engine_state import EngineState
from router.fleet_state.reservations import BLOCKS, PREFILL, SEQUENCES
from router.fleet_state.target_table import RankKey, TargetTable
from router.service import RouterService

PLAN_SECONDS = 30.0
_BUDGET_DIGITS = 18


def fleet_record(service: RouterService) -> FleetRecord:
    """Return what this router knows of the fleet."""
    engines = sorted(service.view.engines(), key=lambda state: state.joined.engine)
    models = {state.joined.model: _model_load(service, state.joined.model) for state in engines}
    return FleetRecord(
        router=service.tag,
        ready=service.ready,
        missing=service.missing,
        bus_silent=service.bus_silent,
        models=service.view.models(live=True),
        waiting=len(service.wait_queue),
        engines=[_engine(state, models[state.joined.model]) for state in engines],
    )


class _ModelLoad(NamedTuple):
    """Targets of a model. load: [AMOUNTS, targets]; excluded: reasons by rank."""

    table: TargetTable
    load: IntArray
    excluded: Mapping[RankKey, str]


def _model_load(service: RouterService, model: str) -> _ModelLoad:
    now, table = service.clock(), service.view.target_table(model)
    return _ModelLoad(
        table,
        service.scheduler.reservations.load(table.rows, now),
        service.scheduler.health.exclusions(table, now).every,
    )


def _engine(state: EngineState, model: _ModelLoad) -> EngineRecord:
    joined = state.joined
    return EngineRecord(
        engine=joined.engine,
        worker_id=str(joined.worker_id),
        kind=joined.engine_kind,
        models=sorted(state.contexts),
        node=joined.node,
        state=state.obstacle or "live",
        epoch=None if state.placement is None else state.placement.epoch,
        layout=None if state.layout is None else str(state.layout),
        handover_seconds=state.handover_seconds,
        kv_blocks=state.kv_blocks,
        ranks=[_rank(state, rank, model) for rank in range(state.ranks)],
    )


def _rank(state: EngineState, rank: int, model: _ModelLoad) -> TargetRecord:
    """Return one target of an engine; one that cannot be chosen at present has no load."""
    key = state.joined.worker_id, rank
    at = model.table.index.get(key)
    amounts = None if at is None else model.load[:, at]
    return TargetRecord(
        rank=rank,
        url=state.joined.urls[rank],
        state=state.obstacle or model.excluded.get(key) or "live",
        requests=0 if amounts is None else int(amounts[SEQUENCES]),
        prefill_tokens=0 if amounts is None else int(amounts[PREFILL]),
        blocks=0 if amounts is None else int(amounts[BLOCKS]),
    )


async def planned(service: RouterService, engine: str, policy: str, budget_bytes: str | None) -> bytes:
    """Return the plan that the planner would make for an engine now, as JSON. Nothing is moved.

    ApiError 400 for an invalid budget, 409 with the planner's reason if it cannot plan for this engine, 503
    without a planner.
    """
    if budget_bytes is not None and not (budget_bytes.isdecimal() and len(budget_bytes) <= _BUDGET_DIGITS):
        message = f"budget_bytes must be a whole number of bytes, not {budget_bytes[:64]!r}"
        raise ApiError(400, message, param="budget_bytes", code="invalid_value")
    question = DescribePlan(
        engine=engine, policy=policy, budget_bytes=None if budget_bytes is None else int(budget_bytes)
    )
    try:
        answer = await service.ask_planner(question, PLAN_SECONDS)
    except Declined as refusal:
        raise ApiError(409, str(refusal), code="no_plan") from refusal
    except BusTimeout as error:
        message = "no planner answers: it is not running, or busy with other plans"
        raise ApiError(503, message, code="no_planner", retry_after=5.0) from error
    except BusError as error:
        raise ApiError(503, f"the planner cannot be asked: {error}", code="no_planner") from error
    if not isinstance(answer, PlanDescribed):
        message = f"the planner answered with {type(answer).__name__}; is it of another version of Roost?"
        raise ApiError(502, message, code="no_planner")
    return answer.record
