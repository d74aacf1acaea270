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
    MAX_LEASES,
    CellTable,
    Content,
    Inconsistent,
    LeaseRefused,
    NoFreeCell,
    ReadLease,
    Requested,
)
from fleet.handover import Cell, IllegalTransition
from fleet.placement import EMPTY, Placement
from fleet.sharding import ALL_PARTS

LAYERS, SLOTS, EXPERTS = 2, 3, 5
CELLS = (LAYERS + 1) * SLOTS
RANKS, RANK = 3, 1
HELD = np.array([[0, 1, EMPTY], [2, 3, 4]], np.int16)
Held = np.ndarray[tuple[int, int], np.dtype[np.int16]]


def placed(held: Held = HELD, *sharded: int) -> Placement:
    """What the rank holds, among others that hold every expert. Rows of sharded layers count for nothing."""
    first, last = np.array([[0, 1, 2]] * LAYERS), np.array([[3, 4, EMPTY]] * LAYERS)
    slots = np.concatenate([first, held, last], axis=1)
    slots[list(sharded)] = EMPTY
    return Placement(slots, experts=EXPERTS, ranks=RANKS, sharded=tuple(sharded))


def table(cells: int = CELLS) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    return np.arange(LAYERS * SLOTS, dtype=np.int32).reshape(LAYERS, SLOTS)


def sums(layer: int, expert: int) -> tuple[int, ...]:
    return (100 * layer + expert, 7)


def started(held: Held = HELD) -> CellTable:
    cell_table = CellTable(placed(held), RANK, table(), CELLS)
    for resident in cell_table.residents():
        cell_table.seal(resident, sums(resident.content.layer, resident.content.number))
    return cell_table


def staged(cell_table: CellTable, layer: int, slot: int, expert: int) -> int:
    cell = cell_table.reserve(Content(layer, slot, expert), 0.0)
    cell_table.begun(cell)
    cell_table.landed(cell, 0.0)
    cell_table.verified(cell, sums(layer, expert), 0.0)
    return cell


def adopt(cell_table: CellTable, *changes: tuple[int, int, int], now: float = 0.0) -> None:
    held = cell_table.held.copy()
    for layer, slot, expert in changes:
        held[layer, slot] = expert
    cell_table.adopt(placed(held), cell_table.arranged(placed(held)), now)


