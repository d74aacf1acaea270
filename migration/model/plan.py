"""Plan: a series of handovers between placements, with the copies, reason and gain of each step. Pure.

`migration.planning.handover_batching` creates the handovers. This module defines them as values and executes
them (`applied`, `replay`). Each step is checked against the placement before it. Each handover produces a
Placement, whose constructor checks the invariants.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.arrays import SlotTable
from fleet.experts import ExpertId
from fleet.layout import ATTENTION_NAMES, AttentionKind
from fleet.placement import EMPTY, Placement, Split
from migration.model.cost_model import Figures, Payback

StepKind = Literal["reweight", "replicate", "swap", "move", "drop", "shard", "gather", "attention"]
NO_LAYER = -1
"""layer of an `attention` step"""
Link = Literal["same-node", "cross-node", "checkpoint"]
"""path of a copy. checkpoint: no rank holds the expert any more, so its weights are read from storage"""


PartLink = Literal["local", "same-node", "cross-node"]
"""path of a part. local: its rank holds it already, in the layer's other form"""
PART_LINKS: tuple[PartLink, ...] = ("local", "same-node", "cross-node")


class PartsMoved(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Parts of experts that take one kind of path when a layer turns over (`fleet.sharding.turn`)."""

    link: PartLink
    parts: int
    bytes: int


class Copy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Copy of an expert's weights into a slot of another rank."""

    expert: int
    slot: int
    source: int | None = None
    """source slot; None: the checkpoint"""
    link: Link
    bytes: int


class PlanStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One change of one layer, or of the attention. Its effect by kind:

    - `reweight`: change how the replicas of the layer share its tokens; nothing is copied.
    - `replicate`: put `expert` into `slot`, replacing `evicted`.
    - `move`: as `replicate`, and `other_slot`, which held `expert`, becomes empty.
    - `swap`: exchange `expert` in `other_slot` and `other_expert` in `slot`.
    - `drop`: remove `expert` from `slot`, which becomes empty.
    - `shard`: cut the layer's experts, so that every rank holds a part of each.
    - `gather`: make the sharded layer whole, with the experts in `slots`.
    - `attention`: change the attention to `attention`, while all layers are sharded.

    A `shard` or `gather` is the only step of its layer in a handover, an `attention` step the only one of its
    handover.
    """

    kind: StepKind
    layer: int
    """`NO_LAYER` for an `attention` step"""
    slot: int | None = None
    expert: int | None = None
    evicted: int | None = None
    """expert that is replaced; None: the slot was empty. A spare replica, unless other steps of the handover
    bring the expert elsewhere: an engine that moves its experts itself makes all steps at once
    """
    other_slot: int | None = None
    other_expert: int | None = None
    copies: tuple[Copy, ...] = ()
    slots: bytes = b""
    """the row of a layer that becomes whole: int16 little endian, [ranks * slots_per_rank], -1 is empty"""
    parts: tuple[PartsMoved, ...] = ()
    """the parts that a turned layer moves, by path"""
    attention: AttentionKind | None = None
    """attention after an `attention` step"""
    gain: float = 0.0
    """expected reduction of the engine step, in seconds"""
    why: str
    """one sentence"""

    @property
    def turns(self) -> bool:
        """True if the step changes the form of its layer."""
        return self.kind in ("shard", "gather")

    @property
    def transfers(self) -> int:
        """Copies of experts, and of parts, from one rank to another."""
        return len(self.copies) + sum(moved.parts for moved in self.parts if moved.link != "local")

    @property
    def bytes(self) -> int:
        """Bytes that arrive from other ranks or from storage."""
        parts = sum(moved.bytes for moved in self.parts if moved.link != "local")
        return sum(copy.bytes for copy in self.copies) + parts

    @property
    def local_bytes(self) -> int:
        """Bytes that ranks copy within their memory."""
        return sum(moved.bytes for moved in self.parts if moved.link == "local")


class SplitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Split of some layers in wire format: u16 little endian, [len(layers), slots] each."""

    layers: tuple[int, ...]
    """ascending; the other layers keep their split"""
    keep: bytes
    spill: bytes
    near: bytes

    @classmethod
    def of(cls, split: Split, layers: NDArray[np.intp]) -> "SplitRecord":
        """Take these layers of a split."""
        return cls(
            layers=tuple(layers.tolist()),
            **{name: part[layers].astype("<u2").tobytes() for name, part in split._asdict().items()},
        )

    def over(self, split: Split) -> Split:
        """Return a split [layers, slots] with these layers replaced. Raises ValueError if they do not fit."""
        rows, slots = list(self.layers), split.spill.shape[1]
        if any(not 0 <= layer < len(split.spill) for layer in rows):
            raise ValueError(f"split: it names layers {rows}; the placement has 0..{len(split.spill) - 1}")
        return Split(
            *(_over(part, rows, getattr(self, name), slots, name) for name, part in split._asdict().items())
        )


class Handover(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Steps that are staged together and become visible atomically, as the next epoch."""

    epoch: int
    """epoch that the handover creates"""
    steps: tuple[PlanStep, ...]
    """in order. Copies read from the slots of the previous epoch"""
    split: SplitRecord | None = None
    """how replicas share tokens afterwards; None: evenly, in every layer"""

    @property
    def attention(self) -> AttentionKind | None:
        """Attention afterwards; None: as before."""
        return next((step.attention for step in self.steps if step.kind == "attention"), None)

    @property
    def bytes(self) -> int:
        return sum(step.bytes for step in self.steps)

    @property
    def transfers(self) -> int:
        """Copies of experts, and of parts, from one rank to another."""
        return sum(step.transfers for step in self.steps)


class Plan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Plan for the placement of one engine. `refused` gives the reason if nothing is to be done."""

    id: str
    base_epoch: int
    """epoch of the initial placement; the handovers create the following epochs"""
    layers: int
    experts: int
    ranks: int
    slots_per_rank: int
    handovers: tuple[Handover, ...] = ()
    before: Figures | None = None
    after: Figures | None = None
    payback: Payback | None = None
    reason: str = ""
    """one sentence: reason for these changes"""
    refused: str = ""
    """reason why nothing is done; empty: the plan is worthwhile"""

    @property
    def steps(self) -> tuple[PlanStep, ...]:
        return tuple(step for handover in self.handovers for step in handover.steps)

    @property
    def copies(self) -> tuple[Copy, ...]:
        return tuple(copy for step in self.steps for copy in step.copies)

    @property
    def transfers(self) -> int:
        """Copies of experts, and of parts, from one rank to another."""
        return sum(handover.transfers for handover in self.handovers)

    @property
    def bytes(self) -> int:
        """Bytes that arrive from other ranks or from storage."""
        return sum(handover.bytes for handover in self.handovers)

    @property
    def local_bytes(self) -> int:
        """Bytes that ranks copy within their memory."""
        return sum(step.local_bytes for step in self.steps)

    @property
    def attention(self) -> AttentionKind | None:
        """Attention afterwards; None: as before."""
        changed = [one.attention for one in self.handovers if one.attention is not None]
        return changed[-1] if changed else None

    def turned(self, kind: StepKind) -> tuple[int, ...]:
        """Return the layers that steps of this kind turn over, ascending. kind: shard or gather."""
        return tuple(sorted({step.layer for step in self.steps if step.kind == kind}))


def planned(
    placement: Placement,
    handovers: Iterable[Handover] = (),
    *,
    before: Figures | None = None,
    after: Figures | None = None,
    payback: Payback | None = None,
    reason: str = "",
    refused: str = "",
    name: str | None = None,
) -> Plan:
    """Make a plan for a placement.

    name: its id. None: a hash of the handovers and the base epoch, so that equal plans have equal ids.
    """
    series = tuple(handovers)
    table = placement.expert_of_slot
    digest = blake2b(
        msgspec.msgpack.encode(
            (placement.epoch, table.shape, table.astype("<i2").tobytes(), placement.sharded, series)
        ),
        digest_size=8,
    ).hexdigest()
    return Plan(
        id=digest if name is None else name,
        base_epoch=placement.epoch,
        layers=placement.layers,
        experts=placement.experts,
        ranks=placement.ranks,
        slots_per_rank=placement.slots_per_rank,
        handovers=series,
        before=before,
        after=after,
        payback=payback,
        reason=reason,
        refused=refused,
    )


class PlanCause(StrEnum):
    """Reason why a plan does not apply to the current placement."""

    EPOCH = "epoch"
    """the handover does not follow the epoch of the placement"""
    SHAPE = "shape"
    """the plan was made for other numbers of layers, experts, ranks or slots, or names one that does not
    exist"""
    SOURCE = "source"
    """the source slot does not hold the expert"""
    SLOT = "slot"
    """a slot does not hold what the step expects"""
    DUPLICATE = "duplicate"
    """the rank would hold the expert twice"""
    COPY = "copy"
    """the copies of a step do not match its writes"""
    ATTENTION = "attention"
    """the attention does not change so from what is served, or layers turn over that need other attention"""
    PLACEMENT = "placement"
    """the resulting placement would be invalid: an expert without a holder, or a split that does not add up
    """


class Inapplicable(ValueError):
    """Error: a handover does not apply to a placement. step: its index in the handover; None: the handover as
    a whole."""

    def __init__(self, cause: PlanCause, handover: Handover, step: int | None, detail: str) -> None:
        where = (
            f"handover to epoch {handover.epoch}"
            if step is None
            else f"step {step} ({handover.steps[step].kind}) of the handover to epoch {handover.epoch}"
        )
        super().__init__(f"plan: {where}: {detail}")
        self.cause = cause
        self.epoch = handover.epoch
        self.step = step


def replay(placement: Placement, plan: Plan) -> list[Placement]:
    """Return the placement of every epoch that the plan creates, in order. Raises Inapplicable if a step does
    not apply."""
    stated = (plan.layers, plan.experts, plan.ranks, plan.slots_per_rank)
    found = (placement.layers, placement.experts, placement.ranks, placement.slots_per_rank)
    series: list[Placement] = []
    for handover in plan.handovers:
        if stated != found:
            raise Inapplicable(
                PlanCause.SHAPE,
                handover,
                None,
                f"made for (layers, experts, ranks, slots per rank) {stated}, the placement has {found}; plan"
                " anew",
            )
        placement = applied(placement, handover)
        series.append(placement)
    return series


def applied(placement: Placement, handover: Handover) -> Placement:
    """Return the placement after one handover. Raises Inapplicable with the failing step and the cause."""
    if handover.epoch != placement.epoch + 1:
        raise Inapplicable(
            PlanCause.EPOCH,
            handover,
            None,
            f"the placement is of epoch {placement.epoch}; plan anew from what is there",
        )
    table, sharded = placement.expert_of_slot.copy(), set(placement.sharded)
    for index, step in enumerate(handover.steps):
        _Check(placement, table, sharded, handover, index).carry_out(step)
    try:
        split = None if handover.split is None else handover.split.over(placement.split)
        return Placement(
            table,
            experts=placement.experts,
            ranks=placement.ranks,
            epoch=handover.epoch,
            split=split,
            duplicates=placement.duplicates,
            sharded=tuple(sorted(sharded)),
            attention=handover.attention or placement.attention,
        )
    except ValueError as error:
        raise Inapplicable(PlanCause.PLACEMENT, handover, None, str(error)) from error


@dataclass(frozen=True, slots=True, eq=False)
class _Check:
    """One step, checked against a table already changed by the previous steps."""

    base: Placement
    table: SlotTable
    sharded: set[int]
    handover: Handover
    index: int

    def carry_out(self, step: PlanStep) -> None:
        """Apply a step to the table. Raises Inapplicable if it does not apply."""
        if step.kind == "attention":
            self._change_attention(step)
            return
        if not 0 <= step.layer < self.base.layers:
            raise self._no(PlanCause.SHAPE, f"layer {step.layer} does not exist")
        if step.turns:
            self._turn(step)
            return
        if step.layer in self.sharded or step.layer in self.base.sharded:
            raise self._no(
                PlanCause.SLOT,
                f"layer {step.layer} is sharded: every rank holds a part of each of its experts; make it"
                " whole first",
            )
        if step.kind == "reweight":
            self._copies(step, {})
            return
        if step.slot is None or step.expert is None or not 0 <= step.expert < self.base.experts:
            raise self._no(
                PlanCause.SHAPE, f"slot {step.slot}, expert {step.expert}: both must be named, and exist"
            )
        match step.kind:
            case "drop":
                self._write(step.layer, step.slot, step.expert, EMPTY)
                self._copies(step, {})
            case "replicate":
                self._write(step.layer, step.slot, _or_empty(step.evicted), step.expert)
                self._copies(step, {step.slot: step.expert})
            case "move":
                self._write(step.layer, step.other_slot, step.expert, EMPTY)
                self._write(step.layer, step.slot, _or_empty(step.evicted), step.expert)
                self._copies(step, {step.slot: step.expert})
            case "swap":
                there = _or_empty(step.other_expert)
                self._write(step.layer, step.slot, there, EMPTY)
                self._write(step.layer, step.other_slot, step.expert, EMPTY)
                self._write(step.layer, step.slot, EMPTY, step.expert)
                self._write(step.layer, step.other_slot, EMPTY, there)
                self._copies(step, {step.slot: step.expert, int(step.other_slot or 0): there})

    def _change_attention(self, step: PlanStep) -> None:
        """Check a change of attention."""
        if len(self.handover.steps) > 1 or step.copies or step.parts:
            raise self._no(PlanCause.ATTENTION, "attention changes together with something else; plan anew")
        if step.attention is None or step.attention == self.base.attention:
            raise self._no(
                PlanCause.ATTENTION, f"attention is {ATTENTION_NAMES[self.base.attention]} already; plan anew"
            )
        if len(self.base.whole):
            raise self._no(
                PlanCause.ATTENTION,
                f"attention changes while {len(self.base.whole)} layers are whole; make all layers sharded"
                " first",
            )

    def _turn(self, step: PlanStep) -> None:
        """Change the form of a layer."""
        if self.base.attention == "tp":
            raise self._no(
                PlanCause.ATTENTION,
                f"layer {step.layer} turns over while attention is tensor-parallel; make it data-parallel"
                " first",
            )
        if sum(other.layer == step.layer for other in self.handover.steps) > 1:
            raise self._no(
                PlanCause.SLOT, f"layer {step.layer} turns over, and has other steps in the same handover"
            )
        if (step.kind == "gather") != (step.layer in self.sharded):
            form = "sharded" if step.layer in self.sharded else "whole"
            raise self._no(PlanCause.SLOT, f"layer {step.layer} is {form} already; plan anew")
        width = self.table.shape[1]
        if len(step.slots) != (2 * width if step.kind == "gather" else 0):
            raise self._no(
                PlanCause.SHAPE,
                f"{len(step.slots)} bytes of slots; a layer that becomes whole needs {2 * width}, for"
                f" [{width}] int16, and one that becomes sharded none",
            )
        row = np.frombuffer(step.slots, "<i2") if step.kind == "gather" else np.full(width, EMPTY)
        self.table[step.layer] = row
        (self.sharded.discard if step.kind == "gather" else self.sharded.add)(step.layer)
        replicas = int((row != EMPTY).sum()) if step.kind == "gather" else self.base.experts
        expected = replicas * self.base.ranks if self.base.ranks > 1 else 0
        counts = [moved.parts for moved in step.parts]
        if sum(counts) != expected or min(counts, default=1) < 1 or step.copies:
            raise self._no(
                PlanCause.COPY,
                f"it moves {expected} parts, but names {counts}, and {len(step.copies)} copies of experts",
            )

    def _write(self, layer: int, slot: int | None, before: int, after: int) -> None:
        if slot is None or not 0 <= slot < self.table.shape[1]:
            raise self._no(PlanCause.SHAPE, f"slot {slot} does not exist")
        found = int(self.table[layer, slot])
        if found != before:
            raise self._no(
                PlanCause.SLOT,
                f"layer {layer} slot {slot} holds {_named(layer, found)}, not {_named(layer, before)}; plan"
                " anew",
            )
        per = self.base.slots_per_rank
        rank = slot // per
        if after != EMPTY and (self.table[layer, rank * per : (rank + 1) * per] == after).any():
            raise self._no(PlanCause.DUPLICATE, f"rank {rank} holds {_named(layer, after)} already")
        self.table[layer, slot] = after

    def _copies(self, step: PlanStep, expected: dict[int, int]) -> None:
        """Check that the copies match the writes and that the source slots hold the experts in the served
        epoch."""
        stated = {copy.slot: copy.expert for copy in step.copies}
        if stated != expected or len(step.copies) != len(expected):
            raise self._no(PlanCause.COPY, f"it writes {expected} (slot: expert), but copies {stated}")
        for copy in step.copies:
            if copy.source is None:
                continue
            if not 0 <= copy.source < self.table.shape[1]:
                raise self._no(PlanCause.SHAPE, f"slot {copy.source} does not exist")
            held = int(self.base.expert_of_slot[step.layer, copy.source])
            if held != copy.expert:
                raise self._no(
                    PlanCause.SOURCE,
                    f"layer {step.layer} slot {copy.source} holds {_named(step.layer, held)}, not"
                    f" {_named(step.layer, copy.expert)}; plan anew",
                )

    def _no(self, cause: PlanCause, detail: str) -> Inapplicable:
        return Inapplicable(cause, self.handover, self.index, detail)


def _or_empty(expert: int | None) -> int:
    return EMPTY if expert is None else expert


def _named(layer: int, expert: int) -> str:
    return "nothing" if expert == EMPTY else f"expert {ExpertId(layer, expert)}"


def _over(
    part: NDArray[np.uint16], rows: list[int], stated: bytes, slots: int, name: str
) -> NDArray[np.uint16]:
    if len(stated) != 2 * len(rows) * slots:
        raise ValueError(
            f"split: {len(stated)} bytes of {name}, expected {2 * len(rows) * slots} for [{len(rows)},"
            f" {slots}] u16"
        )
    after = np.array(part)
    after[rows] = np.frombuffer(stated, "<u2").reshape(len(rows), slots)
    return after
