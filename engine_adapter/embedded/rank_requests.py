"""Requests of one rank: those that it owns, with their queue and KV pages, and those that it accepted and
another rank owns. Belongs to the step thread.

Under data-parallel attention a rank owns what it accepts. Under tensor-parallel attention rank 0 owns
everything, with the limits of the whole engine.
"""

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_adapter.batching.kv_cache import KvCache
from engine_adapter.batching.scheduler import BatchScheduler, Overloaded, SequenceState, Slice
from engine_adapter.config import EmbeddedConfig
from engine_adapter.embedded.kv_exchange import KvExchange
from engine_adapter.embedded.request_relay import News, RequestRelay
from engine_adapter.embedded.step_notes import AheadNote, RequestName, StepNote, TravellingWork
from engine_adapter.embedded.travelling import EmbeddedSequence, SequenceCodec
from engine_adapter.kv_switch.kv_state import KvState, OpenSequence
from engine_adapter.kv_switch.scheduler_state import AheadCopies, RequestOrigin, restore, state_of
from engine_adapter.serving.generation import AnswerDelta
from fleet.blocks import BLOCK_SIZE
from fleet.layout import AttentionKind


class Switchover(NamedTuple):
    """Requests of a rank in the other layout of attention."""

    units: NDArray[np.int32]
    """[pages, units of a page], under tensor-parallel attention those of all ranks."""
    news: list[News]
    """Refusals of requests that had not reached their owner."""


