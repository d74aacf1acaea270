"""The handover state of one worker: which maps it holds, votes for, drops and carries out."""

import numpy as np
import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from roost_vllm.mailbox import Mailbox
from roost_vllm.wire import DropMap, MapStatus, PermitVote, StageMap, map_digest

LAYERS, SLOTS, EXPERTS = 2, 6, 4
INITIAL = np.array([[0, 1, 2, 3, 0, 1]] * LAYERS, np.int16)
OTHER = np.array([[3, 2, 1, 0, 2, 2]] * LAYERS, np.int16)


def packed(table: np.ndarray) -> bytes:
    return table.astype("<i2").tobytes()


def stage(handover: int, table: np.ndarray = OTHER, *, replaces: str = "", epoch: int = 0) -> StageMap:
    return StageMap(
        handover=handover,
        epoch=epoch or handover,
        replaces=replaces or map_digest(INITIAL, EXPERTS),
        map=packed(table),
    )


@pytest.fixture
def mailbox() -> Mailbox:
    return Mailbox(INITIAL, EXPERTS)


def test_a_valid_map_is_held_permitted_and_carried_out(mailbox: Mailbox) -> None:
    staged = mailbox.stage(stage(1))
    assert (staged.state, staged.digest) == ("staged", map_digest(OTHER, EXPERTS))
    assert mailbox.proposal() is None, "no permission, no vote"
    assert mailbox.permit(PermitVote(handover=1)).state == "voting"
    mailbox.pass_vote()
    mailbox.come_into_force(OTHER)
    status = mailbox.status()
    assert (status.state, status.flipped, status.epoch) == ("idle", 1, 1)
    assert status.served == map_digest(OTHER, EXPERTS)


def test_a_message_that_comes_twice_changes_nothing(mailbox: Mailbox) -> None:
    first = mailbox.stage(stage(1))
    assert mailbox.stage(stage(1)) == first
    voting = mailbox.permit(PermitVote(handover=1))
    assert mailbox.permit(PermitVote(handover=1)) == voting
    assert mailbox.stage(stage(1)) == voting
    dropped = mailbox.drop(DropMap(handover=1, reason="enough"))
    assert mailbox.drop(DropMap(handover=1, reason="again")) == dropped


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (OTHER[:, :4], "wrong width"),
        (np.where(OTHER == 3, -1, OTHER), "is empty"),
        (np.where(OTHER == 3, 9, OTHER), "names expert 9"),
        (np.where(OTHER == 3, 2, OTHER), "expert 3 of layer 0 has no slot"),
    ],
)
def test_a_map_that_vllm_could_not_serve_is_refused_with_the_reason(
    mailbox: Mailbox, table: np.ndarray, words: str
) -> None:
    status = mailbox.stage(stage(1, table))
    assert (status.state, status.handover, status.digest) == ("idle", 1, "")
    assert words in status.reason
    assert mailbox.permit(PermitVote(handover=1)).state == "idle"


def test_a_map_that_was_made_for_another_one_is_stale(mailbox: Mailbox) -> None:
    status = mailbox.stage(stage(1, replaces="00" * 8))
    assert status.state == "idle"
    assert "stale map" in status.reason


def test_an_epoch_that_is_not_above_the_one_in_force_is_refused(mailbox: Mailbox) -> None:
    mailbox.epoch = 5
    assert "stale epoch" in mailbox.stage(stage(1, epoch=5)).reason
    assert mailbox.stage(stage(2, epoch=6)).state == "staged"


def test_a_worker_that_refuses_says_why(mailbox: Mailbox) -> None:
    mailbox.refusal = "elastic EP"
    assert mailbox.stage(stage(1)).reason == "elastic EP"


def test_a_dropped_number_is_past_even_if_its_map_comes_later(mailbox: Mailbox) -> None:
    dropped = mailbox.drop(DropMap(handover=3, reason="timed out"))
    assert (dropped.state, dropped.handover, dropped.reason) == ("idle", 3, "timed out")
    for late in (1, 2, 3):
        assert mailbox.stage(stage(late)).state == "idle"
    assert mailbox.stage(stage(4)).state == "staged"