Lies = tuple[int, int]
"""(layer, expert) in a cell."""


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
        self.cell_table = started()
        self.memory: dict[int, Lies] = {
            int(table()[place]): (place[0], int(expert))
            for place, expert in np.ndenumerate(HELD)
            if expert != EMPTY
        }
        self.writers: set[int] = set()
        self.staged: dict[int, tuple[int, int, int]] = {}
        self.requested: dict[int, tuple[int, int, int]] = {}
        self.sums_of_lease: dict[int, tuple[ReadLease, dict[int, Lies]]] = {}

    def _requests(self, layer: int, slot: int, expert: int) -> bool:
        """Whether a placement could want this, beside what is on its way."""
        return expert not in self.cell_table.held[layer] and not any(
            (one[0], one[1]) == (layer, slot) or (one[0], one[2]) == (layer, expert)
            for one in self.requested.values()
        )

    def _reserve(self, layer: int, slot: int, expert: int) -> int | None:
        try:
            cell = self.cell_table.reserve(Content(layer, slot, expert), self.now)
            self.cell_table.begun(cell)
        except NoFreeCell:
            assert self.cell_table.count(Cell.FREE) == 0
            return None
        assert cell not in self.writers
        assert cell not in self.cell_table.table
        assert not any(cell in promises for _, promises in self.sums_of_lease.values())
        self.writers.add(cell)
        self.requested[cell] = (layer, slot, expert)
        self.memory[cell] = (-1, cell)
        return cell

    @rule(
        target=writing,
        layer=st.integers(0, LAYERS - 1),
        slot=st.integers(0, SLOTS - 1),
        expert=st.integers(0, EXPERTS - 1),
    )
    def reserve(self, layer: int, slot: int, expert: int) -> object:
        cell = self._reserve(layer, slot, expert) if self._requests(layer, slot, expert) else None
        return multiple() if cell is None else cell

    @rule(
        layer=st.integers(0, LAYERS - 1), slot=st.integers(0, SLOTS - 1), expert=st.integers(0, EXPERTS - 1)
    )
    def bring(self, layer: int, slot: int, expert: int) -> None:
        """All the way, for flips to happen often."""
        cell = self._reserve(layer, slot, expert) if self._requests(layer, slot, expert) else None
        if cell is not None:
            self.land(cell)
            self.compare(cell, True)

    @rule(target=landed, cell=consumes(writing))
    def arrive(self, cell: int) -> int:
        self.land(cell)
        return cell

    def land(self, cell: int) -> None:
        self.cell_table.landed(cell, self.now)
        self.writers.discard(cell)
        layer, _, expert = self.requested[cell]
        self.memory[cell] = (layer, expert)

    @rule(cell=consumes(writing))
    def break_off(self, cell: int) -> None:
        self.cell_table.failed(cell, self.now)
        self.writers.discard(cell)
        del self.requested[cell]

    @rule(target=late, cell=st.one_of(consumes(writing), consumes(landed)))
    def give_up(self, cell: int) -> int:
        self.cell_table.give_up(cell, self.now)
        self.writers.add(cell)
        del self.requested[cell]
        return cell

    @rule(cell=consumes(late))
    def settle(self, cell: int) -> None:
        self.cell_table.settled(cell, self.now)
        self.writers.discard(cell)

    @rule(cell=consumes(landed), good=st.booleans())
    def verify(self, cell: int, good: bool) -> None:
        self.compare(cell, good)

    def compare(self, cell: int, good: bool) -> None:
        layer, slot, expert = self.requested[cell]
        if good:
            self.cell_table.verified(cell, sums(layer, expert), self.now)
            self.staged[cell] = (layer, slot, expert)
        else:
            self.cell_table.failed(cell, self.now)
            del self.requested[cell]

    @rule()
    def drop(self) -> None:
        self.cell_table.drop_staged(self.now)
        for cell in self.staged:
            del self.requested[cell]
        self.staged.clear()

    @precondition(lambda self: len(self.requested) == len(self.staged))
    @rule(random=st.randoms(use_true_random=False))
    def flip(self, random: object) -> None:
        """To what is staged, with the experts of each layer in any slots, and some of them gone."""
        held = self.cell_table.held.copy()
        for row in held:
            random.shuffle(row)  # type: ignore[attr-defined]
            row[random.randrange(SLOTS)] = EMPTY  # type: ignore[attr-defined]
        for layer, slot, expert in self.staged.values():
            held[layer, slot] = expert
        before = self.cell_table.table.copy()
        arranged = self.cell_table.arranged(placed(held))
        self.cell_table.adopt(placed(held), arranged, self.now)
        assert set(self.staged) <= set(arranged.flat)
        assert set(arranged.flat) <= set(before.flat) | set(self.staged)
        for cell in self.staged:
            del self.requested[cell]
        self.staged.clear()

    @rule(
        target=reading,
        reader=st.integers(1, 2),
        picks=st.sets(st.integers(0, LAYERS * SLOTS - 1), min_size=1, max_size=3),
        seconds=st.floats(0.5, 3),
    )
    def lease(self, reader: int, picks: set[int], seconds: float) -> object:
        experts = [
            Requested(*divmod(pick, SLOTS), int(self.cell_table.held.flat[pick])) for pick in sorted(picks)
        ]
        known = {lease.experts for lease, _ in self.sums_of_lease.values() if lease.reader == reader}
        if any(one.expert == EMPTY for one in experts) and tuple(experts) not in known:
            with pytest.raises(LeaseRefused):
                self.cell_table.lease(reader, 1, experts, seconds, self.now)
            return multiple()
        lease = self.cell_table.lease(reader, 1, experts, seconds, self.now)
        assert lease.checksums == tuple(sums(one.layer, one.expert) for one in experts)
        self.sums_of_lease[lease.number] = (lease, {cell: self.memory[cell] for cell in lease.cells})
        return lease

    @rule(lease=consumes(reading))
    def end(self, lease: ReadLease) -> None:
        assert self.cell_table.end(lease.number, self.now) == (lease.number in self.sums_of_lease)
        self.sums_of_lease.pop(lease.number, None)

    @rule(seconds=st.floats(0, 2))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        silent = {lease.number for lease in self.cell_table.expire(self.now)}
        assert silent == {
            number for number, (lease, _) in self.sums_of_lease.items() if lease.until <= self.now
        }
        for number in silent:
            del self.sums_of_lease[number]

    @invariant()
    def the_books_agree(self) -> None:
        self.cell_table.check_integrity()
        assert sum(self.cell_table.count(use) for use in Cell) == CELLS

    @invariant()
    def what_is_served_or_read_is_as_it_was(self) -> None:
        for resident in self.cell_table.residents():
            assert self.memory[resident.cell] == (resident.content.layer, resident.content.number)
            assert resident.cell not in self.writers
        for _, promises in self.sums_of_lease.values():
            assert all(self.memory[cell] == content for cell, content in promises.items())

    @invariant()
    def nothing_that_may_be_written_or_read_is_free(self) -> None:
        read = {cell for _, promises in self.sums_of_lease.values() for cell in promises}
        assert not [cell for cell in self.writers | read if self.cell_table.use(cell) is Cell.FREE]

    def teardown(self) -> None:
        if not hasattr(self, "cell_table"):
            return
        for number in list(self.sums_of_lease):
            self.cell_table.end(number, self.now)
        for cell in range(CELLS):
            match self.cell_table.use(cell):
                case Cell.PULLING | Cell.VERIFYING:
                    self.cell_table.give_up(cell, self.now)
                    self.cell_table.settled(cell, self.now)
                case Cell.QUARANTINED:
                    self.cell_table.settled(cell, self.now)
        self.cell_table.drop_staged(self.now)
        assert self.cell_table.idle
        assert self.cell_table.count(Cell.FREE) == CELLS - LAYERS * SLOTS
        self.cell_table.check_integrity()


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
    cell_table = started()
    cell = staged(cell_table, 0, 1, 4)
    adopt(cell_table, (0, 1, 4))
    assert cell_table.table[0, 1] == cell
    assert cell_table.use(1) is Cell.FREE