class RankRequests:
    """Requests of one rank."""

    def __init__(
        self, config: EmbeddedConfig, rank: int, codec: SequenceCodec, attention: AttentionKind, pages: int
    ) -> None:
        """pages: KV pages of this layout."""
        self._config = config
        self._rank = rank
        self._codec = codec
        self.exchange: KvExchange | None = None
        """Of KV with other engines. None: there is none."""
        self._numbers = count()
        self._sequences: dict[SequenceState, EmbeddedSequence] = {}
        self._cancelled: list[RequestName] = []
        """Given up by clients of other ranks."""
        self.relay = RequestRelay(rank)
        self.attention: AttentionKind = attention
        self.scheduler = BatchScheduler(KvCache(pages, BLOCK_SIZE), **self._limits)

    @property
    def max_open(self) -> int:
        """Requests that may be open on this rank."""
        return self._share * (self._config.max_running + self._config.max_waiting)

    @property
    def cache(self) -> KvCache:
        return self.scheduler.cache

    def of(self, state: SequenceState) -> EmbeddedSequence:
        """Return the owned request of a scheduled sequence."""
        return self._sequences[state]

    def accept(self, sequence: EmbeddedSequence) -> News | None:
        """Queue a request of this rank's clients here, or send it to its owner. Return a refusal, if any."""
        sequence.name = RequestName(self._rank, next(self._numbers))
        if self._is_owner:
            return self._own(sequence)
        self.relay.hand_over(sequence, self._codec.pack(sequence))
        return None

    def cancel(self, sequence: EmbeddedSequence) -> EmbeddedSequence | None:
        """Free what a request of this rank's clients holds. Return it if it is owned here and was
        not over."""
        if sequence.state in self._sequences:
            return self.end(sequence)
        self.relay.cancel(sequence)
        return None

    def hand_over(self, sequence: EmbeddedSequence) -> None:
        """Say where the KV of an answer's prompt is, if its request asks for it. Called before its end."""
        if sequence.request.hands_over and self.exchange is not None:
            full = sequence.prompt_tokens // BLOCK_SIZE
            sequence.answer.kv = self.exchange.source(sequence.state.table.pages[:full])

    def end(self, sequence: EmbeddedSequence) -> EmbeddedSequence | None:
        """Free everything that an owned request holds. Return it, or None if it was over. Idempotent, because
        a request can finish and be cancelled in the same step."""
        self.scheduler.remove(sequence.state)
        return self._sequences.pop(sequence.state, None)

    def tell(self, sequence: EmbeddedSequence, news: AnswerDelta | Exception) -> list[News]:
        """Return the news of an owned request for this rank's own clients. What belongs to another rank is
        sent with the next note."""
        if self.relay.is_foreign(sequence):
            self.relay.tell(sequence, news)
            return []
        return [(sequence.answer, news)]

    def note(self, slices: Sequence[Slice], ahead: AheadNote | None) -> StepNote:
        """Return what the other ranks have to know in this step. slices: the plan of this rank. ahead: of its
        copies ahead of a switch."""
        plan = [
            TravellingWork(one.tokens, one.start, one.sequence.table.pages, one.last)
            for one in slices
            if self.attention == "tp"
        ]
        return self.relay.note(plan, ahead)

    def hear(self, rank: int, note: StepNote) -> list[News]:
        """Take what a rank has told, and return the news of requests that this rank accepted. Requests for
        this rank as their owner are queued. Cancellations wait for `take_cancelled`, because this step is
        planned already."""
        if rank != self._rank:
            self._cancelled += note.cancelled
            if self._is_owner:
                for one in note.requests:
                    self._receive(one)
        return self.relay.arrived(note.deltas)

    def take_cancelled(self) -> list[EmbeddedSequence]:
        """Free what cancelled requests of other ranks hold. Return those that were owned here and not
        over."""
        names, self._cancelled = set(self._cancelled), []
        found = [one for one in self._sequences.values() if one.name in names] if names else []
        for sequence in found:
            self.end(sequence)
        return found

    def state(self, units: NDArray[np.int32], copies: AheadCopies | None = None) -> KvState | None:
        """Return all that this rank owns. None: it owns nothing. units: int32 [pages, units of a page], under
        tensor-parallel attention those of all ranks. copies: as in `scheduler_state.state_of`."""
        if not self._is_owner:
            return None
        origins = {
            state: RequestOrigin(*one.name, one.moments.submitted, self._codec.request(one))
            for state, one in self._sequences.items()
        }
        return self._state(units, origins, copies)

    def pages_state(self, units: NDArray[np.int32], copies: AheadCopies) -> KvState:
        """Return `state` without what only a new owner needs of the requests."""
        origins = {
            state: RequestOrigin(*one.name, one.moments.submitted, b"")
            for state, one in self._sequences.items()
        }
        return self._state(units, origins, copies)

    def _state(
        self,
        units: NDArray[np.int32],
        origins: dict[SequenceState, RequestOrigin],
        copies: AheadCopies | None,
    ) -> KvState:
        is_tp = self.attention == "tp"
        return state_of(self.scheduler, units, origins, tensor_parallel=is_tp, copies=copies)

    def restore(self, attention: AttentionKind, state: KvState, pages: int, page_units: int) -> Switchover:
        """Own what a state of the other layout has, if this rank is its owner. What this rank's clients have
        in progress elsewhere is relayed from there.

        pages, page_units: as in `scheduler_state.restore`.
        """
        mine = {one.name: one for one in self._sequences.values() if not self.relay.is_foreign(one)}
        self.attention, self._sequences = attention, {}
        restored = restore(state, pages=pages, page_units=page_units, **self._limits)
        if self._is_owner:
            self.scheduler = restored.scheduler
            for travelled, sequence in restored.sequences:
                name = RequestName(travelled.rank, travelled.number)
                known = mine.pop(name, None) or self.relay.take_back(name)
                self._sequences[sequence] = self._codec.unpack(travelled, sequence, known)
        else:
            self.scheduler = BatchScheduler(KvCache.of(pages, (), (), ()), **self._limits)
        for one in mine.values():
            self.relay.entrust(one)
        return Switchover(restored.units, self._own_unsent())

    def _own_unsent(self) -> list[News]:
        """Queue requests that were not sent to their owner before this rank became it. Return refusals."""
        if not self._is_owner:
            return []
        known = [self.relay.take_back(RequestName(one.rank, one.number)) for one in self.relay.unsent()]
        refusals = [self._own(one) for one in known if one is not None]
        return [one for one in refusals if one is not None]

    def _receive(self, travelled: OpenSequence) -> None:
        state = SequenceState(list(travelled.tokens), travelled.max_new, salt=travelled.salt)
        refusal = self._own(self._codec.unpack(travelled, state, None))
        if refusal is not None:
            raise RuntimeError("requests: a refusal for another rank came back to this one")

    def _own(self, sequence: EmbeddedSequence) -> News | None:
        source = sequence.request.kv
        if source is not None and self.exchange is not None:
            # The last token is always computed, because its logits are needed.
            blocks = sequence.state.blocks[: (len(sequence.state.tokens) - 1) // BLOCK_SIZE]
            self.exchange.fetch(source, self.cache, blocks)
        try:
            self.scheduler.submit(sequence.state)
        except (Overloaded, ValueError) as refusal:
            told = self.tell(sequence, refusal)
            return told[0] if told else None
        self._sequences[sequence.state] = sequence
        return None

    @property
    def _is_owner(self) -> bool:
        return self.attention == "dp" or self._rank == 0

    @property
    def _share(self) -> int:
        """Ranks whose requests the owner has."""
        return self._config.ranks if self.attention == "tp" else 1

    @property
    def _limits(self) -> dict[str, int]:
        """Limits of the scheduler: those of this rank, or of the engine if it owns everything."""
        names = ("max_batch_tokens", "max_running", "max_waiting")
        return {name: getattr(self._config, name) * self._share for name in names}
