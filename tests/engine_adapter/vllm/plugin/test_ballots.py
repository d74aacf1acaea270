"""The vote: all ranks come to the same outcome, and a map passes only when all vote for it."""

from hypothesis import given
from hypothesis import strategies as st
from roost_vllm.ballots import EARLY_VOTES, Ballot, Outcome, ballot_digest, is_due, tally

MAP, SERVED = ballot_digest("8000000000000001"), ballot_digest("00000000000000ff")


def ballot(
    count: int = 8, proposal: int = MAP, handover: int = 3, every: int = 32, served: int = SERVED
) -> Ballot:
    return Ballot(count, proposal, served, handover, every, 0)


def test_a_map_passes_when_all_vote_for_it() -> None:
    assert tally([ballot(), ballot()], every=32, fallback=False) == Outcome(True, 8, 32, False)


def test_no_map_passes_without_all() -> None:
    for other in (
        ballot(proposal=0, handover=0),
        ballot(proposal=MAP + 1),
        ballot(handover=4),
        ballot(served=1),
    ):
        assert not tally([ballot(), other], every=32, fallback=False).passed
    nothing = ballot(proposal=0, handover=0)
    assert not tally([nothing, nothing], every=32, fallback=False).passed


def test_unequal_counts_decide_nothing_and_all_continue_from_the_highest() -> None:
    outcome = tally([ballot(7), ballot(9)._replace(every=8, fallback=1)], every=32, fallback=False)
    assert outcome == Outcome(False, 9, 32, False)


def test_the_steps_between_votes_change_only_by_agreement() -> None:
    assert tally([ballot(every=8), ballot(every=4)], every=32, fallback=False).every == 32
    assert tally([ballot(every=8), ballot(every=8)], every=32, fallback=False).every == 8


def test_the_policy_changes_only_by_agreement_and_returns_as_soon_as_one_rank_has_an_agent() -> None:
    alone, served = ballot()._replace(fallback=1), ballot()
    assert tally([alone, alone], every=32, fallback=False).fallback
    assert not tally([alone, served], every=32, fallback=True).fallback


@given(
    st.lists(
        st.builds(
            Ballot,
            st.integers(1, 3),
            st.sampled_from([0, MAP, -5]),
            st.sampled_from([SERVED, 1]),
            st.integers(0, 2),
            st.sampled_from([1, 8]),
            st.integers(0, 1),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_the_outcome_does_not_depend_on_who_counts(ballots: list[Ballot]) -> None:
    outcome = tally(ballots, every=32, fallback=False)
    assert outcome == tally(ballots[::-1], every=32, fallback=False)
    assert outcome.passed == (len({one[:4] for one in ballots}) == 1 and ballots[0].proposal != 0)


def test_the_first_steps_are_all_votes_and_then_each_kth() -> None:
    due = [count for count in range(1, EARLY_VOTES + 100) if is_due(count, 32)]
    assert due == [*range(1, EARLY_VOTES + 1), 96, 128, 160]


@given(st.binary(min_size=8, max_size=8))
def test_a_digest_survives_as_a_signed_number(digest: bytes) -> None:
    number = ballot_digest(digest.hex())
    assert number.to_bytes(8, "big", signed=True) == digest
    assert ballot_digest("") == 0