def test_an_expert_that_changes_slots_takes_its_cell_along_and_an_empty_slot_takes_what_is_left() -> None:
    cell_table = started()
    adopt(cell_table, (0, 0, EMPTY), (0, 2, 0))
    assert cell_table.table[0].tolist() == [2, 1, 0]
    assert cell_table.count(Cell.FREE) == SLOTS


def test_a_leased_cell_that_is_evicted_drains_until_its_reader_ends() -> None:
    cell_table = started()
    lease = cell_table.lease(1, 1, [Requested(0, 1, 1)], 5.0, 0.0)
    staged(cell_table, 0, 1, 4)
    adopt(cell_table, (0, 1, 4), now=1.0)
    assert cell_table.use(1) is Cell.DRAINING
    assert cell_table.oldest(4.0) == 3.0
    assert cell_table.end(lease.number, 4.0)
    assert cell_table.use(1) is Cell.FREE
    assert not cell_table.end(lease.number, 4.0)


def test_a_lease_of_a_reader_that_died_ends_by_its_silence() -> None:
    cell_table = started()
    cell_table.lease(1, 1, [Requested(0, 1, 1)], 5.0, 0.0)
    staged(cell_table, 0, 1, 4)
    adopt(cell_table, (0, 1, 4), now=1.0)
    assert cell_table.next_expiry == 5.0
    assert cell_table.expire(4.9) == ()
    assert [lease.reader for lease in cell_table.expire(5.0)] == [1]
    assert cell_table.use(1) is Cell.FREE
    assert cell_table.next_expiry == float("inf")


