"""The real coordinator and the real ranks against each other, under all faults of networks, transfers and
processes.
"""

import random
from typing import Any

import pytest

from engine_adapter.handover import cell_table
from engine_adapter.handover.cell_table import CellTable, Inconsistent
from fleet.handover import (
    CELL,
    Cell,
    CellEvent,
    CoordinatorState,
    Filling,
    IllegalTransition,
    after_part,
)
from fleet.placement import Placement, with_attention
from fleet.requests.handovers import ExpertCopy, HandoverDescribed
from migration.config import MigrationConfig
from migration.handover.coordinator import HandoverState, OpenHandover, taken_over
from migration.handover.handover_messages import found_on_ranks, left_open
from tests.handovers.handover_fake_memory import Seat, Unsafe
from tests.handovers.handover_parties import PACE, Leader, World
from tests.handovers.handover_walk import Walk


def walked(seeds: range, pieces: int, world: type[World] = World) -> tuple[int, int]:
    """Count (flips, those that turned the layer over) of walks from these seeds. Unsafe, or a party's own
    error, with the seed."""
    flips = turns = 0
    for seed in seeds:
        walk = Walk(seed, world)
        try:
            walk.whatever(pieces)
            walk.calm()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        flips += walk.world.flips
        turns += walk.world.turns
    return flips, turns


def test_whatever_happens_on_the_way_the_parties_keep_every_promise_and_come_to_rest() -> None:
    flips, turns = walked(range(8), 1500)
    assert flips > 20, "hardly any handover came to its end"
    assert turns > 2, "the layer hardly ever turned over"


@pytest.mark.slow
def test_the_same_on_many_long_walks() -> None:
    flips, turns = walked(range(1000, 1050), 4000)
    assert flips > 300
    assert turns > 30


class _ChangesAttention(World):
    """Most handovers of a sharded layer change the attention."""

    def another(self, present: Placement) -> tuple[Placement, tuple[ExpertCopy, ...]]:
        if present.attention == "tp":
            return with_attention(present, "dp", epoch=present.epoch + 1), ()
        if present.sharded and self.dice.random() < 0.8:
            return with_attention(present, "tp", epoch=present.epoch + 1), ()
        return super().another(present)


def test_the_same_where_handovers_change_the_attention() -> None:
    switches = 0
    for seed in range(20):
        walk = Walk(seed, _ChangesAttention)
        walk.world.turning = 0.5
        walk.whatever(1500)
        walk.calm()
        switches += walk.world.switches
    assert switches > 5


def test_no_number_is_given_twice_though_ranks_were_found_with_an_earlier_handover_open() -> None:
    world = World(random.Random(0))
    last = found_on_ranks(world.entry, 8, CoordinatorState.IDLE, 1, None)
    found = found_on_ranks(world.entry, 7, CoordinatorState.ABORTING, 1, last)
    proceeding = taken_over(left_open("a", found, None, None, MigrationConfig()), found, 1, PACE, 0.0)
    ended = proceeding.durable(CoordinatorState.IDLE, 1.0)
    assert (ended.handover, ended.highest) == (7, 8)
    assert found_on_ranks(world.entry, 6, CoordinatorState.ABORTING, 1, ended).highest == 8


class _LosesItsStore(World):
    """Key and log vanish at intervals, together with the leader. Commands stay in transit, and tokens start
    over.

    So decisions are known only from ranks' reports, and may be made again where no rank has seen them. No
    rank dies: no other record of its epoch would remain.
    """

    def claim(self, value: OpenHandover, revision: int | None) -> bool:
        this = value.worker_id, value.handover
        if self.accepts(revision) and this in self.known and value.state is not CoordinatorState.COMMITTING:
            self.decided[this] -= (
                {CoordinatorState.COMMITTING}
                if value.state is CoordinatorState.ABORTING
                else set(CoordinatorState)
            )
        return super().claim(value, revision)

    def lose(self) -> None:
        self.key, self.log, self.known, self.leaders = None, [], frozenset(self.decided), [Leader(1)]
        self.tell("the store loses everything; a coordinator with token 1 takes over")


def lossy(seeds: range, world: type[_LosesItsStore] = _LosesItsStore) -> int:
    """Count the flips on walks in which the store is lost a few times."""
    flips = 0
    for seed in seeds:
        walk = Walk(seed, world)
        assert isinstance(walk.world, _LosesItsStore)
        walk.deaths = 0.0
        for _ in range(4):
            walk.whatever(500)
            walk.world.lose()
        walk.calm()
        flips += walk.world.flips
    return flips


