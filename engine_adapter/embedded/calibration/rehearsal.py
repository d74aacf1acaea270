"""Steps of a rank for measurements, with the work of the step loop around the forward pass, and the layouts
in which they are made."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_adapter.batching.routed_experts import RoutedTrace
from engine_adapter.batching.sampling import GREEDY, Draw, sample
from engine_adapter.embedded.model_runner import ModelRunner, PreparedEpoch, SequenceWork
from engine_adapter.embedded.step_notes import StepNote, TravellingWork, decoded, encoded
from engine_adapter.embedded.step_sync import StepHeader, StepSync


class RehearsedStep(NamedTuple):
    """A step of this rank."""

    seconds: float
    tokens_by_rank: tuple[int, ...]
    routed: NDArray[Any]
    """`Forward.routed`."""
    served_by: Sequence[NDArray[np.int64]]
    """`Forward.served_by`."""


class StepRehearsal:
    """Steps as the step loop makes them: exchange of headers and of rank 0's plan, forward pass, sampling,
    and the notes of the experts of each sequence. All ranks make the same steps."""

    def __init__(self, runner: ModelRunner, step_sync: StepSync) -> None:
        self._runner = runner
        self._sync = step_sync
        self.rank = step_sync.rank

    def step(self, work: Sequence[SequenceWork]) -> RehearsedStep:
        """Compute a step. work: of this rank; under tensor-parallel attention that of the engine."""
        began = time.perf_counter()
        one_plan = self._runner.placement.attention == "tp"
        plans = one_plan and self.rank == 0
        note = encoded(StepNote(plan=_plan(work) if plans else ()))
        tokens = 0 if one_plan and not plans else sum(len(one.tokens) for one in work)
        headers = self._sync.exchange(StepHeader(step=0, tokens=tokens, note_bytes=len(note)))
        sizes = [header.note_bytes for header in headers]
        if any(sizes):
            heard = [decoded(each) for each in self._sync.share(note, sizes)]
            work = [one.work for one in heard[0].plan]
        by_rank = tuple(header.tokens for header in headers)
        found = self._runner.forward(work, by_rank)
        if not one_plan or plans:
            self._finish(work, found.routed, found.logits.numpy())
        return RehearsedStep(time.perf_counter() - began, by_rank, found.routed, found.served_by)

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of every rank, in rank order."""
        return self._sync.gather(numbers)

    @staticmethod
    def _finish(work: Sequence[SequenceWork], routed: NDArray[Any], logits: NDArray[np.float32]) -> None:
        """Sample, and note the experts of each sequence."""
        at = 0
        for one in work:
            count = len(one.tokens)
            RoutedTrace(*routed.shape[1:]).note(0, routed[at : at + count])
            at += count
        sample(logits, [Draw(GREEDY, one.start) for one in work])


def _plan(work: Sequence[SequenceWork]) -> tuple[TravellingWork, ...]:
    return tuple(
        TravellingWork(list(one.tokens), one.start, list(one.pages), one.needs_logits) for one in work
    )


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
