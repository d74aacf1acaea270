"""Measured costs of parts of a step: of experts, and of what ranks send each other."""

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine_adapter.embedded.checkpoint import RUN_DTYPES
from engine_adapter.embedded.dispatch import GROUP_ROWS, Dispatch, Sending
from engine_adapter.embedded.moe import SparseBlock
from fleet.experts import ModelShape
from fleet.placement import Placement, linear
from fleet.timing import gathered_bytes

_READING_SECONDS = 0.4
"""Time after which reads are no longer repeated, if they were measured `_FEWEST` times."""
_FEWEST = 3
_FEW_PAIRS, _MANY_PAIRS = 16, 144
"""Rows of one expert in the two calls that are compared to measure the cost per row."""


def pair_seconds(block: SparseBlock, shape: ModelShape, slots: int) -> float:
    """Cost of one more row for an expert that already has rows: the load of a pair that other ranks do not
    have. slots: of a rank and layer."""

    def compute(rows: int) -> None:
        block.compute(_zeros(rows, shape), torch.full((slots,), rows, dtype=torch.int32))

    return _more_seconds(lambda: compute(_FEW_PAIRS), lambda: compute(_MANY_PAIRS), 25) / (
        _MANY_PAIRS - _FEW_PAIRS
    )


def read_seconds(blocks: Sequence[SparseBlock], shape: ModelShape, slots: int) -> float:
    """Cost of one more distinct expert in a step's batch: the same rows, spread over all slots of a layer
    instead of one slot. slots: whole experts of a rank, or parts of experts.

    Layers alternate, so that weights come from memory as in a real step and not from the nearest cache.
    """
    if slots < 2:
        return 0.0
    rows = _zeros(slots * GROUP_ROWS, shape)
    spread = torch.arange(1, slots + 1, dtype=torch.int32) * GROUP_ROWS
    single = torch.full((slots,), slots * GROUP_ROWS, dtype=torch.int32)

    def every_layer(ends: torch.Tensor) -> None:
        for block in blocks:
            block.compute(rows, ends)

    seconds = _more_seconds(lambda: every_layer(single), lambda: every_layer(spread), 15, _READING_SECONDS)
    return seconds / ((slots - 1) * len(blocks))


def dispatch_seconds(
    dispatch: Dispatch, placement: Placement, served: Sending, shape: ModelShape, rank: int, tokens: int
) -> float:
    """Cost per token, layer and remote rank of sending a token there and back, compared to a local dispatch.
    All ranks call it together. served: what the dispatch uses now.

    Measured with a full step of tokens, because the fixed cost of a collective hides the cost of a few
    tokens.
    """
    if placement.ranks == 1:
        return 0.0
    # As if every layer were whole and experts were in order: of sharded layers nothing is dispatched.
    in_order = linear(
        layers=placement.layers,
        experts=placement.experts,
        ranks=placement.ranks,
        slots_per_rank=placement.slots_per_rank,
    )
    here = in_order.replicas_on_rank[0, rank].astype(bool)
    own, away = np.flatnonzero(here), np.flatnonzero(~here)
    x = _zeros(tokens, shape)

    def there_and_back(candidates: NDArray[np.int64]) -> None:
        experts = np.resize(candidates, (tokens, shape.top_k))
        weights = torch.ones((tokens, shape.top_k))
        dispatch.begin_step(tokens, [tokens] * placement.ranks)
        sent = dispatch.dispatch(0, x, experts)
        dispatch.combine(sent.rows, weights, sent.handle)

    dispatch.adopt(dispatch.sending(in_order))
    try:
        seconds = _more_seconds(lambda: there_and_back(own), lambda: there_and_back(away), 25)
    finally:
        dispatch.adopt(served)
    return seconds / (tokens * min(placement.ranks - 1, shape.top_k))


def gather_byte_seconds(dispatch: Dispatch, shape: ModelShape, ranks: int, most: int) -> float:
    """Cost of one more byte that a rank moves in the collectives of a sharded layer
    (`fleet.timing.gathered_bytes`). Their fixed cost is about that of a whole layer's. All ranks call it
    together. most: tokens of one rank in the larger step that is measured."""
    few = max(1, most // 16)
    if ranks == 1 or few == most:
        return 0.0

    def gather_and_reduce(tokens: int) -> None:
        # One expert per token, so that sorting the rows costs little.
        dispatch.begin_step(tokens, [tokens] * ranks)
        gathered = dispatch.gather(
            _zeros(tokens, shape), np.zeros((tokens, 1), np.int64), torch.ones((tokens, 1))
        )
        dispatch.reduce(gathered.rows, gathered.handle)

    seconds = _more_seconds(lambda: gather_and_reduce(few), lambda: gather_and_reduce(most), 25)
    return seconds / (gathered_bytes(shape, ranks, 1) * ranks * (most - few))


def fastest_seconds(call: Callable[[], object], times: int) -> float:
    """Minimum wall-clock seconds of several calls. Engines start together, and load at the start must not be
    mistaken for a slow machine."""
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return min(taken)


def _more_seconds(
    less: Callable[[], object], more: Callable[[], object], times: int, longest: float = math.inf
) -> float:
    """Difference between the minimum durations of two calls, measured in turn, so that load that arises
    meanwhile slows both. longest: seconds after which `_FEWEST` times are enough. Only for calls that need no
    other rank, since the ranks' clocks differ."""
    pairs: list[tuple[float, float]] = []
    began = time.perf_counter()
    while len(pairs) < times and (len(pairs) < _FEWEST or time.perf_counter() - began < longest):
        pairs.append((fastest_seconds(less, 1), fastest_seconds(more, 1)))
    return max(0.0, min(slow for _, slow in pairs) - min(fast for fast, _ in pairs))


def _zeros(rows: int, shape: ModelShape) -> torch.Tensor:
    """Hidden states [rows, H] as the model computes them."""
    return torch.zeros((rows, shape.hidden), dtype=RUN_DTYPES[shape.dtype])
