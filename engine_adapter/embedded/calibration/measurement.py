"""Steps measured in several layouts, in turn, so that load that arises meanwhile slows all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from engine_adapter.embedded.calibration.cells import Cell, DecodeCell, owned
from engine_adapter.embedded.calibration.rehearsal import Rehearsal, RehearsedStep, StepRehearsal, serve
from engine_adapter.embedded.calibration.speed_fit import StepLoad
from engine_adapter.embedded.dispatch import sent_away
from engine_adapter.embedded.model_runner import ModelRunner, PreparedEpoch
from engine_adapter.embedded.paged_attention import PAGE_TOKENS
from fleet.timing import gathered_bytes, surplus_pairs

FEWEST, MOST = 2, 15
"""Steps of a kind that are measured, however long or short they are."""
_NANOSECOND = 1e-9
LayoutKey = TypeVar("LayoutKey")


@dataclass(slots=True)
class MeasuredSteps:
    """Steps of one kind in one layout. All ranks have the same."""

    cell: Cell
    load: StepLoad
    surplus: float
    """Pairs of the most loaded rank above the mean, summed over layers."""
    seconds: list[float] = field(default_factory=list)
    """Of each step, the mean of the ranks."""
    rehearsal: Rehearsal | None = None
    """Requests of the next step. None: there were no steps yet."""

    @property
    def usual(self) -> float:
        """Seconds of a step: the median. On a machine that others share, most steps take longer than the
        fastest ones, also while the engine serves."""
        return float(np.median(self.seconds))


def repeats(seconds: float, share: float) -> int:
    """Return how often a step that takes this long is measured in `share` seconds."""
    return min(max(round(share / seconds), FEWEST), MOST)


class StepMeasurement(Generic[LayoutKey]):
    """Measurement of several layouts by one rank, on scratch (`rehearsal.scratch`). All ranks make the same
    calls."""

    def __init__(
        self, runner: ModelRunner, rehearsal: StepRehearsal, layouts: Mapping[LayoutKey, PreparedEpoch]
    ) -> None:
        self._runner = runner
        self._rehearsal = rehearsal
        self._layouts = layouts

    def of(
        self, cells: Mapping[LayoutKey, Sequence[Cell]], budget: float
    ) -> dict[LayoutKey, list[MeasuredSteps]]:
        """Measure steps of every kind in every layout. budget: seconds, of which each kind gets as many.

        The first steps decide how many steps that is, on every rank. They count only in a slow engine, whose
        steps are measured once more, and without a budget.
        """
        found = {key: self._first(key, every) for key, every in cells.items()}
        every = [one for steps in found.values() for one in steps]
        is_slow = sum(one.seconds[0] for one in every) > 2 * budget
        share, once = budget / len(every), int(budget > 0)
        planned = {
            key: [(one, once if is_slow else repeats(one.seconds[0], share)) for one in steps]
            for key, steps in found.items()
        }
        if not is_slow:
            for one in every:
                one.seconds.clear()
        for turn in range(MOST):
            for key, steps in planned.items():
                serve(self._runner, self._layouts[key])
                for one, times in steps:
                    if turn < times:
                        one.seconds.append(self._next(one).seconds)
        self._agree(every)
        return found

    def seconds_of(self, key: LayoutKey, cell: Cell) -> float:
        """Return the seconds of a single step."""
        serve(self._runner, self._layouts[key])
        return self._mean([self._rehearsal.step(self._rehearsal.of(cell)).seconds])[0]

    def _first(self, key: LayoutKey, cells: Sequence[Cell]) -> list[MeasuredSteps]:
        """Make the first steps of a layout, which touch memory for the first time."""
        serve(self._runner, self._layouts[key])
        found = []
        for cell in cells:
            rehearsal = self._rehearsal.of(cell)
            step = self._rehearsal.step(rehearsal)
            load, surplus = self._described(cell, step)
            found.append(MeasuredSteps(cell, load, surplus, [step.seconds], rehearsal))
        self._agree(found)
        return found

    def _agree(self, steps: Sequence[MeasuredSteps]) -> None:
        """Replace the times by the means of all ranks."""
        means = iter(self._mean([seconds for one in steps for seconds in one.seconds]))
        for one in steps:
            one.seconds = [next(means) for _ in one.seconds]

    def _mean(self, seconds: Sequence[float]) -> list[float]:
        """Return the means of all ranks."""
        mine = [round(one / _NANOSECOND) for one in seconds]
        means: list[float] = (np.mean(self._rehearsal.gather(mine), axis=0) * _NANOSECOND).tolist()
        return means

    def _next(self, steps: MeasuredSteps) -> RehearsedStep:
        """Make one more step of a kind, in the served layout."""
        if steps.rehearsal is None or not steps.rehearsal.left:
            steps.rehearsal = self._rehearsal.of(steps.cell)
        return self._rehearsal.step(steps.rehearsal)

    def _described(self, cell: Cell, step: RehearsedStep) -> tuple[StepLoad, float]:
        """Return the load of rank 0, which has as much work as any, and the surplus of the engine."""
        placement, shape = self._runner.placement, self._runner.shape
        ranks, one_plan = placement.ranks, placement.attention == "tp"
        sequences = len(owned(cell, placement.attention, 0, ranks))
        own = sequences * cell.tokens
        tokens = own if one_plan else sum(step.tokens_by_rank)
        remote, surplus = 0, 0.0
        for layer in step.served_by:
            remote += sent_away(layer[:own], 0)
            surplus += float(surplus_pairs(np.bincount(layer.ravel(), minlength=ranks)[None]))
        uneven = 0.0 if one_plan else shape.layers * shape.top_k * (tokens / ranks - own)
        decodes = isinstance(cell, DecodeCell)
        pairs = own * (cell.cached + (cell.tokens + 1) / 2)
        load = StepLoad(
            prefill_token=0 if decodes else own,
            prefill_pair=0 if decodes else pairs,
            decode_sequence=own if decodes else 0,
            decode_block=sequences * -(-cell.context // PAGE_TOKENS) if decodes else 0,
            dispatch=remote,
            expert_read=self._distinct(step) / (1 if one_plan else ranks),
            expert_pair=surplus + uneven,
            gather_byte=tokens * gathered_bytes(shape, ranks, len(placement.sharded)),
        )
        return load, surplus

    def _distinct(self, step: RehearsedStep) -> int:
        """Return the distinct experts of all tokens of a step, summed over layers."""
        shape = self._runner.shape
        used = np.zeros((shape.layers, shape.experts), np.bool_)
        for layer in range(shape.layers):
            used[layer, step.routed[:, layer].ravel()] = True
        by_rank = np.array(self._rehearsal.gather(np.packbits(used).tolist()), np.uint8)
        return int(np.bitwise_count(np.bitwise_or.reduce(by_rank, axis=0)).sum())
