"""Answers of a worker in the form of Dynamo's request plane: maps of new token ids, of which the last has the
finish reason and the usage. Pure.

A frontend makes text of the ids itself, so the engine's own text is not sent.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from engine_adapter.dynamo.requests import TokenStops
from engine_adapter.serving.generation import AnswerDelta, GenerationOutcome, ScoredToken

_MIN_LOGPROB = -1e30
"""Sent for minus infinity, which JSON does not have."""


class AnswerChunks:
    """Formatter of one answer: one map per delta of the engine, up to the first stop token."""

    def __init__(self, stops: TokenStops, piece: Callable[[int], str], *, scores: bool) -> None:
        """piece: text of a token id. scores: report log-probabilities."""
        self._stops = stops
        self._piece = piece
        self._scores = scores
        self.generated = 0
        """Tokens of the answer so far, with the one that ended it."""

    def chunk(self, delta: AnswerDelta, end: int | None, outcome: GenerationOutcome | None) -> dict[str, Any]:
        """Return the map of a delta. end: position of the stop token that ends the answer, if it is in this
        delta. outcome: of the whole request, once it is over."""
        if end is None:
            self.generated += len(delta.token_ids)
            reason = None if delta.outcome is None else delta.outcome.reason
            return self._map(delta.token_ids, delta.scored, reason, outcome)
        self.generated += end + 1
        last = delta.token_ids[end]
        shown = end + (last in self._stops.shown)
        found = self._map(delta.token_ids[:shown], delta.scored[:shown], "stop", outcome)
        return found if last in self._stops.shown else {**found, "stop_reason": last}

    def _map(
        self,
        tokens: Sequence[int],
        scored: Sequence[ScoredToken],
        reason: str | None,
        outcome: GenerationOutcome | None,
    ) -> dict[str, Any]:
        found: dict[str, Any] = {"token_ids": list(tokens), "index": 0, "finish_reason": reason}
        if reason is not None and outcome is not None:
            found["completion_usage"] = self._usage(outcome)
        if self._scores:
            found["log_probs"] = [_finite(one.logprobs.chosen) for one in scored]
            found["top_logprobs"] = [self._alternatives(one) for one in scored]
        return found

    def _usage(self, outcome: GenerationOutcome) -> dict[str, Any]:
        """Return the usage. The engine may have generated tokens after the one that ended the answer."""
        return {
            "prompt_tokens": outcome.prompt_tokens,
            "completion_tokens": self.generated,
            "total_tokens": outcome.prompt_tokens + self.generated,
            "prompt_tokens_details": {"cached_tokens": outcome.cached_tokens},
        }

    def _alternatives(self, scored: ScoredToken) -> list[dict[str, Any]]:
        return [
            {"rank": rank, "token_id": token, "token": self._piece(token), "logprob": _finite(value)}
            for rank, (token, value) in enumerate(scored.logprobs.top, start=1)
        ]


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _MIN_LOGPROB
