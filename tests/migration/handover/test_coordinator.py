"""One handover as a value: its commands, and the (missing) effect of lost, repeated and reordered answers."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.facts.engines import EngineJoined
from fleet.facts.migrations import (
    ExpertArrival,
    MigrationAborted,
    MigrationCommitted,
    MigrationStaged,
    PullReport,
)
from fleet.facts.placements import PlacementCommitted
from fleet.handover import CommandVerdict, CoordinatorEvent, CoordinatorState, RankState
from fleet.placement import linear
from fleet.requests.handovers import (
    AbortHandover,
    CommitHandover,
    DescribeHandover,
    ExpertCopy,
    HandoverDescribed,
    ProposeHandover,
)
from migration.config import MigrationConfig
from migration.engine_state.placement_registry import EngineEntry
from migration.handover.coordinator import (
    Command,
    HandoverSpec,
    HandoverState,
    HandoverTimes,
    begun,
    taken_over,
)
from migration.handover.handover_messages import left_open

PACE = HandoverTimes(repeat=0.5, grace=1.0, commit=5.0)
RANKS = 3
PLACEMENT = linear(layers=1, experts=6, ranks=RANKS)


def undertaking(**other: Any) -> HandoverSpec:
    plain: dict[str, Any] = {
        "engine": "a",
        "worker_id": 1,
        "ranks": RANKS,
        "handover": 7,
        "plan": "p",
        "number": 0,
        "last": True,
        "epoch": 4,
        "placement": PLACEMENT.record(),
        "copied": 1,
        "bytes": 100,
        "stage_seconds": 2.0,
    }
    return HandoverSpec(**{**plain, **other})


def proposing() -> HandoverState:
    return begun(undertaking(), 3, PACE, 10.0)


def report(rank: int, state: RankState = RankState.SERVING, **other: Any) -> HandoverDescribed:
    open_ = 0 if state is RankState.SERVING else 7
    plain: dict[str, Any] = {"served": 3, "token": 3, "handover": open_, "concluded": 6, "flipped": 6}
    return HandoverDescribed(worker_id=1, rank=rank, state=state, **{**plain, **other})


def all_report(handover_state: HandoverState, state: RankState, **other: Any) -> HandoverState:
    for rank in range(RANKS):
        handover_state = handover_state.reported(report(rank, state, **other))
    return handover_state


def make(handover_state: HandoverState, now: float) -> tuple[HandoverState, CoordinatorEvent]:
    transition = handover_state.next_transition(now)
    assert transition is not None
    return handover_state.with_transition(transition, now), transition.event


def committing() -> HandoverState:
    return make(all_report(proposing(), RankState.STAGED), 11.0)[0]


def aborting() -> HandoverState:
    return make(proposing(), 13.5)[0]


def sent(handover_state: HandoverState, now: float) -> dict[int, type[Command]]:
    return {rank: type(command) for rank, command in handover_state.due(now)}


# Commands


def test_everybody_is_proposed_to_and_again_after_a_while_until_it_answers() -> None:
    handover_state = proposing()
    assert sent(handover_state, 10.0) == dict.fromkeys(range(3), ProposeHandover)
    handover_state = handover_state.commanded(range(3), 10.0)
    assert sent(handover_state, 10.4) == {}
    assert handover_state.next_look(10.1) == 10.5
    handover_state = handover_state.reported(report(0, RankState.STAGING)).reported(
        report(1, RankState.STAGED)
    )
    assert sent(handover_state, 10.5) == {
        0: DescribeHandover,
        2: ProposeHandover,
    }, "who has taken it is asked how it goes"


def test_commits_go_to_all_and_again_to_those_that_do_not_serve_yet() -> None:
    handover_state = committing()
    assert sent(handover_state, 11.0) == dict.fromkeys(range(3), CommitHandover), "at once"
    handover_state = (
        handover_state.commanded(range(3), 11.0)
        .reported(report(0, RankState.READY))
        .reported(report(1, flipped=7, concluded=7))
    )
    assert sent(handover_state, 11.5) == dict.fromkeys((0, 2), CommitHandover)


def test_an_abort_goes_to_all_with_its_reason_until_each_says_that_it_is_over() -> None:
    handover_state = aborting()
    assert all(
        isinstance(command, AbortHandover) and "did not answer" in command.reason
        for _, command in handover_state.due(13.5)
    )
    handover_state = handover_state.reported(report(0, concluded=7)).reported(report(1, RankState.STAGED))
    assert sent(handover_state, 13.5) == dict.fromkeys((1, 2), AbortHandover)


def test_after_a_higher_token_all_are_asked_again_at_once() -> None:
    handover_state = (
        proposing().commanded(range(3), 10.0).reported(report(1, token=9, verdict=CommandVerdict.FENCED))
    )
    assert (handover_state.highest_token, handover_state.token) == (9, 3)
    after = handover_state.with_token(10)
    assert {command.token for _, command in after.due(10.1) if isinstance(command, ProposeHandover)} == {10}
    assert after.failure is None, "being fenced is no fault of the rank"


# Moves


def test_all_staged_is_recorded_with_every_pull_and_decided() -> None:
    pull = PullReport(source=0, transfer="nixl", experts=1, bytes=50, seconds=0.1)
    handover_state = all_report(proposing(), RankState.STAGED, pulls=(pull,))
    transition = handover_state.next_transition(11.0)
    assert transition is not None
    assert (transition.event, transition.after) == (CoordinatorEvent.ALL_STAGED, CoordinatorState.COMMITTING)
    (staged,) = transition.records
    assert isinstance(staged, MigrationStaged)
    assert (staged.pulls, staged.seconds, staged.epoch, staged.handover) == ((pull,) * 3, 1.0, 4, 7)


def test_all_serving_is_recorded_with_the_placement_first() -> None:
    handover_state = all_report(committing(), RankState.SERVING, flipped=7, concluded=7, served=4)
    transition = handover_state.next_transition(12.0)
    assert transition is not None
    placed, committed = transition.records
    assert isinstance(placed, PlacementCommitted)
    assert isinstance(committed, MigrationCommitted)
    assert (placed.plan, committed.seconds, committed.commit_seconds, committed.last) == ("p", 2.0, 1.0, True)
    assert transition.after is CoordinatorState.IDLE


@pytest.mark.parametrize(
    ("status", "fault"),
    [
        (report(1, RankState.FAILED, failure="bad bytes", fault="checksum"), "checksum"),
        (report(1, RankState.FAILED), "unknown"),
        (report(1, RankState.STAGED, handover=6, verdict=CommandVerdict.BUSY), "busy"),
        (report(1, served=5, verdict=CommandVerdict.PAST), "epoch"),
        (report(1, concluded=7), "coordinator"),
    ],
)
def test_what_leaves_no_hope_aborts_with_whose_fault_it_is(status: HandoverDescribed, fault: str) -> None:
    handover_state, event = make(proposing().reported(report(0, RankState.STAGED)).reported(status), 10.5)
    assert event is CoordinatorEvent.FAILED
    assert handover_state.failure is not None
    assert (handover_state.failure.fault, handover_state.failure.rank) == (fault, 1)
    transition = all_report(handover_state, RankState.SERVING, concluded=7).next_transition(11.0)
    assert transition is not None
    (aborted,) = transition.records
    assert isinstance(aborted, MigrationAborted)
    assert (aborted.fault, aborted.rank, aborted.handover, aborted.epoch) == (fault, 1, 7, 4)


def test_the_deadline_names_who_is_late_and_a_commit_has_none() -> None:
    handover_state = (
        proposing()
        .reported(report(0, RankState.STAGED))
        .reported(report(1, RankState.STAGING))
        .reported(report(2, RankState.STAGING))
    )
    assert handover_state.next_transition(12.9) is None
    after, event = make(handover_state, 13.0)
    assert event is CoordinatorEvent.FAILED
    assert after.failure is not None
    assert after.failure.reason.startswith("ranks 1, 2 did not stage within 2 s")
    assert committing().next_transition(1e9) is None
    assert committing().overdue(16.1)
    assert not committing().overdue(15.9)


def test_a_rank_that_refuses_commands_ends_a_proposal_and_is_not_waited_for_with_the_abort() -> None:
    handover_state = proposing().reported(report(0, RankState.STAGED)).declined(2, "no experts")
    after, event = make(handover_state, 10.5)
    assert event is CoordinatorEvent.FAILED
    assert after.waiting_for == (0, 1)
    again = committing().declined(2, "a defect")
    assert 2 in again.waiting_for, "what is decided must be heard"


@pytest.mark.parametrize(
    ("begin", "records"),
    [
        (proposing, [MigrationAborted]),
        (committing, [PlacementCommitted, MigrationCommitted]),
        (aborting, [MigrationAborted]),
    ],
)
def test_an_engine_that_is_gone_ends_it_with_what_was_decided(begin: Any, records: list[type]) -> None:
    handover_state = begin().gone("it has left")
    assert handover_state.due(20.0) == ()
    transition = handover_state.next_transition(20.0)
    assert transition is not None
    assert (transition.event, transition.after) == (CoordinatorEvent.ENGINE_GONE, CoordinatorState.IDLE)
    assert [type(entry) for entry in transition.records] == records


def test_silence_ends_an_abort_only() -> None:
    assert proposing().checked(silent=True).next_transition(11.0) is None
    assert committing().checked(silent=True).next_transition(1e6) is None
    transition = aborting().checked(silent=True).next_transition(14.0)
    assert transition is not None
    assert transition.event is CoordinatorEvent.ALL_ABORTED


# Engines that rearrange


def refusal(rank: int, why: str = "") -> HandoverDescribed:
    return report(rank, concluded=7, failure=why, fault="refused" if why else "")


def test_a_decided_handover_that_every_rank_has_dropped_ends_as_aborted() -> None:
    handover_state = committing().reported(refusal(0)).reported(refusal(2))
    assert handover_state.next_transition(12.0) is None, "rank 1 may still vote"
    handover_state, event = make(handover_state.reported(refusal(1, "no agent for 10 minutes")), 12.0)
    assert event is CoordinatorEvent.ALL_REFUSED
    found = handover_state.durable(handover_state.state, 12.0)
    assert (found.state, found.fault, found.rank) == (CoordinatorState.ABORTING, "refused", 1)
    transition = handover_state.next_transition(12.0)
    assert transition is not None
    assert transition.after is CoordinatorState.IDLE
    (aborted,) = transition.records
    assert isinstance(aborted, MigrationAborted)
    assert (aborted.fault, aborted.rank, aborted.epoch) == ("refused", 1, 4)
    assert "every rank has dropped the new map" in aborted.reason
    assert "no agent for 10 minutes" in aborted.reason


def test_a_rank_that_refused_and_one_that_serves_leave_the_handover_open_for_ever() -> None:
    handover_state = committing().reported(refusal(0)).reported(refusal(1))
    handover_state = handover_state.reported(report(2, flipped=7, concluded=7, served=4))
    assert handover_state.next_transition(1e6) is None, "that is a defect, and no record may hide it"
    assert handover_state.waiting_for == (0, 1)
    assert handover_state.overdue(1e6)


def test_what_all_ranks_reported_counts_more_than_that_the_engine_is_gone() -> None:
    refused = all_report(committing(), RankState.SERVING, concluded=7).gone("it has left")
    assert make(refused, 12.0)[1] is CoordinatorEvent.ALL_REFUSED
    unknown = committing().reported(refusal(0)).gone("it has left")
    assert make(unknown, 12.0)[1] is CoordinatorEvent.ENGINE_GONE


def test_a_successor_hears_the_refusals_anew() -> None:
    left = committing()
    heir = taken_over(left.what, left.durable(left.state, 12.0), 8, PACE, 20.0)
    assert heir.next_transition(20.0) is None
    transition = all_report(heir, RankState.SERVING, concluded=7).next_transition(20.0)
    assert transition is not None
    assert transition.event is CoordinatorEvent.ALL_REFUSED


def test_a_rank_that_drops_the_map_before_the_decision_ends_the_proposal_with_its_own_words() -> None:
    handover_state, event = make(proposing().reported(refusal(1, "it restarts")), 10.5)
    assert event is CoordinatorEvent.FAILED
    assert handover_state.failure is not None
    assert (handover_state.failure.reason, handover_state.failure.rank) == ("it restarts", 1)


def test_ranks_that_move_experts_themselves_are_told_the_map_alone_and_the_copies_are_counted() -> None:
    copy = ExpertCopy(layer=0, expert=1, source=0, slot=3)
    handover_state = begun(undertaking(rearranges=True, copies=(copy,)), 3, PACE, 10.0)
    (_, proposal), *_ = handover_state.due(10.0)
    assert isinstance(proposal, ProposeHandover)
    assert (proposal.copies, proposal.placement) == ((), PLACEMENT.record())
    transition = all_report(handover_state, RankState.STAGED).next_transition(11.0)
    assert transition is not None
    (staged,) = transition.records
    assert isinstance(staged, MigrationStaged)
    assert (staged.copies, staged.bytes, staged.arrivals) == (1, 100, (ExpertArrival(0, 1, 0, 1),))


@pytest.mark.parametrize(
    ("rearranges", "words"),
    [(True, "its initial map, not the one on record"), (False, "the placement in the log")],
)
def test_what_an_engine_starts_from_after_its_end_depends_on_its_kind(rearranges: bool, words: str) -> None:
    gone = begun(undertaking(rearranges=rearranges), 3, PACE, 10.0).gone("it has left")
    transition = gone.next_transition(20.0)
    assert transition is not None
    (aborted,) = transition.records
    assert isinstance(aborted, MigrationAborted)
    assert words in aborted.reason


def test_a_successor_knows_of_which_kind_the_engine_was() -> None:
    left = proposing().durable(CoordinatorState.PROPOSING, 11.0)
    joined = EngineJoined(
        engine="a",
        worker_id=1,
        model="m",
        node="n",
        urls=("http://a",),
        block_size=16,
        kv_blocks=1,
        max_context=1,
        max_batch_tokens=1,
        rearranges=True,
    )
    entry = EngineEntry("a", 1, PLACEMENT, joined)
    assert left_open("a", left, None, entry, MigrationConfig()).rearranges


# Successors


@pytest.mark.parametrize(
    ("begin", "command", "event"),
    [
        (proposing, None, CoordinatorEvent.FAILED),
        (committing, CommitHandover, None),
        (aborting, AbortHandover, None),
    ],
)
def test_a_successor_goes_on_from_what_is_durable(
    begin: Any, command: type | None, event: CoordinatorEvent | None
) -> None:
    left = begin()
    found = left.durable(left.state, 13.5)
    heir = taken_over(left.what, found, 8, PACE, 100.0)
    transition = heir.next_transition(100.0)
    assert (None if transition is None else transition.event) is event
    if command is not None:
        assert sent(heir, 100.0) == dict.fromkeys(range(3), command)
        assert {one.token for _, one in heir.due(100.0) if not isinstance(one, DescribeHandover)} == {8}
    if left.failure is not None:
        assert heir.failure is not None
        assert heir.failure.reason == left.failure.reason


def test_what_nothing_durable_knew_of_is_ended_without_a_record() -> None:
    left = aborting()
    heir = taken_over(
        undertaking(plan="", placement=None), left.durable(CoordinatorState.ABORTING, 13.5), 8, PACE, 20.0
    )
    transition = all_report(heir, RankState.SERVING, concluded=7).next_transition(20.0)
    assert transition is not None
    assert transition.records == ()


# Lost, repeated and reordered reports


class _Rank:
    """Reports of one rank in one handover, in the order in which they become true."""

    def __init__(self, rank: int, fails: bool) -> None:
        self.words = [
            report(rank),
            report(rank, RankState.STAGING),
            report(rank, RankState.FAILED if fails else RankState.STAGED),
        ]
        self.aborted = report(rank, concluded=7)
        self.committed = [report(rank, RankState.READY), report(rank, flipped=7, concluded=7, served=4)]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    fails=st.sets(st.integers(0, RANKS - 1), max_size=1),
    heirs=st.integers(0, 2),
)
def test_whatever_is_lost_repeated_and_reordered_the_end_is_that_of_the_protocol(
    seed: int, fails: set[int], heirs: int
) -> None:
    """Reports arrive late, twice or never.

    A coordinator may end at any time, and its successor knows only the durable state.
    """
    chance = random.Random(seed)
    ranks = [_Rank(rank, rank in fails) for rank in range(RANKS)]
    truth = [0] * RANKS
    """number of reports that are true for each rank"""
    reports: list[HandoverDescribed] = []
    handover_state, now, token = proposing(), 10.0, 3
    recorded: list[type] = []
    states = [handover_state.state]
    while handover_state.state is not CoordinatorState.IDLE:
        now += 0.25
        assert now < 200, "every run ends"
        for rank, command in handover_state.due(now):
            handover_state = handover_state.commanded((rank,), now)
            if chance.random() < 0.3:
                continue
            at = ranks[rank]
            match command:
                case ProposeHandover() | DescribeHandover() if (
                    handover_state.state is CoordinatorState.PROPOSING
                ):
                    truth[rank] = min(truth[rank] + 1, 2)
                    reports.append(at.words[truth[rank]])
                case CommitHandover():
                    assert all(one == 2 for one in truth), "nobody is told to commit before all have staged"
                    reports.append(at.committed[chance.random() < 0.5])
                case AbortHandover():
                    assert CoordinatorState.COMMITTING not in states, "what was decided is not given up"
                    reports.append(at.aborted)
        for status in chance.sample(reports, min(2, len(reports))):
            handover_state = handover_state.reported(status)
        if (transition := handover_state.next_transition(now)) is not None:
            recorded += [type(entry) for entry in transition.records if type(entry) not in recorded]
            if heirs and chance.random() < 0.3:
                heirs, token = heirs - 1, token + 1
                handover_state = taken_over(
                    handover_state.what, handover_state.durable(handover_state.state, now), token, PACE, now
                )
                continue
            handover_state = handover_state.with_transition(transition, now)
            states.append(handover_state.state)
    committed = CoordinatorState.COMMITTING in states
    assert committed == (MigrationCommitted in recorded)
    assert committed != (MigrationAborted in recorded)
    assert not (fails and committed)
