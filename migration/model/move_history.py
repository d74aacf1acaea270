"""Recent moves and their evidence, to prevent oscillation of experts between ranks. Pure; the time is an
argument.

There are two rules. First, a moved expert cools down, and its layer has its own cooldown (`frozen`). Second,
the last plan is undone only if the demand behind it has changed by more than the noise of the two samples
(`without_reversals`). With counts a of A and b of B pairs of a layer, the share of an expert differs
significantly if |a/A - b/B| > z * sqrt(a/A^2 + b/B^2), the deviation of two Poisson counts.

The history follows from the committed placements, in order, so it can be rebuilt from the log (`committed`).
The log does not hold the demand. The first demand seen afterwards takes its place (`seen`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import Float32Array, SlotTable
from fleet.placement import EMPTY, Placement
from migration.model.placement_changes import NOWHERE, PlacementChanges, taken

NEVER = -np.inf
SIGNIFICANT = 4.0
"""standard deviations: a false positive once in 16,000 tests, about one per comparison of 58 x 256 experts.
The deviation follows from counts, so this holds for windows of any size"""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MoveHistory:
    """Moves of one incarnation of an engine. Bounded: one time per expert, one plan, one demand."""

    worker_id: int
    epoch: int
    table: SlotTable
    """int16 [layers, slots]: table of that epoch"""
    ranks: int
    moved: NDArray[np.float64]
    """[layers, experts]: last time at which a rank gained or lost a replica; NEVER"""
    plan: str | None = None
    """last plan with a committed handover"""
    base: SlotTable
    """table before that plan"""
    demand: Float32Array | None = None
    """demand that the plan was based on; None: unknown"""
    rests: NDArray[np.float64] | None = None
    """[layers, experts]: end of the extra cooldown of experts that a harmful plan moved; None: no such
    experts"""

    @classmethod
    def begin(cls, worker_id: int, placement: Placement) -> "MoveHistory":
        """Start the history of an incarnation that begins with this placement."""
        never = np.full((placement.layers, placement.experts), NEVER)
        table = placement.expert_of_slot
        return cls(
            worker_id=worker_id,
            epoch=placement.epoch,
            table=table,
            ranks=placement.ranks,
            moved=never,
            base=table,
        )

    def committed(
        self, placement: Placement, plan: str | None, at: float, demand: Float32Array | None = None
    ) -> "MoveHistory":
        """Return the history after one more epoch. Old epochs change nothing.

        plan: its id. Handovers of one plan count as one, and an epoch without a plan leaves nothing to undo.
        at: seconds on the clock that is passed to `frozen`. demand: demand that the plan was based on. Raises
        ValueError if the placement has another shape.
        """
        if placement.epoch <= self.epoch:
            return self
        table = placement.expert_of_slot
        if table.shape != self.table.shape or placement.ranks != self.ranks:
            raise ValueError(
                f"history: {placement} follows {self.table.shape[1]} slots x {self.table.shape[0]} layers on"
                f" {self.ranks} ranks; begin anew"
            )
        same_plan = plan is not None and plan == self.plan
        base = self.base if same_plan else self.table
        # A layer that turns over was not rebalanced: nothing rests, and there is nothing to undo.
        turned = ((table == EMPTY).all(axis=1) != (self.table == EMPTY).all(axis=1))[:, None]
        changed = (self._held(table) != self._held(self.table)).any(axis=1)
        return replace(
            self,
            epoch=placement.epoch,
            table=table,
            moved=np.where(changed & ~turned, at, self.moved),
            plan=plan,
            base=np.where(turned, table, base),
            demand=self.demand if same_plan and demand is None else demand,
        )

    def seen(self, demand: Float32Array) -> "MoveHistory":
        """Use the demand of a window as evidence for the last plan, if the plan has none yet."""
        return self if self.demand is not None else replace(self, demand=demand)

    def harmed(self, cells: NDArray[np.bool_], until: float) -> "MoveHistory":
        """Freeze these experts [layers, experts] until that time. Raises ValueError if the shape does not
        match."""
        if cells.shape != self.moved.shape:
            raise ValueError(f"history: {cells.shape} experts are to rest; there are {self.moved.shape}")
        rests = np.full(cells.shape, NEVER) if self.rests is None else self.rests
        return replace(self, rests=np.where(cells, np.maximum(rests, until), rests))

    def frozen(self, now: float, expert_seconds: float, layer_seconds: float = 0.0) -> NDArray[np.bool_]:
        """Return the experts in cooldown, bool [layers, experts], for `Constraints.frozen`.

        A whole layer is frozen for `layer_seconds` after any of its experts was moved.
        """
        resting = now - self.moved < expert_seconds
        if self.rests is not None:
            resting = resting | (now < self.rests)
        return np.asarray(resting | (now - self.moved.max(axis=1, keepdims=True) < layer_seconds))

    def without_reversals(
        self, changes: PlacementChanges, demand: Float32Array, z: float = SIGNIFICANT
    ) -> PlacementChanges:
        """Remove changes that undo the last plan without new evidence, and the later changes of the same
        layers.

        changes: relative to the placement of this epoch. A change undoes the last plan if it brings to a rank
        an expert that the plan removed, or removes an expert that the plan brought. There is new evidence if
        the demand for such an expert, over all ranks or on that rank, differs significantly from the demand
        that the plan was based on. demand: of the present window.
        """
        if self.plan is None or not changes:
            return changes
        new = self._evidence(demand, z)
        before, now = self._held(self.base), self._held(self.table)
        table, per = self.table.copy(), self.table.shape[1] // self.ranks
        kept = np.ones(len(changes.kind), bool)
        closed: set[int] = set()
        for at, (layer, *writes) in enumerate(zip(*(part.tolist() for part in changes[1:6]), strict=True)):
            if layer in closed:
                kept[at] = False
                continue
            touched = _touched(table[layer], per, *writes)
            undoes = any(
                now[layer, rank, expert] != before[layer, rank, expert]
                and comes == before[layer, rank, expert]
                for rank, expert, comes in touched
            )
            if undoes and not any(new[rank % len(new), layer, expert] for rank, expert, _ in touched):
                kept[at] = False
                closed.add(layer)
                continue
            slot, expert, other_slot, other_expert = writes
            table[layer, slot] = expert
            if other_slot != NOWHERE:
                table[layer, other_slot] = other_expert
        return taken(changes, kept)

    def _evidence(self, demand: Float32Array, z: float) -> NDArray[np.bool_]:
        """Return where demand has changed, over all ranks or on the rank, bool [groups, layers, experts].

        Nothing counts as changed if the demand of the plan is unknown.
        """
        if self.demand is None or self.demand.shape != demand.shape:
            return np.zeros((1, *demand.shape[1:]), bool)
        together = differs(self.demand.sum(axis=0), demand.sum(axis=0), z)
        return differs(self.demand, demand, z) | together

    def _held(self, table: SlotTable) -> NDArray[np.bool_]:
        """Return the experts that each rank holds, bool [layers, ranks, experts]."""
        held = np.zeros((len(table), self.ranks, self.moved.shape[1]), bool)
        layer, slot = np.nonzero(table != EMPTY)
        held[layer, slot // (table.shape[1] // self.ranks), table[layer, slot]] = True
        return held


def retraced(worker_id: int, life: Sequence[tuple[Placement, str | None, float]]) -> MoveHistory | None:
    """Rebuild the history of an incarnation from the log: (placement, plan id, time) in log order.

    Returns None if the log has no valid entries.
    """
    history: MoveHistory | None = None
    for placement, plan, at in life:
        try:
            history = (
                MoveHistory.begin(worker_id, placement)
                if history is None
                else history.committed(placement, plan, at)
            )
        except ValueError:
            return None
    return history


def differs(before: NDArray[Any], now: NDArray[Any], z: float) -> NDArray[np.bool_]:
    """Return where an expert's share of its layer differs by more than z standard deviations, bool [...,
    layers, experts].

    The standard deviation combines both samples.
    """
    totals = [
        np.maximum(counts.sum(axis=-1, keepdims=True, dtype=np.float64), 1.0) for counts in (before, now)
    ]
    shares = [counts / total for counts, total in zip((before, now), totals, strict=True)]
    variance = shares[0] / totals[0] + shares[1] / totals[1]
    return np.asarray((shares[0] - shares[1]) ** 2 > z * z * variance)


def _touched(
    row: SlotTable, per: int, slot: int, expert: int, other_slot: int, other_expert: int
) -> list[tuple[int, int, bool]]:
    """Return the effects of a change on its ranks: (rank, expert, True if the expert arrives)."""
    writes = [(slot, expert)] if other_slot == NOWHERE else [(slot, expert), (other_slot, other_expert)]
    goes = [(at // per, int(row[at]), False) for at, _ in writes if row[at] != EMPTY]
    return goes + [(at // per, new, True) for at, new in writes if new != EMPTY]
