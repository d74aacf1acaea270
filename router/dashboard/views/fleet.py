"""View *Fleet*: what is wrong, then engines and ranks with their load."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.arrays import IntArray
from router.fleet_state.engine_state import EngineState, EngineStatus
from router.fleet_state.reservations import BLOCKS, PREFILL, SEQUENCES, STEPS
from router.fleet_state.target_table import RankKey, TargetTable
from router.health.circuit_breakers import ExclusionKind, Exclusions

Severity = Literal["critical", "warning", "info"]
RankState = Literal["live", "breaker", "outlier", "drain", "saturated", "stale", "down"]
"""breaker, outlier, drain: why the rank is excluded; saturated: it accepts no further request; stale: its
load reports have stopped; down: its engine gets no requests
"""
MOST_PROBLEMS = 100
"""Problems listed, the gravest first."""
_GRAVITY: dict[Severity, int] = {"critical": 0, "warning": 1, "info": 2}
_ABOUT_RANK: dict[RankState, tuple[Severity, str]] = {
    "breaker": ("warning", "circuit breaker open"),
    "outlier": ("warning", "ejected as an outlier"),
    "saturated": ("warning", "saturated: accepts no further request"),
    "stale": ("warning", "load reports have stopped: only this fleet's bookings count"),
    "drain": ("info", "drained by an operator"),
}


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Something that needs an operator, or explains what the figures show."""

    severity: Severity
    what: str
    reason: str = ""
    engine: str | None = None
    """None: the whole router"""
    ranks: tuple[int, ...] = ()
    """empty: the whole engine"""


