"""Requests on their way from one rank of an engine to another: packing and unpacking."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import msgspec

from engine_adapter.batching.detokenizer import Detokenizer, TextStream
from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.batching.routed_experts import RoutedTrace
from engine_adapter.batching.scheduler import SequenceState
from engine_adapter.embedded.step_notes import RequestName, TravellingRequest
from engine_adapter.kv_switch.kv_state import OpenSequence
from engine_adapter.serving.generation import AnswerStream
from engine_adapter.serving.sequences import ServedSequence
from fleet.experts import ModelShape

_REQUESTS = msgspec.msgpack.Decoder(TravellingRequest)


@dataclass(slots=True, eq=False, kw_only=True)
class EmbeddedSequence(ServedSequence[RoutedTrace]):
    """One request with all its state on the step thread.

    The answer of a request that another rank accepted is not read here: what is generated is relayed.
    """

    name: RequestName = RequestName(0, 0)  # noqa: RUF009 immutable
    """Its name. The step thread that accepts the request sets it."""


class SequenceTokenizer(Protocol):
    """Properties of a model's tokens that its sequences need."""

    @property
    def eos(self) -> Collection[int]:
        """Token IDs that end an answer."""
        ...

    def detokenizer(self) -> Detokenizer: ...


class SequenceCodec:
    """Packs the requests of one model, and unpacks them on another rank."""

    def __init__(self, tokenizer: SequenceTokenizer, shape: ModelShape) -> None:
        self._tokenizer = tokenizer
        self._shape = shape

    def request(self, sequence: EmbeddedSequence) -> bytes:
        """Return what another rank needs to continue a request, beside its tokens and pages."""
        request = sequence.request
        about = TravellingRequest(
            sampling=request.sampling,
            stop=request.stop,
            ignore_eos=request.ignore_eos,
            emitted=request.emitted,
            decision=request.decision,
            text=sequence.text.state,
            moments=sequence.moments,
            positions=sequence.trace.positions,
            routed=sequence.trace.chosen().astype("<i2").tobytes(),
        )
        return msgspec.msgpack.encode(about)

    def pack(self, sequence: EmbeddedSequence) -> OpenSequence:
        """Return a request that nothing was computed of."""
        state = sequence.state
        return OpenSequence(
            rank=sequence.name.rank,
            number=sequence.name.number,
            arrived=sequence.moments.submitted,
            request=self.request(sequence),
            tokens=state.tokens,
            max_new=state.max_new,
            computed=0,
            generated=0,
            cached_tokens=0,
            admissions=0,
            salt=state.salt,
            registered=0,
            collided=False,
            pages=[],
        )

    def unpack(
        self, travelled: OpenSequence, state: SequenceState, known: EmbeddedSequence | None
    ) -> EmbeddedSequence:
        """Return a request that this rank owns from now on. known: the request, if this rank accepted it. It
        is brought up to date and returned."""
        about = _REQUESTS.decode(travelled.request)
        sequence = known or self._foreign(travelled, about, state)
        sequence.state = state
        sequence.text.restore(about.text)
        sequence.moments = about.moments
        sequence.trace = about.trace(self._shape.layers, self._shape.top_k)
        return sequence

    def _foreign(
        self, travelled: OpenSequence, about: TravellingRequest, state: SequenceState
    ) -> EmbeddedSequence:
        prompt = travelled.tokens[: len(travelled.tokens) - travelled.generated]
        request = GenerationRequest(
            prompt=prompt,
            max_tokens=travelled.max_new,
            sampling=about.sampling,
            stop=about.stop,
            ignore_eos=about.ignore_eos,
            emitted=about.emitted,
            decision=about.decision,
            salt=travelled.salt,
        )
        return EmbeddedSequence(
            request,
            AnswerStream(lambda _: None),
            state,
            TextStream(self._tokenizer.detokenizer(), about.stop),
            RoutedTrace(self._shape.layers, self._shape.top_k),
            self._tokenizer.eos,
            name=RequestName(travelled.rank, travelled.number),
        )
