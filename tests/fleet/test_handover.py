"""Transition tables and rules of the handover in isolation. `test_handover_model.py` tests all parties
together.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.handover import (
    CELL,
    CONDUCTING,
    RANK,
    REARRANGING,
    Ballot,
    Cell,
    CellEvent,
    CommandVerdict,
    CoordinatorEvent,
    CoordinatorState,
    Filling,
    IllegalTransition,
    ProtocolState,
    RankEvent,
    RankState,
    aborted,
    after_part,
    committed,
    disagreement,
    flipped,
    flips,
    given_up,
    handle_abort,
    handle_commit,
    handle_propose,
    is_open,
    next_state,
    passes,
    proposed,
    refused,
    staged,
    with_token,
)

Table = Mapping[tuple[Any, Any], Any]
TABLES: list[tuple[Table, type[StrEnum], type[StrEnum], str, set[StrEnum]]] = [
    (CONDUCTING, CoordinatorState, CoordinatorEvent, "coordinator", {CoordinatorState.IDLE}),
    (RANK, RankState, RankEvent, "rank", {RankState.SERVING}),
    (REARRANGING, RankState, RankEvent, "rank", {RankState.SERVING}),
    (CELL, Cell, CellEvent, "cell", {Cell.FREE, Cell.LIVE}),
]
each_table = pytest.mark.parametrize(
    ("table", "states", "events", "role", "rest"),
    TABLES,
    ids=["coordinator", "rank", "rank that rearranges", "cell"],
)


@each_table
def test_every_state_can_be_reached_from_rest_and_has_a_way_back_to_it(
    table: Table, states: type[StrEnum], events: type[StrEnum], role: str, rest: set[StrEnum]
) -> None:
    leads_to = {of: {after for (one, _), after in table.items() if one is of} for of in states}
    assert _closure(leads_to, rest) == set(states)
    leads_from = {to: {of for (of, _), after in table.items() if after is to} for to in states}
    assert _closure(leads_from, rest) == set(states)


def _closure(edges: Mapping[StrEnum, set[StrEnum]], start: set[StrEnum]) -> set[StrEnum]:
    found, frontier = set(start), set(start)
    while frontier:
        frontier = set().union(*(edges[one] for one in frontier)) - found
        found |= frontier
    return found


@each_table
def test_every_event_is_allowed_somewhere(
    table: Table, states: type[StrEnum], events: type[StrEnum], role: str, rest: set[StrEnum]
) -> None:
    unused = {RankEvent.REFUSED} if table is RANK else set()
    assert {event for _, event in table} == set(events) - unused


@each_table
def test_a_move_that_the_table_lacks_is_refused_by_role_state_and_event(
    table: Table, states: type[StrEnum], events: type[StrEnum], role: str, rest: set[StrEnum]
) -> None:
    for state in states:
        for event in events:
            if (state, event) in table:
                assert next_state(table, state, event) is table[state, event]
                continue
            with pytest.raises(IllegalTransition) as refused:
                next_state(table, state, event)
            assert str(refused.value).startswith(
                f"a {role} that is {state.value!r} cannot take {event.value!r}; allowed: "
            )
            assert all(repr(allowed.value) in str(refused.value) for of, allowed in table if of is state)


def test_nothing_leaves_live_memory_but_by_draining_and_nothing_enters_it_but_verified() -> None:
    assert {event for (of, event) in CELL if of is Cell.LIVE} == {CellEvent.EVICTED}
    assert {of for (of, _), after in CELL.items() if after is Cell.LIVE} == {Cell.STAGED}
    assert {of for (of, _), after in CELL.items() if after is Cell.STAGED} == {Cell.VERIFYING}


@given(st.integers(1, 8), st.data())
def test_a_cell_follows_its_slowest_part_and_is_given_up_as_a_whole(parts: int, data: st.DataObject) -> None:
    progress = dict.fromkeys(range(parts), "waiting")  # the oracle: one word per part
    filling, use, gave_up = Filling.of(parts), Cell.PULLING, False
    onward = {"waiting": "reading", "reading": "comparing", "comparing": "done"}
    while use in (Cell.PULLING, Cell.VERIFYING, Cell.QUARANTINED):
        movable = [part for part, at in progress.items() if at in onward and (at != "waiting" or not gave_up)]
        part = data.draw(st.sampled_from(movable))
        fails = data.draw(st.booleans()) if progress[part] != "waiting" else False
        if progress[part] == "waiting":
            progress[part], filling = "reading", filling.begun(part)
        elif gave_up or fails or progress[part] == "comparing":
            progress[part], filling = "done", filling.done(part)
        else:
            progress[part], filling = "comparing", filling.landed(part)
        uses = {at for at in progress.values() if at in ("reading", "comparing")}
        assert filling.uses_cell == bool(uses)
        if fails and not gave_up:
            filling, gave_up = filling.stopped(), True
            use = next_state(CELL, use, given_up(use, filling))
            assert use is (Cell.QUARANTINED if uses else Cell.FREE)
            continue
        event = after_part(use, filling)
        if event is not None:
            use = next_state(CELL, use, event)
        if gave_up:
            assert use is (Cell.QUARANTINED if uses else Cell.FREE)
        else:
            expected = Cell.STAGED if set(progress.values()) == {"done"} else Cell.VERIFYING
            assert use is (Cell.PULLING if set(progress.values()) & {"waiting", "reading"} else expected)


def test_a_part_is_read_once_into_a_cell() -> None:
    filling = Filling.of(2).begun(1)
    for again in (filling, filling.landed(1), filling.landed(1).done(1), Filling.of(2).stopped()):
        with pytest.raises(IllegalTransition, match="part 1 of a cell cannot be read now"):
            again.begun(1)
    with pytest.raises(IllegalTransition, match="part 0 of a cell cannot land now"):
        filling.landed(0)


@given(st.lists(st.tuples(st.integers(3, 4), st.integers(0, 2)), min_size=1, max_size=5))
def test_the_first_two_ranks_that_mean_different_placements_by_one_epoch_are_named(
    headers: list[tuple[int, int]],
) -> None:
    ready, digests = zip(*headers, strict=True)
    conflicts = [
        (one, other)
        for other, (epoch, digest) in enumerate(headers)
        for one, (same, its_digest) in enumerate(headers[:other])
        if same == epoch and its_digest != digest
    ]
    assert disagreement(ready, digests) == (conflicts[0] if conflicts else None)


def test_after_the_decision_there_is_no_way_to_abort() -> None:
    assert {
        event
        for (of, event), after in CONDUCTING.items()
        if (of, after) == (CoordinatorState.COMMITTING, CoordinatorState.ABORTING)
    } == {CoordinatorEvent.ALL_REFUSED}, "which no rank that weights are copied to ever reports"
    assert (RankState.READY, RankEvent.ABORT) not in RANK
    assert (RankState.READY, RankEvent.ABORT) not in REARRANGING


def test_only_what_every_rank_reports_ends_a_decided_handover() -> None:
    assert {event for (of, event) in CONDUCTING if of is CoordinatorState.COMMITTING} == {
        CoordinatorEvent.ALL_SERVING,
        CoordinatorEvent.ALL_REFUSED,
        CoordinatorEvent.ENGINE_GONE,
    }


def test_a_rank_that_has_refused_votes_for_that_number_never_again() -> None:
    voting = committed(staged(proposed(ProtocolState(RankState.SERVING, served=3), 1, 7)), 1)
    rank = refused(voting)
    assert (rank.state, rank.served, rank.concluded, rank.flipped) == (RankState.SERVING, 3, 7, 0)
    assert handle_propose(rank, 1, 7, 4) is CommandVerdict.PAST
    assert handle_commit(rank, 1, 7) is CommandVerdict.PAST
    assert handle_propose(rank, 1, 8, 4) is CommandVerdict.TAKE
    with pytest.raises(IllegalTransition, match="a rank that is 'serving' cannot take 'refused'"):
        refused(rank)


BALLOTS = st.builds(Ballot, st.integers(0, 2), st.sampled_from(["a", "b"]), st.sampled_from(["x", "y"]))


@given(st.lists(BALLOTS, min_size=1, max_size=4))
def test_a_vote_passes_only_if_all_ballots_name_one_handover_one_map_and_one_map_in_force(
    ballots: list[Ballot],
) -> None:
    assert passes(ballots) == (len(set(ballots)) == 1 and ballots[-1].handover != 0)


COMMANDS = st.tuples(st.sampled_from(["propose", "commit", "abort"]), st.integers(0, 4), st.integers(1, 4))
OWN = st.tuples(st.sampled_from(["stage", "fail", "flip"]), st.just(0), st.just(0))


def _acts(
    rank: ProtocolState, what: str, token: int, handover: int
) -> tuple[ProtocolState, CommandVerdict | None]:
    """One command, or one autonomous step of the rank."""
    match what:
        case "propose":
            verdict = handle_propose(rank, token, handover, rank.served + 1)
            after = proposed(rank, token, handover) if verdict is CommandVerdict.TAKE else rank
        case "commit":
            verdict = handle_commit(rank, token, handover)
            after = committed(rank, token) if verdict is CommandVerdict.TAKE else rank
        case "abort":
            verdict = handle_abort(rank, token, handover)
            after = aborted(rank, token, handover) if verdict is CommandVerdict.TAKE else rank
        case "flip":
            return (flipped(rank) if rank.state is RankState.READY else rank), None
        case _:
            return (staged(rank, failed=what == "fail") if rank.state is RankState.STAGING else rank), None
    return with_token(after, token), verdict


@given(st.lists(st.one_of(COMMANDS, OWN), max_size=40))
def test_whatever_comes_in_whatever_order_a_rank_keeps_its_promises(
    story: list[tuple[str, int, int]],
) -> None:
    rank, over = ProtocolState(RankState.SERVING, served=0), set[int]()
    for what, token, handover in story:
        after, verdict = _acts(rank, what, token, handover)
        assert after.token >= rank.token
        assert after.concluded >= rank.concluded
        assert after.served == rank.served + (
            rank.state is RankState.READY and after.state is RankState.SERVING
        )
        assert (after.handover == 0) == (after.state is RankState.SERVING)
        if verdict is not None and verdict is not CommandVerdict.TAKE:
            assert after == with_token(rank, token)
        if verdict is CommandVerdict.FENCED:
            assert after == rank
            assert token < rank.token
        if what == "commit" and verdict is CommandVerdict.TAKE:
            assert rank.state is RankState.STAGED
            assert rank.handover == handover
        if what == "abort" and verdict in (CommandVerdict.TAKE, CommandVerdict.REPEAT):
            over.add(handover)
        assert after.handover not in over
        assert handle_commit(after, after.token, handover) is not CommandVerdict.TAKE or handover not in over
        rank = after


@given(st.lists(st.one_of(COMMANDS, OWN), max_size=25), COMMANDS)
def test_a_command_that_was_taken_is_not_taken_again(
    story: list[tuple[str, int, int]], command: tuple[str, int, int]
) -> None:
    rank = ProtocolState(RankState.SERVING, served=0)
    for step in story:
        rank, _ = _acts(rank, *step)
    after, verdict = _acts(rank, *command)
    if verdict is CommandVerdict.TAKE:
        again, repeated = _acts(after, *command)
        assert repeated in (CommandVerdict.REPEAT, CommandVerdict.PAST)
        assert again == after


def test_an_abort_of_a_handover_that_comes_later_leaves_the_open_one_open() -> None:
    rank = aborted(proposed(ProtocolState(RankState.SERVING, served=3), 1, 7), 1, 9)
    assert is_open(rank, 7)
    assert handle_propose(rank, 1, 7, 4) is CommandVerdict.REPEAT
    assert handle_abort(rank, 1, 7) is CommandVerdict.TAKE
    rank = flipped(committed(staged(rank), 1))
    assert rank.concluded == 9
    assert handle_propose(rank, 1, 9, 5) is CommandVerdict.PAST


def test_a_late_command_about_a_handover_that_is_over_is_told_from_one_about_a_handover_never_heard_of() -> (
    None
):
    rank = aborted(
        flipped(committed(staged(proposed(ProtocolState(RankState.SERVING, served=0), 1, 2)), 1)), 1, 3
    )
    verdicts = {
        handover: (handle_commit(rank, 1, handover), handle_abort(rank, 1, handover))
        for handover in (1, 2, 3, 4)
    }
    assert verdicts == {
        1: (CommandVerdict.PAST, CommandVerdict.REPEAT),
        2: (CommandVerdict.REPEAT, CommandVerdict.PREMATURE),
        3: (CommandVerdict.PAST, CommandVerdict.REPEAT),
        4: (CommandVerdict.UNKNOWN, CommandVerdict.TAKE),
    }


@given(st.integers(0, 5), st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_a_step_flips_only_when_every_rank_is_ready(served: int, ready: list[int]) -> None:
    assert flips(served, tuple(ready)) == all(epoch > served for epoch in ready)
