"""Timeline of plans, folded from the log of plans, and of the layouts that engines had. Bounded."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Literal

import msgspec

from fleet.facts.migrations import (
    LoopFigures,
    MigrationAborted,
    MigrationCommitted,
    MigrationPlanned,
    MigrationStaged,
    Origin,
    PlanEvaluated,
)
from fleet.layout import AttentionKind, Layout, layer_ranges

MAX_PLANS = 128
"""Plans kept, of all engines together: the newest."""
MAX_HANDOVERS = 64
"""Handovers kept of a plan: the newest."""
MAX_LAYOUTS = 64
"""Layouts kept of an engine: the newest."""

PlanState = Literal["under way", "committed", "aborted"]


class HandoverBar(msgspec.Struct, kw_only=True):
    """One handover of a plan."""

    number: int
    """index in the plan, from 0"""
    epoch: int
    bytes: int
    begun_at: float
    """Unix seconds, here and below"""
    staged_at: float
    committed_at: float | None = None
    """None: not committed"""
    commit_seconds: float = 0.0


class PlanBar(msgspec.Struct, kw_only=True):
    """One plan: what it was to do, its handovers, its end and its verdict."""

    engine: str
    plan: str
    origin: Origin
    policy: str
    at: float
    """start, Unix seconds"""
    reason: str
    handovers: int
    copies: int
    bytes: int
    counts: bool
    """its bytes count towards the byte budget"""
    to_sharded: str = ""
    """layers that it turns from whole to sharded"""
    to_whole: str = ""
    attention: AttentionKind | None = None
    """attention after the plan; None: as before"""
    done: int = 0
    """committed handovers"""
    moved_bytes: int = 0
    """bytes of committed handovers"""
    bars: list[HandoverBar] = msgspec.field(default_factory=list)
    state: PlanState = "under way"
    ended_at: float | None = None
    fault: str = ""
    """why it was aborted"""
    verdict: str = ""
    """empty: not evaluated"""
    verdict_at: float | None = None
    verdict_reason: str = ""
    realised: float | None = None
    """measured gain in step seconds, as a share of the predicted gain"""
    plan_discount: float | None = None
    """factor on predicted gains after the verdict"""
    predicted_before: LoopFigures | None = None
    predicted_after: LoopFigures | None = None
    measured_before: LoopFigures | None = None
    measured_after: LoopFigures | None = None


class LayoutSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A layout that an engine serves from a time on, until the next one."""

    at: float | None
    """Unix seconds; None: since before the timeline"""
    epoch: int | None
    """None: not known"""
    attention: AttentionKind
    sharded: int
    """number of sharded layers"""
    layers: str
    """the sharded layers"""
    plan: str = ""


