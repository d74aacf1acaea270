"""View *Requests*: the recent decisions of one router process, newest first."""

from collections.abc import Iterable, Iterator
from itertools import islice

import msgspec

from router.scheduling.decision import Decision

SHOWN = 100
"""Decisions in the feed, and in an answer."""
SEARCHED = 10_000
"""Decisions looked at for a filter."""


class DecisionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One booked decision in a list. Nothing of the prompt is in it but its length."""

    id: str
    request_id: str
    at: float
    """Unix seconds, to a tenth"""
    model: str
    tenant: str
    """"" without keys"""
    engine: str
    rank: int
    why: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    """expected"""
    score_ms: float | None
    """predicted milliseconds of the chosen rank; None: the score is no time"""
    margin_ms: float | None
    """by which the runner-up is more expensive; None: there is none, or the score is no time"""
    candidates: int
    attempt: int
    cause: str | None
    """failure that this attempt follows"""


class DecisionList(msgspec.Struct, frozen=True, kw_only=True):
    """Decisions, newest first. kept: number of decisions of this process that can be read back."""

    rows: list[DecisionRow]
    kept: int


class DecisionFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Properties that a decision must have; "": any."""

    tenant: str = ""
    model: str = ""
    engine: str = ""

    def admits(self, decision: Decision) -> bool:
        return (
            self.tenant in ("", decision.ask.owner.tenant)
            and self.model in ("", decision.ask.model)
            and self.engine in ("", decision.target.engine.engine)
        )


def decision_row(decision: Decision, at: float) -> DecisionRow:
    """Return the row of a decision. at: Unix seconds of its booking."""
    timed = decision.unit == "ms" and decision.is_measured(decision.chosen)
    margin = decision.margin if timed else None
    return DecisionRow(
        id=decision.id,
        request_id=decision.ask.request_id,
        at=round(at, 1),
        model=decision.ask.model,
        tenant=decision.ask.owner.tenant,
        engine=decision.target.engine.engine,
        rank=decision.target.rank,
        why=decision.choice.why,
        prompt_tokens=decision.ask.prompt_tokens,
        cached_tokens=decision.cached_tokens,
        output_tokens=decision.ask.output_tokens,
        score_ms=float(decision.score[decision.chosen]) if timed else None,
        margin_ms=margin,
        candidates=len(decision.at),
        attempt=decision.ask.attempt,
        cause=decision.ask.cause,
    )


def filtered(
    recent: Iterable[tuple[Decision, float]], wanted: DecisionFilter, limit: int = SHOWN
) -> Iterator[tuple[Decision, float]]:
    """Yield the first decisions that a filter admits, with their times, among SEARCHED."""
    return islice((each for each in islice(recent, SEARCHED) if wanted.admits(each[0])), limit)
