"""The cells of a rank: none is used again before what went before has settled, none is lost, and what is
leased does not change.

The oracle is a memory that was made up: what lies in each cell, who is still writing into it, and who reads
it and what they were promised.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from engine_adapter.handover.cell_table import (
    MOST_LEASES,
    CellTable,
    Inconsistent,
    LeaseRefused,
    NoFreeCell,
    ReadLease,
)
from fleet.handover import Cell, IllegalMove
from fleet.placement import EMPTY

LAYERS, SLOTS, EXPERTS = 2, 3, 5
CELLS = (LAYERS + 1) * SLOTS
HELD = np.array([[0, 1, EMPTY], [2, 3, 4]], np.int16)
Content = tuple[int, int]
"""(layer, expert)"""


def table(cells: int = CELLS) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    return np.arange(LAYERS * SLOTS, dtype=np.int32).reshape(LAYERS, SLOTS)


def sums(layer: int, expert: int) -> tuple[int, ...]:
    return (100 * layer + expert, 7)


def started(held: np.ndarray[tuple[int, int], np.dtype[np.int16]] = HELD) -> CellTable:
    residency = CellTable(held, table(), CELLS)
    for resident in residency.residents():
        residency.seal(resident, sums(resident.layer, resident.expert))
    return residency


def staged(residency: CellTable, layer: int, slot: int, expert: int) -> int:
    cell = residency.reserve((layer, slot, expert), 0.0)
    residency.landed(cell, 0.0)
    residency.verified(cell, sums(layer, expert), 0.0)
    return cell


def adopt(residency: CellTable, *changes: tuple[int, int, int], now: float = 0.0) -> None:
    held = residency.held.copy()
    for layer, slot, expert in changes:
        held[layer, slot] = expert
    residency.adopt(held, residency.arranged(held), now)


class Cells(RuleBasedStateMachine):
    """Reads and leases in any order; flips to whatever is staged."""

    writing: Bundle[int] = Bundle("writing")
    landed: Bundle[int] = Bundle("landed")
    late: Bundle[int] = Bundle("late")
    """given up, and still written into"""
    reading: Bundle[ReadLease] = Bundle("reading")

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.residency = started()
        self.memory: dict[int, Content] = {
            int(table()[place]): (place[0], int(expert))
            for place, expert in np.ndenumerate(HELD)
            if expert != EMPTY
        }
        self.writers: set[int] = set()
        self.staged: dict[int, tuple[int, int, int]] = {}
        self.wanted: dict[int, tuple[int, int, int]] = {}
        self.promised: dict[int, tuple[ReadLease, dict[int, Content]]] = {}

    def _wants(self, layer: int, slot: int, expert: int) -> bool:
        """Whether a placement could want this, beside what is on its way."""
        return expert not in self.residency.held[layer] and not any(
            (one[0], one[1]) == (layer, slot) or (one[0], one[2]) == (layer, expert)
            for one in self.wanted.values()
        )

    def _reserve(self, layer: int, slot: int, expert: int) -> int | None:
        try:
            cell = self.residency.reserve((layer, slot, expert), self.now)
        except NoFreeCell:
            assert self.residency.count(Cell.FREE) == 0
            return None
        assert cell not in self.writers
        assert cell not in self.residency.table
        assert not any(cell in promises for _, promises in self.promised.values())
        self.writers.add(cell)
        self.wanted[cell] = (layer, slot, expert)
        self.memory[cell] = (-1, cell)
        return cell

    @rule(
        target=writing,
        layer=st.integers(0, LAYERS - 1),
        slot=st.integers(0, SLOTS - 1),
        expert=st.integers(0, EXPERTS - 1),
    )
    def reserve(self, layer: int, slot: int, expert: int) -> object:
        cell = self._reserve(layer, slot, expert) if self._wants(layer, slot, expert) else None
        return multiple() if cell is None else cell

    @rule(
        layer=st.integers(0, LAYERS - 1), slot=st.integers(0, SLOTS - 1), expert=st.integers(0, EXPERTS - 1)
    )
    def bring(self, layer: int, slot: int, expert: int) -> None:
        """All the way, for flips to happen often."""
        cell = self._reserve(layer, slot, expert) if self._wants(layer, slot, expert) else None
        if cell is not None:
            self.land(cell)
            self.compare(cell, True)

    @rule(target=landed, cell=consumes(writing))
    def arrive(self, cell: int) -> int:
        self.land(cell)
        return cell

    def land(self, cell: int) -> None:
        self.residency.landed(cell, self.now)
        self.writers.discard(cell)
        layer, _, expert = self.wanted[cell]
        self.memory[cell] = (layer, expert)

    @rule(cell=consumes(writing))
    def break_off(self, cell: int) -> None:
        self.residency.broken(cell, self.now)
        self.writers.discard(cell)
        del self.wanted[cell]

    @rule(target=late, cell=st.one_of(consumes(writing), consumes(landed)))
    def give_up(self, cell: int) -> int:
        self.residency.overdue(cell, self.now)
        self.writers.add(cell)
        del self.wanted[cell]
        return cell

    @rule(cell=consumes(late))
    def settle(self, cell: int) -> None:
        self.residency.settled(cell, self.now)
        self.writers.discard(cell)

    @rule(cell=consumes(landed), good=st.booleans())
    def verify(self, cell: int, good: bool) -> None:
        self.compare(cell, good)

    def compare(self, cell: int, good: bool) -> None:
        layer, slot, expert = self.wanted[cell]
        if good:
            self.residency.verified(cell, sums(layer, expert), self.now)
            self.staged[cell] = (layer, slot, expert)
        else:
            self.residency.refused(cell, self.now)
            del self.wanted[cell]

    @rule()
    def drop(self) -> None:
        self.residency.drop_staged(self.now)
        for cell in self.staged:
            del self.wanted[cell]
        self.staged.clear()

    @precondition(lambda self: len(self.wanted) == len(self.staged))
    @rule(dice=st.randoms(use_true_random=False))
    def flip(self, dice: object) -> None:
        """To what is staged, with the experts of each layer in any slots, and some of them gone."""
        held = self.residency.held.copy()
        for row in held:
            dice.shuffle(row)  # type: ignore[attr-defined]
            row[dice.randrange(SLOTS)] = EMPTY  # type: ignore[attr-defined]
        for layer, slot, expert in self.staged.values():
            held[layer, slot] = expert
        before = self.residency.table.copy()
        arranged = self.residency.arranged(held)
        self.residency.adopt(held, arranged, self.now)
        assert set(self.staged) <= set(arranged.flat)
        assert set(arranged.flat) <= set(before.flat) | set(self.staged)
        for cell in self.staged:
            del self.wanted[cell]
        self.staged.clear()

    @rule(
        target=reading,
        reader=st.integers(1, 2),
        picks=st.sets(st.integers(0, LAYERS * SLOTS - 1), min_size=1, max_size=3),
        seconds=st.floats(0.5, 3),
    )
    def lease(self, reader: int, picks: set[int], seconds: float) -> object:
        experts = [(*divmod(pick, SLOTS), int(self.residency.held.flat[pick])) for pick in sorted(picks)]
        known = {lease.experts for lease, _ in self.promised.values() if lease.reader == reader}
        if any(expert == EMPTY for _, _, expert in experts) and tuple(experts) not in known:
            with pytest.raises(LeaseRefused):
                self.residency.lease(reader, 1, experts, seconds, self.now)
            return multiple()
        lease = self.residency.lease(reader, 1, experts, seconds, self.now)
        assert lease.checksums == tuple(sums(layer, expert) for layer, _, expert in experts)
        self.promised[lease.number] = (lease, {cell: self.memory[cell] for cell in lease.cells})
        return lease

    @rule(lease=consumes(reading))
    def end(self, lease: ReadLease) -> None:
        assert self.residency.end(lease.number, self.now) == (lease.number in self.promised)
        self.promised.pop(lease.number, None)

    @rule(seconds=st.floats(0, 2))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        silent = {lease.number for lease in self.residency.expire(self.now)}
        assert silent == {number for number, (lease, _) in self.promised.items() if lease.until <= self.now}
        for number in silent:
            del self.promised[number]

    @invariant()
    def the_books_agree(self) -> None:
        self.residency.check_integrity()
        assert sum(self.residency.count(use) for use in Cell) == CELLS

    @invariant()
    def what_is_served_or_read_is_as_it_was(self) -> None:
        for resident in self.residency.residents():
            assert self.memory[resident.cell] == (resident.layer, resident.expert)
            assert resident.cell not in self.writers
        for _, promises in self.promised.values():
            assert all(self.memory[cell] == content for cell, content in promises.items())

    @invariant()
    def nothing_that_may_be_written_or_read_is_free(self) -> None:
        read = {cell for _, promises in self.promised.values() for cell in promises}
        assert not [cell for cell in self.writers | read if self.residency.use(cell) is Cell.FREE]

    def teardown(self) -> None:
        if not hasattr(self, "residency"):
            return
        for number in list(self.promised):
            self.residency.end(number, self.now)
        for cell in range(CELLS):
            match self.residency.use(cell):
                case Cell.PULLING | Cell.VERIFYING:
                    self.residency.overdue(cell, self.now)
                    self.residency.settled(cell, self.now)
                case Cell.QUARANTINED:
                    self.residency.settled(cell, self.now)
        self.residency.drop_staged(self.now)
        assert self.residency.idle
        assert self.residency.count(Cell.FREE) == CELLS - LAYERS * SLOTS
        self.residency.check_integrity()


TestCells = Cells.TestCase
TestCells.settings = settings(
    max_examples=50,
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


@pytest.mark.slow
class TestManyCells(Cells.TestCase):
    settings = settings(
        max_examples=300,
        stateful_step_count=60,
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    )


def test_a_slot_takes_the_cell_that_was_staged_for_it_and_its_old_one_is_room_again() -> None:
    residency = started()
    cell = staged(residency, 0, 1, 4)
    adopt(residency, (0, 1, 4))
    assert residency.table[0, 1] == cell
    assert residency.use(1) is Cell.FREE


def test_an_expert_that_changes_slots_takes_its_cell_along_and_an_empty_slot_takes_what_is_left() -> None:
    residency = started()
    adopt(residency, (0, 0, EMPTY), (0, 2, 0))
    assert residency.table[0].tolist() == [2, 1, 0]
    assert residency.count(Cell.FREE) == SLOTS


def test_a_leased_cell_that_is_evicted_drains_until_its_reader_ends() -> None:
    residency = started()
    lease = residency.lease(1, 1, [(0, 1, 1)], 5.0, 0.0)
    staged(residency, 0, 1, 4)
    adopt(residency, (0, 1, 4), now=1.0)
    assert residency.use(1) is Cell.DRAINING
    assert residency.oldest(4.0) == 3.0
    assert residency.end(lease.number, 4.0)
    assert residency.use(1) is Cell.FREE
    assert not residency.end(lease.number, 4.0)


def test_a_lease_of_a_reader_that_died_ends_by_its_silence() -> None:
    residency = started()
    residency.lease(1, 1, [(0, 1, 1)], 5.0, 0.0)
    staged(residency, 0, 1, 4)
    adopt(residency, (0, 1, 4), now=1.0)
    assert residency.next_expiry == 5.0
    assert residency.expire(4.9) == ()
    assert [lease.reader for lease in residency.expire(5.0)] == [1]
    assert residency.use(1) is Cell.FREE
    assert residency.next_expiry == float("inf")


def test_a_lease_that_is_asked_for_again_is_renewed_even_when_its_expert_was_evicted_meanwhile() -> None:
    residency = started()
    first = residency.lease(1, 1, [(0, 1, 1)], 5.0, 0.0)
    adopt(residency, (0, 1, EMPTY))
    again = residency.lease(1, 1, [(0, 1, 1)], 5.0, 3.0)
    assert (again.number, again.until, again.cells) == (first.number, 8.0, first.cells)
    with pytest.raises(LeaseRefused, match="holds nothing, not expert 1"):
        residency.lease(2, 1, [(0, 1, 1)], 5.0, 3.0)


@pytest.mark.parametrize(
    ("experts", "told"),
    [
        ([(0, 0, 1)], "holds expert 0/0, not expert 1"),
        ([(0, 2, EMPTY)], "holds nothing"),
        ([(2, 0, 0)], "layer 2 slot 0 of this rank does not exist"),
        ([(0, -1, 0)], "layer 0 slot -1 of this rank does not exist"),
        ([], "a lease of 0 experts"),
        ([(0, 0, 0), (0, 0, 0)], "each once"),
    ],
)
def test_only_what_is_served_is_leased(experts: list[tuple[int, int, int]], told: str) -> None:
    with pytest.raises(LeaseRefused, match=told):
        started().lease(1, 1, experts, 5.0, 0.0)


def test_what_has_no_checksums_yet_is_not_leased() -> None:
    residency = CellTable(HELD, table(), CELLS)
    with pytest.raises(LeaseRefused, match="no checksums yet"):
        residency.lease(1, 1, [(0, 0, 0)], 5.0, 0.0)


def test_leases_are_bounded() -> None:
    residency = started()
    for handover in range(MOST_LEASES):
        residency.lease(1, handover, [(0, 0, 0)], 5.0, 0.0)
    with pytest.raises(LeaseRefused, match="leases are open already"):
        residency.lease(1, MOST_LEASES, [(0, 0, 0)], 5.0, 0.0)


def test_checksums_that_were_found_of_something_that_is_gone_are_no_news() -> None:
    residency = CellTable(HELD, table(), CELLS)
    old = next(iter(residency.residents()))
    staged(residency, 0, 0, 4)
    adopt(residency, (0, 0, 4))
    residency.seal(old, (1, 2))
    again = residency.reserve((0, 1, 3), 0.0)
    assert again == old.cell
    residency.landed(again, 0.0)
    residency.seal(old, (1, 2))
    residency.verified(again, sums(0, 3), 0.0)
    adopt(residency, (0, 1, 3))
    assert residency.lease(1, 1, [(0, 1, 3)], 5.0, 0.0).checksums == (sums(0, 3),)


def test_a_table_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="distinct cells out of 9"):
        CellTable(HELD, np.zeros((LAYERS, SLOTS), np.int32), CELLS)
    with pytest.raises(ValueError, match=r"both must be \[layers, slots\]"):
        CellTable(HELD, table()[:1], CELLS)


def test_books_that_do_not_agree_are_told_and_so_is_what_cannot_be() -> None:
    residency = started()
    with pytest.raises(Inconsistent, match="expert 0/4 is neither here nor staged"):
        adopt(residency, (0, 0, 4))
    with pytest.raises(Inconsistent, match="cell 0 is live; only quarantined"):
        residency.settled(0, 0.0)
    with pytest.raises(IllegalMove):
        residency.landed(0, 0.0)
    residency.table[0, 0] = 8
    with pytest.raises(Inconsistent, match="slots map to"):
        residency.check_integrity()


def test_room_that_is_used_up_says_what_for() -> None:
    residency = started()
    for slot in range(SLOTS):
        residency.reserve((0, slot, 4), 0.0)
    with pytest.raises(NoFreeCell, match="no cell is free for expert 1/0: 3 pulling, 6 live"):
        residency.reserve((1, 0, 0), 0.0)
