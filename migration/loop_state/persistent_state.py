"""Persistent state of the control loop, stored under one key as JSON. Pure; bounded.

It holds the pause, the discount factor on predictions, the harmful plans, and the inputs of the pending
evaluations.
"""

from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.facts.migrations import LoopFigures
from migration.config import LayoutPolicyName
from migration.layouts.curves_record import CurvesRecord
from migration.loop_state.verdict import Measurement, StepPrices

MAX_ENGINES = 256
"""Limit on the engines remembered; the least recently written is dropped first."""
MAX_HARMS = 4
"""Limit on the harmful plans of an engine whose experts are remembered; the newest are kept."""
MAX_EXPERTS = 1 << 20
"""Limit on the (layer, expert) cells of one engine whose cooldown is remembered."""
MAX_REASON = 500
"""characters"""
_RENAMED = {"trust": "plan_discount", "trust_at": "plan_discount_at", "judging": "pending"}
"""Fields of an engine's state as older versions stored them, and their present names."""


class PendingVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs for the evaluation of a plan, recorded when it began."""

    plan: str
    prices: StepPrices
    before: Measurement | None = None
    """None: too little was measured"""


class Harm(msgspec.Struct, frozen=True, kw_only=True):
    """Experts in cooldown after a harmful plan."""

    plan: str
    until: float
    """Unix seconds"""
    layers: int
    experts: int
    cells: bytes
    """packed bits of the [layers, experts] mask"""

    @classmethod
    def of(cls, plan: str, until: float, cells: NDArray[np.bool_]) -> "Harm":
        return cls(
            plan=plan,
            until=until,
            layers=cells.shape[0],
            experts=cells.shape[1],
            cells=np.packbits(cells).tobytes(),
        )

    def resting(self) -> NDArray[np.bool_] | None:
        """Return the mask, bool [layers, experts]; None: the stored data is invalid."""
        size = self.layers * self.experts
        if not (
            0 < self.layers <= MAX_EXPERTS
            and 0 < self.experts <= MAX_EXPERTS
            and size <= MAX_EXPERTS
            and len(self.cells) == -(-size // 8)
        ):
            return None
        return (
            np.unpackbits(np.frombuffer(self.cells, np.uint8), count=size)
            .astype(bool)
            .reshape(self.layers, self.experts)
        )


class EngineMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Persistent state of one engine."""

    worker_id: int = 0
    """incarnation that `at_start` and `pending` refer to"""
    plan_discount: float = 1.0
    """discount factor on the predicted gains of plans"""
    plan_discount_at: float = 0.0
    """last change of the discount factor, Unix seconds"""
    at_start: LoopFigures | None = None
    pending: PendingVerdict | None = None
    harms: tuple[Harm, ...] = ()
    layout_chosen: bool | None = None
    """True: the planner chooses the layout; False: it leaves it as it is; None: as configured"""
    curves: CurvesRecord | None = None
    """step times of the engine's layouts, as corrected by live steps"""

    def layout_policy(self, configured: LayoutPolicyName) -> LayoutPolicyName:
        """Return the policy that chooses the layout: as configured, or `regret` if it was turned on."""
        return "regret" if self.layout_chosen and configured == "static" else configured

    def harmed(self, harm: Harm, now: float) -> "EngineMemory":
        """Add a harmful plan, and drop those that have expired at `now`, in Unix seconds."""
        kept = tuple(known for known in self.harms if known.until > now and known.plan != harm.plan)
        return msgspec.structs.replace(self, harms=(*kept, harm)[-MAX_HARMS:])

    def begun(self, worker_id: int) -> "EngineMemory":
        """Return the state for this incarnation of the engine."""
        return (
            self
            if self.worker_id == worker_id
            else msgspec.structs.replace(self, worker_id=worker_id, at_start=None, pending=None)
        )


class LoopMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Persistent state of the control loop."""

    paused: bool = False
    paused_reason: str = ""
    paused_at: float | None = None
    """Unix seconds"""
    engines: dict[str, EngineMemory] = {}
    """by name, the most recently written last"""

    def engine(self, name: str) -> EngineMemory:
        return self.engines.get(name, EngineMemory())

    def with_engine(self, name: str, memory: EngineMemory) -> "LoopMemory":
        """Replace the state of one engine."""
        engines = {known: its for known, its in self.engines.items() if known != name} | {name: memory}
        return msgspec.structs.replace(self, engines=dict(list(engines.items())[-MAX_ENGINES:]))

    def with_pause(self, paused: bool, reason: str, at: float) -> "LoopMemory":
        """Pause from a time in Unix seconds, or resume. A repeated pause keeps the time of the first."""
        since = (self.paused_at if self.paused else at) if paused else None
        return msgspec.structs.replace(
            self, paused=paused, paused_reason=reason[:MAX_REASON] if paused else "", paused_at=since
        )

    def with_changes(self, base: "LoopMemory", theirs: "LoopMemory") -> "LoopMemory":
        """Merge two states derived from `base` (three-way merge).

        Keeps this state, with the changes that only `theirs` has. In a conflict, this state wins.
        """
        chosen = theirs if self._pause == base._pause else self
        engines = {
            name: its for name, its in theirs.engines.items() if self.engine(name) == base.engine(name)
        }
        merged = self
        for name, its in engines.items():
            if its != base.engine(name):
                merged = merged.with_engine(name, its)
        return merged.with_pause_of(chosen)

    def with_pause_of(self, other: "LoopMemory") -> "LoopMemory":
        """Return this state, paused or not as another."""
        return msgspec.structs.replace(
            self, paused=other.paused, paused_reason=other.paused_reason, paused_at=other.paused_at
        )

    @property
    def _pause(self) -> tuple[bool, str, float | None]:
        return self.paused, self.paused_reason, self.paused_at


class RestoredMemory(NamedTuple):
    """State as it was stored, without parts that are invalid and that nothing else depends on."""

    memory: LoopMemory
    dropped: tuple[str, ...]
    """what was left out, and why"""


def decoded(content: bytes) -> RestoredMemory:
    """Return the state in this JSON, of this or an older version. Raises ValueError if it is invalid.

    Invalid step times of an engine's layouts are dropped alone: they begin anew from its calibration, while a
    pause by an operator or a harmful plan must not be forgotten.
    """
    stored = msgspec.json.decode(content, type=dict[str, Any])
    engines = msgspec.convert(stored.get("engines", {}), dict[str, dict[str, Any]])
    dropped = []
    for name, engine in engines.items():
        try:
            msgspec.convert(engine.get("curves"), CurvesRecord | None)
        except ValueError as error:
            engine["curves"] = None
            dropped.append(f"step times of the layouts of engine {name}: {error}")
    stored["engines"] = {
        name: {_RENAMED.get(field, field): value for field, value in engine.items()}
        for name, engine in engines.items()
    }
    return RestoredMemory(msgspec.convert(stored, LoopMemory), tuple(dropped))
