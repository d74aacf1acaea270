"""Placement: the expert in each slot of each rank, per layer, and the split of its tokens among replicas.
Invariants are checked at construction.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64

from fleet.experts import ExpertId
from fleet.layout import AttentionKind, AttentionLayout, Layout, check_ascending

EMPTY = -1
"""Value of an empty slot."""
MAX_CELLS = 1 << 27
"""Limit for layers x ranks x experts of a placement, so that input from other processes cannot exhaust
memory.
"""


FULL = 65_535
"""All of an expert's tokens, as a share in u16."""


class Split(NamedTuple):
    """Shares of an expert's tokens among its replicas: u16 [layers, slots] each, 0 in empty slots.
    `fleet.dispatch` is the rule.

    keep: share (of FULL) of its own tokens that a holder serves itself, before any are distributed. near:
    share that a replica takes of its own node's remaining tokens. If the replicas of a node claim more than
    FULL together, the claims are scaled down in proportion. All 0 if there is only one node. spill: share
    that a replica takes of all tokens then left, from any rank; the spills of an expert's replicas sum to
    FULL.
    """

    keep: NDArray[np.uint16]
    spill: NDArray[np.uint16]
    near: NDArray[np.uint16]


class PlacementRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A placement in wire format: `slots` is int16 little endian, [layers, ranks * slots_per_rank],
    row-major.
    """

    epoch: int
    experts: int
    layers: int
    ranks: int
    slots_per_rank: int
    slots: bytes
    keep: bytes = b""
    """u16 little endian, shaped like `slots`, as are the next two (`Split`); all three empty: the even split
    """
    spill: bytes = b""
    near: bytes = b""
    duplicates: bool = False
    """a rank may hold an expert twice in a layer: only in placements as an engine reports them"""
    sharded: tuple[int, ...] = ()
    """layers whose experts are sharded, ascending: their slots are -1 and their splits 0"""
    attention: AttentionKind = "dp"
    """Tensor-parallel attention goes with all layers sharded, or with none"""


def as_stated(record: PlacementRecord, attention: AttentionLayout) -> PlacementRecord:
    """Return the placement of an event that states the attention beside it. Events of earlier releases state
    it there alone, and their placements none: then the event counts."""
    return msgspec.structs.replace(record, attention="tp") if attention.kind == "tp" else record


class Placement:
    """One epoch's placement of an engine. Immutable.

    `expert_of_slot` is int16 [layers, ranks * slots_per_rank], rank-major: slot `s` is on rank `s //
    slots_per_rank`; -1 marks an empty slot.

    `sharded` names the layers whose experts are cut, with a part of each on every rank (`fleet.sharding`).
    Their rows name no experts: every slot is -1, every split 0.

    `split` defines how replicas share an expert's tokens; None: evenly.

    `attention` is data-parallel (dp: each rank has its own requests) or tensor-parallel (tp: every rank
    computes its heads of all requests).

    `duplicates` admits ranks that hold an expert twice in a layer, as vLLM's initial map may. It is for
    placements as an engine reports them. The attribute says if there are any.

    Invariants (ValueError names the offender): every expert of every whole layer has at least one replica, no
    rank holds two replicas of one expert in a layer (but see `duplicates`), ids are in range, the spills of
    an expert sum to FULL, and tensor-parallel attention goes with all layers sharded or with none.
    """

    def __init__(
        self,
        expert_of_slot: NDArray[Any],
        *,
        experts: int,
        ranks: int,
        epoch: int = 0,
        split: Split | None = None,
        duplicates: bool = False,
        sharded: tuple[int, ...] = (),
        attention: AttentionKind = "dp",
    ) -> None:
        table = np.ascontiguousarray(expert_of_slot, dtype=np.int16)
        if (
            table.ndim != 2
            or table.shape[0] < 1
            or ranks < 1
            or table.shape[1] == 0
            or table.shape[1] % ranks
        ):
            raise ValueError(
                f"placement: slots have shape {table.shape}; expected [layers, ranks * slots_per_rank] with"
                f" {ranks} ranks"
            )
        if epoch < 0:
            raise ValueError(f"placement: epoch must not be negative, got {epoch}")
        table.flags.writeable = False
        self.expert_of_slot: NDArray[np.int16] = table
        self.experts = experts
        self.ranks = ranks
        self.epoch = epoch
        check_ascending(sharded, "placement")
        self.sharded = tuple(sharded)
        """layers whose experts are sharded, ascending"""
        self.attention: AttentionKind = attention
        again = repeated(table, ranks)
        self._check(again, duplicates=duplicates)
        self.duplicates = bool(again.any())
        """True if some rank holds an expert twice in a layer"""
        self.even = split is None
        """True for the default split"""
        if split is not None:
            self.split = _checked(split, table, experts, self.sharded)
        else:
            self.split = even_split(table, experts, again if self.duplicates else None)

    def _check(self, again: NDArray[np.bool_], *, duplicates: bool) -> None:
        table = self.expert_of_slot
        if not 1 <= self.experts <= table.shape[1]:
            raise ValueError(
                f"placement: {self.experts} experts do not fit into the {table.shape[1]} slots of a layer"
            )
        if self.layers * self.ranks * self.experts > MAX_CELLS:
            raise ValueError(
                f"placement: {self.layers} layers x {self.ranks} ranks x {self.experts} experts are more than"
                f" {MAX_CELLS} cells"
            )
        outside = (table < EMPTY) | (table >= self.experts)
        if outside.any():
            layer, slot = np.argwhere(outside)[0]
            raise ValueError(
                f"placement: layer {layer} slot {slot} names expert {table[layer, slot]}; ids run from 0 to"
                f" {self.experts - 1}, {EMPTY} is empty"
            )
        if not duplicates and again.any():
            layer, slot = np.argwhere(again)[0]
            raise ValueError(
                f"placement: rank {slot // self.slots_per_rank} holds expert"
                f" {ExpertId(int(layer), int(table[layer, slot]))} more than once"
            )
        if self.sharded and self.sharded[-1] >= self.layers:
            raise ValueError(
                f"placement: sharded layer {self.sharded[-1]}; its {self.layers} layers are numbered from 0"
            )
        self.layout.check_layers(self.layers)
        named = np.argwhere(table[list(self.sharded)] != EMPTY)
        if len(named):
            layer, slot = self.sharded[named[0, 0]], named[0, 1]
            raise ValueError(
                f"placement: layer {layer} is sharded, but its slot {slot} names expert {table[layer, slot]};"
                f" all slots of a sharded layer must be {EMPTY}"
            )
        layers, slots = np.nonzero(table != EMPTY)
        copies = np.bincount(
            layers * self.experts + table[layers, slots], minlength=self.layers * self.experts
        )
        copies.reshape(self.layers, self.experts)[list(self.sharded)] = 1
        missing = np.flatnonzero(copies == 0)
        if len(missing):
            raise ValueError(
                "placement: expert"
                f" {ExpertId(int(missing[0]) // self.experts, int(missing[0]) % self.experts)} has no replica"
            )

    @property
    def layers(self) -> int:
        return int(self.expert_of_slot.shape[0])

    @property
    def slots_per_rank(self) -> int:
        return int(self.expert_of_slot.shape[1]) // self.ranks

    @cached_property
    def whole(self) -> NDArray[np.intp]:
        """Layers that hold whole experts, ascending: int [n]."""
        return np.setdiff1d(np.arange(self.layers), self.sharded)

    @property
    def layout(self) -> Layout:
        return Layout(self.attention, self.sharded)

    @cached_property
    def digest(self) -> int:
        """Digest of all that ranks must agree on, without the epoch: experts by slot, splits, forms and
        attention. A positive int64."""
        state = xxh3_64(self.expert_of_slot.tobytes())
        for part in self.split:
            state.update(part.tobytes())
        state.update(np.array((self.experts, self.ranks, *self.sharded), "<i8").tobytes())
        if self.attention == "tp":
            state.update(b"tp")
        return state.intdigest() >> 1

    @cached_property
    def replicas_on_rank(self) -> NDArray[np.int32]:
        """1 if the rank holds the expert, else 0: int32 [layers, ranks, experts]."""
        counts = np.zeros((self.layers, self.ranks, self.experts), np.int32)
        layer, slot = np.nonzero(self.expert_of_slot != EMPTY)
        counts[layer, slot // self.slots_per_rank, self.expert_of_slot[layer, slot]] = 1
        counts.flags.writeable = False
        return counts

    @cached_property
    def holding_ranks(self) -> NDArray[np.intp]:
        """Number of ranks that hold the expert: int [layers, experts]."""
        held = self.expert_of_slot != EMPTY
        if self.duplicates:
            held &= ~repeated(self.expert_of_slot, self.ranks)
        layer, slot = np.nonzero(held)
        place = layer * self.experts + self.expert_of_slot[layer, slot]
        return np.bincount(place, minlength=self.layers * self.experts).reshape(self.layers, self.experts)

    @cached_property
    def keeps_all(self) -> bool:
        """True if every holder serves all of its own tokens itself."""
        return bool((self.split.keep[self.expert_of_slot != EMPTY] == FULL).all())

    def on_rank(self, rank: int) -> NDArray[np.int16]:
        """Return the experts in a rank's slots: int16 [layers, slots_per_rank]."""
        return self.expert_of_slot[:, rank * self.slots_per_rank : (rank + 1) * self.slots_per_rank]

    def holders(self, expert: ExpertId) -> list[int]:
        """Return the ranks that hold a replica of the expert, ascending."""
        slots = np.flatnonzero(self.expert_of_slot[expert.layer] == expert.expert)
        return [int(rank) for rank in np.unique(slots // self.slots_per_rank)]

    def record(self) -> PlacementRecord:
        """Return the placement in wire format."""
        return PlacementRecord(
            epoch=self.epoch,
            experts=self.experts,
            layers=self.layers,
            ranks=self.ranks,
            slots_per_rank=self.slots_per_rank,
            slots=self.expert_of_slot.astype("<i2").tobytes(),
            duplicates=self.duplicates,
            sharded=self.sharded,
            attention=self.attention,
            **(
                {}
                if self.even
                else {name: part.astype("<u2").tobytes() for name, part in self.split._asdict().items()}
            ),
        )

    @classmethod
    def from_record(cls, record: PlacementRecord) -> "Placement":
        """Decode the wire format. ValueError if the bytes do not fit the stated shape or break an
        invariant."""
        width = record.ranks * record.slots_per_rank
        if len(record.slots) != 2 * record.layers * width:
            raise ValueError(
                f"placement: {len(record.slots)} bytes of slots, expected {2 * record.layers * width} for"
                f" [{record.layers}, {width}] int16"
            )
        table = np.frombuffer(record.slots, "<i2").reshape(record.layers, width)
        return cls(
            table,
            experts=record.experts,
            ranks=record.ranks,
            epoch=record.epoch,
            split=_split_of(record, table.shape),
            duplicates=record.duplicates,
            sharded=record.sharded,
            attention=record.attention,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Placement):
            return NotImplemented
        return self.epoch == other.epoch and self.serves_as(other)

    def serves_as(self, other: "Placement") -> bool:
        """Return True if both dispatch every token the same way: equal in all but the epoch."""
        same_head = (self.experts, self.ranks, self.layout) == (other.experts, other.ranks, other.layout)
        return (
            same_head
            and np.array_equal(self.expert_of_slot, other.expert_of_slot)
            and all(map(np.array_equal, self.split, other.split))
        )

    def __hash__(self) -> int:
        return hash((self.experts, self.ranks, self.epoch, self.layout, self.expert_of_slot.tobytes()))

    def __repr__(self) -> str:
        sharded = f", {len(self.sharded)} layers sharded" if self.sharded else ""
        attention = ", tensor-parallel attention" if self.attention == "tp" else ""
        return (
            f"<Placement epoch {self.epoch}: {self.layers} layers x {self.experts} experts on {self.ranks}"
            f" ranks, {self.slots_per_rank} slots each{sharded}{attention}>"
        )


def repeated(expert_of_slot: NDArray[np.int16], ranks: int) -> NDArray[np.bool_]:
    """Return the slots whose expert is in a lower slot of the same rank too: bool [layers, slots]."""
    by_rank = expert_of_slot.reshape(len(expert_of_slot), ranks, -1)
    again = np.zeros(by_rank.shape, np.bool_)
    # All pairs of slots: ranks of large engines have few, and sorting them takes longer.
    for apart in range(1, by_rank.shape[2]):
        again[:, :, apart:] |= by_rank[:, :, apart:] == by_rank[:, :, :-apart]
    return np.asarray(again & (by_rank != EMPTY)).reshape(expert_of_slot.shape)


def even_split(
    expert_of_slot: NDArray[np.int16], experts: int, again: NDArray[np.bool_] | None = None
) -> Split:
    """Return the even split: holders keep their own tokens, and replicas share the rest evenly.

    The remainder of FULL / replicas goes to the first replicas. again: `repeated`; of the slots of a rank
    with the same expert, the first keeps its tokens. None: there are none.
    """
    held = expert_of_slot != EMPTY
    spill = even_spill(expert_of_slot, experts, held)
    keeps = held if again is None else held & ~again
    keep = np.where(keeps, np.uint16(FULL), np.uint16(0))
    return _frozen(Split(keep, spill, np.zeros(held.shape, np.uint16)))


def even_spill(
    expert_of_slot: NDArray[np.int16], experts: int, which: NDArray[np.bool_]
) -> NDArray[np.uint16]:
    """Return the spill of the even split, of some experts: uint16 [layers, slots].

    which: bool [layers, slots], all slots of these experts; 0 in others.
    """
    layer, slot = np.nonzero(which)
    place = layer * experts + expert_of_slot[layer, slot]
    order = np.argsort(place, kind="stable")
    counts = np.bincount(place, minlength=len(which) * experts)
    nth = np.empty(len(place), np.int64)
    nth[order] = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
    replicas = counts[place]
    spill = np.zeros(which.shape, np.uint16)
    spill[layer, slot] = FULL // replicas + (nth < FULL % replicas)
    return spill


def _frozen(split: Split) -> Split:
    for part in split:
        part.flags.writeable = False
    return split


def _checked(split: Split, table: NDArray[np.int16], experts: int, sharded: tuple[int, ...]) -> Split:
    """Return a validated copy of a placement's split. ValueError names the defect."""
    for name, part in split._asdict().items():
        if part.shape != table.shape or part.dtype != np.uint16:
            raise ValueError(
                f"placement: {name} is {part.dtype} {part.shape}; expected uint16 {table.shape}, one number"
                " per slot"
            )
        stray = (table == EMPTY) & (part > 0)
        if stray.any():
            layer, slot = np.argwhere(stray)[0]
            raise ValueError(
                f"placement: layer {layer} slot {slot} is empty but has {name} {part[layer, slot]}; it"
                " must be 0"
            )
    layer, slot = np.nonzero(table != EMPTY)
    sums = np.bincount(
        layer * experts + table[layer, slot], weights=split.spill[layer, slot], minlength=len(table) * experts
    )
    sums.reshape(len(table), experts)[list(sharded)] = FULL
    wrong = np.flatnonzero(sums != FULL)
    if len(wrong):
        expert = ExpertId(int(wrong[0]) // experts, int(wrong[0]) % experts)
        raise ValueError(
            f"placement: the spills of expert {expert} add up to {sums[wrong[0]]:.0f}; they must be {FULL}"
            " together"
        )
    return _frozen(Split(*(np.array(part) for part in split)))


def _split_of(record: PlacementRecord, shape: tuple[int, ...]) -> Split | None:
    """Decode the split of a record. ValueError if its bytes do not fit."""
    parts = {"keep": record.keep, "spill": record.spill, "near": record.near}
    if not any(parts.values()):
        return None
    for name, part in parts.items():
        if len(part) != len(record.slots):
            raise ValueError(
                f"placement: {len(part)} bytes of {name}, expected {len(record.slots)}: one u16 per slot"
            )
    return Split(*(np.frombuffer(part, "<u2").astype(np.uint16).reshape(shape) for part in parts.values()))


def linear(*, layers: int, experts: int, ranks: int, slots_per_rank: int | None = None) -> Placement:
    """Return the placement of epoch 0: contiguous blocks of experts, rank 0 first.

    The first `experts % ranks` ranks take one more. `slots_per_rank` defaults to the minimum; surplus slots
    stay empty. ValueError if it is too small.
    """
    minimum = -(-experts // ranks)
    slots = minimum if slots_per_rank is None else slots_per_rank
    if slots < minimum:
        raise ValueError(
            f"placement: {experts} experts over {ranks} ranks need {minimum} slots per rank, not {slots}"
        )
    row = np.full((ranks, slots), EMPTY, np.int16)
    for rank, block in enumerate(np.array_split(np.arange(experts), ranks)):
        row[rank, : len(block)] = block
    return Placement(np.tile(row.reshape(1, -1), (layers, 1)), experts=experts, ranks=ranks)


def with_slots(placement: Placement, slots_per_rank: int) -> Placement:
    """Return the placement with additional empty slots on every rank. ValueError if it already has more."""
    more = slots_per_rank - placement.slots_per_rank
    if more < 0:
        raise ValueError(
            f"placement: it uses {placement.slots_per_rank} slots per rank and layer, and the engine is to"
            f" have {slots_per_rank}"
        )
    if not more:
        return placement

    def wider(part: NDArray[Any], fill: int) -> NDArray[Any]:
        by_rank = part.reshape(placement.layers, placement.ranks, -1)
        return np.pad(by_rank, ((0, 0), (0, 0), (0, more)), constant_values=fill).reshape(
            placement.layers, -1
        )

    split = None if placement.even else Split(*(wider(part, 0).astype(np.uint16) for part in placement.split))
    return Placement(
        wider(placement.expert_of_slot, EMPTY),
        experts=placement.experts,
        ranks=placement.ranks,
        epoch=placement.epoch,
        split=split,
        sharded=placement.sharded,
        attention=placement.attention,
    )


def with_attention(placement: Placement, attention: AttentionKind, *, epoch: int) -> Placement:
    """Return the placement of an epoch with this attention. ValueError for tensor-parallel attention where
    only some layers are sharded."""
    return Placement(
        placement.expert_of_slot,
        experts=placement.experts,
        ranks=placement.ranks,
        epoch=epoch,
        split=None if placement.even else placement.split,
        duplicates=placement.duplicates,
        sharded=placement.sharded,
        attention=attention,
    )


def with_rows(
    placement: Placement, rows: Mapping[int, NDArray[Any] | None], *, epoch: int, split: Split | None = None
) -> Placement:
    """Return the placement of an epoch in which some layers have other rows.

    rows: by layer, int [ranks * slots_per_rank], the experts in its slots; None: the layer is sharded. split:
    of all layers; None: layers with a new row share evenly, and the others as before. ValueError for a layer
    that does not exist, and as `Placement`.
    """
    table = placement.expert_of_slot.copy()
    sharded = set(placement.sharded)
    for layer, row in rows.items():
        if not 0 <= layer < placement.layers:
            raise ValueError(
                f"placement: layer {layer} does not exist; its {placement.layers} layers are numbered from 0"
            )
        table[layer] = EMPTY if row is None else row
        (sharded.add if row is None else sharded.discard)(layer)

    def made(split: Split | None) -> Placement:
        return Placement(
            table,
            experts=placement.experts,
            ranks=placement.ranks,
            epoch=epoch,
            split=split,
            duplicates=placement.duplicates,
            sharded=tuple(sorted(sharded)),
            attention=placement.attention,
        )

    if split is None and not placement.even:
        is_new = np.isin(np.arange(placement.layers), list(rows))[:, None]
        evenly = made(None).split
        split = Split(*(np.where(is_new, new, old) for new, old in zip(evenly, placement.split, strict=True)))
    return made(split)