def test_a_lease_that_is_asked_for_again_is_renewed_even_when_its_expert_was_evicted_meanwhile() -> None:
    cell_table = started()
    first = cell_table.lease(1, 1, [Requested(0, 1, 1)], 5.0, 0.0)
    adopt(cell_table, (0, 1, EMPTY))
    again = cell_table.lease(1, 1, [Requested(0, 1, 1)], 5.0, 3.0)
    assert (again.number, again.until, again.cells) == (first.number, 8.0, first.cells)
    with pytest.raises(LeaseRefused, match="holds nothing, not expert 1"):
        cell_table.lease(2, 1, [Requested(0, 1, 1)], 5.0, 3.0)


@pytest.mark.parametrize(
    ("experts", "summary"),
    [
        ([(0, 0, 1)], "holds expert 0/0, not expert 1"),
        ([(0, 2, EMPTY)], "holds nothing"),
        ([(2, 0, 0)], "layer 2 slot 0 of this rank does not exist"),
        ([(0, -1, 0)], "layer 0 slot -1 of this rank does not exist"),
        ([], "a lease of 0 experts"),
        ([(0, 0, 0), (0, 0, 0)], "each once"),
    ],
)
def test_only_what_is_served_is_leased(experts: list[tuple[int, int, int]], summary: str) -> None:
    with pytest.raises(LeaseRefused, match=summary):
        started().lease(1, 1, [Requested(*one) for one in experts], 5.0, 0.0)


def test_what_has_no_checksums_yet_is_not_leased() -> None:
    cell_table = CellTable(placed(), RANK, table(), CELLS)
    with pytest.raises(LeaseRefused, match="no checksums yet"):
        cell_table.lease(1, 1, [Requested(0, 0, 0)], 5.0, 0.0)


def test_leases_are_bounded() -> None:
    cell_table = started()
    for handover in range(MAX_LEASES):
        cell_table.lease(1, handover, [Requested(0, 0, 0)], 5.0, 0.0)
    with pytest.raises(LeaseRefused, match="leases are open already"):
        cell_table.lease(1, MAX_LEASES, [Requested(0, 0, 0)], 5.0, 0.0)


def test_checksums_that_were_found_of_something_that_is_gone_are_no_news() -> None:
    cell_table = CellTable(placed(), RANK, table(), CELLS)
    old = next(iter(cell_table.residents()))
    staged(cell_table, 0, 0, 4)
    adopt(cell_table, (0, 0, 4))
    cell_table.seal(old, (1, 2))
    again = cell_table.reserve(Content(0, 1, 3), 0.0)
    assert again == old.cell
    cell_table.begun(again)
    cell_table.landed(again, 0.0)
    cell_table.seal(old, (1, 2))
    cell_table.verified(again, sums(0, 3), 0.0)
    adopt(cell_table, (0, 1, 3))
    assert cell_table.lease(1, 1, [Requested(0, 1, 3)], 5.0, 0.0).checksums == (sums(0, 3),)


def test_a_table_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="distinct cells out of 9"):
        CellTable(placed(), RANK, np.zeros((LAYERS, SLOTS), np.int32), CELLS)
    with pytest.raises(ValueError, match=r"both must be \[layers, slots\]"):
        CellTable(placed(), RANK, table()[:1], CELLS)


