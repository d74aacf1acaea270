"""The expert ranks of an engine that rearranges: what they tell the coordinator, and their workers, in each
case."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.engine import WorkerMap
from engine_adapter.handover.vote_protocol import (
    IDLE_SECONDS,
    Drop,
    NotConnected,
    Nudge,
    Permit,
    Stage,
    VoteProtocol,
)
from fleet.handover import REARRANGING, CommandVerdict, RankState
from fleet.placement import EMPTY, FULL, Placement, Split
from fleet.requests.handovers import AbortHandover, CommitHandover, HandoverDescribed, ProposeHandover
from tests.voting_workers import Worker, digest

RANKS = 2
FIRST = Placement(np.array([[0, 1, 2, 2, 3, 0]] * 2), experts=4, ranks=RANKS, epoch=3)
NEXT = Placement(np.array([[0, 1, 3, 2, 3, 1]] * 2), experts=4, ranks=RANKS, epoch=4)


def proposal(rank: int, placement: Placement = NEXT, handover: int = 7, **other: Any) -> ProposeHandover:
    plain: dict[str, Any] = {"token": 2, "plan": "p", "deadline_seconds": 10.0}
    return ProposeHandover(
        engine="a",
        worker_id=1,
        rank=rank,
        handover=handover,
        placement=placement.record(),
        **{**plain, **other},
    )


def commit(rank: int, handover: int = 7, token: int = 2) -> CommitHandover:
    return CommitHandover(worker_id=1, rank=rank, token=token, handover=handover)


def abort(rank: int, handover: int = 7, token: int = 2) -> AbortHandover:
    return AbortHandover(worker_id=1, rank=rank, token=token, handover=handover, reason="a test wants it")


class Bench:
    """A protocol and its workers; messages arrive when the test says so."""

    def __init__(self) -> None:
        self.workers = [Worker(FIRST) for _ in range(RANKS)]
        self.now = 0.0
        self.restart()

    def restart(self) -> None:
        """Put a new agent in place of the old one."""
        self.protocol = VoteProtocol(worker_id=1, placement=FIRST)
        self.hear()

    def hear(self, *, away: tuple[int, ...] = ()) -> None:
        statuses: list[WorkerMap | None] = [
            None if rank in away else worker.status for rank, worker in enumerate(self.workers)
        ]
        self.protocol.update(statuses, self.now)

    def deliver(self, *, lost: tuple[int, ...] = ()) -> list[str]:
        """Deliver what was sent, but not to ranks whose messages get lost; then their statuses. Return the
        messages."""
        sent = []
        for effect in self.protocol.drain():
            sent.append(type(effect).__name__)
            if isinstance(effect, Nudge) or effect.rank in lost:
                continue
            worker = self.workers[effect.rank]
            match effect:
                case Stage():
                    worker.stage(effect.handover, effect.placement, digest(FIRST))
                case Permit():
                    worker.permit(effect.handover)
                case Drop():
                    worker.drop(effect.handover, effect.reason)
        self.hear()
        return sent

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.protocol.tick(self.now)

    def propose(self, placement: Placement = NEXT, handover: int = 7, **other: Any) -> None:
        for rank in range(RANKS):
            self.protocol.propose(proposal(rank, placement, handover, **other), placement, self.now)

    def voting(self) -> None:
        """Bring all workers to vote for handover 7."""
        self.propose()
        self.deliver()
        for rank in range(RANKS):
            self.protocol.commit(commit(rank))
        self.deliver()

    def said(self, rank: int) -> HandoverDescribed:
        return self.protocol.describe(rank, self.now)

    @property
    def states(self) -> list[str]:
        return [self.said(rank).state for rank in range(RANKS)]


def test_a_map_is_held_then_voted_for_then_in_force_and_each_is_reported_when_the_worker_says_so() -> None:
    bench = Bench()
    bench.propose()
    assert bench.states == ["staging", "staging"], "a message that was sent proves nothing"
    assert bench.deliver() == ["Stage", "Stage"]
    assert bench.states == ["staged", "staged"]
    assert bench.protocol.commit(commit(0)) is CommandVerdict.TAKE
    assert bench.states == ["staged", "staged"]
    assert bench.deliver() == ["Permit"]
    assert bench.states == ["ready", "staged"]
    assert bench.protocol.commit(commit(0)) is CommandVerdict.REPEAT
    bench.protocol.commit(commit(1))
    bench.deliver()
    for worker in bench.workers:
        worker.carry_out()
    bench.hear()
    for rank in range(RANKS):
        said = bench.said(rank)
        assert (said.state, said.served, said.flipped, said.concluded, said.failure) == (
            "serving",
            4,
            7,
            7,
            "",
        )
    assert bench.protocol.commit(commit(0)) is CommandVerdict.REPEAT


def test_a_lost_proposal_is_repeated_until_its_deadline_and_then_it_has_failed() -> None:
    bench = Bench()
    bench.propose(deadline_seconds=2.0)
    bench.deliver(lost=(1,))
    bench.wait(0.6)
    assert bench.deliver(lost=(1,)) == ["Stage"]
    assert bench.protocol.wakes == 1.1
    bench.wait(1.5)
    assert bench.states == ["staged", "failed"]
    assert (bench.said(1).fault, bench.said(1).failure[:34]) == (
        "overdue",
        "the worker of expert rank 1 did no",
    )
    assert bench.protocol.abort(abort(1)) is CommandVerdict.TAKE
    assert bench.states[1] == "failed", "until its worker knows the number, a late message may still arrive"
    bench.deliver()
    assert (bench.said(1).state, bench.said(1).concluded) == ("serving", 7)
    bench.workers[1].stage(7, NEXT, digest(FIRST))
    bench.hear()
    assert bench.states[1] == "serving", "the late message was ignored"


def test_a_worker_that_rejects_a_map_fails_its_rank_with_its_own_words() -> None:
    bench = Bench()
    bench.workers[1].map = NEXT
    bench.propose()
    bench.deliver()
    assert bench.states == ["staged", "failed"]
    assert "is in force, not" in bench.said(1).failure
    bench.protocol.abort(abort(1))
    assert bench.states[1] == "serving", "the worker holds nothing, and knows that the number is past"


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (Placement(np.array([[0, 1, 2, 3]]), experts=4, ranks=2, epoch=4), "plan anew"),
        (
            Placement(np.array([[0, 1, EMPTY, 2, 3, 0]] * 2), experts=4, ranks=2, epoch=4),
            "layer 0 slot 2 is empty, and this engine has no empty slots",
        ),
        (
            Placement(
                NEXT.expert_of_slot,
                experts=4,
                ranks=2,
                epoch=4,
                split=Split(
                    NEXT.split.keep,
                    np.array([[FULL, FULL - 9, FULL - 9, FULL, 9, 9]] * 2, np.uint16),
                    NEXT.split.near,
                ),
            ),
            "replicas share their tokens unevenly",
        ),
    ],
)
def test_a_map_that_the_engine_cannot_serve_reaches_no_worker(placement: Placement, words: str) -> None:
    bench = Bench()
    bench.propose(placement)
    assert bench.deliver() == []
    assert bench.states == ["failed", "failed"]
    assert words in bench.said(0).failure


def test_no_map_is_taken_while_the_engine_is_at_fault_or_the_placement_cannot_be_read() -> None:
    bench = Bench()
    bench.protocol.fault = "slot 3 holds other weights than it should"
    bench.protocol.propose(proposal(0), NEXT, 0.0)
    bench.protocol.propose(proposal(1), "its bytes do not fit", 0.0)
    assert bench.deliver() == []
    assert [bench.said(rank).failure for rank in (0, 1)] == [
        "slot 3 holds other weights than it should",
        "its bytes do not fit",
    ]


def test_a_fault_of_the_engine_ends_what_is_staged_or_voted_for_too() -> None:
    bench = Bench()
    bench.propose()
    bench.deliver()
    bench.protocol.commit(commit(0))
    bench.deliver()
    bench.protocol.fault = "slot 3 holds other weights than it should"
    bench.protocol.commit(commit(1))
    bench.wait(0.1)
    assert bench.deliver() == ["Drop", "Drop"]
    assert bench.states == ["serving", "serving"]
    assert bench.said(0).failure == "slot 3 holds other weights than it should"


def test_a_worker_that_drops_the_map_after_the_permission_ends_the_handover_for_all() -> None:
    bench = Bench()
    bench.voting()
    bench.workers[1].drop(7, "no agent for 10 minutes")
    bench.hear()
    assert bench.states == ["ready", "serving"]
    assert (bench.said(1).concluded, bench.said(1).flipped) == (7, 0)
    assert (bench.said(1).fault, bench.said(1).failure) == ("refused", "no agent for 10 minutes")
    bench.wait(0.1)
    assert bench.deliver(lost=(0,)) == ["Drop"]
    bench.wait(0.6)
    assert bench.deliver() == ["Drop"], "again, because the first was lost"
    assert bench.states == ["serving", "serving"]
    assert "expert rank 1 has dropped the map" in bench.said(0).failure
    assert bench.protocol.commit(commit(0)) is CommandVerdict.PAST


def test_a_permission_that_could_never_matter_any_more_is_a_drop_instead() -> None:
    bench = Bench()
    bench.propose()
    bench.deliver()
    bench.workers[1].drop(7, "why not")
    bench.hear()
    assert bench.protocol.commit(commit(0)) is CommandVerdict.TAKE
    assert bench.deliver() == ["Drop"]
    assert bench.states == ["serving", "serving"]


def test_workers_that_hold_different_maps_under_one_number_are_told_to_drop_them() -> None:
    bench = Bench()
    bench.propose()
    bench.deliver()
    bench.workers[0].held = Placement(FIRST.expert_of_slot, experts=4, ranks=2, epoch=4)
    for rank in range(RANKS):
        bench.workers[rank].permit(7)
    bench.hear()
    bench.wait(0.1)
    assert bench.deliver() == ["Drop", "Drop"]
    assert bench.states == ["serving", "serving"]


def test_after_the_vote_has_passed_a_silent_worker_leaves_its_rank_as_it_was() -> None:
    bench = Bench()
    bench.voting()
    late = bench.workers[1].status
    for worker in bench.workers:
        worker.carry_out()
    bench.protocol.update([bench.workers[0].status, late], bench.now)
    assert bench.states == ["serving", "ready"]
    bench.wait(60.0)
    assert bench.said(1).pending == "unknown"
    assert [type(effect) for effect in bench.protocol.drain()] == [Nudge], "the vote may have passed there"


def test_a_rank_whose_worker_is_not_connected_takes_no_command_and_says_so() -> None:
    bench = Bench()
    bench.hear(away=(1,))
    for command in (
        lambda: bench.protocol.propose(proposal(1), NEXT, 0.0),
        lambda: bench.protocol.commit(commit(1)),
        lambda: bench.protocol.abort(abort(1)),
        lambda: bench.protocol.status_requested(1, 3),
    ):
        with pytest.raises(NotConnected, match="the worker of expert rank 1 is not connected"):
            command()
    assert bench.protocol.propose(proposal(0), NEXT, 0.0) is CommandVerdict.TAKE


def test_a_restarted_agent_learns_everything_from_the_workers() -> None:
    bench = Bench()
    bench.propose()
    bench.deliver()
    bench.protocol.commit(commit(0))
    bench.deliver()
    bench.restart()
    assert bench.states == ["ready", "staged"]
    assert [bench.said(rank).handover for rank in (0, 1)] == [7, 7]
    bench.protocol.commit(commit(1))
    bench.deliver()
    for worker in bench.workers:
        worker.carry_out()
    bench.restart()
    assert [(bench.said(rank).served, bench.said(rank).flipped) for rank in (0, 1)] == [(4, 7), (4, 7)]
    assert bench.protocol.propose(proposal(0), NEXT, 0.0) is CommandVerdict.PAST
    bench.protocol.abort(abort(1, handover=9))
    bench.deliver()
    bench.restart()
    assert bench.protocol.verdict_on_proposal(proposal(1, handover=9)) is CommandVerdict.PAST


def test_an_abort_that_no_worker_answers_waits_for_its_deadline() -> None:
    bench = Bench()
    bench.propose(deadline_seconds=10.0)
    bench.deliver(lost=(0, 1))
    for rank in range(RANKS):
        bench.protocol.abort(abort(rank))
    bench.deliver(lost=(0, 1))
    bench.wait(1.0)
    assert bench.protocol.wakes == 10.0
    assert bench.deliver() == [], "the coordinator repeats the abort"


def test_an_abort_before_the_proposal_arrives_makes_its_number_past() -> None:
    bench = Bench()
    assert bench.protocol.abort(abort(0)) is CommandVerdict.TAKE
    assert bench.said(0).concluded == 0, "not before the worker knows"
    bench.deliver()
    assert bench.said(0).concluded == 7
    assert bench.protocol.propose(proposal(0), NEXT, 0.0) is CommandVerdict.PAST
    assert bench.protocol.abort(abort(0)) is CommandVerdict.REPEAT


def test_lower_tokens_are_fenced_off() -> None:
    bench = Bench()
    bench.protocol.status_requested(0, 5)
    assert bench.protocol.propose(proposal(0), NEXT, 0.0) is CommandVerdict.FENCED
    assert bench.protocol.abort(abort(0)) is CommandVerdict.FENCED
    assert bench.protocol.commit(commit(0)) is CommandVerdict.FENCED
    assert (bench.said(0).token, bench.said(1).token) == (5, 0)
    assert bench.deliver() == []


def test_an_engine_that_makes_no_steps_is_nudged_and_shown_as_idle_until_something_changes() -> None:
    bench = Bench()
    bench.voting()
    bench.wait(IDLE_SECONDS - 0.1)
    assert bench.deliver() == []
    assert bench.said(0).pending == ""
    bench.wait(0.2)
    assert bench.deliver() == ["Nudge"]
    assert [bench.said(rank).pending for rank in (0, 1)] == ["idle", "idle"]
    bench.wait(IDLE_SECONDS)
    assert bench.deliver() == ["Nudge"]
    for worker in bench.workers:
        worker.carry_out()
    bench.hear()
    assert bench.said(0).pending == ""
    bench.wait(60.0)
    assert bench.deliver() == []


def test_a_map_that_comes_into_force_by_layers_is_in_force_with_the_last_one() -> None:
    bench = Bench()
    bench.voting()
    bench.workers[0].layers_done = 1
    bench.hear()
    assert bench.states == ["ready", "ready"]
    assert [bench.said(rank).pending for rank in (0, 1)] == ["1 of 2 layers", ""]
    bench.workers[0].layers_done = 2
    bench.hear()
    assert bench.said(0).pending == "", "these may be those of the map before"


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["propose", "commit", "abort", "messages", "statuses", "step", "drop", "agent", "wait", "mislead"]
        ),
        st.integers(0, RANKS - 1),
        st.integers(1, 3),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(EVENTS)
def test_whatever_happens_a_rank_moves_along_the_table_and_reports_only_what_its_worker_said(
    events: list[tuple[str, int, int]],
) -> None:
    bench = Bench()
    before = [bench.said(rank) for rank in range(RANKS)]
    for what, rank, number in events:
        happen(bench, what, rank, number)
        bench.protocol.tick(bench.now)
        assert bench.protocol.wakes > bench.now, "its owner would call tick again and again"
        for at in range(RANKS):
            said = bench.said(at)
            assert (said.handover == 0) == (said.state == "serving")
            assert said.concluded >= before[at].concluded
            assert said.served >= before[at].served
            if said.state in ("staged", "ready"):
                assert said.handover > said.concluded, "what has ended is never held again"
            if said.handover == before[at].handover != 0 and what != "agent":
                assert RankState(said.state) in within(RankState(before[at].state))
            before[at] = said


def happen(bench: Bench, what: str, rank: int, number: int) -> None:
    following = Placement(NEXT.expert_of_slot, experts=4, ranks=RANKS, epoch=bench.said(rank).served + 1)
    match what:
        case "propose":
            bench.protocol.propose(proposal(rank, following, number), following, bench.now)
        case "commit":
            bench.protocol.commit(commit(rank, number))
        case "abort":
            bench.protocol.abort(abort(rank, number))
        case "messages":
            bench.deliver(lost=(rank,) if number == 1 else ())
        case "statuses":
            bench.hear()
        case "step":
            ballots = {worker.ballot for worker in bench.workers}
            if len(ballots) == 1 and all(worker.voting for worker in bench.workers):
                for worker in bench.workers:
                    worker.carry_out()
        case "drop":
            bench.workers[rank].drop(number, "on its own")
        case "agent":
            bench.restart()
        case "wait":
            bench.wait(float(number * 4))
        case "mislead":
            bench.workers[rank].permit(number)


def within(state: RankState) -> set[RankState]:
    """Return the states to which the table leads within one handover, in any number of steps: statuses may be
    missed."""
    found, frontier = {state}, {state}
    while frontier:
        frontier = {to for (of, _), to in REARRANGING.items() if of in frontier} - found - {RankState.SERVING}
        found |= frontier
    return found