def test_a_store_that_loses_everything_costs_no_promise() -> None:
    assert lossy(range(3)) > 3


@pytest.mark.slow
def test_the_same_with_many_losses() -> None:
    assert lossy(range(3000, 3080)) > 150


class _TrustsTies(_LosesItsStore):
    """A token that ranks know counts as the coordinator's own if it is equal."""

    def survey(self, leader: Leader) -> list[HandoverDescribed]:
        leader.token, leader.fenced = (
            max(leader.token, *(seat.protocol.protocol_state.token for seat in self.seats)),
            self.life,
        )
        return super().survey(leader)


@pytest.mark.slow
def test_a_walk_notices_when_a_new_token_may_equal_an_old_one() -> None:
    with pytest.raises(Unsafe):
        lossy(range(7000, 7400), _TrustsTies)


class _AnybodyWrites(World):
    """The store accepts every write."""

    def claim(self, value: OpenHandover, revision: int | None) -> bool:
        return super().claim(value, None if self.key is None else self.revision)


class _NoHeaders(World):
    """A rank flips when it is ready itself."""

    def going(self) -> list[Seat]:
        return [seat for seat in self.seats if seat.ready is not None]


@pytest.mark.parametrize(
    ("world", "promise"),
    [
        (
            _AnybodyWrites,
            "is both committed and aborted|goes on, though|was not decided|does not come to rest",
        ),
        (_NoHeaders, "in one step"),
    ],
)
def test_a_walk_notices_when_the_world_lacks_a_rule(world: type[World], promise: str) -> None:
    with pytest.raises(Unsafe, match=promise):
        walked(range(200), 2000, world)


def _without_quarantine(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        cell_table,
        "CELL",
        {**CELL, (Cell.PULLING, CellEvent.OVERDUE): Cell.FREE, (Cell.FREE, CellEvent.SETTLED): Cell.FREE},
    )
    patch.setattr(CellTable, "settled", lambda *_: None)


def _without_draining(patch: pytest.MonkeyPatch) -> None:
    def at_once(self: CellTable, cell: int, now: float) -> None:
        if self.use(cell) is Cell.DRAINING:
            self._move(cell, CellEvent.SETTLED, now)

    patch.setattr(CellTable, "_settle_drained", at_once)
    patch.setattr(CellTable, "check_integrity", lambda _: None)


def _staged_by_most(patch: pytest.MonkeyPatch) -> None:
    real = HandoverState.waiting_for.fget  # type: ignore[attr-defined]
    patch.setattr(HandoverState, "waiting_for", property(lambda self: tuple(real(self))[1:]))


def _free_with_a_part_on_its_way(patch: pytest.MonkeyPatch) -> None:
    """A cell that was given up is free at once, though other parts may still land in it."""
    patch.setattr(
        cell_table, "given_up", lambda use, _: CellEvent.BROKEN if use is Cell.PULLING else CellEvent.REFUSED
    )
    _without_books(patch)


def _free_with_its_first_part(patch: pytest.MonkeyPatch) -> None:
    """A quarantined cell is free when the first of its parts has settled."""

    def rule(use: Cell, filling: Filling) -> CellEvent | None:
        return CellEvent.SETTLED if use is Cell.QUARANTINED else after_part(use, filling)

    patch.setattr(cell_table, "after_part", rule)
    _without_books(patch)


def _staged_with_its_first_part(patch: pytest.MonkeyPatch) -> None:
    """A cell is staged when one of its parts compares."""

    def rule(use: Cell, filling: Filling) -> CellEvent | None:
        if use is Cell.VERIFYING:
            return CellEvent.VERIFIED
        return CellEvent.LANDED if use is Cell.PULLING and not filling.reading else after_part(use, filling)

    patch.setattr(cell_table, "after_part", rule)
    _without_books(patch)


def _without_books(patch: pytest.MonkeyPatch) -> None:
    """Nothing but the memory shows what went wrong."""
    patch.setattr(CellTable, "check_integrity", lambda _: None)


@pytest.mark.parametrize(
    "broken",
    [
        _without_quarantine,
        _staged_by_most,
        _free_with_a_part_on_its_way,
        _free_with_its_first_part,
        _staged_with_its_first_part,
        pytest.param(_without_draining, marks=pytest.mark.slow),
    ],
)
def test_a_walk_notices_when_a_part_lacks_a_rule(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    with pytest.raises((Unsafe, Inconsistent, IllegalTransition)):
        walked(range(400), 2000)
