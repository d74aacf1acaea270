"""Requests that one rank of an engine accepted and another one owns, seen from either: what has to be told to
the other ranks in the next step, and what they have told. Belongs to the step thread."""

from collections import deque
from collections.abc import Sequence

from engine_adapter.batching.scheduler import Overloaded
from engine_adapter.embedded.step_notes import (
    AheadNote,
    RelayedDelta,
    RequestName,
    StepNote,
    TravellingWork,
)
from engine_adapter.embedded.travelling import EmbeddedSequence
from engine_adapter.kv_switch.kv_state import OpenSequence
from engine_adapter.serving.generation import AnswerDelta, AnswerStream

_TOKENS_PER_NOTE = 65_536
"""Tokens of the requests in one note, so that no step waits long for it. A longer request travels alone."""

News = tuple[AnswerStream, AnswerDelta | Exception]


class RequestRelay:
    """Relay of one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._elsewhere: dict[RequestName, EmbeddedSequence] = {}
        """Requests accepted here that another rank owns."""
        self._requests: deque[OpenSequence] = deque()
        self._cancelled: list[RequestName] = []
        self._deltas: list[RelayedDelta] = []

    def is_foreign(self, sequence: EmbeddedSequence) -> bool:
        """True if another rank accepted the request."""
        return sequence.name.rank != self._rank

    def entrust(self, sequence: EmbeddedSequence) -> None:
        """Note that another rank owns a request from now on, which this rank accepted."""
        self._elsewhere[sequence.name] = sequence

    def hand_over(self, sequence: EmbeddedSequence, packed: OpenSequence) -> None:
        """Send a request that was just accepted to its owner."""
        self.entrust(sequence)
        self._requests.append(packed)

    def take_back(self, name: RequestName) -> EmbeddedSequence | None:
        """Return a request accepted here that this rank owns from now on. None: it is over here."""
        return self._elsewhere.pop(name, None)

    def unsent(self) -> list[OpenSequence]:
        """Take the requests that have not been sent yet, because the owner changes."""
        found = list(self._requests)
        self._requests.clear()
        return found

    def cancel(self, sequence: EmbeddedSequence) -> None:
        """Tell the owner that a client gave up its request. Ignored when it is over."""
        if self._elsewhere.pop(sequence.name, None) is None:
            return
        unsent = [one for one in self._requests if RequestName(one.rank, one.number) != sequence.name]
        if len(unsent) == len(self._requests):
            self._cancelled.append(sequence.name)
        self._requests = deque(unsent)

    def tell(self, sequence: EmbeddedSequence, news: AnswerDelta | Exception) -> None:
        """Send a part of the answer, or a refusal, to the rank that accepted the request."""
        is_delta = isinstance(news, AnswerDelta)
        self._deltas.append(
            RelayedDelta(
                name=sequence.name,
                generated=sequence.state.generated,
                cached_tokens=sequence.state.cached_tokens,
                admitted=sequence.moments.admitted,
                delta=news if isinstance(news, AnswerDelta) else None,
                refused="" if is_delta else str(news),
                max_waiting=news.max_waiting if isinstance(news, Overloaded) else None,
            )
        )

    def note(self, plan: Sequence[TravellingWork], ahead: AheadNote | None) -> StepNote:
        """Return what the other ranks have to know in this step, and count it as told."""
        requests: list[OpenSequence] = []
        tokens = 0
        while self._requests and (not requests or tokens + len(self._requests[0].tokens) <= _TOKENS_PER_NOTE):
            requests.append(self._requests.popleft())
            tokens += len(requests[-1].tokens)
        note = StepNote(tuple(plan), tuple(requests), tuple(self._cancelled), tuple(self._deltas), ahead)
        self._cancelled, self._deltas = [], []
        return note

    def arrived(self, deltas: Sequence[RelayedDelta]) -> list[News]:
        """Return the news of requests that this rank accepted, from the deltas of an owner."""
        return [
            (sequence.answer, self._news(sequence, one))
            for one in deltas
            if (sequence := self._elsewhere.get(one.name)) is not None
        ]

    def _news(self, sequence: EmbeddedSequence, one: RelayedDelta) -> AnswerDelta | Exception:
        # The event loop asks the sequence for its outcome when the client cancels it.
        sequence.state.generated, sequence.state.cached_tokens = one.generated, one.cached_tokens
        sequence.moments.admitted = one.admitted
        if one.delta is None or one.delta.outcome is not None:
            del self._elsewhere[sequence.name]
        if one.delta is not None:
            return one.delta
        return ValueError(one.refused) if one.max_waiting is None else Overloaded(one.max_waiting)
