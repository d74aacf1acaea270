"""What the migration service must not forget of its own doing: that it is paused, how far it trusts its predictions, what did harm, and what a plan is
to be judged by. It stands under one key, as JSON. Pure; bounded."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.events import LoopFigures
from migration.loop_state.verdict import Measurement, StepPrices

MOST_ENGINES = 256
"""Engines that are remembered; those that were written of last stay."""
MOST_HARMS = 4
"""Harmful plans of an engine whose experts are remembered; of more, the newest."""
MOST_EXPERTS = 1 << 20
"""Cells of one engine whose rest is remembered."""
MOST_REASON = 500
"""characters"""


class PendingVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan is to be judged by, as it was when it began."""

    plan: str
    prices: StepPrices
    before: Measurement | None = None
    """None: too little was measured"""


class Harm(msgspec.Struct, frozen=True, kw_only=True):
    """Experts that rest after a plan that did harm."""

    plan: str
    until: float
    """Unix seconds"""
    layers: int
    experts: int
    cells: bytes
    """bits, packed, of [layers, experts]: which"""

    @classmethod
    def of(cls, plan: str, until: float, cells: NDArray[np.bool_]) -> "Harm":
        return cls(plan=plan, until=until, layers=cells.shape[0], experts=cells.shape[1], cells=np.packbits(cells).tobytes())

    def resting(self) -> NDArray[np.bool_] | None:
        """bool [layers, experts]; None: what stands there cannot be."""
        size = self.layers * self.experts
        if not (0 < self.layers <= MOST_EXPERTS and 0 < self.experts <= MOST_EXPERTS and size <= MOST_EXPERTS and len(self.cells) == -(-size // 8)):
            return None
        return np.unpackbits(np.frombuffer(self.cells, np.uint8), count=size).astype(bool).reshape(self.layers, self.experts)


class EngineMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Of one engine."""

    worker_id: int = 0
    """of the life that `at_start` and `judging` are about"""
    trust: float = 1.0
    trust_at: float = 0.0
    """Unix seconds, when it was last moved"""
    at_start: LoopFigures | None = None
    judging: PendingVerdict | None = None
    harms: tuple[Harm, ...] = ()

    def harmed(self, harm: Harm, now: float) -> "EngineMemory":
        """With one more, and without those that are over at `now`, Unix seconds."""
        kept = tuple(known for known in self.harms if known.until > now and known.plan != harm.plan)
        return msgspec.structs.replace(self, harms=(*kept, harm)[-MOST_HARMS:])

    def begun(self, worker_id: int) -> "EngineMemory":
        """For this life of the engine."""
        return self if self.worker_id == worker_id else msgspec.structs.replace(self, worker_id=worker_id, at_start=None, judging=None)


class LoopMemory(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    paused: bool = False
    paused_reason: str = ""
    paused_at: float | None = None
    """Unix seconds"""
    engines: dict[str, EngineMemory] = {}
    """by name, the one that was written of last at the end"""

    def engine(self, name: str) -> EngineMemory:
        return self.engines.get(name, EngineMemory())

    def remembering(self, name: str, memory: EngineMemory) -> "LoopMemory":
        """With this of one engine."""
        engines = {known: its for known, its in self.engines.items() if known != name} | {name: memory}
        return msgspec.structs.replace(self, engines=dict(list(engines.items())[-MOST_ENGINES:]))

    def steered(self, paused: bool, reason: str, at: float) -> "LoopMemory":
        """Paused from a time on, in Unix seconds, or not any more. Paused again it keeps the time of the first."""
        since = (self.paused_at if self.paused else at) if paused else None
        return msgspec.structs.replace(self, paused=paused, paused_reason=reason[:MOST_REASON] if paused else "", paused_at=since)

    def with_changes(self, base: "LoopMemory", theirs: "LoopMemory") -> "LoopMemory":
        """A merge of two memories that were both made from `base`: this one, with what only `theirs` changed. What both changed is ours."""
        chosen = theirs if self._pause == base._pause else self
        engines = {name: its for name, its in theirs.engines.items() if self.engine(name) == base.engine(name)}
        merged = self
        for name, its in engines.items():
            if its != base.engine(name):
                merged = merged.remembering(name, its)
        return msgspec.structs.replace(merged, paused=chosen.paused, paused_reason=chosen.paused_reason, paused_at=chosen.paused_at)

    @property
    def _pause(self) -> tuple[bool, str, float | None]:
        return self.paused, self.paused_reason, self.paused_at
