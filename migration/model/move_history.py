"""What was moved lately, and on what evidence: so that plans do not move the same experts to and fro. Pure; the time is an argument.

Two rules. An expert that was moved rests for a while, and its layer for another (`frozen`). And what the last plan did is undone only when the
demand behind it has changed by more than the noise of the two samples (`without_reversals`): with counts a of A and b of B pairs of a
layer, an expert's share differs significantly where |a/A - b/B| > z * sqrt(a/A^2 + b/B^2), the deviation of two Poisson counts.

All of it follows from the placements that were committed, in their order, so it can be had again from the log (`committed`). What the
log does not say is the demand; the first that is seen afterwards takes its place (`seen`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.placement import EMPTY, Placement
from migration.model.placement_changes import NOWHERE, PlacementChanges, Table, taken

Counts = NDArray[np.float32]
"""float32 [groups, layers, experts]: (token, k) pairs of a window, by rank, or of all ranks together where `groups` is 1"""
NEVER = -np.inf
SIGNIFICANT = 4.0
"""standard deviations: by chance once in 16,000 looks"""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MoveHistory:
    """Of one life of an engine. Bounded: one time per expert, one plan, one demand."""

    worker_id: int
    epoch: int
    table: Table
    """int16 [layers, slots] of that epoch"""
    ranks: int
    moved: NDArray[np.float64]
    """[layers, experts]: when a rank last got or lost a replica of it; NEVER"""
    plan: str | None = None
    """the last plan of which a handover was committed"""
    base: Table
    """what it started from"""
    demand: Counts | None = None
    """what it was made on; None: nobody knows"""
    rests: NDArray[np.float64] | None = None
    """[layers, experts]: until when an expert rests whatever was moved, because it was part of a plan that did harm; None: none does"""

    @classmethod
    def begin(cls, worker_id: int, placement: Placement) -> "MoveHistory":
        """A life that begins with this placement."""
        never = np.full((placement.layers, placement.experts), NEVER)
        table = placement.expert_of_slot
        return cls(worker_id=worker_id, epoch=placement.epoch, table=table, ranks=placement.ranks, moved=never, base=table)

    def committed(self, placement: Placement, plan: str | None, at: float, demand: Counts | None = None) -> "MoveHistory":
        """After one more epoch; an old one changes nothing.

        plan: its id; handovers of one plan count as one, and an epoch of no plan leaves nothing that could be undone. at: when, in seconds of the clock that
        `frozen` is asked by. demand: what the plan was made on. ValueError when the placement is of another shape.
        """
        if placement.epoch <= self.epoch:
            return self
        table = placement.expert_of_slot
        if table.shape != self.table.shape or placement.ranks != self.ranks:
            raise ValueError(f"history: {placement} follows {self.table.shape[1]} slots x {self.table.shape[0]} layers on {self.ranks} ranks; begin anew")
        goes_on = plan is not None and plan == self.plan
        return replace(
            self,
            epoch=placement.epoch,
            table=table,
            moved=np.where((self._held(table) != self._held(self.table)).any(axis=1), at, self.moved),
            plan=plan,
            base=self.base if goes_on else self.table,
            demand=self.demand if goes_on and demand is None else demand,
        )

    def seen(self, demand: Counts) -> "MoveHistory":
        """The demand of a window: evidence for what the last plan did, where there is none."""
        return self if self.demand is not None else replace(self, demand=demand)

    def harmed(self, cells: NDArray[np.bool_], until: float) -> "MoveHistory":
        """These experts [layers, experts] rest until then. ValueError when there are others in this history."""
        if cells.shape != self.moved.shape:
            raise ValueError(f"history: {cells.shape} experts are to rest; there are {self.moved.shape}")
        rests = np.full(cells.shape, NEVER) if self.rests is None else self.rests
        return replace(self, rests=np.where(cells, np.maximum(rests, until), rests))

    def frozen(self, now: float, expert_seconds: float, layer_seconds: float = 0.0) -> NDArray[np.bool_]:
        """bool [layers, experts], for `Limits.frozen`: what rests. A layer rests as a whole after any of its experts was moved."""
        resting = now - self.moved < expert_seconds
        if self.rests is not None:
            resting = resting | (now < self.rests)
        return np.asarray(resting | (now - self.moved.max(axis=1, keepdims=True) < layer_seconds))

    def without_reversals(self, changes: PlacementChanges, demand: Counts, z: float = SIGNIFICANT) -> PlacementChanges:
        """Without those that undo the last plan on no new evidence, and without what builds on them: the rest of their layers.

        changes: of the placement of this epoch. A change undoes the last plan when it brings to a rank what the plan took from it, or takes what
        the plan brought. There is new evidence when the demand for an expert that it brings or takes, of all or of that rank, differs
        significantly from the demand the plan was made on. demand: of the present window.
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
            undoes = any(now[layer, rank, expert] != before[layer, rank, expert] and comes == before[layer, rank, expert] for rank, expert, comes in touched)
            if undoes and not any(new[rank % len(new), layer, expert] for rank, expert, _ in touched):
                kept[at] = False
                closed.add(layer)
                continue
            slot, expert, other_slot, other_expert = writes
            table[layer, slot] = expert
            if other_slot != NOWHERE:
                table[layer, other_slot] = other_expert
        return taken(changes, kept)

    def _evidence(self, demand: Counts, z: float) -> NDArray[np.bool_]:
        """bool [groups, layers, experts]: whose demand has changed, of the rank or of all; nothing is new where nobody knows what was."""
        if self.demand is None or self.demand.shape != demand.shape:
            return np.zeros((1, *demand.shape[1:]), bool)
        together = differs(self.demand.sum(axis=0), demand.sum(axis=0), z)
        return differs(self.demand, demand, z) | together

    def _held(self, table: Table) -> NDArray[np.bool_]:
        """bool [layers, ranks, experts]"""
        held = np.zeros((len(table), self.ranks, self.moved.shape[1]), bool)
        layer, slot = np.nonzero(table != EMPTY)
        held[layer, slot // (table.shape[1] // self.ranks), table[layer, slot]] = True
        return held


def retraced(worker_id: int, life: Sequence[tuple[Placement, str | None, float]]) -> MoveHistory | None:
    """The history of a life from what the log says of it: (placement, id of its plan, when), in the log's order. None: it says nothing, or nonsense."""
    history: MoveHistory | None = None
    for placement, plan, at in life:
        try:
            history = MoveHistory.begin(worker_id, placement) if history is None else history.committed(placement, plan, at)
        except ValueError:
            return None
    return history


def counted(rates: NDArray[Any], pairs: NDArray[Any]) -> Counts:
    """Counts of a window from its rates [ranks, layers, experts] and the pairs [ranks] behind each layer of them."""
    total = rates.sum(axis=2, dtype=np.float64, keepdims=True)
    return np.asarray(rates * np.where(total > 0, pairs[:, None, None] / np.where(total > 0, total, 1.0), 0.0), np.float32)


def differs(before: NDArray[Any], now: NDArray[Any], z: float) -> NDArray[np.bool_]:
    """bool [..., layers, experts]: where an expert's share of its layer's counts differs by more than z standard deviations of both samples."""
    totals = [np.maximum(counts.sum(axis=-1, keepdims=True, dtype=np.float64), 1.0) for counts in (before, now)]
    shares = [counts / total for counts, total in zip((before, now), totals, strict=True)]
    variance = shares[0] / totals[0] + shares[1] / totals[1]
    return np.asarray((shares[0] - shares[1]) ** 2 > z * z * variance)


def _touched(row: Table, per: int, slot: int, expert: int, other_slot: int, other_expert: int) -> list[tuple[int, int, bool]]:
    """(rank, expert, whether it comes or goes) of what a change does to what ranks hold."""
    writes = [(slot, expert)] if other_slot == NOWHERE else [(slot, expert), (other_slot, other_expert)]
    goes = [(at // per, int(row[at]), False) for at, _ in writes if row[at] != EMPTY]
    return goes + [(at // per, new, True) for at, new in writes if new != EMPTY]
