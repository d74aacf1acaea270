"""Retries: how attempts of a request failed, and the ranks that its next attempt avoids. Pure.

A request is tried at another rank after a failure. `ranks_to_avoid` are those that failed;
`ranks_with_other_weights` must not continue an answer that has begun.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from router.fleet_state.target_table import RankKey, TargetTable


class AttemptFailure(StrEnum):
    """Failure of an attempt at a rank."""

    CONNECT = "connect"
    """no connection could be made"""
    DISCONNECTED = "disconnected"
    """the connection closed before any answer: a dead rank, or an idle connection closed during the request
    """
    SERVER_ERROR = "server_error"
    BUSY = "busy"
    """the rank answered 429"""
    FIRST_TOKEN_TIMEOUT = "first_token_timeout"
    STALLED = "stalled"
    """no further token in time"""
    BROKEN = "broken"
    """the stream ended or became invalid before the answer was complete"""

    @property
    def lost_connection(self) -> bool:
        """True when the engine may have died."""
        return self in (AttemptFailure.CONNECT, AttemptFailure.DISCONNECTED, AttemptFailure.BROKEN)


class BegunAnswer(NamedTuple):
    """Weights with which an answer was begun (`EngineJoined.weights_digest`). Other weights would change the
    model in mid-sentence.
    """

    weights: str | None


def ranks_with_other_weights(begun: BegunAnswer, table: TargetTable) -> dict[RankKey, str]:
    """Return the ranks that must not continue an answer because their weights differ from those it was begun
    with, with reasons.
    """
    return {
        target.key: (
            f"it serves {_named(target.engine.weights_digest)}; this answer was begun with"
            f" {_named(begun.weights)}"
        )
        for target in table.targets
        if target.engine.weights_digest != begun.weights
    }


def _named(weights: str | None) -> str:
    return "weights that it does not name" if weights is None else f"weights {weights[:12]}"


def ranks_to_avoid(
    failures: Iterable[tuple[RankKey, AttemptFailure]], table: TargetTable
) -> list[frozenset[RankKey]]:
    """Return the ranks to avoid after these failures, strictest choice first. The caller takes the first that
    leaves a candidate.

    1. The failed ranks, and the entire engine of those that broke (an engine fails as a unit).
    2. Only the failed ranks.
    3. The ranks that certainly failed. A connection that closed before any answer may have been idle for too
       long, and deserves one more try.
    """
    failures = list(failures)
    if not failures:
        return [frozenset()]
    failed = {rank for rank, _ in failures}
    broken = {rank[0] for rank, how in failures if how is not AttemptFailure.BUSY}
    engines = {target.key for target in table.targets if target.key[0] in broken}
    twice = {rank for rank in failed if sum(rank == other for other, _ in failures) > 1}
    sure = {rank for rank, how in failures if how is not AttemptFailure.DISCONNECTED} | twice
    return [frozenset(failed | engines), frozenset(failed), frozenset(sure)]