def test_books_that_do_not_agree_are_told_and_so_is_what_cannot_be() -> None:
    cell_table = started()
    with pytest.raises(Inconsistent, match="expert 0/4 is neither here nor staged"):
        adopt(cell_table, (0, 0, 4))
    with pytest.raises(Inconsistent, match="cell 0 is live; only quarantined"):
        cell_table.settled(0, 0.0)
    with pytest.raises(IllegalTransition, match="part 0 of a cell cannot land now"):
        cell_table.landed(0, 0.0)
    with pytest.raises(Inconsistent, match="cell 0 is live, and its piece 0 is not awaited"):
        cell_table.failed(0, 0.0)
    cell_table.table[0, 0] = 8
    with pytest.raises(Inconsistent, match="slots map to"):
        cell_table.check_integrity()


def test_room_that_is_used_up_says_what_for() -> None:
    cell_table = started()
    for slot in range(SLOTS):
        cell_table.reserve(Content(0, slot, 4), 0.0)
    with pytest.raises(NoFreeCell, match="no cell is free for expert 1/0: 3 pulling, 6 live"):
        cell_table.reserve(Content(1, 0, 0), 0.0)


# cells of several pieces

PARTS = RANKS
GROUP = Content(0, 1, 1, sharded=True)
"""experts 3 and 4 of layer 0: a group of two of its three pieces"""


def part_sums(layer: int, expert: int, part: int) -> tuple[int, int]:
    """Of two tensors."""
    return 1000 * layer + 10 * expert + part, 7000 + 10 * expert + part


def sealed_in_parts(placement: Placement) -> CellTable:
    cell_table = CellTable(placement, RANK, table(), CELLS, PARTS)
    for resident in cell_table.residents():
        layer, _, number, sharded = resident.content
        pieces = [
            part_sums(layer, number * PARTS + piece, RANK) if sharded else part_sums(layer, number, piece)
            for piece in range(resident.pieces)
        ] + [(0, 0)] * (PARTS - resident.pieces)
        cell_table.seal(resident, tuple(one for row in zip(*pieces, strict=True) for one in row))
    return cell_table


