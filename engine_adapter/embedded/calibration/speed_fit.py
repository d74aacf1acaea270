"""Speeds of a rank (`fleet.timing.EngineSpeed`), fitted to measured steps. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from fleet.timing import EngineSpeed

_PRICES = ("dispatch", "expert_read", "expert_pair", "gather_byte")
"""Speeds that are measured apart, too. Whole steps correct them a little only: there, each grows with the
number of tokens as other costs do."""
_TRUST = 0.1
"""Weight of such a price: twice as much as measured counts like a step that is predicted 10 % wrong."""


class StepLoad(NamedTuple):
    """Numbers of one step by which the time model prices it, of the rank with the most work. By the names of
    the speeds."""

    prefill_token: float
    """Prompt tokens."""
    prefill_pair: float
    """Pairs of a prompt token and a token that it attends to."""
    decode_sequence: float
    """Decoding sequences."""
    decode_block: float
    """Their KV blocks."""
    dispatch: float
    """Remote ranks that its tokens reach, summed over tokens and whole layers."""
    expert_read: float
    """Distinct experts that it reads, summed over layers."""
    expert_pair: float
    """Pairs of the most loaded rank of each layer above those of its own tokens."""
    gather_byte: float
    """Bytes in the exchanges of sharded layers."""


def fitted(prices: EngineSpeed, loads: Sequence[StepLoad], seconds: Sequence[float]) -> EngineSpeed:
    """Return the speed with the least squared relative errors in these steps (non-negative least squares,
    Lawson and Hanson 1974), with prices that stay near the measured ones. prices: dispatch to gather_byte."""
    names = ("step", *StepLoad._fields)
    steps = np.array([(1.0, *load) for load in loads]) / np.asarray(seconds, np.float64)[:, None]
    priors = [(name, getattr(prices, name)) for name in _PRICES if getattr(prices, name) > 0]
    rows = np.zeros((len(priors), len(names)))
    for row, (name, price) in zip(rows, priors, strict=True):
        row[names.index(name)] = _TRUST / price
    free = [name not in _PRICES or getattr(prices, name) > 0 for name in names]
    matrix: NDArray[np.float64] = np.vstack([steps, rows])[:, free]
    goal = np.concatenate([np.ones(len(steps)), np.full(len(rows), _TRUST)])
    # Columns of about equal size: the solver compares gradients with an absolute tolerance.
    scale = np.maximum(np.abs(matrix).max(axis=0), np.finfo(np.float64).tiny)
    found, _ = nnls(matrix / scale, goal)
    kept = [name for name, is_free in zip(names, free, strict=True) if is_free]
    return msgspec.structs.replace(prices, **dict(zip(kept, (found / scale).tolist(), strict=True)))
