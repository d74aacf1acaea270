"""Results of a rank's steps: booked with the requests that were computed, and reported to the event loop.
Belongs to the step thread."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine_adapter.batching.sampling import Draw, logprobs, sample
from engine_adapter.batching.scheduler import Slice
from engine_adapter.embedded.dispatch_stats import DispatchLog, FinishedStep
from engine_adapter.embedded.model_runner import Forward, PreparedEpoch
from engine_adapter.embedded.rank_requests import RankRequests
from engine_adapter.embedded.request_relay import News
from engine_adapter.embedded.travelling import EmbeddedSequence
from engine_adapter.serving.fact_log import DecodeSteps, FactLog
from engine_adapter.serving.generation import ScoredToken
from fleet.placement import Placement
from fleet.routings import count_pairs


@dataclass(slots=True)
class StepReport:
    """Results of one step for the event loop."""

    news: list[News] = field(default_factory=list)
    facts: bool = False
    """True if there are new facts to take."""
    flipped: PreparedEpoch | None = None
    """Epoch that is served from this step on."""
    caught_up: bool = False
    """True if the pages for a switch of attention have been copied ahead."""

    @property
    def is_empty(self) -> bool:
        return not (self.facts or self.news or self.flipped or self.caught_up)


class StepResults:
    """Bookkeeping of one rank around its forward passes."""

    def __init__(self, requests: RankRequests, facts: FactLog, sent: DispatchLog, experts: int) -> None:
        """experts: of a layer."""
        self._requests = requests
        self._facts = facts
        self._sent = sent
        self._experts = experts
        self._decoding = DecodeSteps()

    def admit(self, slices: Sequence[Slice], began: int) -> None:
        """Record admissions, before the forward pass: a request that fails in it did not fail in the queue.
        began: wall-clock start of the step, in nanoseconds."""
        for one in slices:
            if cached := self._requests.of(one.sequence).admit(began):
                self._facts.add_cached(cached)

    def book(self, slices: Sequence[Slice], forward: Forward, now: int, report: StepReport) -> None:
        """Update pages and routing after the slices were computed, and sample a token for each that is
        complete. now: wall-clock end of the forward pass, in nanoseconds."""
        at, routed = 0, forward.routed
        for one in slices:
            self._requests.scheduler.computed(one)
            self._requests.of(one.sequence).trace.note(one.start, routed[at : at + one.count])
            at += one.count
        if at:
            self._facts.add_activations(count_pairs(routed, self._experts), at)
        rows = [self._requests.of(one.sequence) for one in slices if one.last]
        if rows:
            self._advance(rows, forward.logits.numpy(), now, report)

    def note(self, slices: Sequence[Slice], placement: Placement, step: FinishedStep, now: float) -> None:
        """Record a step that is complete but for its report. The headers contain only token counts, so
        another rank counts as decoding if it computes at most `max_running` tokens. now: seconds of the clock
        of `publish`."""
        if (
            all(one.count == 1 for one in slices)
            and max(step.tokens_by_rank) <= self._requests.scheduler.max_running
        ):
            self._decoding.note(now, step.seconds)
        self._sent.add(placement.epoch, step, placement.sharded)

    def end(self, sequence: EmbeddedSequence, report: StepReport) -> None:
        """Report what a request computed that is over."""
        if (ended := sequence.ended()) is not None:
            self._facts.add_ended(ended)
            report.facts = True

    def publish(self, report: StepReport, now: float) -> None:
        """Add the load and the changes of the KV cache to the facts. now: seconds of a monotonic clock."""
        cache = self._requests.cache
        changes = cache.take_changes()
        self._facts.add_kv(changes, cache.restated)
        load = self._requests.scheduler.load(self._decoding.median(now))
        report.facts = self._facts.set_load(load) or bool(changes) or report.facts

    def _advance(
        self, rows: list[EmbeddedSequence], logits: NDArray[np.float32], now: int, report: StepReport
    ) -> None:
        """Sample a token for each row and report the deltas."""
        tokens = sample(
            logits, [Draw(sequence.request.sampling, len(sequence.state.tokens)) for sequence in rows]
        )
        scored = _score(rows, logits, tokens)
        for row, (sequence, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
            self._requests.scheduler.append(sequence.state, token)
            delta = sequence.emit(token, now, scored.get(row, []))
            if delta.outcome is not None:
                self._requests.hand_over(sequence)
            report.news += self._requests.tell(sequence, delta)
            if delta.outcome is not None and self._requests.end(sequence) is not None:
                self.end(sequence, report)


def _score(
    rows: list[EmbeddedSequence], logits: NDArray[np.float32], tokens: NDArray[np.int64]
) -> dict[int, list[ScoredToken]]:
    requested = [(row, sequence.request.sampling.logprobs) for row, sequence in enumerate(rows)]
    counts = {row: count for row, count in requested if count is not None}
    if not counts:
        return {}
    chosen = list(counts)
    found = logprobs(logits[chosen], tokens[chosen], list(counts.values()))
    return {
        row: [ScoredToken(int(tokens[row]), one, rows[row].text.decoded)]
        for row, one in zip(chosen, found, strict=True)
    }
