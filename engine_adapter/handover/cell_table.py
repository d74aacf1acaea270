"""Cell table of one rank's expert memory: the use, content and readers of each cell. Pure.

Every slot maps to a cell, also an empty slot. Cells without a slot receive what comes in. A cell consists of
*pieces*: the parts of one expert in a whole layer, the parts of a group of experts in a sharded one
(`fleet.sharding`). Each piece arrives on its own, from up to as many sources as there are pieces, and a cell
may be read by as many peers. `fleet.handover.CELL` defines the transitions of a cell's use, and this module
performs them. Invariants, for every order of events (`check_integrity`):

- Every slot maps to a cell of its own, and exactly these cells are LIVE.
- A cell is STAGED once every piece of it has landed and matches its checksums.
- A piece is read into a cell once. When that fails, the cell is given up: it is quarantined, and becomes FREE
  once no piece of it is being read or compared any more.
- A cell can be reserved only while it is FREE. It becomes FREE only when no byte can land in it and no lease
  covers it. A slot's old cell drains while it is leased. A cell of which one piece is overdue is quarantined
  until all its reads have settled.
- Leased cells do not change: readers rely on the checksums that came with the lease.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.experts import ExpertId
from fleet.handover import CELL, Cell, CellEvent, Filling, after_part, given_up, next_state
from fleet.placement import EMPTY, Placement
from fleet.sharding import ALL_PARTS, contents, group_of

MAX_LEASES = 256
"""Limit of open leases. A reader has one per source and handover, and forgotten leases expire."""


class Content(NamedTuple):
    """Content of a cell that a slot holds or will hold."""

    layer: int
    slot: int
    """Slot of this rank."""
    number: int
    """Expert, or group of a sharded layer."""
    sharded: bool = False
    """The layer is sharded."""

    def __str__(self) -> str:
        return (
            f"group {self.number} of layer {self.layer}"
            if self.sharded
            else f"expert {ExpertId(self.layer, self.number)}"
        )


_NOTHING = Content(0, 0, EMPTY)
_FILLED = Filling()


class Requested(NamedTuple):
    """An expert or a part of one, as a lease names it."""

    layer: int
    slot: int
    """Slot of this rank. In a sharded layer that of the expert's group."""
    expert: int
    part: int = ALL_PARTS


class NoFreeCell(Exception):
    """No cell is free. The text states what holds the cells."""


class LeaseRefused(ValueError):
    """These experts cannot be read here. The text gives the reason and the remedy."""


class Inconsistent(Exception):
    """The cell table contradicts itself: a defect in this program."""


class ResidentCell(NamedTuple):
    """A cell that holds served experts."""

    cell: int
    content: Content
    pieces: int
    """Number of its pieces. The last group of a sharded layer may have fewer than the others."""


@dataclass(slots=True)
class _Record:
    use: Cell = Cell.FREE
    content: Content = _NOTHING
    checksums: tuple[int, ...] = ()
    """[tensors, parts] row by row, 0 for pieces that the cell does not have. Empty: unknown."""
    since: float = 0.0
    """Time of the last change of use, in seconds."""
    readers: set[int] = field(default_factory=set)
    """Numbers of the leases on this cell."""
    filling: Filling = _FILLED
    """Reads that fill it: one per piece, or one of a whole expert."""


@dataclass(frozen=True, slots=True)
class ReadLease:
    """Read lease: a promise to one reader that some cells will not change until the lease expires."""

    number: int
    reader: int
    """Rank of the reader."""
    handover: int
    experts: tuple[Requested, ...]
    cells: tuple[int, ...]
    checksums: tuple[tuple[int, ...], ...]
    """Per part: one u64 per tensor. Per whole expert: [tensors, parts] row by row."""
    until: float
    """Expiry time in seconds, unless the lease is renewed."""


