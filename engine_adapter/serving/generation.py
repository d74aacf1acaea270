"""What is asked of the engine and what it gives back: requests, the pieces of an answer, and the reader's end of it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from engine_adapter.batching.routed_experts import Routed
from engine_adapter.batching.sampling import TokenLogprobs

FinishReason = Literal["stop", "length"]
Ending = FinishReason | Literal["cancelled", "failed"]


class ScoredToken(NamedTuple):
    """A token's log-probabilities and where its text begins in the answer's text, in characters."""

    token: int
    logprobs: TokenLogprobs
    offset: int


@dataclass(slots=True)
class RequestTimes:
    """When things happened to a request: nanoseconds of the wall clock, 0 if they have not."""

    submitted: int = 0
    admitted: int = 0
    first_token: int = 0
    finished: int = 0


@dataclass(frozen=True, slots=True)
class GenerationOutcome:
    """Everything known of a request at its end, as far as it came."""

    reason: Ending
    """`cancelled` and `failed` are an `AnswerStream`'s alone; no `AnswerDelta` says them"""
    prompt_tokens: int
    """without what a continuation had emitted before"""
    completion_tokens: int
    """what this rank added"""
    cached_tokens: int
    preemptions: int
    moments: RequestTimes
    routed: Routed
    """the experts chosen for each computed token"""
    failure: Exception | None = None
    """why it failed"""


@dataclass(slots=True)
class AnswerDelta:
    """What an answer grew by since it was last read; pieces that were not read in time are joined."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    scored: list[ScoredToken] = field(default_factory=list)
    outcome: GenerationOutcome | None = None

    def absorb(self, later: "AnswerDelta") -> None:
        """Append what came afterwards."""
        self.token_ids += later.token_ids
        self.text += later.text
        self.scored += later.scored
        self.outcome = later.outcome


class AnswerStream:
    """The reader's end of a request, for one event loop: an async iterator of what is new.

    A slow reader costs the engine nothing: what it has not read is one joined `AnswerDelta`, as long as the answer at most.
    Reading raises what ended the request early: `EngineFailed`, `Overloaded`, `ValueError`. `cancel` may be called at any
    time and frees what the request holds before the engine's next step.
    """

    def __init__(self, cancel: Callable[["AnswerStream"], GenerationOutcome | None]) -> None:
        """cancel: tells the engine; gives what it knows of the request so far."""
        self.outcome: GenerationOutcome | None = None
        """how the request ended, whether read or not; None while it has not, or when the engine never had it"""
        self._cancel = cancel
        self._unread: AnswerDelta | None = None
        self._error: Exception | None = None
        self._over = False
        self._patient = False
        """whether the reader wants to be woken at the end only"""
        self._news = asyncio.Event()

    @property
    def over(self) -> bool:
        """Whether the engine is done with the request, read or not."""
        return self._over

    def put(self, delta: AnswerDelta) -> None:
        """The engine says what is new."""
        if self._over:
            return
        if self._unread is None:
            self._unread = delta
        else:
            self._unread.absorb(delta)
        self._over = delta.outcome is not None
        self.outcome = delta.outcome
        if self._over or not self._patient:
            self._news.set()

    def fail(self, error: Exception, outcome: GenerationOutcome) -> None:
        """The engine gives the request up."""
        if not self._over:
            self._over = True
            self._error = error
            self.outcome = outcome
            self._news.set()

    def cancel(self) -> None:
        """Nobody wants the rest. Reading ends."""
        if not self._over:
            self._over = True
            self._news.set()
            self.outcome = self._cancel(self)

    async def rest(self) -> AnswerDelta:
        """All that is unread, once the engine is done: one wake instead of one a step, which the step thread would wait for.

        Raises as reading does.
        """
        self._patient = True
        while not self._over:
            self._news.clear()
            await self._news.wait()
        whole = AnswerDelta()
        async for delta in self:
            whole.absorb(delta)
        return whole

    def __aiter__(self) -> "AnswerStream":
        return self

    async def __anext__(self) -> AnswerDelta:
        while self._unread is None:
            if self._over:
                error, self._error = self._error, None
                raise error if error is not None else StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        unread, self._unread = self._unread, None
        return unread
