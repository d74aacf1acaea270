"""The cells of one rank's expert memory: what each is in use for, what lies in it, and who reads it. Pure.

A slot is *in* a cell, an empty slot too; the cells that no slot is in are room for experts on their way in. `fleet.handover.CELL` says how the
use of a cell changes, and this is where it does. What has to hold, whatever happens in whatever order (`check_integrity`):

- Every slot is in one cell of its own, and exactly these are LIVE.
- A cell is reserved only when it is FREE, and becomes FREE only when no byte can land in it and nobody reads it: a slot's old cell drains
  while it is leased, and one that was given up while bytes were landing is quarantined until they have settled.
- What is leased does not change: readers are promised the checksums of what lies there.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.experts import ExpertId
from fleet.handover import CELL, Cell, CellEvent, moved
from fleet.placement import EMPTY

MOST_LEASES = 256
"""open at once; a reader has one per source and handover, and what it forgot runs out"""

Wanted = tuple[int, int, int]
"""(layer, slot of this rank, expert)"""


class NoFreeCell(Exception):
    """No cell is free; the text says what holds them."""


class LeaseRefused(ValueError):
    """These experts cannot be read here; the text says why, and what to do."""


class Inconsistent(Exception):
    """The books of the cells do not agree with each other: a defect in this program."""


class ResidentCell(NamedTuple):
    """A cell of the experts that are served."""

    cell: int
    layer: int
    slot: int
    """of this rank"""
    expert: int


@dataclass(slots=True)
class _Record:
    use: Cell = Cell.FREE
    layer: int = 0
    slot: int = 0
    expert: int = EMPTY
    checksums: tuple[int, ...] = ()
    since: float = 0.0
    """when its use changed last, seconds"""
    readers: set[int] = field(default_factory=set)
    """numbers of the leases on it"""


@dataclass(frozen=True, slots=True)
class ReadLease:
    """A promise to one reader that some cells will not change."""

    number: int
    reader: int
    """rank"""
    handover: int
    experts: tuple[Wanted, ...]
    cells: tuple[int, ...]
    checksums: tuple[tuple[int, ...], ...]
    """u64 per tensor of each"""
    until: float
    """seconds; without renewal it is over then"""


class CellTable:
    """What lies where on one rank.

    held: int16 [layers, slots], the experts in the rank's slots, -1 in empty ones. cells: int32 [layers, slots], the cell that each slot is in.
    total: how many cells there are. ValueError when the table names a cell twice, or one that does not exist.
    """

    def __init__(self, held: NDArray[np.int16], cells: NDArray[np.int32], total: int, now: float = 0.0) -> None:
        if held.shape != cells.shape or held.ndim != 2:
            raise ValueError(f"cells: a table of {cells.shape} for slots of {held.shape}; both must be [layers, slots]")
        if not ((cells >= 0) & (cells < total)).all() or len(np.unique(cells)) != cells.size:
            raise ValueError(f"cells: {cells.size} slots must be in as many different ones of {total}; the table is {cells.tolist()}")
        self.held = held.copy()
        """int16 [layers, slots]: experts served"""
        self.table = cells.astype(np.int32)
        """int32 [layers, slots]: the cell of each slot"""
        self._records = [_Record(since=now) for _ in range(total)]
        for layer, slot in np.ndindex(held.shape):
            cell = int(cells[layer, slot])
            self._records[cell] = _Record(Cell.LIVE, layer, slot, int(held[layer, slot]), since=now)
        self._counts = Counter(record.use for record in self._records)
        self._leases: dict[int, ReadLease] = {}
        self._last_lease = 0

    # experts on their way in

    def reserve(self, wanted: Wanted, now: float) -> int:
        """A free cell for an expert that a slot shall hold: bytes may land in it from now on. NoRoom when there is none."""
        for cell, record in enumerate(self._records):
            if record.use is Cell.FREE:
                self._move(cell, CellEvent.RESERVED, now)
                record.layer, record.slot, record.expert = wanted
                return cell
        raise NoFreeCell(f"no cell is free for expert {ExpertId(wanted[0], wanted[2])}: {self.told()}")

    def landed(self, cell: int, now: float) -> None:
        """All its bytes are there."""
        self._move(cell, CellEvent.LANDED, now)

    def broken(self, cell: int, now: float) -> None:
        """Its transfer failed, or was never begun; nothing is under way."""
        self._move(cell, CellEvent.BROKEN, now)

    def overdue(self, cell: int, now: float) -> None:
        """It is given up, while somebody may still write to it or compare its checksums: quarantined until `settled`."""
        self._move(cell, CellEvent.OVERDUE, now)

    def verified(self, cell: int, checksums: tuple[int, ...], now: float) -> None:
        """It holds what was promised."""
        self._move(cell, CellEvent.VERIFIED, now)
        self._records[cell].checksums = checksums

    def refused(self, cell: int, now: float) -> None:
        """It does not; nothing is under way."""
        self._move(cell, CellEvent.REFUSED, now)

    def settled(self, cell: int, now: float) -> None:
        """Nothing lands in a quarantined cell any more."""
        if self._records[cell].use is not Cell.QUARANTINED:
            raise Inconsistent(f"cell {cell} is {self._records[cell].use.value}; only quarantined ones settle by word")
        self._move(cell, CellEvent.SETTLED, now)

    def drop_staged(self, now: float) -> None:
        """Let go of everything that was staged: its handover was given up."""
        for cell in self._of(Cell.STAGED):
            self._move(cell, CellEvent.DROPPED, now)

    # the flip

    def arranged(self, held: NDArray[np.int16]) -> NDArray[np.int32]:
        """int32 [layers, slots]: the cell of each slot once the rank holds these experts, int16 [layers, slots].

        An expert that stays, or goes to another slot of the rank, takes its cell along; one that comes is in the cell staged for it; an empty slot is
        in its old cell or, where another slot took that, in one that its layer has to spare. Inconsistent when an expert is neither here nor staged.
        """
        staged = {(record.layer, record.slot, record.expert): cell for cell, record in self._in_use(Cell.STAGED)}
        table = self.table.copy()
        for layer in np.flatnonzero((held != self.held).any(axis=1)).tolist():
            table[layer] = -1
            cell_of = {expert: int(cell) for expert, cell in zip(self.held[layer].tolist(), self.table[layer], strict=True) if expert != EMPTY}
            for slot, expert in enumerate(held[layer].tolist()):
                if expert != EMPTY:
                    found = cell_of.get(expert, staged.get((layer, slot, expert)))
                    if found is None:
                        raise Inconsistent(f"layer {layer} slot {slot}: expert {ExpertId(layer, expert)} is neither here nor staged")
                    table[layer, slot] = found
            self._house_empty(layer, table)
        return table

    def _house_empty(self, layer: int, table: NDArray[np.int32]) -> None:
        taken = set(table[layer].tolist())
        spare = [cell for cell in self.table[layer].tolist() if cell not in taken]
        for slot in np.flatnonzero(table[layer] < 0).tolist():
            own = int(self.table[layer, slot])
            table[layer, slot] = own if own in spare else spare[0]
            spare.remove(int(table[layer, slot]))

    def adopt(self, held: NDArray[np.int16], table: NDArray[np.int32], now: float) -> None:
        """The rank serves these experts from these cells from now on (`arranged`). Cells that no slot is in any more drain, and are free as soon as nobody
        reads them."""
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

    # what lies there

    def residents(self) -> Iterator[ResidentCell]:
        """The cells of all experts that are served."""
        for (layer, slot), expert in np.ndenumerate(self.held):
            if expert != EMPTY:
                yield ResidentCell(int(self.table[layer, slot]), layer, slot, int(expert))

    def seal(self, resident: ResidentCell, checksums: tuple[int, ...]) -> None:
        """What was loaded into a cell has these checksums: it can be leased from now on. No news, where the cell is in another use meanwhile."""
        record = self._records[resident.cell]
        if record.use is Cell.LIVE and (record.layer, record.expert) == (resident.layer, resident.expert):
            record.checksums = checksums

    def sealed(self, resident: ResidentCell) -> tuple[int, ...] | None:
        """The checksums of what is served from a cell; None where they are not known yet, or the cell is in another use meanwhile."""
        record = self._records[resident.cell]
        serves = record.use is Cell.LIVE and (record.layer, record.expert) == (resident.layer, resident.expert)
        return (record.checksums or None) if serves else None

    # readers

    def lease(self, reader: int, handover: int, experts: Sequence[Wanted], seconds: float, now: float) -> ReadLease:
        """Promise not to change the cells of these experts for so long; asked again, the promise is renewed. LeaseRefused when one of them is not
        served here."""
        asked = tuple(experts)
        held = next((one for one in self._leases.values() if (one.reader, one.handover, one.experts) == (reader, handover, asked)), None)
        if held is None:
            return self._grant(reader, handover, asked, seconds, now)
        renewed = ReadLease(held.number, reader, handover, asked, held.cells, held.checksums, now + seconds)
        self._leases[held.number] = renewed
        return renewed

    def _grant(self, reader: int, handover: int, asked: tuple[Wanted, ...], seconds: float, now: float) -> ReadLease:
        if not 0 < len(asked) <= self.held.size or len(set(asked)) < len(asked):
            raise LeaseRefused(f"a lease of {len(asked)} experts: ask for 1 to {self.held.size}, each once")
        if len(self._leases) >= MOST_LEASES:
            raise LeaseRefused(f"{MOST_LEASES} leases are open already; ask again when readers have ended theirs")
        cells = tuple(self._cell_of(one) for one in asked)
        self._last_lease += 1
        lease = ReadLease(self._last_lease, reader, handover, asked, cells, tuple(self._records[cell].checksums for cell in cells), now + seconds)
        self._leases[lease.number] = lease
        for cell in cells:
            self._records[cell].readers.add(lease.number)
        return lease

    def _cell_of(self, wanted: Wanted) -> int:
        layer, slot, expert = wanted
        layers, slots = self.held.shape
        if not (0 <= layer < layers and 0 <= slot < slots):
            raise LeaseRefused(f"layer {layer} slot {slot} of this rank does not exist; it has {layers} layers of {slots}")
        if expert == EMPTY or expert != self.held[layer, slot]:
            found = int(self.held[layer, slot])
            said = "nothing" if found == EMPTY else f"expert {ExpertId(layer, found)}"
            raise LeaseRefused(f"layer {layer} slot {slot} of this rank holds {said}, not expert {expert}; ask the coordinator for the epoch that is served")
        cell = int(self.table[layer, slot])
        if not self._records[cell].checksums:
            raise LeaseRefused(f"expert {ExpertId(layer, expert)} has no checksums yet; ask again in a moment")
        return cell

    def end(self, number: int, now: float) -> bool:
        """The reads of a lease have settled; False: it was over already."""
        lease = self._leases.pop(number, None)
        if lease is None:
            return False
        for cell in lease.cells:
            self._records[cell].readers.discard(number)
            self._settle_drained(cell, now)
        return True

    def expire(self, now: float) -> tuple[ReadLease, ...]:
        """End the leases of readers that have been silent too long, dead ones among them."""
        silent = tuple(lease for lease in self._leases.values() if lease.until <= now)
        for lease in silent:
            self.end(lease.number, now)
        return silent

    @property
    def leases(self) -> int:
        return len(self._leases)

    @property
    def next_expiry(self) -> float:
        """When the first lease runs out, seconds; infinity: there is none."""
        return min((lease.until for lease in self._leases.values()), default=float("inf"))

    # the books

    def count(self, use: Cell) -> int:
        return self._counts[use]

    @property
    def idle(self) -> bool:
        """Nothing is on its way in."""
        return not any(self.count(use) for use in (Cell.PULLING, Cell.VERIFYING, Cell.STAGED))

    def oldest(self, now: float) -> float:
        """Seconds since the oldest of the quarantined and draining cells is held; 0: there is none."""
        if not self.count(Cell.QUARANTINED) and not self.count(Cell.DRAINING):
            return 0.0
        return max(now - record.since for record in self._records if record.use in (Cell.QUARANTINED, Cell.DRAINING))

    def use(self, cell: int) -> Cell:
        return self._records[cell].use

    def told(self) -> str:
        """How many cells are in use for what, in words."""
        return ", ".join(f"{self.count(use)} {use.value}" for use in Cell if self.count(use))

    def check_integrity(self) -> None:
        """Inconsistent unless every cell is accounted for once, as the module says."""
        live = self._of(Cell.LIVE)
        if live != np.sort(self.table, axis=None).tolist():
            raise Inconsistent(f"cells {live} are live, slots are in {sorted(self.table.flat)}")
        if self._counts != Counter(record.use for record in self._records):
            raise Inconsistent(f"{self.told()} cells were counted, and they are {Counter(record.use for record in self._records)}")
        leased: dict[int, set[int]] = {}
        for lease in self._leases.values():
            for cell in lease.cells:
                leased.setdefault(cell, set()).add(lease.number)
        for cell, record in enumerate(self._records):
            if record.readers != leased.get(cell, set()):
                raise Inconsistent(f"cell {cell} has readers {sorted(record.readers)}, but leases {sorted(leased.get(cell, ()))}")
            if record.readers and record.use not in (Cell.LIVE, Cell.DRAINING):
                raise Inconsistent(f"cell {cell} is {record.use.value}, and leased")
            if record.use is Cell.DRAINING and not record.readers:
                raise Inconsistent(f"cell {cell} drains, and nobody reads it")

    def _move(self, cell: int, event: CellEvent, now: float) -> None:
        record = self._records[cell]
        before, record.use = record.use, moved(CELL, record.use, event)
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
