"""Notes that the ranks of an engine exchange at the beginning of a step, and what of a request travels from
one rank to another. Data only.

A request belongs to two ranks: to the one that *accepted* it and keeps its connection, and to its *owner*,
which computes it. `RequestName` names it on both.
"""

from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from engine_adapter.batching.detokenizer import TextState
from engine_adapter.batching.routed_experts import RoutedTrace
from engine_adapter.batching.sampling import Sampling
from engine_adapter.embedded.model_runner import SequenceWork
from engine_adapter.kv_switch.kv_state import OpenSequence
from engine_adapter.kv_switch.pre_copy_notes import PreCopyNote
from engine_adapter.serving.generation import AnswerDelta, RequestTimes


class RequestName(NamedTuple):
    """Name of a request among all ranks of an engine."""

    rank: int
    """The rank that accepted it."""
    number: int
    """Its number there."""


class TravellingRequest(msgspec.Struct, frozen=True, array_like=True):
    """Knowledge of its owner about a request, beside `OpenSequence`."""

    sampling: Sampling
    stop: tuple[str, ...]
    ignore_eos: bool
    emitted: int
    """`GenerationRequest.emitted`."""
    decision: str
    text: TextState
    moments: RequestTimes
    positions: int
    routed: bytes
    """int16 little endian [positions, layers, k]: the experts of its tokens so far."""

    def trace(self, layers: int, top_k: int) -> RoutedTrace:
        """Return the trace with which the next owner continues."""
        found = np.frombuffer(self.routed, "<i2").astype(np.int16).reshape(self.positions, layers, top_k)
        return RoutedTrace.of(found) if self.positions else RoutedTrace(layers, top_k)


class TravellingWork(msgspec.Struct, frozen=True, array_like=True):
    """Work of one sequence, as rank 0 plans it for all ranks (`SequenceWork`)."""

    tokens: list[int]
    start: int
    pages: list[int]
    needs_logits: bool

    @property
    def work(self) -> SequenceWork:
        return SequenceWork(self.tokens, self.start, self.pages, self.needs_logits)


class RelayedDelta(msgspec.Struct, frozen=True, array_like=True):
    """Growth or end of an answer, from the owner to the rank that accepted the request."""

    name: RequestName
    generated: int
    cached_tokens: int
    admitted: int
    """`RequestTimes.admitted`."""
    delta: AnswerDelta | None
    """None: the owner refused the request."""
    refused: str = ""
    max_waiting: int | None = None
    """Refused because the owner has that many waiting requests already. None: not for that reason."""


class AheadNote(msgspec.Struct, frozen=True, array_like=True):
    """Part of a note about KV pages that are copied ahead of a switch of attention."""

    wish: Literal["dp", "tp", "none"] | None
    """Layout for which this rank is to copy ahead from now on. None: unchanged."""
    copies: PreCopyNote | None


class StepNote(msgspec.Struct, frozen=True, array_like=True):
    """Message of a rank to all others in a step. Each picks what concerns it."""

    plan: tuple[TravellingWork, ...] = ()
    """Work of all ranks in this step, from rank 0 under tensor-parallel attention."""
    requests: tuple[OpenSequence, ...] = ()
    """Requests that this rank accepted, for the owner."""
    cancelled: tuple[RequestName, ...] = ()
    """Requests that their clients gave up."""
    deltas: tuple[RelayedDelta, ...] = ()
    ahead: AheadNote | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.plan or self.requests or self.cancelled or self.deltas or self.ahead)


_NOTES = msgspec.msgpack.Decoder(StepNote)


def encoded(note: StepNote) -> bytes:
    """Return a note as bytes. Empty for an empty note."""
    return b"" if note.is_empty else msgspec.msgpack.encode(note, enc_hook=_plain)


def decoded(note: bytes) -> StepNote:
    """Return the note of another rank of this engine."""
    return _NOTES.decode(note) if note else StepNote()


def _plain(value: Any) -> Any:
    """Convert NumPy's numbers, which routing and sampling leave in places."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot travel in a step's note")
