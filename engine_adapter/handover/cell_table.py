"""Cell table of one rank's expert memory: the use, content and readers of each cell. Pure.

Every slot maps to a cell, also an empty slot. Cells without a slot receive incoming experts.
`fleet.handover.CELL` defines the transitions of a cell's use, and this module performs them. Invariants, for
every order of events (`check_integrity`):

- Every slot maps to a cell of its own, and exactly these cells are LIVE.
- A cell can be reserved only while it is FREE. It becomes FREE only when no byte can land in it and no lease
  covers it. A slot's old cell drains while it is leased. A cell that was given up while bytes were landing is
  quarantined until they have settled.
- Leased cells do not change: readers rely on the checksums that came with the lease.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.experts import ExpertId
from fleet.handover import CELL, Cell, CellEvent, next_state
from fleet.placement import EMPTY

MAX_LEASES = 256
"""Limit of open leases. A reader has one per source and handover, and forgotten leases expire."""

ExpertInSlot = tuple[int, int, int]
"""(layer, slot of this rank, expert)."""


class NoFreeCell(Exception):
    """No cell is free. The text states what holds the cells."""


class LeaseRefused(ValueError):
    """These experts cannot be read here. The text gives the reason and the remedy."""


class Inconsistent(Exception):
    """The cell table contradicts itself: a defect in this program."""


class ResidentCell(NamedTuple):
    """A cell that holds a served expert."""

    cell: int
    layer: int
    slot: int
    """Slot of this rank."""
    expert: int


@dataclass(slots=True)
class _Record:
    use: Cell = Cell.FREE
    layer: int = 0
    slot: int = 0
    expert: int = EMPTY
    checksums: tuple[int, ...] = ()
    since: float = 0.0
    """Time of the last change of use, in seconds."""
    readers: set[int] = field(default_factory=set)
    """Numbers of the leases on this cell."""


@dataclass(frozen=True, slots=True)
class ReadLease:
    """Read lease: a promise to one reader that some cells will not change until the lease expires."""

    number: int
    reader: int
    """Rank of the reader."""
    handover: int
    experts: tuple[ExpertInSlot, ...]
    cells: tuple[int, ...]
    checksums: tuple[tuple[int, ...], ...]
    """Per expert: one u64 per tensor."""
    until: float
    """Expiry time in seconds, unless the lease is renewed."""


class CellTable:
    """Use and content of one rank's cells.

    held: int16 [layers, slots], the experts in the rank's slots, -1 in empty slots. cells: int32 [layers,
    slots], the cell of each slot. total: number of cells. ValueError when `cells` names a cell twice or one
    that does not exist.
    """

    def __init__(
        self, held: NDArray[np.int16], cells: NDArray[np.int32], total: int, now: float = 0.0
    ) -> None:
        if held.shape != cells.shape or held.ndim != 2:
            raise ValueError(
                f"cells: a table of {cells.shape} for slots of {held.shape}; both must be [layers, slots]"
            )
        if not ((cells >= 0) & (cells < total)).all() or len(np.unique(cells)) != cells.size:
            raise ValueError(
                f"cells: {cells.size} slots need as many distinct cells out of {total}; the table is"
                f" {cells.tolist()}"
            )
        self.held = held.copy()
        """int16 [layers, slots]: the served experts."""
        self.table = cells.astype(np.int32)
        """int32 [layers, slots]: the cell of each slot."""
        self._records = [_Record(since=now) for _ in range(total)]
        for layer, slot in np.ndindex(held.shape):
            cell = int(cells[layer, slot])
            self._records[cell] = _Record(Cell.LIVE, layer, slot, int(held[layer, slot]), since=now)
        self._counts = Counter(record.use for record in self._records)
        self._leases: dict[int, ReadLease] = {}
        self._last_lease = 0

    # incoming experts

    def reserve(self, requested: ExpertInSlot, now: float) -> int:
        """Reserve a free cell for an expert that a slot will hold. Bytes may land in the cell from now on.
        NoFreeCell when there is none."""
        for cell, record in enumerate(self._records):
            if record.use is Cell.FREE:
                self._move(cell, CellEvent.RESERVED, now)
                record.layer, record.slot, record.expert = requested
                return cell
        raise NoFreeCell(
            f"no cell is free for expert {ExpertId(requested[0], requested[2])}: {self.summary()}"
        )

    def landed(self, cell: int, now: float) -> None:
        """Mark a cell as completely received."""
        self._move(cell, CellEvent.LANDED, now)

    def broken(self, cell: int, now: float) -> None:
        """Free a cell whose transfer failed or never began. No transfer is in flight."""
        self._move(cell, CellEvent.BROKEN, now)

    def overdue(self, cell: int, now: float) -> None:
        """Quarantine a cell until `settled`: it was given up while a transfer or a checksum comparison may
        still use it."""
        self._move(cell, CellEvent.OVERDUE, now)

    def verified(self, cell: int, checksums: tuple[int, ...], now: float) -> None:
        """Mark a cell as staged: its content matches the checksums."""
        self._move(cell, CellEvent.VERIFIED, now)
        self._records[cell].checksums = checksums

    def refused(self, cell: int, now: float) -> None:
        """Free a cell whose content does not match the checksums. No transfer is in flight."""
        self._move(cell, CellEvent.REFUSED, now)

    def settled(self, cell: int, now: float) -> None:
        """Free a quarantined cell: nothing can land in it any more."""
        if self._records[cell].use is not Cell.QUARANTINED:
            raise Inconsistent(
                f"cell {cell} is {self._records[cell].use.value}; only quarantined cells can be settled"
            )
        self._move(cell, CellEvent.SETTLED, now)

    def drop_staged(self, now: float) -> None:
        """Free all staged cells, because their handover was aborted."""
        for cell in self._of(Cell.STAGED):
            self._move(cell, CellEvent.DROPPED, now)

    # the flip

    def arranged(self, held: NDArray[np.int16]) -> NDArray[np.int32]:
        """Return the cell of each slot, int32 [layers, slots], for the experts `held`, int16 [layers, slots].

        An expert that stays, or moves to another slot of the rank, keeps its cell. An incoming expert gets
        the cell staged for it. An empty slot keeps its old cell or, where another slot took that cell, gets a
        spare cell of its layer. Inconsistent when an expert is neither held nor staged.
        """
        staged = {
            (record.layer, record.slot, record.expert): cell for cell, record in self._in_use(Cell.STAGED)
        }
        table = self.table.copy()
        for layer in np.flatnonzero((held != self.held).any(axis=1)).tolist():
            table[layer] = -1
            cell_of = {
                expert: int(cell)
                for expert, cell in zip(self.held[layer].tolist(), self.table[layer], strict=True)
                if expert != EMPTY
            }
            for slot, expert in enumerate(held[layer].tolist()):
                if expert != EMPTY:
                    found = cell_of.get(expert, staged.get((layer, slot, expert)))
                    if found is None:
                        raise Inconsistent(
                            f"layer {layer} slot {slot}: expert {ExpertId(layer, expert)} is neither here nor"
                            " staged"
                        )
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

    def adopt(self, held: NDArray[np.int16], table: NDArray[np.int32], now: float) -> None:
        """Switch to these experts and these cells (from `arranged`). Cells without a slot drain, and become
        free once no lease covers them."""
        for cell in np.setdiff1d(self.table, table).tolist():
            self._move(cell, CellEvent.EVICTED, now)
            self._settle_drained(cell, now)
        for layer, slot in np.argwhere((held != self.held) | (table != self.table)).tolist():
            cell = int(table[layer, slot])
            record = self._records[cell]
            if record.use is Cell.STAGED:
                self._move(cell, CellEvent.ADOPTED, now)
            record.layer, record.slot, record.expert = layer, slot, int(held[layer, slot])
            if record.expert == EMPTY:
                record.checksums = ()
        self.held, self.table = held.copy(), table.copy()

    # content of the cells

    def residents(self) -> Iterator[ResidentCell]:
        """Iterate over the cells of all served experts."""
        for (layer, slot), expert in np.ndenumerate(self.held):
            if expert != EMPTY:
                yield ResidentCell(int(self.table[layer, slot]), layer, slot, int(expert))

    def seal(self, resident: ResidentCell, checksums: tuple[int, ...]) -> None:
        """Store the checksums of a served expert. The expert can be leased from now on. Do nothing if the
        cell has changed its use meanwhile."""
        record = self._records[resident.cell]
        if record.use is Cell.LIVE and (record.layer, record.expert) == (resident.layer, resident.expert):
            record.checksums = checksums

    def sealed(self, resident: ResidentCell) -> tuple[int, ...] | None:
        """Return the checksums of a served expert. None while they are unknown, or if the cell has changed
        its use meanwhile."""
        record = self._records[resident.cell]
        serves = record.use is Cell.LIVE and (record.layer, record.expert) == (
            resident.layer,
            resident.expert,
        )
        return (record.checksums or None) if serves else None

    # leases

    def lease(
        self, reader: int, handover: int, experts: Sequence[ExpertInSlot], seconds: float, now: float
    ) -> ReadLease:
        """Lease the cells of these experts to a reader for a number of seconds: they do not change until the
        lease ends. A repeated request renews the lease. LeaseRefused when one of the experts is not served
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
        self, reader: int, handover: int, requested: tuple[ExpertInSlot, ...], seconds: float, now: float
    ) -> ReadLease:
        if not 0 < len(requested) <= self.held.size or len(set(requested)) < len(requested):
            raise LeaseRefused(
                f"a lease of {len(requested)} experts: ask for 1 to {self.held.size}, each once"
            )
        if len(self._leases) >= MAX_LEASES:
            raise LeaseRefused(
                f"{MAX_LEASES} leases are open already; ask again when readers have ended theirs"
            )
        cells = tuple(self._cell_of(one) for one in requested)
        self._last_lease += 1
        lease = ReadLease(
            self._last_lease,
            reader,
            handover,
            requested,
            cells,
            tuple(self._records[cell].checksums for cell in cells),
            now + seconds,
        )
        self._leases[lease.number] = lease
        for cell in cells:
            self._records[cell].readers.add(lease.number)
        return lease

    def _cell_of(self, requested: ExpertInSlot) -> int:
        layer, slot, expert = requested
        layers, slots = self.held.shape
        if not (0 <= layer < layers and 0 <= slot < slots):
            raise LeaseRefused(
                f"layer {layer} slot {slot} of this rank does not exist; it has {layers} layers of {slots}"
            )
        if expert == EMPTY or expert != self.held[layer, slot]:
            found = int(self.held[layer, slot])
            content = "nothing" if found == EMPTY else f"expert {ExpertId(layer, found)}"
            raise LeaseRefused(
                f"layer {layer} slot {slot} of this rank holds {content}, not expert {expert}; ask the"
                " coordinator for the epoch that is served"
            )
        cell = int(self.table[layer, slot])
        if not self._records[cell].checksums:
            raise LeaseRefused(
                f"expert {ExpertId(layer, expert)} has no checksums yet; ask again in a moment"
            )
        return cell

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

    def _move(self, cell: int, event: CellEvent, now: float) -> None:
        record = self._records[cell]
        before, record.use = record.use, next_state(CELL, record.use, event)
        self._counts[before] -= 1
        self._counts[record.use] += 1
        record.since = now
        if record.use is Cell.FREE:
            record.expert, record.checksums = EMPTY, ()

    def _settle_drained(self, cell: int, now: float) -> None:
        record = self._records[cell]
        if record.use is Cell.DRAINING and not record.readers:
            self._move(cell, CellEvent.SETTLED, now)

    def _in_use(self, use: Cell) -> Iterator[tuple[int, _Record]]:
        return ((cell, record) for cell, record in enumerate(self._records) if record.use is use)

    def _of(self, use: Cell) -> list[int]:
        return [cell for cell, _ in self._in_use(use)]
