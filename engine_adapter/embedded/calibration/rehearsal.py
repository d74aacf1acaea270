"""Steps of a rank for measurements, with the work of the step loop around the forward pass and an event loop
that takes their reports, and the layouts in which they are made."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_adapter.batching.detokenizer import ByteDetokenizer, Detokenizer
from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.batching.routed_experts import RoutedTrace
from engine_adapter.batching.scheduler import Slice
from engine_adapter.config import EmbeddedConfig
from engine_adapter.embedded.calibration.cells import Cell, known_tokens, next_token, owned
from engine_adapter.embedded.dispatch_stats import DispatchLog, FinishedStep
from engine_adapter.embedded.model_runner import Forward, ModelRunner, PreparedEpoch, SequenceWork
from engine_adapter.embedded.rank_requests import RankRequests
from engine_adapter.embedded.step_notes import StepNote, decoded, encoded
from engine_adapter.embedded.step_results import StepReport, StepResults
from engine_adapter.embedded.step_sync import StepHeader, StepSync
from engine_adapter.embedded.travelling import EmbeddedSequence, SequenceCodec
from engine_adapter.serving.fact_log import FACT_BLOCKS_PER_PAGE, FactLog
from engine_adapter.serving.generation import AnswerDelta, AnswerStream
from engine_adapter.serving.sequences import sequence_parts
from fleet.blocks import BLOCK_SIZE

Deliver = Callable[[StepReport], None]


class RehearsedStep(NamedTuple):
    """A step of this rank."""

    seconds: float
    """From its begin to its end, as in `FinishedStep`."""
    tokens_by_rank: tuple[int, ...]
    routed: NDArray[Any]
    """`Forward.routed`."""
    served_by: Sequence[NDArray[np.int64]]
    """`Forward.served_by`."""


@dataclass(slots=True)
class Rehearsal:
    """Requests of this rank in steps of one kind, in one layout."""

    cell: Cell
    requests: RankRequests
    results: StepResults
    numbers: range
    """Of the sequences that the rank owns."""
    left: int
    """Steps before the sequences need more room than the kind of step has."""


class RehearsalTokenizer:
    """Tokenizer whose text is never read."""

    eos: frozenset[int] = frozenset()

    def __init__(self, vocabulary: int) -> None:
        self._bytes = [b"x"] * vocabulary

    def detokenizer(self) -> Detokenizer:
        return ByteDetokenizer(self._bytes, set())


class StepRehearsal:
    """Steps as the step loop makes them: planning, exchange of headers and notes, forward pass, sampling,
    bookkeeping, and reports to an event loop. All ranks make the same steps."""

    def __init__(
        self, runner: ModelRunner, step_sync: StepSync, config: EmbeddedConfig, deliver: Deliver
    ) -> None:
        self._runner = runner
        self._sync = step_sync
        self._config = config
        self._deliver = deliver
        self._tokenizer = RehearsalTokenizer(runner.config.vocabulary)
        self.rank = step_sync.rank

    def of(self, cell: Cell) -> Rehearsal:
        """Return requests for `cell.steps` steps of a kind in the served layout."""
        shape, placement, pages = self._runner.shape, self._runner.placement, self._runner.kv_pages
        codec = SequenceCodec(self._tokenizer, shape)
        requests = RankRequests(self._config, self.rank, codec, placement.attention, pages)
        facts = FactLog(shape.layers, shape.experts, FACT_BLOCKS_PER_PAGE * pages)
        sent = DispatchLog(self.rank, layers=shape.layers, top_k=shape.top_k)
        numbers = owned(cell, placement.attention, self.rank, placement.ranks)
        for number in numbers:
            self._accept(cell, number, requests)
        requests.cache.take_changes()
        return Rehearsal(
            cell, requests, StepResults(requests, facts, sent, shape.experts), numbers, cell.steps
        )

    def step(self, kind: Rehearsal) -> RehearsedStep:
        """Compute a step. All of `kind.left` steps may be made; the layout must be that of `of`."""
        began, wall, communicated = time.monotonic(), time.time_ns(), self._sync.communication_seconds
        requests, report = kind.requests, StepReport()
        slices = requests.scheduler.plan()
        note = encoded(requests.note(slices, None))
        header = StepHeader(step=0, tokens=sum(one.count for one in slices), note_bytes=len(note))
        headers = self._sync.exchange(header)
        sizes = [one.note_bytes for one in headers]
        heard = [decoded(one) for one in self._sync.share(note, sizes)] if any(sizes) else [StepNote()]
        for rank, each in enumerate(heard):
            requests.hear(rank, each)
        by_rank = tuple(one.tokens for one in headers)
        kind.results.admit(slices, wall)
        forward = self._runner.forward(self._work(slices, heard[0]), by_rank)
        self._choose_tokens(kind, forward)
        kind.results.book(slices, forward, time.time_ns(), report)
        now = time.monotonic()
        communication = self._sync.communication_seconds - communicated
        step = FinishedStep(now - began, by_rank, forward.served_by, min(communication, now - began))
        kind.results.note(slices, self._runner.placement, step, now)
        kind.results.publish(report, now)
        if not report.is_empty:
            self._deliver(report)
        kind.left -= 1
        return RehearsedStep(now - began, by_rank, forward.routed, forward.served_by)

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of every rank, in rank order."""
        return self._sync.gather(numbers)

    def _accept(self, cell: Cell, number: int, requests: RankRequests) -> None:
        """Queue a sequence, with cached tokens as if an earlier request had computed them."""
        known = known_tokens(cell, number, self._runner.config.vocabulary)
        request = GenerationRequest(
            prompt=known, max_tokens=cell.steps + 1, ignore_eos=True, salt=str(number)
        )
        state, text = sequence_parts(request, BLOCK_SIZE, self._tokenizer.detokenizer())
        trace = RoutedTrace(self._runner.shape.layers, self._runner.shape.top_k)
        cache, table = requests.cache, requests.cache.open([])
        cache.extend(table, cell.cached // BLOCK_SIZE)
        cache.register(table, state.blocks, cell.cached // BLOCK_SIZE)
        cache.close(table)
        answer = AnswerStream(lambda _: None)
        sequence = EmbeddedSequence(request, answer, state, text, trace, self._tokenizer.eos)
        if (refusal := requests.accept(sequence)) is not None:
            raise RuntimeError(f"calibration: {cell} does not fit this engine: {refusal[1]}")

    def _work(self, slices: Sequence[Slice], plan: StepNote) -> list[SequenceWork]:
        if self._runner.placement.attention == "tp":
            return [one.work for one in plan.plan]
        return [SequenceWork(one.tokens, one.start, one.sequence.table.pages, one.last) for one in slices]

    def _choose_tokens(self, kind: Rehearsal, forward: Forward) -> None:
        """Let every sequence continue with the token that it has computed: without a meaningful context, the
        model would say the same in all of them, and read fewer experts than with text."""
        if kind.numbers:
            vocabulary = self._runner.config.vocabulary
            logits = forward.logits.numpy()
            tokens = [next_token(number, vocabulary) for number in kind.numbers]
            logits[np.arange(len(tokens)), tokens] = np.finfo(logits.dtype).max


@contextmanager
def event_loop() -> Iterator[Deliver]:
    """Run an event loop on a thread, as engines have one, and yield a function that delivers reports there.
    Answers are not read: reading is the work of interfaces, not of steps."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="deliveries of rehearsed steps", daemon=True)
    thread.start()
    try:
        yield lambda report: _post(loop, report)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _post(loop: asyncio.AbstractEventLoop, report: StepReport) -> None:
    loop.call_soon_threadsafe(_put, report)


def _put(report: StepReport) -> None:
    for answer, news in report.news:
        if isinstance(news, AnswerDelta):
            answer.put(news)


@contextmanager
def scratch(runner: ModelRunner) -> Iterator[None]:
    """Let a rank serve other layouts for measurements (`serve`), and afterwards what it served before, with
    the same pages. KV is lost."""
    served, units = runner.served, runner.kv_units
    try:
        yield
    finally:
        runner.adopt(served)
        runner.adopt_kv(units)
        # Meaningless weights can leave values behind that are no numbers. A weight of zero would not hide
        # them where padding is read.
        runner.kv_pool.values.zero_()


def serve(runner: ModelRunner, prepared: PreparedEpoch) -> None:
    """Serve a layout on scratch: in layers of another form than the served one, weights are meaningless."""
    runner.adopt(prepared)
    units_of_page = runner.kv_pool.groups if prepared.placement.attention == "dp" else 1
    runner.adopt_kv(runner.kv_pool.first_units(units_of_page))