class CellTable:
    """Use and content of one rank's cells.

    placement, rank: the served placement, and this rank in it. cells: int32 [layers, slots], the cell of each
    slot. total: number of cells. parts: parts of an expert, 1 or the number of ranks. ValueError when `cells`
    names a cell twice or one that does not exist, or a layer is sharded whose experts cannot be cut.
    """

    def __init__(
        self,
        placement: Placement,
        rank: int,
        cells: NDArray[np.int32],
        total: int,
        parts: int = 1,
        now: float = 0.0,
    ) -> None:
        held = contents(placement, rank)
        if held.shape != cells.shape:
            raise ValueError(
                f"cells: a table of {cells.shape} for slots of {held.shape}; both must be [layers, slots]"
            )
        if not ((cells >= 0) & (cells < total)).all() or len(np.unique(cells)) != cells.size:
            raise ValueError(
                f"cells: {cells.size} slots need as many distinct cells out of {total}; the table is"
                f" {cells.tolist()}"
            )
        if parts not in (1, placement.ranks) or (placement.sharded and parts != placement.ranks):
            raise ValueError(
                f"cells: experts of {parts} parts for {placement!r}; they must have a part per rank, or one"
                " part if no layer is sharded"
            )
        self.parts = parts
        self.rank = rank
        self.held = held
        """int16 [layers, slots]: the served experts, or groups of a sharded layer."""
        self.table = cells.astype(np.int32)
        """int32 [layers, slots]: the cell of each slot."""
        self._experts = placement.experts
        self._sharded = self._forms(placement)
        self._records = [_Record(since=now) for _ in range(total)]
        for layer, slot in np.ndindex(held.shape):
            self._records[cells[layer, slot]] = _Record(
                Cell.LIVE, self._content(held, self._sharded, layer, slot), since=now
            )
        self._free = self._of(Cell.FREE)
        """A heap, so that a layer that turns over finds its cells quickly among thousands."""
        self._counts = Counter(record.use for record in self._records)
        self._leases: dict[int, ReadLease] = {}
        self._last_lease = 0

    # incoming experts

    def reserve(self, content: Content, now: float, *, in_pieces: bool = False) -> int:
        """Reserve a free cell for what a slot will hold. in_pieces: each piece is read on its own; otherwise
        one read fills the cell. NoFreeCell when there is none."""
        if not self._free:
            raise NoFreeCell(f"no cell is free for {content}: {self.summary()}")
        cell = heappop(self._free)
        self._move(cell, CellEvent.RESERVED, now)
        record = self._records[cell]
        record.content = content
        record.filling = Filling.of(self._pieces(content) if in_pieces else 1)
        return cell

    # The rules of a cell that is filled are `fleet.handover.after_part` and `given_up`. ALL_PARTS in place of
    # a piece stands for the one read of a cell that was not reserved in pieces.

    def begun(self, cell: int, piece: int = ALL_PARTS) -> None:
        """Note that a read begins: bytes may land from now on. IllegalTransition unless it is the first of
        its piece."""
        record = self._records[cell]
        record.filling = record.filling.begun(_part(piece))

    def landed(self, cell: int, now: float, piece: int = ALL_PARTS) -> None:
        """Mark a piece as completely received. Its checksums are compared next."""
        record = self._records[cell]
        record.filling = record.filling.landed(_part(piece))
        self._proceed(cell, now)

    def verified(self, cell: int, checksums: tuple[int, ...], now: float, piece: int = ALL_PARTS) -> None:
        """Mark a piece as equal to its checksums. The last one stages the cell. checksums: one per tensor, or
        [tensors, parts] row by row for all pieces."""
        record = self._records[cell]
        self._done(cell, piece)
        if piece == ALL_PARTS:
            record.checksums = checksums
        else:
            sums = list(record.checksums or (0,) * (len(checksums) * self.parts))
            sums[piece :: self.parts] = checksums
            record.checksums = tuple(sums)
        self._proceed(cell, now)

    def failed(self, cell: int, now: float, piece: int = ALL_PARTS) -> None:
        """Give up the cell of a piece whose read failed, or that does not match its checksums. The piece is
        not in flight; others may be, until they have `settled`."""
        self._done(cell, piece)
        self.give_up(cell, now)

    def give_up(self, cell: int, now: float) -> None:
        """Give up a cell: free it, or quarantine it while a read or a checksum comparison may still use it.
        Do nothing if it was given up before."""
        record = self._records[cell]
        if record.use in (Cell.PULLING, Cell.VERIFYING):
            record.filling = record.filling.stopped()
            self._move(cell, given_up(record.use, record.filling), now)
        else:
            self._proceed(cell, now)

    def settled(self, cell: int, now: float, piece: int = ALL_PARTS) -> None:
        """Note that a piece of a quarantined cell can neither land nor be compared any more. The last one
        frees the cell."""
        record = self._records[cell]
        if record.use is not Cell.QUARANTINED:
            raise Inconsistent(f"cell {cell} is {record.use.value}; only quarantined cells can be settled")
        self._done(cell, piece)
        self._proceed(cell, now)

    def _done(self, cell: int, piece: int) -> None:
        record = self._records[cell]
        if not sum(record.filling) >> _part(piece) & 1:
            raise Inconsistent(
                f"cell {cell} is {record.use.value}, and its piece {_part(piece)} is not awaited:"
                f" {record.filling}"
            )
        record.filling = record.filling.done(_part(piece))

    def _proceed(self, cell: int, now: float) -> None:
        """Perform what follows from the pieces of a cell."""
        record = self._records[cell]
        event = after_part(record.use, record.filling)
        if event is not None:
            self._move(cell, event, now)

    def drop_staged(self, now: float) -> None:
        """Free all staged cells, because their handover was aborted."""
        for cell in self._of(Cell.STAGED):
            self._move(cell, CellEvent.DROPPED, now)

    # the flip

    def arranged(self, placement: Placement) -> NDArray[np.int32]:
        """Return the cell of each slot, int32 [layers, slots], for a placement.

        An expert that stays, or moves to another slot of the rank, keeps its cell, unless its layer changes
        its form. What comes in gets the cell staged for it. An empty slot keeps its old cell or, where
        another slot took that cell, gets a spare cell of its layer. Inconsistent when something is neither
        held nor staged.
        """
        held, sharded = contents(placement, self.rank), self._forms(placement)
        staged = {record.content: cell for cell, record in self._in_use(Cell.STAGED)}
        table = self.table.copy()
        turned = self._sharded ^ sharded
        for layer in range(len(held)):
            if layer not in turned and (held[layer] == self.held[layer]).all():
                continue
            table[layer] = -1
            cell_of = {
                number: int(cell)
                for number, cell in zip(self.held[layer].tolist(), self.table[layer], strict=True)
                if number != EMPTY and layer not in turned
            }
            for slot, number in enumerate(held[layer].tolist()):
                if number != EMPTY:
                    content = self._content(held, sharded, layer, slot)
                    found = cell_of.get(number, staged.get(content))
                    if found is None:
                        raise Inconsistent(f"layer {layer} slot {slot}: {content} is neither here nor staged")
                    table[layer, slot] = found
            self._assign_empty(layer, table)
        return table

    def _assign_empty(self, layer: int, table: NDArray[np.int32]) -> None:
        taken = set(table[layer].tolist())
        spare = [cell for cell in self.table[layer].tolist() if cell not in taken]
        for slot in np.flatnonzero(table[layer] < 0).tolist():
            own = int(self.table[layer, slot])
            table[layer, slot] = own if own in spare else spare[0]
            spare.remove(int(table[layer, slot]))

    def adopt(self, placement: Placement, table: NDArray[np.int32], now: float) -> None:
        """Switch to a placement and these cells (from `arranged`). Cells without a slot drain, and become
        free once no lease covers them."""
        held, sharded = contents(placement, self.rank), self._forms(placement)
        for cell in np.setdiff1d(self.table, table).tolist():
            self._move(cell, CellEvent.EVICTED, now)
            self._settle_drained(cell, now)
        changed = (held != self.held) | (table != self.table)
        changed[list(self._sharded ^ sharded)] = True
        for layer, slot in np.argwhere(changed).tolist():
            cell = int(table[layer, slot])
            record = self._records[cell]
            if record.use is Cell.STAGED:
                self._move(cell, CellEvent.ADOPTED, now)
            record.content = self._content(held, sharded, layer, slot)
            if record.content.number == EMPTY:
                record.checksums = ()
        self.held, self.table, self._sharded = held, table.copy(), sharded

    # content of the cells

    def residents(self) -> Iterator[ResidentCell]:
        """Iterate over the cells of all served experts."""
        for (layer, slot), number in np.ndenumerate(self.held):
            if number != EMPTY:
                content = self._content(self.held, self._sharded, layer, slot)
                yield ResidentCell(int(self.table[layer, slot]), content, self._pieces(content))

    def seal(self, resident: ResidentCell, checksums: tuple[int, ...]) -> None:
        """Store the checksums of a served cell, [tensors, parts] row by row. It can be leased from now on. Do
        nothing if the cell has changed its use meanwhile."""
        if self._serves(resident):
            self._records[resident.cell].checksums = checksums

    def sealed(self, resident: ResidentCell) -> tuple[int, ...] | None:
        """Return the checksums of a served cell. None while they are unknown, or if the cell has changed its
        use meanwhile."""
        return (self._records[resident.cell].checksums or None) if self._serves(resident) else None

    def _serves(self, resident: ResidentCell) -> bool:
        """Return True if a cell still serves the same, in whichever slot."""
        record = self._records[resident.cell]
        return record.use is Cell.LIVE and record.content._replace(slot=0) == resident.content._replace(
            slot=0
        )

    def _forms(self, placement: Placement) -> frozenset[int]:
        """Return the layers whose cells hold groups. None where the forms coincide."""
        return frozenset(placement.sharded if self.parts > 1 else ())

    @staticmethod
    def _content(held: NDArray[np.int16], sharded: frozenset[int], layer: int, slot: int) -> Content:
        return Content(layer, slot, int(held[layer, slot]), layer in sharded)

    def _pieces(self, content: Content) -> int:
        """Return the number of pieces of a cell with this content."""
        if not content.sharded:
            return self.parts
        return min(self.parts, self._experts - content.number * self.parts)

    # leases

    def lease(
        self, reader: int, handover: int, experts: Sequence[Requested], seconds: float, now: float
    ) -> ReadLease:
        """Lease the cells of these experts or parts to a reader for a number of seconds: they do not change
        until the lease ends. A repeated request renews the lease. LeaseRefused when one of them is not served
        here."""
        requested = tuple(experts)
        held = next(
            (
                one
                for one in self._leases.values()
                if (one.reader, one.handover, one.experts) == (reader, handover, requested)
            ),
            None,
        )
        if held is None:
            return self._grant(reader, handover, requested, seconds, now)
        renewed = ReadLease(
            held.number, reader, handover, requested, held.cells, held.checksums, now + seconds
        )
        self._leases[held.number] = renewed
        return renewed

    def _grant(
        self, reader: int, handover: int, requested: tuple[Requested, ...], seconds: float, now: float
    ) -> ReadLease:
        if not 0 < len(requested) <= self.held.size or len(set(requested)) < len(requested):
            raise LeaseRefused(
                f"a lease of {len(requested)} experts: ask for 1 to {self.held.size}, each once"
            )
        if len(self._leases) >= MAX_LEASES:
            raise LeaseRefused(
                f"{MAX_LEASES} leases are open already; ask again when readers have ended theirs"
            )
        found = [self.find(one) for one in requested]
        self._last_lease += 1
        lease = ReadLease(
            self._last_lease,
            reader,
            handover,
            requested,
            tuple(cell for cell, _ in found),
            tuple(checksums for _, checksums in found),
            now + seconds,
        )
        self._leases[lease.number] = lease
        for cell in lease.cells:
            self._records[cell].readers.add(lease.number)
        return lease

    def find(self, requested: Requested) -> tuple[int, tuple[int, ...]]:
        """Return (cell, checksums) of a served expert or part. The checksums are those of a `ReadLease`.
        LeaseRefused when it is not served here."""
        layer, slot, expert, part = requested
        layers, slots = self.held.shape
        if not (0 <= layer < layers and 0 <= slot < slots):
            raise LeaseRefused(
                f"layer {layer} slot {slot} of this rank does not exist; it has {layers} layers of {slots}"
            )
        content = self._content(self.held, self._sharded, layer, slot)
        number, piece = group_of(expert, self.parts) if content.sharded else (expert, part)
        parts = (self.rank,) if content.sharded else range(ALL_PARTS, self.parts)
        if not 0 <= expert < self._experts or number != content.number:
            present = "nothing" if content.number == EMPTY else str(content)
            raise LeaseRefused(
                f"layer {layer} slot {slot} of this rank holds {present}, not expert {expert}; ask the"
                " coordinator for the epoch that is served"
            )
        if part not in parts:
            raise LeaseRefused(
                f"this rank has no part {part} of expert {ExpertId(layer, expert)}, but {list(parts)}"
                f" ({ALL_PARTS}: all); ask the coordinator for the epoch that is served"
            )
        cell = int(self.table[layer, slot])
        sums = self._records[cell].checksums
        if not sums:
            raise LeaseRefused(
                f"expert {ExpertId(layer, expert)} has no checksums yet; ask again in a moment"
            )
        return cell, sums if piece == ALL_PARTS else sums[piece :: self.parts]

    def end(self, number: int, now: float) -> bool:
        """End a lease, because its reads have settled. False: it had already ended."""
        lease = self._leases.pop(number, None)
        if lease is None:
            return False
        for cell in lease.cells:
            self._records[cell].readers.discard(number)
            self._settle_drained(cell, now)
        return True

    def expire(self, now: float) -> tuple[ReadLease, ...]:
        """End the expired leases. Their readers have been silent too long or are dead."""
        silent = tuple(lease for lease in self._leases.values() if lease.until <= now)
        for lease in silent:
            self.end(lease.number, now)
        return silent

    @property
    def leases(self) -> int:
        return len(self._leases)

    @property
    def next_expiry(self) -> float:
        """Time at which the first lease expires, in seconds. Infinity: there is no lease."""
        return min((lease.until for lease in self._leases.values()), default=float("inf"))

    # counts and integrity

    def count(self, use: Cell) -> int:
        return self._counts[use]

    @property
    def idle(self) -> bool:
        """True when no expert is being received or staged."""
        return not any(self.count(use) for use in (Cell.PULLING, Cell.VERIFYING, Cell.STAGED))

    def oldest(self, now: float) -> float:
        """Age in seconds of the oldest quarantined or draining cell. 0: there is none."""
        if not self.count(Cell.QUARANTINED) and not self.count(Cell.DRAINING):
            return 0.0
        return max(
            now - record.since for record in self._records if record.use in (Cell.QUARANTINED, Cell.DRAINING)
        )

    def use(self, cell: int) -> Cell:
        return self._records[cell].use

    def summary(self) -> str:
        """Format the number of cells in each use for messages."""
        return ", ".join(f"{self.count(use)} {use.value}" for use in Cell if self.count(use))

    def check_integrity(self) -> None:
        """Check the invariants in the module's docstring. Inconsistent when one is violated."""
        live = self._of(Cell.LIVE)
        if live != np.sort(self.table, axis=None).tolist():
            raise Inconsistent(f"cells {live} are live, but slots map to {sorted(self.table.flat)}")
        if self._counts != Counter(record.use for record in self._records):
            raise Inconsistent(
                f"{self.summary()} cells were counted, but the cells are"
                f" {Counter(record.use for record in self._records)}"
            )
        if sorted(self._free) != self._of(Cell.FREE):
            raise Inconsistent(
                f"cells {self._of(Cell.FREE)} are free, but {sorted(self._free)} can be reserved"
            )
        leased: dict[int, set[int]] = {}
        for lease in self._leases.values():
            for cell in lease.cells:
                leased.setdefault(cell, set()).add(lease.number)
        for cell, record in enumerate(self._records):
            if record.readers != leased.get(cell, set()):
                raise Inconsistent(
                    f"cell {cell} has readers {sorted(record.readers)}, but leases"
                    f" {sorted(leased.get(cell, ()))}"
                )
            if record.readers and record.use not in (Cell.LIVE, Cell.DRAINING):
                raise Inconsistent(f"cell {cell} is {record.use.value}, and leased")
            if record.use is Cell.DRAINING and not record.readers:
                raise Inconsistent(f"cell {cell} drains without a lease")
            self._check_filling(cell, record)

    @staticmethod
    def _check_filling(cell: int, record: _Record) -> None:
        """Check that pieces are awaited where the cell's use says so, and nowhere else."""
        waiting, reading, comparing = record.filling
        consistent = {
            Cell.PULLING: bool(waiting | reading),
            Cell.VERIFYING: not waiting | reading and bool(comparing),
            Cell.QUARANTINED: not waiting and record.filling.uses_cell,
        }.get(record.use, record.filling == _FILLED)
        if not consistent:
            raise Inconsistent(f"cell {cell} is {record.use.value}, and its reads are {record.filling}")
        if record.use is Cell.STAGED and not record.checksums:
            raise Inconsistent(f"cell {cell} is staged without checksums")

    def _move(self, cell: int, event: CellEvent, now: float) -> None:
        record = self._records[cell]
        before, record.use = record.use, next_state(CELL, record.use, event)
        self._counts[before] -= 1
        self._counts[record.use] += 1
        record.since = now
        if record.use is Cell.FREE:
            record.content, record.checksums, record.filling = _NOTHING, (), _FILLED
            heappush(self._free, cell)

    def _settle_drained(self, cell: int, now: float) -> None:
        record = self._records[cell]
        if record.use is Cell.DRAINING and not record.readers:
            self._move(cell, CellEvent.SETTLED, now)

    def _in_use(self, use: Cell) -> Iterator[tuple[int, _Record]]:
        return ((cell, record) for cell, record in enumerate(self._records) if record.use is use)

    def _of(self, use: Cell) -> list[int]:
        return [cell for cell, _ in self._in_use(use)]


def _part(piece: int) -> int:
    """Return the number of a read in `Filling`."""
    return 0 if piece == ALL_PARTS else piece
