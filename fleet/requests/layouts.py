"""Requests to the migration service about the layouts that it chooses for engines."""

import msgspec

from fleet.event import Event
from fleet.layout_times import LayoutName


class DescribeLayouts(Event, frozen=True, kw_only=True):
    """Request to the migration service: describe how it chooses layouts. Answered with `LayoutsDescribed`."""

    engine: str = ""
    """empty: all engines"""


class SetLayoutChoice(Event, frozen=True, kw_only=True):
    """Request to the migration service: choose the layout of an engine, or leave it as it is. The setting
    survives restarts of the service and of the engine. Answered with `LayoutsDescribed`.
    """

    engine: str
    """empty: all present engines"""
    automatic: bool


class LayoutOption(msgspec.Struct, frozen=True, kw_only=True):
    """A layout that an engine could be in, at its present load."""

    layout: LayoutName
    refusal: str = ""
    """why the engine cannot be in it now; empty: it can"""
    step_seconds: float | None = None
    """duration of a decode step; None: not known"""
    deviation: float = 0.0
    """relative standard error of `step_seconds`"""
    uncertain: bool = False
    """too old or too rough to act on"""
    regret_seconds: float = 0.0
    """time lost so far because the engine is not in this layout"""
    cost_seconds: float | None = None
    """time lost by a switch to it; None: not known"""


class StepTimeCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Decode steps of a layout by the number of sequences, at the present context. Tuples are [points]."""

    layout: LayoutName
    sequences: tuple[int, ...]
    seconds: tuple[float, ...]
    deviation: tuple[float, ...]
    """relative standard errors"""


class LayoutCrossing(msgspec.Struct, frozen=True, kw_only=True):
    """Number of sequences at which two layouts take equally long, at the present context."""

    sequences: float
    below: LayoutName
    """faster layout for fewer sequences"""
    above: LayoutName


class EngineLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Choice of the layout of one engine."""

    engine: str
    worker_id: int
    layout: str
    policy: str
    automatic: bool
    """switches that pay are carried out"""
    running: int = 0
    """decoding sequences"""
    waiting: int = 0
    """requests that are not admitted yet"""
    context: float = 0.0
    """mean tokens of a decoding sequence"""
    options: tuple[LayoutOption, ...] = ()
    curves: tuple[StepTimeCurve, ...] = ()
    crossings: tuple[LayoutCrossing, ...] = ()
    decided: str = ""
    """why it stays, or what it does, in one sentence"""
    single_layers: str = ""
    """what the last planning run found about the forms of single layers; empty: there was no run"""


class LayoutsDescribed(Event, frozen=True, kw_only=True):
    """Answer to `DescribeLayouts` and `SetLayoutChoice`."""

    engines: tuple[EngineLayout, ...] = ()
