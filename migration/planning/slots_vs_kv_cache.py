"""Weigh redundant expert slots against the KV blocks that they take. Pure.

More slots even out the ranks and bring experts nearer, which shortens every step. They take KV blocks from
every rank, and fewer blocks make requests wait longer. Both are seconds of a step here, so they can be added.

The waiting time comes from a queueing model: a rank's cache is a queue with one server for each request that
it has room for. The offered load is a = the requests that would run if none waited (Little 1961); there is
room for c of them. The blocks in use vary with variance a * b^2 * (1 + v): Poisson arrivals of requests of b
blocks, with squared coefficient of variation v. The free room is beta standard deviations of that. A request
finds no room with probability 1 / (1 + beta * Phi(beta) / phi(beta)) (Halfin and Whitt 1981, "Heavy-traffic
limits for queues with many exponential servers", theorem 1). It then waits (1 + v) / 2 / (c - a) times as
long as it will run (Allen and Cunneen's correction, exact for v = 1). A request that runs for n steps and
waits for w seconds has waited w / n per step.
"""

from collections.abc import Sequence
from math import erfc, exp, inf, isfinite, pi, sqrt
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.placement import Placement
from migration.model.cost_model import CostTerms, Figures, figures
from migration.solvers.full_placement import full_placement


class KvCacheModel(msgspec.Struct, frozen=True, kw_only=True):
    """KV cache of an engine, mean over its ranks. ValueError names the value out of range."""

    blocks: float
    """Blocks of a rank."""
    block_bytes: int
    used: float
    """Blocks in use."""
    requests: float
    """Requests that run, and those that wait for room."""
    variation: float = 1.0
    """Squared coefficient of variation of the blocks that a request takes."""

    def __post_init__(self) -> None:
        for name in ("blocks", "used", "requests", "variation"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"cache: {name} must be finite and not negative, not {getattr(self, name)}")
        if self.block_bytes < 1:
            raise ValueError(
                f"cache: block_bytes must be at least 1, not {self.block_bytes}; without it slots cannot be"
                " weighed against blocks"
            )


class TradeOffPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Expected costs with a given number of slots per rank and layer."""

    slots_per_rank: int
    bytes_per_rank: int
    """Of redundant slots' weights, over all layers."""
    kv_blocks: int
    """Blocks left per rank."""
    figures: Figures
    """Of a placement made for these slots."""
    step_seconds: float
    waiting_seconds: float | None
    """Seconds per step that requests wait for KV blocks; None: more requests arrive than the cache can ever
    serve."""
    total_seconds: float | None


def waiting_seconds(cache: KvCacheModel, blocks: float, step_seconds: float, growth: float = 1.0) -> float:
    """Return seconds per step that requests wait for KV blocks with `blocks` per rank; inf beyond the cache's
    capacity.

    growth: running time of requests as a multiple of the present one, as steps take longer. The number of
    concurrent requests grows by the same factor.
    """
    offered, used = cache.requests * growth, cache.used * growth
    if not used or not offered:
        return 0.0
    if blocks <= used:
        return inf
    beta = (blocks - used) / (used * sqrt((1.0 + cache.variation) / offered))
    if beta > _FAR:
        return 0.0
    finds_none = 1.0 / (
        1.0 + beta * (1.0 - 0.5 * erfc(beta / sqrt(2.0))) * sqrt(2.0 * pi) * exp(0.5 * beta * beta)
    )
    room = offered * (blocks / used - 1.0)
    return step_seconds * finds_none * 0.5 * (1.0 + cache.variation) / room


_FAR = 30.0
"""Standard deviations of free room beyond which no request waits. The normal density is still representable
there."""


def memory_seconds(cache: KvCacheModel, redundant_bytes: float, step_seconds: float) -> float:
    """Return the waiting that replicas cause by taking cache memory, in seconds of a step, for `figures`.

    redundant_bytes: of replicas, on a rank. Both waiting times are limited to one step: a request waits at
    most as long as it runs, and beyond capacity the model has no answer.
    """
    with_them, without = (
        waiting_seconds(cache, blocks, step_seconds)
        for blocks in (cache.blocks, cache.blocks + redundant_bytes / cache.block_bytes)
    )
    return max(min(with_them, step_seconds) - min(without, step_seconds), 0.0)


def curve(
    demand: NDArray[Any],
    terms: CostTerms,
    cache: KvCacheModel,
    slots: Sequence[int],
    *,
    present: int,
    expert_bytes: int,
    sharded: int = 0,
) -> tuple[TradeOffPoint, ...]:
    """Return the expected costs for each number of slots per rank and layer, with a full placement into them.

    demand: [ranks, layers, experts], as for `figures`. present: current slots per rank and layer, for which
    the cache has `cache.blocks`. expert_bytes: of one expert of one layer. sharded: layers beside those of
    the demand, whose slots take as much memory, since they may become whole again. Numbers that leave no KV
    block, or have no room for all experts, are left out; more slots than experts are of no use. The step time
    follows from the engine's speeds at the present load, so a shorter step also empties the cache.
    """
    ranks, layers, experts = demand.shape
    load, fewest = demand.sum(axis=0, dtype=np.float64), -(-experts // ranks)
    slot_bytes = (layers + sharded) * expert_bytes
    slot_blocks = slot_bytes / cache.block_bytes
    numbers = sorted({number for number in slots if fewest <= number <= experts} | {min(present, experts)})
    made = {
        number: figures(
            Placement(full_placement(load, ranks, number, node=terms.node), experts=experts, ranks=ranks),
            demand,
            terms,
        )
        for number in numbers
    }
    lasts = {number: terms.step_seconds(found.seconds, layers, cache.used) for number, found in made.items()}
    points = []
    for number in numbers:
        blocks = cache.blocks - (number - present) * slot_blocks
        if blocks >= 1 and (number in slots or number == present):
            waits = waiting_seconds(
                cache, blocks, lasts[number], lasts[number] / lasts[min(present, experts)]
            )
            points.append(
                _point(
                    number,
                    blocks,
                    made[number],
                    lasts[number],
                    waits,
                    (number - fewest) * slot_bytes,
                )
            )
    return tuple(points)


def best(points: Sequence[TradeOffPoint], within: float = 0.0) -> TradeOffPoint | None:
    """Return the point of fewest slots whose seconds exceed the least by at most this share.

    None where the cache cannot serve the arriving requests at any of the points.
    """
    served = [(point.total_seconds, point) for point in points if point.total_seconds is not None]
    least = min((seconds for seconds, _ in served), default=0.0)
    near = [point for seconds, point in served if seconds <= least * (1.0 + within)]
    return min(near, key=lambda point: point.slots_per_rank, default=None)


def _point(
    number: int, blocks: float, found: Figures, step: float, waits: float, taken: int
) -> TradeOffPoint:
    waiting = waits if isfinite(waits) else None
    return TradeOffPoint(
        slots_per_rank=number,
        bytes_per_rank=taken,
        kv_blocks=int(blocks),
        figures=found,
        step_seconds=step,
        waiting_seconds=waiting,
        total_seconds=None if waiting is None else step + waiting,
    )
