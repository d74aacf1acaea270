"""View *Layouts*: the layout of each engine, step times and regret of each layout, and its past layouts."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from fleet.layout import AttentionKind, layer_ranges
from fleet.requests.layouts import EngineLayout, LayoutCrossing, LayoutOption, LayoutsDescribed
from router.dashboard.views.plan_timeline import LayoutSpan
from router.fleet_state.engine_state import EngineState, EngineStatus

DIGITS = 4
"""Significant digits of the points of curves."""


class LayoutCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Decode steps of a layout by the number of sequences. Lists are [points]."""

    layout: str
    sequences: list[int]
    step_ms: list[float]
    deviation: list[float]
    """relative standard errors"""


class LayoutChoiceView(msgspec.Struct, frozen=True, kw_only=True):
    """Choice of the layout of an engine by the planner."""

    policy: str
    automatic: bool
    """switches that pay are carried out"""
    running: int
    """decoding sequences"""
    waiting: int
    context: float
    """mean tokens of a decoding sequence"""
    options: list[LayoutOption]
    curves: list[LayoutCurve]
    crossings: list[LayoutCrossing]
    decided: str
    single_layers: str


class EngineForm(msgspec.Struct, frozen=True, kw_only=True):
    """One engine with experts."""

    engine: str
    epoch: int | None
    attention: AttentionKind
    layers: int
    """MoE layers of the model"""
    sharded: int
    """number of sharded layers"""
    sharded_layers: str
    choice: LayoutChoiceView | None
    """None: the planner says nothing about it"""
    spans: list[LayoutSpan]
    """layouts that it had, oldest first"""


class LayoutsPicture(msgspec.Struct, frozen=True, kw_only=True):
    """The whole page."""

    silence: str
    """why the planner's answer is unknown, or was last known some time ago; empty: it answers"""
    engines: list[EngineForm]
    """by name"""
    history_seconds: float


def layouts_picture(
    engines: Iterable[EngineState],
    described: LayoutsDescribed | None,
    silence: str,
    spans: Mapping[str, Sequence[LayoutSpan]],
    history_seconds: float,
) -> LayoutsPicture:
    """Return the page from the router's view, the planner's last answer, and the layouts of the log."""
    choices = {} if described is None else {one.engine: one for one in described.engines}
    shown = sorted(
        (
            state
            for state in engines
            if state.layout is not None
            and state.placement is not None
            and state.status not in (EngineStatus.LEFT, EngineStatus.DEAD)
        ),
        key=lambda state: state.joined.engine,
    )
    return LayoutsPicture(
        silence=silence,
        engines=[
            _form(state, choices.get(state.joined.engine), spans.get(state.joined.engine, ()))
            for state in shown
        ],
        history_seconds=history_seconds,
    )


def _form(state: EngineState, choice: EngineLayout | None, spans: Sequence[LayoutSpan]) -> EngineForm:
    assert state.layout is not None
    assert state.placement is not None
    return EngineForm(
        engine=state.joined.engine,
        epoch=state.placement.epoch,
        attention=state.layout.attention,
        layers=state.placement.layers,
        sharded=len(state.layout.sharded),
        sharded_layers=layer_ranges(state.layout.sharded),
        choice=None if choice is None else _choice(choice),
        spans=list(spans),
    )


def _choice(choice: EngineLayout) -> LayoutChoiceView:
    return LayoutChoiceView(
        policy=choice.policy,
        automatic=choice.automatic,
        running=choice.running,
        waiting=choice.waiting,
        context=round(choice.context, 1),
        options=list(choice.options),
        curves=[
            LayoutCurve(
                layout=curve.layout,
                sequences=list(curve.sequences),
                step_ms=[_rounded(1e3 * seconds) for seconds in curve.seconds],
                deviation=[_rounded(one) for one in curve.deviation],
            )
            for curve in choice.curves
        ],
        crossings=list(choice.crossings),
        decided=choice.decided,
        single_layers=choice.single_layers,
    )


def _rounded(value: float) -> float:
    """Return a value with few digits, so that curves stay short."""
    return float(f"{value:.{DIGITS}g}")
