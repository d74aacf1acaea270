"""Duration of a step. Pure NumPy."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_adapter.batching.scheduler import Slice
from engine_adapter.simulated.model.dispatch_model import StepTraffic
from engine_adapter.simulated.model.routing_model import RoutingModel
from fleet.timing import EngineSpeed, step_seconds, surplus_pairs


class PlannedWork(NamedTuple):
    """A slice of the next step, and the row of the routing table that each of its tokens uses."""

    part: Slice
    rows: NDArray[np.int16]


class StepPlan(NamedTuple):
    """Work of one rank in the next step."""

    parts: list[PlannedWork]
    prefill_tokens: int
    prefill_pairs: float
    """Pairs of a computed prompt token and a token that it attends to, itself included."""
    sequences: int
    """Sequences that decode."""
    blocks: int
    """KV blocks of the decoding sequences."""


NOTHING = StepPlan([], 0, 0.0, 0, 0)


def plan(slices: Sequence[Slice], routing: RoutingModel) -> StepPlan:
    """Summarize a rank's slices. A slice of one last token counts as decoding, as in the scheduler."""
    if not slices:
        return NOTHING
    parts: list[PlannedWork] = []
    tokens = sequences = blocks = 0
    pairs = 0.0
    for one in slices:
        sequence = one.sequence
        # One row without the array machinery of a chunk: nearly all slices of a busy engine are of this kind.
        if one.count == 1 and one.last:
            parts.append(
                PlannedWork(
                    one,
                    np.array([routing.row(sequence.tokens[one.start], one.start, sequence.blocks)], np.int16),
                )
            )
            sequences += 1
            blocks += len(sequence.table.pages)
        else:
            parts.append(PlannedWork(one, routing.rows_of(one.tokens, one.start, sequence.blocks)))
            tokens += one.count
            # Token i of the slice attends to start + i + 1 tokens. The sum over the slice has a closed form.
            pairs += one.count * (one.start + (one.count + 1) / 2)
    return StepPlan(parts, tokens, pairs, sequences, blocks)


def tokens_of_row(parts: Sequence[PlannedWork], rows: int) -> NDArray[np.int64]:
    """Count the tokens of each row: int64 [rows]."""
    if not parts:
        return np.zeros(rows, np.int64)
    return np.bincount(np.concatenate([one.rows for one in parts]), minlength=rows).astype(
        np.int64, copy=False
    )


def seconds(speed: EngineSpeed, plans: Sequence[StepPlan], caused: StepTraffic) -> NDArray[np.float64]:
    """Return the simulated seconds that each rank needs for the step, by `fleet.timing`: float64 [ranks]. The
    maximum is the duration of the step."""
    return step_seconds(
        speed,
        prefill_tokens=np.array([one.prefill_tokens for one in plans], np.float64),
        prefill_pairs=np.array([one.prefill_pairs for one in plans], np.float64),
        sequences=np.array([one.sequences for one in plans], np.float64),
        blocks=np.array([one.blocks for one in plans], np.float64),
        remote_ranks=caused.remote_ranks,
        remote_nodes=caused.remote_nodes,
        distinct_experts=caused.distinct_experts,
        surplus=float(surplus_pairs(caused.served)),
        gathered=caused.gathered,
    )