class Pieces(RuleBasedStateMachine):
    """Cells whose pieces are read, compared, and fail one by one, in any order. The oracle is where each
    piece of each reserved cell was left, and which cells were given up."""

    @initialize()
    def begin(self) -> None:
        self.cell_table = sealed_in_parts(placed())
        self.state: dict[tuple[int, int], str] = {}
        """by (cell, piece): waiting, reading, comparing or done"""
        self.lost: set[int] = set()
        """cells of which a piece was lost"""

    def _in(self, *states: str) -> list[tuple[int, int]]:
        return sorted(one for one, state in self.state.items() if state in states)

    @rule(content=st.sampled_from([Content(0, 2, 3), Content(0, 0, 0, sharded=True), GROUP]))
    def reserve(self, content: Content) -> None:
        free = self.cell_table.count(Cell.FREE)
        try:
            cell = self.cell_table.reserve(content, 0.0, in_pieces=True)
        except NoFreeCell:
            assert not free
            return
        assert not any(busy == cell for busy, _ in self.state)
        self.state |= {(cell, piece): "waiting" for piece in range(2 if content == GROUP else PARTS)}

    @rule(which=st.integers(0, 99))
    def read(self, which: int) -> None:
        if waiting := [one for one in self._in("waiting") if one[0] not in self.lost]:
            cell, piece = waiting[which % len(waiting)]
            self.cell_table.begun(cell, piece)
            self.state[cell, piece] = "reading"

    @rule(which=st.integers(0, 99))
    def land(self, which: int) -> None:
        if reading := self._in("reading"):
            cell, piece = reading[which % len(reading)]
            self.cell_table.landed(cell, 0.0, piece)
            self.state[cell, piece] = "comparing"

    @rule(which=st.integers(0, 99))
    def verify(self, which: int) -> None:
        if comparing := self._in("comparing"):
            cell, piece = comparing[which % len(comparing)]
            self.cell_table.verified(cell, (piece, 10 + piece), 0.0, piece)
            self._end(cell, piece)

    @rule(which=st.integers(0, 99))
    def fail(self, which: int) -> None:
        if pending := [one for one in self._in("waiting", "reading", "comparing") if one[0] not in self.lost]:
            cell, piece = pending[which % len(pending)]
            self.cell_table.failed(cell, 0.0, piece)
            self._lose(cell)
            self._end(cell, piece)

    @rule(which=st.integers(0, 99))
    def give_up(self, which: int) -> None:
        """A read is overdue, or the handover is aborted."""
        if pending := self._in("waiting", "reading", "comparing"):
            cell, _ = pending[which % len(pending)]
            self.cell_table.give_up(cell, 0.0)
            self._lose(cell)
            self._end(cell)

    @rule(which=st.integers(0, 99))
    def settle(self, which: int) -> None:
        if late := [one for one in self._in("reading", "comparing") if one[0] in self.lost]:
            cell, piece = late[which % len(late)]
            self.cell_table.settled(cell, 0.0, piece)
            self._end(cell, piece)

    def _lose(self, cell: int) -> None:
        self.lost.add(cell)
        for (of, piece), state in self.state.items():
            if of == cell and state == "waiting":
                self.state[of, piece] = "done"

    def _end(self, cell: int, piece: int | None = None) -> None:
        if piece is not None:
            self.state[cell, piece] = "done"
        if cell in self.lost and all(state == "done" for (of, _), state in self.state.items() if of == cell):
            assert self.cell_table.use(cell) is Cell.FREE
            self._forget({cell})

    def _forget(self, cells: set[int]) -> None:
        self.lost -= cells
        self.state = {one: state for one, state in self.state.items() if one[0] not in cells}

    @rule()
    def drop(self) -> None:
        staged = {cell for cell, _ in self.state if self.cell_table.use(cell) is Cell.STAGED}
        self.cell_table.drop_staged(0.0)
        self._forget(staged)

    @rule(which=st.integers(0, 99))
    def a_piece_is_read_once(self, which: int) -> None:
        if begun := self._in("reading", "comparing", "done"):
            cell, piece = begun[which % len(begun)]
            with pytest.raises(IllegalTransition):
                self.cell_table.begun(cell, piece)

    @invariant()
    def every_use_follows_from_the_pieces(self) -> None:
        self.cell_table.check_integrity()
        busy = {cell for cell, _ in self.state}
        for cell in busy:
            states = {state for (of, _), state in self.state.items() if of == cell}
            if cell in self.lost:
                expected = Cell.QUARANTINED
            elif states & {"waiting", "reading"}:
                expected = Cell.PULLING
            else:
                expected = Cell.VERIFYING if "comparing" in states else Cell.STAGED
            assert self.cell_table.use(cell) is expected
        assert self.cell_table.count(Cell.FREE) == CELLS - LAYERS * SLOTS - len(busy)


TestPieces = Pieces.TestCase
TestPieces.settings = settings(
    max_examples=60, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]
)


def brought(cell_table: CellTable, content: Content, experts: dict[int, tuple[int, int]]) -> int:
    """Stage a cell piece by piece. experts: (expert, part) by piece."""
    cell = cell_table.reserve(content, 0.0, in_pieces=True)
    for piece, (expert, part) in experts.items():
        cell_table.begun(cell, piece)
        cell_table.landed(cell, 0.0, piece)
        cell_table.verified(cell, part_sums(content.layer, expert, part), 0.0, piece)
    return cell


