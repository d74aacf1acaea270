"""Step thread of one rank: takes orders, plans, computes, samples, and reports the results. All state here
belongs to that thread.

A step: take orders -> plan -> exchange headers with the other ranks -> forward -> sample -> update state ->
report. A rank without work takes part with an empty batch. When no rank has work, all sleep until one is
nudged. A rank that is ready for the next epoch announces it in its headers. In the first step in which every
rank is ready, all switch between the headers and the forward pass.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_adapter.batching.kv_cache import KvCache
from engine_adapter.batching.routed_experts import RoutedTrace
from engine_adapter.batching.sampling import Draw, logprobs, sample
from engine_adapter.batching.scheduler import BatchScheduler, Overloaded, SequenceState, Slice
from engine_adapter.config import EmbeddedConfig
from engine_adapter.embedded.dispatch_stats import DispatchLog, FinishedStep
from engine_adapter.embedded.model_runner import Forward, PreparedEpoch, SequenceWork
from engine_adapter.embedded.setup import RankSetup
from engine_adapter.embedded.step_sync import StepHeader
from engine_adapter.engine import DispatchCounts
from engine_adapter.serving.fact_log import DecodeSteps, FactLog
from engine_adapter.serving.generation import AnswerDelta, AnswerStream, ScoredToken
from engine_adapter.serving.sequences import ServedSequence
from fleet.blocks import BLOCK_SIZE
from fleet.handover import flips
from fleet.placement import Placement
from fleet.routings import count_pairs

LEAVING = 1
"""Step header flag: this rank stops after the step, and so does the engine."""


class PeerLeft(Exception):
    """Another rank of this engine stopped intentionally."""


EmbeddedSequence = ServedSequence[RoutedTrace]
"""One request with all its state on the step thread."""


@dataclass(slots=True)
class StepReport:
    """Results of one step for the event loop."""

    news: list[tuple[AnswerStream, AnswerDelta | Exception]] = field(default_factory=list)
    facts: bool = False
    """True if there are new facts to take."""
    flipped: PreparedEpoch | None = None
    """Epoch that is served from this step on."""


class _Order(NamedTuple):
    sequence: EmbeddedSequence
    cancel: bool


class StepLoop:
    """Step loop. `run` is for the step thread. `submit`, `cancel`, `adopt`, `leave`, `take_sent`, `placement`
    and `stepping_since` are thread-safe."""

    def __init__(
        self,
        setup: RankSetup,
        config: EmbeddedConfig,
        facts: FactLog,
        report: Callable[[StepReport], None],
        rank: int = 0,
    ) -> None:
        self._setup = setup
        self._facts = facts
        self._report = report
        self._cache = KvCache(config.kv_blocks, BLOCK_SIZE)
        self._scheduler = BatchScheduler(
            self._cache,
            max_batch_tokens=config.max_batch_tokens,
            max_running=config.max_running,
            max_waiting=config.max_waiting,
        )
        self._sequences: dict[SequenceState, EmbeddedSequence] = {}
        self._orders: deque[_Order] = deque()
        self._step = 0
        self._ready: PreparedEpoch | None = None
        self.placement: Placement = setup.placement
        """The served placement."""
        self._decoding = DecodeSteps()
        self._sent = DispatchLog(rank, layers=setup.shape.layers, top_k=setup.shape.top_k)
        self._communicated = 0.0
        """Seconds in collectives before the current step."""
        self._began = 0
        """Wall-clock start of the current step, in nanoseconds."""
        self.leaving = False
        self.stepping_since: float | None = None
        """Monotonic start of the current step, in seconds. None while asleep."""

    def submit(self, sequence: EmbeddedSequence) -> None:
        """Queue a request for the next step."""
        self._order(_Order(sequence, cancel=False))

    def cancel(self, sequence: EmbeddedSequence) -> None:
        """Free what the request holds before the next step."""
        self._order(_Order(sequence, cancel=True))

    def adopt(self, prepared: PreparedEpoch) -> None:
        """Switch to this epoch at the first step at which every rank is ready. A report announces the switch.
        Only one may be pending."""
        self._ready = prepared
        self._nudge()

    def leave(self) -> None:
        """Stop at the next step, and notify the other ranks in its header."""
        self.leaving = True
        self._nudge()

    def take_sent(self) -> tuple[DispatchCounts, ...]:
        """Return the dispatch statistics since the last call, by epoch."""
        return self._sent.take()

    def run(self) -> None:
        """Step until this rank leaves. PeerLeft when another rank leaves. StepSyncError, and any error of a
        forward pass."""
        while True:
            self.stepping_since = time.monotonic()
            self._began = time.time_ns()
            self._communicated = self._setup.step_sync.communication_seconds
            report = StepReport()
            self._take_orders(report)
            slices = self._scheduler.plan()
            tokens_by_rank = self._exchange(sum(one.count for one in slices), report)
            if tokens_by_rank is None:
                return
            awake = any(tokens_by_rank)
            if awake:
                forward = self._compute(slices, tokens_by_rank, report)
                self._note_step(slices, tokens_by_rank, forward)
            self._publish(report)
            self._step += 1
            if not awake:
                self._scheduler.check_idle()
                self.stepping_since = None
                self._setup.step_sync.sleep(self._step)

    def _note_step(self, slices: list[Slice], tokens_by_rank: list[int], forward: Forward) -> None:
        """Record a step. The headers contain only token counts, so another rank counts as decoding if it
        computes at most `max_running` tokens."""
        now = time.monotonic()
        seconds = now - (now if self.stepping_since is None else self.stepping_since)
        if all(one.count == 1 for one in slices) and max(tokens_by_rank) <= self._scheduler.max_running:
            self._decoding.note(now, seconds)
        communication = self._setup.step_sync.communication_seconds - self._communicated
        self._sent.add(
            self.placement.epoch,
            FinishedStep(seconds, tokens_by_rank, forward.served_by, min(communication, seconds)),
            self.placement.sharded,
        )

    def _order(self, order: _Order) -> None:
        self._orders.append(order)
        self._nudge()

    def _nudge(self) -> None:
        # The step thread may have ended and closed its sockets. The caller then sees the engine's failure.
        with suppress(OSError):
            self._setup.step_sync.nudge()

    def _exchange(self, tokens: int, report: StepReport) -> list[int] | None:
        """Exchange headers and return every rank's tokens of this step. None when this rank leaves.
        Afterwards, all ranks serve the same epoch."""
        leaving, next_up, served = self.leaving, self._ready, self.placement.epoch
        ready = self.placement if next_up is None else next_up.placement
        mine = StepHeader(
            step=self._step,
            tokens=tokens,
            flags=LEAVING if leaving else 0,
            epoch_served=served,
            epoch_ready=ready.epoch,
            digest=ready.digest,
        )
        headers = self._setup.step_sync.exchange(mine)
        left = [rank for rank, header in enumerate(headers) if header.flags & LEAVING]
        if leaving:
            return None
        if left:
            raise PeerLeft(
                f"rank {left[0]} of this engine stopped; an engine serves with all of its ranks or not at all"
            )
        if next_up is not None and flips(served, tuple(header.epoch_ready for header in headers)):
            self._flip(next_up, report)
        return [header.tokens for header in headers]

    def _flip(self, prepared: PreparedEpoch, report: StepReport) -> None:
        if self._setup.experts is None:
            raise RuntimeError(
                "step loop: cannot switch to another epoch: the experts of this engine cannot be moved"
            )
        self._setup.experts.adopt(prepared)
        self.placement, self._ready, report.flipped = prepared.placement, None, prepared

    def _take_orders(self, report: StepReport) -> None:
        while self._orders:
            sequence, cancel = self._orders.popleft()
            if cancel:
                self._end(sequence, report)
                continue
            try:
                self._scheduler.submit(sequence.state)
            except (Overloaded, ValueError) as refusal:
                report.news.append((sequence.answer, refusal))
            else:
                self._sequences[sequence.state] = sequence

    def _end(self, sequence: EmbeddedSequence, report: StepReport) -> None:
        """Free everything that a request holds, and report what it computed. Idempotent, because a request
        can finish and be cancelled in the same step."""
        if self._sequences.pop(sequence.state, None) is not None and (ended := sequence.ended()) is not None:
            self._facts.add_ended(ended)
            report.facts = True
        self._scheduler.remove(sequence.state)

    def _compute(self, slices: list[Slice], tokens_by_rank: list[int], report: StepReport) -> Forward:
        work = [SequenceWork(one.tokens, one.start, one.sequence.table.pages, one.last) for one in slices]
        self._note_admissions(slices)
        forward = self._setup.runner.forward(work, tokens_by_rank)
        now = time.time_ns()
        self._book(slices, forward.routed)
        rows = [self._sequences[one.sequence] for one in slices if one.last]
        if rows:
            self._advance(rows, forward.logits.numpy(), now, report)
        return forward

    def _book(self, slices: list[Slice], routed: NDArray[Any]) -> None:
        """Update pages and routing after the slices were computed."""
        at = 0
        for one in slices:
            self._scheduler.computed(one)
            self._sequences[one.sequence].trace.note(one.start, routed[at : at + one.count])
            at += one.count
        if at:
            self._facts.add_activations(count_pairs(routed, self._setup.shape.experts), at)

    def _note_admissions(self, slices: list[Slice]) -> None:
        """Record admissions before the forward pass: a request that fails in it did not fail in the queue."""
        for one in slices:
            if cached := self._sequences[one.sequence].admit(self._began):
                self._facts.add_cached(cached)

    def _advance(
        self, rows: list[EmbeddedSequence], logits: NDArray[np.float32], now: int, report: StepReport
    ) -> None:
        """Sample a token for each row and report the deltas."""
        tokens = sample(
            logits, [Draw(sequence.request.sampling, len(sequence.state.tokens)) for sequence in rows]
        )
        scored = self._score(rows, logits, tokens)
        for row, (sequence, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
            self._scheduler.append(sequence.state, token)
            delta = sequence.emit(token, now, scored.get(row, []))
            report.news.append((sequence.answer, delta))
            if delta.outcome is not None:
                self._end(sequence, report)

    def _score(
        self, rows: list[EmbeddedSequence], logits: NDArray[np.float32], tokens: NDArray[np.int64]
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

    def _publish(self, report: StepReport) -> None:
        changes = self._cache.take_changes()
        self._facts.add_kv(changes, self._cache.restated)
        load = self._scheduler.load(self._decoding.median(time.monotonic()))
        report.facts = self._facts.set_load(load) or bool(changes) or report.facts
        if report.facts or report.news or report.flipped:
            self._report(report)
