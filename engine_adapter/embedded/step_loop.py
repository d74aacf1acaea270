"""Step thread of one rank: takes orders, plans, computes, samples, and reports the results. All state here
belongs to that thread.

A step: take orders -> plan -> exchange headers and notes with the other ranks -> forward -> sample -> update
state -> report. A rank without work takes part with an empty batch. When no rank has work, all sleep until
one is nudged. A rank that is ready for the next epoch announces it in its headers. In the first step in which
every rank is ready, all switch between the headers and the forward pass. A step that switches attention
computes nothing.

Under tensor-parallel attention rank 0 owns all requests. It plans, and its note brings the plan to the other
ranks, which compute the same tokens and report nothing (docs/decisions/0020).
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from engine_adapter.batching.kv_cache import Block
from engine_adapter.batching.scheduler import Slice
from engine_adapter.config import EmbeddedConfig
from engine_adapter.embedded.dispatch_stats import DispatchLog, FinishedStep
from engine_adapter.embedded.model_runner import Forward, PreparedEpoch, SequenceWork
from engine_adapter.embedded.rank_requests import RankRequests
from engine_adapter.embedded.setup import RankSetup
from engine_adapter.embedded.step_notes import AheadNote, StepNote, decoded, encoded
from engine_adapter.embedded.step_results import StepReport, StepResults
from engine_adapter.embedded.step_sync import StepHeader
from engine_adapter.embedded.travelling import EmbeddedSequence, SequenceCodec
from engine_adapter.engine import DispatchCounts
from engine_adapter.serving.fact_log import FactLog
from fleet.handover import flips
from fleet.layout import AttentionKind
from fleet.placement import Placement

LEAVING = 1
"""Step header flag: this rank stops after the step, and so does the engine."""


class PeerLeft(Exception):
    """Another rank of this engine stopped intentionally."""


class _Order(NamedTuple):
    sequence: EmbeddedSequence
    cancel: bool


@dataclass(frozen=True, slots=True)
class _Agreed:
    """Result of the exchange at the beginning of a step."""

    tokens_by_rank: list[int]
    work: Sequence[SequenceWork]
    """Work of this rank: under tensor-parallel attention that of the engine."""
    awake: bool
    """A rank has work, or something to tell."""


class StepLoop:
    """Step loop. `run` is for the step thread. `submit`, `cancel`, `check`, `copy_ahead`, `adopt`, `leave`,
    `stored_block`, `take_sent`, `placement`, `max_open`, `pause_seconds` and `stepping_since` are
    thread-safe."""

    def __init__(
        self,
        setup: RankSetup,
        config: EmbeddedConfig,
        facts: FactLog,
        report: Callable[[StepReport], None],
        codec: SequenceCodec,
        rank: int = 0,
    ) -> None:
        self._setup = setup
        self._report = report
        attention, switch = setup.placement.attention, setup.attention
        pages = config.kv_blocks if switch is None else switch.pages(attention)
        self._requests = RankRequests(config, rank, codec, attention, pages)
        self._requests.exchange = setup.exchange
        self._orders: deque[_Order] = deque()
        self._step = 0
        self._ready: PreparedEpoch | None = None
        self.placement: Placement = setup.placement
        """The served placement."""
        self._sent = DispatchLog(rank, layers=setup.shape.layers, top_k=setup.shape.top_k)
        self._results = StepResults(self._requests, facts, self._sent, setup.shape.experts)
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

    @property
    def max_open(self) -> int:
        """Requests that may be open on this rank."""
        return self._requests.max_open

    @property
    def pause_seconds(self) -> float:
        """Time for which no step computes in the switch that is pending. 0: none is, or it takes no time."""
        switch = self._setup.attention
        return switch.seconds if switch is not None and self._changes_attention(self._ready) else 0.0

    def check(self, placement: Placement) -> None:
        """Raise ValueError if the open requests would not fit the layout of attention of a placement."""
        if placement.attention == self.placement.attention:
            return
        if self._setup.attention is None:
            raise ValueError("embedded engine: its attention cannot be changed; see the log of its start")
        self._setup.attention.check(placement.attention)

    def copy_ahead(self, to: AttentionKind | None) -> None:
        """Copy KV pages for this layout of attention while the engine serves, as soon as all ranks are to.
        None: no longer. Reports say when it has caught up."""
        if self._setup.attention is not None:
            self._setup.attention.ahead.wish = to
            self._nudge()

    def adopt(self, prepared: PreparedEpoch) -> None:
        """Switch to this epoch at the first step at which every rank is ready. A report announces the switch.
        Only one may be pending."""
        self._ready = prepared
        self._nudge()

    def leave(self) -> None:
        """Stop at the next step, and notify the other ranks in its header."""
        self.leaving = True
        self._nudge()

    def stored_block(self, block_hash: int) -> Block | None:
        """Return the cached block of a sequence hash, or None."""
        return self._requests.cache.block(block_hash)

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
            next_up = self._ready
            # A prompt's pages would all have to be copied in the step that switches.
            slices = self._requests.scheduler.plan(prompts=not self._changes_attention(next_up))
            agreed = self._exchange(slices, next_up, report)
            if agreed is None:
                return
            if any(agreed.tokens_by_rank):
                forward = self._compute(slices, agreed, report)
                self._note_step(slices, agreed.tokens_by_rank, forward)
            self._publish(report)
            self._step += 1
            if not agreed.awake:
                self._requests.scheduler.check_idle()
                self.stepping_since = None
                self._setup.step_sync.sleep(self._step)

    def _note_step(self, slices: list[Slice], tokens_by_rank: list[int], forward: Forward) -> None:
        now = time.monotonic()
        seconds = now - (now if self.stepping_since is None else self.stepping_since)
        communication = self._setup.step_sync.communication_seconds - self._communicated
        step = FinishedStep(seconds, tokens_by_rank, forward.served_by, min(communication, seconds))
        self._results.note(slices, self.placement, step, now)

    def _order(self, order: _Order) -> None:
        self._orders.append(order)
        self._nudge()

    def _nudge(self) -> None:
        # The step thread may have ended and closed its sockets. The caller then sees the engine's failure.
        with suppress(OSError):
            self._setup.step_sync.nudge()

    def _exchange(
        self, slices: list[Slice], next_up: PreparedEpoch | None, report: StepReport
    ) -> _Agreed | None:
        """Exchange headers and notes. None when this rank leaves. Afterwards, all ranks serve the same
        epoch. next_up: epoch that this rank is to switch to."""
        leaving, served = self.leaving, self.placement.epoch
        note = encoded(self._requests.note(slices, self._note_ahead(next_up)))
        ready = self.placement if next_up is None or not self._is_ready(next_up) else next_up.placement
        mine = StepHeader(
            step=self._step,
            tokens=sum(one.count for one in slices),
            flags=LEAVING if leaving else 0,
            epoch_served=served,
            epoch_ready=ready.epoch,
            digest=ready.digest,
            note_bytes=len(note),
            held=self._requests.cache.held,
        )
        headers = self._setup.step_sync.exchange(mine)
        left = [rank for rank, header in enumerate(headers) if header.flags & LEAVING]
        if leaving:
            return None
        if left:
            raise PeerLeft(
                f"rank {left[0]} of this engine stopped; an engine serves with all of its ranks or not at all"
            )
        if self._setup.attention is not None:
            self._setup.attention.heard(headers)
        sizes = [header.note_bytes for header in headers]
        plan = self._hear(self._setup.step_sync.share(note, sizes) if any(sizes) else [])
        tokens = [header.tokens for header in headers]
        if next_up is not None and flips(served, tuple(header.epoch_ready for header in headers)):
            if self._changes_attention(next_up):
                # What was planned belongs to the old layout. The next step plans anew.
                self._change_attention(next_up, report)
                return _Agreed([0] * len(tokens), (), awake=True)
            self._flip(next_up, report)
        own = [SequenceWork(one.tokens, one.start, one.sequence.table.pages, one.last) for one in slices]
        work = own if self.placement.attention == "dp" else [one.work for one in plan.plan]
        return _Agreed(tokens, work, awake=any(tokens) or any(sizes))

    def _hear(self, notes: Sequence[bytes]) -> StepNote:
        """Take the notes of all ranks. Return that of rank 0, which plans for all under tensor-parallel
        attention."""
        heard = [decoded(note) for note in notes] or [StepNote()]
        news = [one for rank, note in enumerate(heard) for one in self._requests.hear(rank, note)]
        if news:
            # Tokens of the last step on their owner: clients do not wait for this one.
            self._report(StepReport(news=news))
        if notes and self._setup.attention is not None:
            self._setup.attention.ahead.hear([note.ahead for note in heard], self._requests)
        return heard[0]

    def _changes_attention(self, next_up: PreparedEpoch | None) -> bool:
        return next_up is not None and next_up.placement.attention != self.placement.attention

    def _note_ahead(self, next_up: PreparedEpoch | None) -> AheadNote | None:
        """Return the part of the note about pages that are copied ahead of a switch of attention."""
        if self._setup.attention is None:
            return None
        return self._setup.attention.note_ahead(self._requests, last=self._changes_attention(next_up))

    def _is_ready(self, next_up: PreparedEpoch) -> bool:
        """True unless pages are still being copied ahead for this epoch."""
        switch = self._setup.attention
        return switch is None or not self._changes_attention(next_up) or switch.ahead.settled

    def _change_attention(self, prepared: PreparedEpoch, report: StepReport) -> None:
        """Serve the other layout of attention from here on, with all requests and their KV."""
        if self._setup.attention is None:
            raise RuntimeError("step loop: the attention of this engine cannot be changed")
        self._drop_cancelled(report)
        to = prepared.placement.attention
        switched = self._setup.attention.run(to, self._requests)
        report.news += switched.news
        self._flip(prepared, report)
        self._setup.attention.adopt(to, switched)

    def _flip(self, prepared: PreparedEpoch, report: StepReport) -> None:
        if self._setup.experts is None:
            raise RuntimeError(
                "step loop: cannot switch to another epoch: the experts of this engine cannot be moved"
            )
        self._setup.experts.adopt(prepared)
        self.placement, self._ready, report.flipped = prepared.placement, None, prepared

    def _drop_cancelled(self, report: StepReport) -> None:
        for sequence in self._requests.take_cancelled():
            self._results.end(sequence, report)

    def _take_orders(self, report: StepReport) -> None:
        self._drop_cancelled(report)
        while self._orders:
            sequence, cancel = self._orders.popleft()
            if cancel:
                if (over := self._requests.cancel(sequence)) is not None:
                    self._results.end(over, report)
            elif (refusal := self._requests.accept(sequence)) is not None:
                report.news.append(refusal)

    def _compute(self, slices: list[Slice], agreed: _Agreed, report: StepReport) -> Forward:
        self._results.admit(slices, self._began)
        forward = self._setup.runner.forward(agreed.work, agreed.tokens_by_rank)
        self._results.book(slices, forward, time.time_ns(), report)
        return forward

    def _publish(self, report: StepReport) -> None:
        self._results.publish(report, time.monotonic())
        report.caught_up = self._setup.attention is not None and self._setup.attention.ahead.caught_up
        if not report.is_empty:
            self._report(report)