def test_a_layer_turns_over_and_back_and_its_parts_are_leased_by_their_checksums() -> None:
    cell_table, sharded = sealed_in_parts(placed()), placed(HELD, 0)
    first = brought(cell_table, Content(0, 0, 0, sharded=True), {at: (at, RANK) for at in range(3)})
    second = brought(cell_table, GROUP, {0: (3, RANK), 1: (4, RANK)})
    cell_table.adopt(sharded, cell_table.arranged(sharded), 0.0)
    cell_table.check_integrity()
    assert cell_table.table.tolist() == [[first, second, 2], [3, 4, 5]]
    assert cell_table.held.tolist() == [[0, 1, EMPTY], [2, 3, 4]]
    assert cell_table.count(Cell.FREE) == SLOTS
    lease = cell_table.lease(
        0, 1, [Requested(0, 1, 4, RANK), Requested(0, 0, 2, RANK), Requested(1, 2, 4, 2)], 5.0, 0.0
    )
    assert lease.cells == (second, first, 5)
    assert lease.checksums == (part_sums(0, 4, RANK), part_sums(0, 2, RANK), part_sums(1, 4, 2))
    back = brought(cell_table, Content(0, 1, 4), {part: (4, part) for part in range(PARTS)})
    whole = placed(np.array([[EMPTY, 4, EMPTY], [2, 3, 4]], np.int16))
    cell_table.adopt(whole, cell_table.arranged(whole), 1.0)
    cell_table.check_integrity()
    assert cell_table.table.tolist() == [[first, back, 2], [3, 4, 5]]
    assert cell_table.use(second) is Cell.DRAINING
    assert cell_table.lease(0, 2, [Requested(0, 1, 4)], 5.0, 0.0).checksums == (
        tuple(part_sums(0, 4, part)[tensor] for tensor in range(2) for part in range(PARTS)),
    )
    cell_table.end(lease.number, 2.0)
    assert cell_table.use(second) is Cell.FREE


def test_an_expert_that_stays_has_its_cell_replaced_when_its_layer_turns_over() -> None:
    cell_table, sharded = sealed_in_parts(placed()), placed(HELD, 1)
    with pytest.raises(Inconsistent, match="group 0 of layer 1 is neither here nor staged"):
        cell_table.arranged(sharded)
    with pytest.raises(Inconsistent, match="expert 0/3 is neither"):
        cell_table.arranged(placed(np.array([[0, 3, EMPTY], [2, 3, 4]], np.int16)))


@pytest.mark.parametrize(
    ("requested", "text"),
    [
        (Requested(0, 0, 0, RANK + 1), r"no part 2 of expert 0/0, but \[1\]"),
        (Requested(0, 0, 0, ALL_PARTS), r"no part -1 of expert 0/0, but \[1\]"),
        (Requested(0, 0, 3, RANK), "holds group 0 of layer 0, not expert 3"),
        (Requested(0, 1, 5, RANK), "holds group 1 of layer 0, not expert 5"),
        (Requested(0, 2, 4, RANK), "holds nothing"),
        (Requested(0, 0, -1, RANK), "not expert -1"),
        (Requested(1, 0, 2, 3), r"no part 3 of expert 1/2, but \[-1, 0, 1, 2\]"),
        (Requested(1, 0, 2, -2), "no part -2 of expert 1/2"),
    ],
)
def test_only_parts_that_are_here_are_leased(requested: Requested, text: str) -> None:
    with pytest.raises(LeaseRefused, match=text):
        sealed_in_parts(placed(HELD, 0)).lease(0, 1, [requested], 5.0, 0.0)


def test_a_sharded_layer_of_experts_that_are_not_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="experts of 1 parts for"):
        CellTable(placed(HELD, 0), RANK, table(), CELLS)
    with pytest.raises(ValueError, match="experts of 2 parts for"):
        CellTable(placed(), RANK, table(), CELLS, 2)


def test_in_an_engine_of_one_rank_the_forms_are_one() -> None:
    first = Placement(np.array([[1, 0, EMPTY]]), experts=2, ranks=1)
    cell_table = CellTable(first, 0, np.array([[0, 1, 2]], np.int32), 6)
    sharded = Placement(np.full((1, 3), EMPTY), experts=2, ranks=1, epoch=1, sharded=(0,))
    cell_table.adopt(sharded, cell_table.arranged(sharded), 0.0)
    cell_table.check_integrity()
    assert cell_table.table.tolist() == [[1, 0, 2]]
    cell_table.adopt(first, cell_table.arranged(first), 0.0)
    assert cell_table.table.tolist() == [[0, 1, 2]]
