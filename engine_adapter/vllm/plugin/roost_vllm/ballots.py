"""Agreement by vote. All expert ranks exchange one ballot each at the same steps, and each counts all of
them: so all come to the same outcome, whatever messages any of them received."""

from typing import NamedTuple

EARLY_VOTES = 64
"""The first that many steps are all votes, so that unequal counts are found at once."""
VOTE_STEPS = 32
"""Steps between votes until all ranks wish for another number."""


class Ballot(NamedTuple):
    """Ballot of one rank. All fields are exchanged as int64."""

    count: int
    """steps of this rank since its start"""
    proposal: int
    """digest of the map that it votes for; 0: none"""
    served: int
    """digest of the map in force"""
    handover: int
    every: int
    """steps between votes that it wishes for"""
    fallback: int
    """1: it wishes for vLLM's own policy"""


class Outcome(NamedTuple):
    """Result of a vote, the same on every rank."""

    passed: bool
    """all ranks carry out the proposed map now"""
    count: int
    """count from which all ranks continue"""
    every: int
    fallback: bool
    """vLLM's own policy is in force"""


def ballot_digest(digest: str) -> int:
    """Return a digest of 16 hexadecimal digits as a signed 64-bit number; 0 for none."""
    return int.from_bytes(bytes.fromhex(digest), "big", signed=True) if digest else 0


def is_due(count: int, every: int) -> bool:
    """Return whether all ranks vote at this step."""
    return count <= EARLY_VOTES or count % every == 0


def tally(ballots: list[Ballot], *, every: int, fallback: bool) -> Outcome:
    """Return the outcome of a vote. every, fallback: what all ranks have agreed on until now. Unequal counts
    decide nothing: all continue from the highest."""
    first = ballots[0]
    count = max(ballot.count for ballot in ballots)
    if any(ballot.count != count for ballot in ballots):
        return Outcome(False, count, every, fallback)
    agree = all(
        (ballot.proposal, ballot.served, ballot.handover) == (first.proposal, first.served, first.handover)
        for ballot in ballots
    )
    wishes = {ballot.every for ballot in ballots}
    return Outcome(
        passed=agree and first.proposal != 0,
        count=count,
        every=first.every if len(wishes) == 1 else every,
        fallback=all(ballot.fallback for ballot in ballots),
    )