class PlanTimeline:
    """Newest plans and layouts of all engines."""

    def __init__(self) -> None:
        self._plans: OrderedDict[tuple[str, str], PlanBar] = OrderedDict()
        self._turned: dict[tuple[str, str], tuple[frozenset[int], frozenset[int]]] = {}
        """layers that each plan shards, and makes whole"""
        self._staged: dict[str, tuple[int, Layout]] = {}
        """epoch and layout of the last staged handover, by engine"""
        self._layouts: dict[str, deque[LayoutSpan]] = {}

    @property
    def plans(self) -> Sequence[PlanBar]:
        """Plans, newest first."""
        return list(reversed(self._plans.values()))

    def layouts(self, engine: str) -> Sequence[LayoutSpan]:
        """Return the layouts of an engine, oldest first; empty: none of its handovers is known."""
        return list(self._layouts.get(engine, ()))

    def clear(self) -> None:
        """Forget everything."""
        for part in (self._plans, self._turned, self._staged, self._layouts):
            part.clear()

    def apply(self, entry: object, at: float) -> None:
        """Apply an entry of the log. at: time at which it was published, Unix seconds. Entries of plans that
        began before the timeline count only for layouts.
        """
        match entry:
            case MigrationPlanned():
                self._begin(entry, at)
            case MigrationStaged():
                self._stage(entry, at)
            case MigrationCommitted():
                self._commit(entry, at)
            case MigrationAborted():
                if (bar := self._plans.get((entry.engine, entry.plan))) is not None and bar.ended_at is None:
                    bar.state, bar.ended_at, bar.fault = "aborted", at, entry.reason
            case PlanEvaluated():
                self._evaluate(entry, at)

    def _begin(self, entry: MigrationPlanned, at: float) -> None:
        key = entry.engine, entry.plan
        if key in self._plans:
            return
        own = entry.origin == "planner" or (entry.origin == "rollback" and bool(entry.policy))
        self._plans[key] = PlanBar(
            engine=entry.engine,
            plan=entry.plan,
            origin=entry.origin,
            policy=entry.policy,
            at=at,
            reason=entry.reason,
            handovers=entry.handovers,
            copies=entry.copies,
            bytes=entry.bytes,
            counts=own or entry.paced,
            to_sharded=layer_ranges(entry.to_sharded),
            to_whole=layer_ranges(entry.to_whole),
            attention=entry.attention,
            predicted_before=entry.before,
            predicted_after=entry.after,
        )
        self._turned[key] = frozenset(entry.to_sharded), frozenset(entry.to_whole)
        while len(self._plans) > MAX_PLANS:
            oldest, _ = self._plans.popitem(last=False)
            del self._turned[oldest]

    def _stage(self, entry: MigrationStaged, at: float) -> None:
        layout = Layout(entry.placement.attention, entry.placement.sharded)
        if entry.engine not in self._layouts:
            self._layouts[entry.engine] = deque(maxlen=MAX_LAYOUTS)
            if (before := self._before(entry, layout)) is not None:
                self._layouts[entry.engine].append(_span(None, None, before))
        self._staged[entry.engine] = entry.epoch, layout
        bar = self._plans.get((entry.engine, entry.plan))
        if bar is not None:
            _bar_of(bar, entry, at)

    def _before(self, entry: MigrationStaged, after: Layout) -> Layout | None:
        """Return the layout before the first known handover of an engine; None: it cannot be told."""
        key = entry.engine, entry.plan
        if key not in self._plans or entry.number:
            return None
        to_sharded, to_whole = self._turned[key]
        sharded = tuple(sorted((set(after.sharded) - to_sharded) | to_whole))
        attention = self._plans[key].attention
        other: dict[AttentionKind, AttentionKind] = {"dp": "tp", "tp": "dp"}
        return Layout(after.attention if attention is None else other[attention], sharded)

    def _commit(self, entry: MigrationCommitted, at: float) -> None:
        epoch, layout = self._staged.get(entry.engine, (None, None))
        spans = self._layouts.get(entry.engine)
        if epoch == entry.epoch and layout is not None and spans is not None:
            last = spans[-1] if spans else None
            span = _span(at, epoch, layout, entry.plan)
            if last is None or (last.attention, last.layers) != (span.attention, span.layers):
                spans.append(span)
        bar = self._plans.get((entry.engine, entry.plan))
        if bar is None:
            return
        one = _bar_of(bar, entry, at - entry.commit_seconds)
        if one.committed_at is None:
            one.committed_at, one.commit_seconds = at, entry.commit_seconds
            bar.done += 1
            bar.moved_bytes += entry.bytes
        if entry.last and bar.ended_at is None:
            bar.state, bar.ended_at = "committed", at

    def _evaluate(self, entry: PlanEvaluated, at: float) -> None:
        bar = self._plans.get((entry.engine, entry.plan))
        if bar is None or bar.verdict:
            return
        bar.verdict, bar.verdict_at, bar.verdict_reason = entry.verdict, at, entry.reason
        bar.realised, bar.plan_discount = entry.realised, entry.plan_discount
        bar.predicted_before, bar.predicted_after = entry.predicted_before, entry.predicted_after
        bar.measured_before, bar.measured_after = entry.measured_before, entry.measured_after


def _bar_of(bar: PlanBar, entry: MigrationStaged | MigrationCommitted, staged_at: float) -> HandoverBar:
    """Return the bar of a handover; begin it if it is new."""
    known = next((one for one in bar.bars if one.number == entry.number), None)
    if known is not None:
        return known
    staging = entry.seconds - (entry.commit_seconds if isinstance(entry, MigrationCommitted) else 0.0)
    made = HandoverBar(
        number=entry.number,
        epoch=entry.epoch,
        bytes=entry.bytes,
        begun_at=staged_at - staging,
        staged_at=staged_at,
    )
    bar.bars.append(made)
    del bar.bars[:-MAX_HANDOVERS]
    return made


def _span(at: float | None, epoch: int | None, layout: Layout, plan: str = "") -> LayoutSpan:
    return LayoutSpan(
        at=at,
        epoch=epoch,
        attention=layout.attention,
        sharded=len(layout.sharded),
        layers=layer_ranges(layout.sharded),
        plan=plan,
    )