def test_only_a_map_that_may_have_been_voted_for_leaves_the_state_refused(mailbox: Mailbox) -> None:
    mailbox.stage(stage(1))
    assert mailbox.drop(DropMap(handover=1, reason="no")).state == "idle"
    mailbox.stage(stage(2))
    mailbox.permit(PermitVote(handover=2))
    assert mailbox.drop(DropMap(handover=2, reason="no")).state == "refused"
    assert mailbox.proposal() is None


def test_nothing_is_dropped_after_the_vote_has_passed(mailbox: Mailbox) -> None:
    mailbox.stage(stage(1))
    mailbox.permit(PermitVote(handover=1))
    mailbox.pass_vote()
    assert mailbox.drop(DropMap(handover=1, reason="late")).state == "voting"
    mailbox.come_into_force(OTHER)
    assert mailbox.drop(DropMap(handover=1, reason="later")).flipped == 1


def test_a_map_is_dropped_when_vllm_chose_another_one(mailbox: Mailbox) -> None:
    mailbox.epoch = 7
    mailbox.stage(stage(1, epoch=8))
    mailbox.replaced_by_vllm(OTHER)
    status = mailbox.status()
    assert (status.state, status.flipped, status.epoch) == ("idle", 0, 0)
    assert "vLLM's own policy" in status.reason


def test_a_map_that_vllm_did_not_carry_out_is_told(mailbox: Mailbox) -> None:
    mailbox.stage(stage(1))
    mailbox.permit(PermitVote(handover=1))
    mailbox.pass_vote()
    mailbox.come_into_force(INITIAL)
    status = mailbox.status()
    assert (status.state, status.served, status.flipped) == ("refused", map_digest(INITIAL, EXPERTS), 0)


class AnyMessages(RuleBasedStateMachine):
    """Messages of any numbers in any order, lost and doubled, with votes between them."""

    def __init__(self) -> None:
        super().__init__()
        self.mailbox = Mailbox(INITIAL, EXPERTS)
        self.past = 0
        self.permitted: set[int] = set()

    def told(self, status: MapStatus) -> None:
        assert status == self.mailbox.status()

    @rule(handover=strategies.integers(1, 8), good=strategies.booleans())
    def stages(self, handover: int, good: bool) -> None:
        before = self.mailbox.status()
        table = OTHER if before.served == map_digest(INITIAL, EXPERTS) else INITIAL
        replaces = before.served if good else "00" * 8
        self.told(self.mailbox.stage(stage(handover, table, replaces=replaces, epoch=before.epoch + 1)))
        if before.state == "voting" or handover <= self.past:
            assert self.mailbox.status() == before, "a vote, and what is past, are not disturbed"
        else:
            self.past = handover

    @rule(handover=strategies.integers(1, 8))
    def permits(self, handover: int) -> None:
        before = self.mailbox.status()
        self.told(self.mailbox.permit(PermitVote(handover=handover)))
        if (before.state, before.handover) == ("staged", handover):
            self.permitted.add(handover)
        else:
            assert self.mailbox.status() == before

    @rule(handover=strategies.integers(1, 8))
    def drops(self, handover: int) -> None:
        held = self.mailbox.status()
        self.told(self.mailbox.drop(DropMap(handover=handover, reason="dropped")))
        self.past = max(self.past, handover) if handover >= held.handover else self.past
        if held.handover == handover:
            assert self.mailbox.proposal() is None

    @rule()
    def vote_passes(self) -> None:
        proposal = self.mailbox.proposal()
        if proposal is not None:
            self.mailbox.pass_vote()
            self.mailbox.come_into_force(proposal.table)
            assert self.mailbox.flipped == proposal.handover

    @invariant()
    def it_votes_only_for_a_map_that_it_holds_and_was_permitted(self) -> None:
        proposal = self.mailbox.proposal()
        if proposal is not None:
            status = self.mailbox.status()
            assert proposal.handover in self.permitted
            assert (status.handover, status.digest) == (proposal.handover, proposal.digest)


AnyMessages.TestCase.settings = settings(max_examples=200, stateful_step_count=25, deadline=None)
TestAnyMessages = AnyMessages.TestCase