class RankColumns(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks of an engine, by number. Load: what is booked and reported, at this router's best knowledge."""

    state: list[RankState]
    requests: list[int]
    """running or waiting"""
    prefill_tokens: list[int]
    """prompt tokens that are not computed yet"""
    blocks: list[int]
    """KV blocks that the requests hold"""
    steps: list[int]
    """tokens that they are still expected to emit"""


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One incarnation of an engine. `worker_id` is a u64 and therefore text."""

    engine: str
    worker_id: str
    kind: str
    models: list[str]
    node: str
    static: bool
    """a server that Roost does not run"""
    state: str
    """"live", or why the engine gets no requests"""
    epoch: int | None
    priced_epoch: int | None
    """epoch that the expert terms of decisions belong to; it follows `epoch` within moments"""
    layout: str | None
    handover_seconds: float
    kv_blocks: int
    """of each target; 0: unknown"""
    ranks: RankColumns


class FleetTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over all targets of requests."""

    engines: int
    live_engines: int
    ranks: int
    live_ranks: int
    """live or stale: requests are sent there"""
    requests: int
    prefill_tokens: int
    blocks: int
    kv_blocks: int
    """of targets whose number of blocks is known"""
    kv_share: float | None
    """share of these blocks that requests hold; None: none is known"""


class FleetPicture(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet as one router process sees it."""

    router: str
    ready: bool
    in_flight: int
    """requests of clients that this process serves"""
    waiting: int
    """requests that wait for a place at this process"""
    models: list[str]
    problems: list[Problem]
    more_problems: int
    totals: FleetTotals
    engines: list[EngineFigures]


class RouterNow(msgspec.Struct, frozen=True, kw_only=True):
    """State of the router process, beside the fleet."""

    tag: str
    ready: bool
    missing: list[str]
    bus_silent: bool
    stopping: bool
    in_flight: int
    waiting: int
    models: list[str]


class ModelNow(msgspec.Struct, frozen=True, kw_only=True):
    """Targets of a model. load: int64 [AMOUNTS, targets]; saturated: bool [targets]; stale: ranks whose load
    reports have stopped.
    """

    table: TargetTable
    load: IntArray
    saturated: NDArray[np.bool_]
    exclusions: Exclusions
    stale: frozenset[RankKey]


def fleet_picture(
    router: RouterNow,
    engines: Iterable[EngineState],
    models: Mapping[str, ModelNow],
    unheard: Mapping[str, str],
) -> FleetPicture:
    """Return the view. models: by base model of an engine. unheard: URLs of static backends without an answer
    so far, by name.
    """
    states = sorted(engines, key=lambda state: state.joined.engine)
    views = [_engine(state, models[state.joined.model]) for state in states]
    problems = sorted(
        (*_of_router(router), *_of_backends(unheard), *_of_engines(states, views, models)),
        key=lambda problem: _GRAVITY[problem.severity],
    )
    return FleetPicture(
        router=router.tag,
        ready=router.ready,
        in_flight=router.in_flight,
        waiting=router.waiting,
        models=router.models,
        problems=problems[:MOST_PROBLEMS],
        more_problems=max(0, len(problems) - MOST_PROBLEMS),
        totals=_totals(views),
        engines=views,
    )


def _engine(state: EngineState, model: ModelNow) -> EngineFigures:
    joined = state.joined
    return EngineFigures(
        engine=joined.engine,
        worker_id=str(joined.worker_id),
        kind=joined.engine_kind,
        models=sorted(state.contexts),
        node=joined.node,
        static=state.probed,
        state=state.obstacle or "live",
        epoch=None if state.placement is None else state.placement.epoch,
        priced_epoch=state.priced_epoch,
        layout=None if state.layout is None else str(state.layout),
        handover_seconds=state.handover_seconds,
        kv_blocks=state.kv_blocks,
        ranks=_ranks(state, model),
    )


def _ranks(state: EngineState, model: ModelNow) -> RankColumns:
    """Return the ranks of an engine; those that cannot be chosen at present have no load."""
    first = model.table.index.get((state.joined.worker_id, 0))
    if first is None:
        nothing = [0] * state.ranks
        down: list[RankState] = ["down"] * state.ranks
        return RankColumns(
            state=down, requests=nothing, prefill_tokens=nothing, blocks=nothing, steps=nothing
        )
    at = slice(first, first + state.ranks)  # an engine's targets are adjacent
    load: list[list[int]] = model.load[:, at].tolist()
    saturated: list[bool] = model.saturated[at].tolist()
    states = [_rank_state((state.joined.worker_id, rank), full, model) for rank, full in enumerate(saturated)]
    return RankColumns(
        state=states,
        requests=load[SEQUENCES],
        prefill_tokens=load[PREFILL],
        blocks=load[BLOCKS],
        steps=load[STEPS],
    )


def _rank_state(key: RankKey, saturated: bool, model: ModelNow) -> RankState:
    kind = model.exclusions.kinds.get(key)
    if kind is not None:
        return _STATES[kind]
    return "saturated" if saturated else "stale" if key in model.stale else "live"


_STATES: dict[ExclusionKind, RankState] = {
    ExclusionKind.BREAKER: "breaker",
    ExclusionKind.OUTLIER: "outlier",
    ExclusionKind.DRAIN: "drain",
}


def _totals(views: list[EngineFigures]) -> FleetTotals:
    known = [view for view in views if view.kv_blocks]
    room = sum(view.kv_blocks * len(view.ranks.blocks) for view in known if view.state == "live")
    return FleetTotals(
        engines=len(views),
        live_engines=sum(view.state == "live" for view in views),
        ranks=sum(len(view.ranks.state) for view in views),
        live_ranks=sum(state in ("live", "stale") for view in views for state in view.ranks.state),
        requests=sum(sum(view.ranks.requests) for view in views),
        prefill_tokens=sum(sum(view.ranks.prefill_tokens) for view in views),
        blocks=sum(sum(view.ranks.blocks) for view in views),
        kv_blocks=room,
        kv_share=sum(sum(view.ranks.blocks) for view in known) / room if room else None,
    )


def _of_router(router: RouterNow) -> Iterator[Problem]:
    if router.stopping:
        yield Problem(severity="warning", what="This router is stopping")
    elif not router.ready:
        yield Problem(
            severity="critical",
            what="This router is not ready",
            reason=f"missing: {', '.join(router.missing)}",
        )
    if router.bus_silent:
        yield Problem(
            severity="critical",
            what="The bus delivers nothing",
            reason="engines, load and placements are as last heard",
        )
    if router.waiting:
        yield Problem(
            severity="warning",
            what=f"{router.waiting} request{' waits' if router.waiting == 1 else 's wait'} for a place",
            reason="every rank that could serve them is saturated or excluded",
        )


def _of_backends(unheard: Mapping[str, str]) -> Iterator[Problem]:
    for name, url in unheard.items():
        yield Problem(
            severity="critical", what="static backend has not answered yet", reason=url, engine=name
        )


def _of_engines(
    states: list[EngineState], views: list[EngineFigures], models: Mapping[str, ModelNow]
) -> Iterator[Problem]:
    for state, view in zip(states, views, strict=True):
        if state.obstacle is not None:
            left = state.status in (EngineStatus.LEFT, EngineStatus.NO_HEARTBEAT)
            yield Problem(
                severity="info" if left else "critical",
                what="gets no requests",
                reason=state.obstacle,
                engine=view.engine,
            )
            continue
        if view.handover_seconds:
            yield Problem(
                severity="info",
                what="handover in progress",
                reason=f"expected to add {1000 * view.handover_seconds:.0f} ms to new requests",
                engine=view.engine,
            )
        yield from _of_ranks(state, view, models[state.joined.model])


def _of_ranks(state: EngineState, view: EngineFigures, model: ModelNow) -> Iterator[Problem]:
    """Yield the problems of an engine's ranks; ranks with the same problem and reason are one."""
    ranks: dict[tuple[RankState, str], list[int]] = {}
    for rank, rank_state in enumerate(view.ranks.state):
        if rank_state in _ABOUT_RANK:
            reason = model.exclusions.every.get((state.joined.worker_id, rank), "")
            ranks.setdefault((rank_state, reason.removeprefix("draining: ")), []).append(rank)
    for (rank_state, reason), members in ranks.items():
        severity, what = _ABOUT_RANK[rank_state]
        yield Problem(severity=severity, what=what, reason=reason, engine=view.engine, ranks=tuple(members))
