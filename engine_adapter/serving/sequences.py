"""One open request of a rank, from its submission to the reports of its end. The same for engines with and
without weights."""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from engine_adapter.batching.detokenizer import Detokenizer, TextStream
from engine_adapter.batching.kv_cache import identify
from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.batching.scheduler import SequenceState
from engine_adapter.engine import EndedRequest, RoutedExperts
from engine_adapter.serving.generation import (
    AnswerDelta,
    AnswerStream,
    Ending,
    GenerationOutcome,
    RequestTimes,
    ScoredToken,
)

LONG_PROMPT = 4096
"""Requests from this number of IDs are prepared off the event loop."""
Trace = TypeVar("Trace", bound=RoutedExperts)
Built = TypeVar("Built")


@dataclass(slots=True, eq=False)
class ServedSequence(Generic[Trace]):
    """One request with all its state in a rank."""

    request: GenerationRequest
    answer: AnswerStream
    state: SequenceState
    text: TextStream
    trace: Trace
    eos: Collection[int]
    """Token IDs that end an answer."""
    moments: RequestTimes = field(default_factory=lambda: RequestTimes(submitted=time.time_ns()))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the client's own prompt."""
        return len(self.request.prompt) - self.request.emitted

    @property
    def is_over(self) -> bool:
        """True if a continuation had already finished before its stream broke."""
        request = self.request
        ended = request.emitted and not request.ignore_eos and request.prompt[-1] in self.eos
        return self.text.stopped or bool(ended)

    def admit(self, now: int) -> int:
        """Note the time of the first admission. Return the tokens that it found in the cache. 0 at later
        admissions."""
        if self.moments.admitted:
            return 0
        self.moments.admitted = max(self.moments.submitted, now)
        return self.state.cached_tokens

    def emit(self, token: int, now: int, scored: list[ScoredToken]) -> AnswerDelta:
        """Return the delta for a token that was just appended to `state`."""
        self.moments.first_token = self.moments.first_token or now
        if token in self.eos and not self.request.ignore_eos:
            return AnswerDelta([token], self.text.finish(), scored, self.outcome("stop", now))
        text = self.text.feed(token)
        if self.text.stopped:
            return AnswerDelta([token], text, scored, self.outcome("stop", now))
        if self.state.generated < self.state.max_new:
            return AnswerDelta([token], text, scored)
        return AnswerDelta([token], text + self.text.finish(), scored, self.outcome("length", now))

    def outcome(self, reason: Ending, now: int, failure: Exception | None = None) -> GenerationOutcome:
        """Return the final state of the request.

        When a request is cancelled or fails, the event loop may call this while a step thread still works on
        it. The numbers may then lack the step in progress, but nothing else, because the step thread only
        adds to them.
        """
        self.answer.trace = self.trace
        moments = replace(self.moments)
        moments.finished = max(now, moments.admitted, moments.first_token)
        return GenerationOutcome(
            reason=reason,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.state.generated,
            cached_tokens=min(self.state.cached_tokens, self.prompt_tokens),
            preemptions=self.state.preemptions,
            moments=moments,
            failure=failure,
        )

    def ended(self) -> EndedRequest | None:
        """Return the report of a request that is no longer computed. None when nothing was computed."""
        if not self.trace.positions:
            return None
        blocks = [block.identity for block in self.state.blocks]
        return EndedRequest(self.request.decision, self.prompt_tokens, self.trace, blocks)


def sequence_parts(
    request: GenerationRequest, block_size: int, detokenizer: Detokenizer
) -> tuple[SequenceState, TextStream]:
    """Return the scheduler's and the client's view of a new request. Of a continuation, the text of what was
    emitted is known already."""
    blocks = identify(request.prompt, block_size, request.salt)
    state = SequenceState(list(request.prompt), request.max_tokens, blocks=blocks, salt=request.salt)
    text = TextStream(detokenizer, request.stop)
    text.resume(request.prompt[len(request.prompt) - request.emitted :])
    return state, text


async def built(prompt: Sequence[int], build: Callable[[], Built]) -> Built:
    """Return what `build` makes of a prompt. It hashes and detokenizes, which takes too long for the event
    loop when the prompt is long."""
    return await asyncio.to_thread(build) if len(prompt) > LONG_PROMPT else build()
