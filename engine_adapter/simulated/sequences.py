"""State of one request in a simulated rank. Its routing trace is a row per token instead of a table."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from engine_adapter.batching.detokenizer import TextStream
from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.batching.sampling import TokenLogprobs
from engine_adapter.batching.scheduler import SequenceState
from engine_adapter.engine import EndedRequest
from engine_adapter.serving.generation import (
    AnswerDelta,
    AnswerStream,
    Ending,
    GenerationOutcome,
    RequestTimes,
    ScoredToken,
)
from engine_adapter.simulated.model.routing_model import RoutingModel
from engine_adapter.simulated.model.text import Script
from fleet.facts.dynamo_kv import KvBlock
from fleet.routings import UNKNOWN, count_pairs


class RowTrace:
    """Rows of one request's tokens by position: a `routed_experts.Routed` with two bytes per position."""

    def __init__(self, tastes: RoutingModel) -> None:
        self._tastes = tastes
        self._rows = array("h")

    @property
    def positions(self) -> int:
        """Number of positions up to the last computed one."""
        return len(self._rows)

    def note(self, start: int, rows: NDArray[np.int16]) -> None:
        """Record the rows of the tokens at positions start, start + 1, and so on. A recomputed position is
        overwritten."""
        if start > len(self._rows):
            self._rows.extend([UNKNOWN] * (start - len(self._rows)))
        self._rows[start : start + len(rows)] = array("h", rows.tobytes())

    def chosen(self) -> NDArray[np.int16]:
        """int16 [positions, layers, k]. UNKNOWN where nothing was computed."""
        return self._tastes.chosen(np.array(self._rows, np.int16))

    def counts(self) -> NDArray[np.int64]:
        """int64 [layers, experts]: (token, k) pairs of all computed positions."""
        return count_pairs(self.chosen(), self._tastes.shape.experts)


class EndedRows(EndedRequest):
    """A finished request whose routing table is built on access. The table may be a thousand times as large
    as the rows."""

    __slots__ = ("_trace",)
    _trace: RowTrace

    def __init__(self, decision: str, prompt_tokens: int, trace: RowTrace, blocks: Sequence[KvBlock]) -> None:
        for name, value in (
            ("decision", decision),
            ("prompt_tokens", prompt_tokens),
            ("_trace", trace),
            ("blocks", blocks),
        ):
            object.__setattr__(self, name, value)

    @property
    def routed(self) -> NDArray[np.int16]:
        """[positions, layers, k], rebuilt on each access."""
        return self._trace.chosen()

    @property
    def nbytes(self) -> int:
        """Approximate memory kept alive by this object."""
        return 2 * self._trace.positions + 64 * len(self.blocks)


@dataclass(slots=True, eq=False)
class SimulatedSequence:
    """One request with all its state."""

    request: GenerationRequest
    answer: AnswerStream
    generation: SequenceState
    text: TextStream
    script: Script
    trace: RowTrace
    moments: RequestTimes
    end: int
    """Token ID that ends the answer."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the client's own prompt."""
        return len(self.request.prompt) - self.request.emitted

    def outcome(self, reason: Ending, now: int, failure: Exception | None = None) -> GenerationOutcome:
        """Return the final state of the request."""
        moments = replace(self.moments)
        moments.finished = max(now, moments.admitted, moments.first_token)
        return GenerationOutcome(
            reason=reason,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.generation.generated,
            cached_tokens=min(self.generation.cached_tokens, self.prompt_tokens),
            preemptions=self.generation.preemptions,
            moments=moments,
            routed=self.trace,
            failure=failure,
        )

    def ended(self) -> EndedRows | None:
        """Return the report of a finished request. None when nothing was computed."""
        if not self.trace.positions:
            return None
        blocks = [block.identity for block in self.generation.blocks]
        return EndedRows(self.request.decision, self.prompt_tokens, self.trace, blocks)

    def say(self, token: int, now: int) -> AnswerDelta:
        """Return the delta for a token that the sequence already contains."""
        scored = self._scored(token)
        if token == self.end and not self.request.ignore_eos:
            return AnswerDelta([token], self.text.finish(), scored, self.outcome("stop", now))
        text = self.text.feed(token)
        if not self.text.stopped and self.generation.generated < self.generation.max_new:
            return AnswerDelta([token], text, scored)
        rest = "" if self.text.stopped else self.text.finish()
        return AnswerDelta(
            [token], text + rest, scored, self.outcome("stop" if self.text.stopped else "length", now)
        )

    def _scored(self, token: int) -> list[ScoredToken]:
        """Score a token with log-probability 0, because no other token was possible."""
        requested = self.request.sampling.logprobs
        if requested is None:
            return []
        return [
            ScoredToken(token, TokenLogprobs(0.0, ((token, 0.0),) if requested else ()), self.text.decoded)
        ]
