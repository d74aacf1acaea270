"""Convert routed traces of finished requests to profiles: signatures over the tracker's clusters. Pure.

A profile covers only what this rank computed. A position from the KV cache activated no expert here, and the
rank that computed its block reported its signature. A position that was computed twice counts once. The
request's signature covers all computed tokens, prompt and completion. A block's signature covers its own
tokens only.

Several requests are processed together, because NumPy's call overhead dominates small ones. All their blocks
are rows of one table.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_adapter.engine import EndedRequest
from fleet.dispatch import own_part
from fleet.facts.activity import RequestProfile, SampledProfile
from fleet.facts.dynamo_kv import KvBlock
from fleet.placement import EMPTY, Placement
from fleet.popularity import ExpertCounts
from fleet.routings import UNKNOWN, count_pairs
from fleet.signatures import PACKED, ClusterModel, pack

CELLS = 1 << 18
"""Counters of a table that is filled at once. It fits the processor's cache, and no NumPy call takes long."""


class _Computed(NamedTuple):
    """Computed tokens of a request. The rows are all blocks from the first to the last that contain them,
    full or partial."""

    chosen: NDArray[np.int16]
    """[tokens, layers, k]."""
    rows: NDArray[np.int64]
    """[tokens], ascending."""
    first: int
    """The block of row 0."""

    @property
    def height(self) -> int:
        return int(self.rows[-1]) + 1 if len(self.rows) else 0


class _Tables(NamedTuple):
    counts: NDArray[np.int64]
    """[requests, layers, experts] (token, k) pairs."""
    packed: NDArray[np.uint8]
    """[rows, PACKED] signatures."""
    full: NDArray[np.bool_]
    """[rows]."""


def max_together(model: ClusterModel) -> int:
    """Number of requests that may be processed at once, since their counts form a table too."""
    cells: int = model.profiles[0].size
    return max(1, CELLS // cells)


def request_profiles(
    requests: Sequence[EndedRequest],
    model: ClusterModel,
    placement: Placement,
    rank: int,
    node: NDArray[np.intp],
    *,
    block_size: int,
    max_blocks: int,
    sampled: Sequence[bool],
) -> list[RequestProfile]:
    """Build the profiles of requests that ended on `rank`. Model and placement must have the shape of the
    traces. node: number of the machine of each rank.

    max_blocks: limit of the reported blocks of a request, counted from the end of the reused prefix.
    sampled: requests whose profiles carry the counts themselves. Cost for 58 layers of 256 experts, K = 32:
    about 40 ms for 8,192 tokens. For the demo model: 0.1 ms for one request, 0.05 ms for one of many.
    """
    computed = [_computed(one.routed, block_size) for one in requests]
    tables = _tables(computed, model, block_size)
    signatures = pack(model.signature(tables.counts))
    pairs = tables.counts.sum(axis=(1, 2)).tolist()
    held = placement.on_rank(rank)
    layer, slot = np.nonzero(held != EMPTY)
    near = (
        tables.counts[:, layer, held[layer, slot]]
        @ own_part(placement, node)[layer, rank * placement.slots_per_rank + slot]
    ).tolist()
    profiles: list[RequestProfile] = []
    top = 0
    for at, (one, own) in enumerate(zip(requests, computed, strict=True)):
        start, end = longest_run(tables.full[top : top + own.height])
        end = max(start, min(end, start + max_blocks, len(one.blocks) - own.first))
        before = own.first + start
        profiles.append(
            RequestProfile(
                decision=one.decision,
                tokens=len(own.rows),
                cached_tokens=len(one.routed) - len(own.rows),
                signature=signatures[at].tobytes(),
                local=min(1.0, near[at] / pairs[at]) if pairs[at] else None,
                parent=one.blocks[before - 1].block_hash if before and end > start else None,
                blocks=_hashes(one.blocks[before : own.first + end]),
                block_signatures=tables.packed[top + start : top + end].tobytes(),
                block_size=block_size,
                sample=_sample(one, tables.counts[at]) if sampled[at] else None,
            )
        )
        top += own.height
    return profiles


def longest_run(full: NDArray[np.bool_]) -> tuple[int, int]:
    """(start, end) of the longest run of True in bool [n], the first one of several. (0, 0) when there is
    none.

    There is one run, after the reused prefix, unless a preempted request found more of its prompt in the
    cache at its readmission.
    """
    count = int(np.count_nonzero(full))
    start = int(full.argmax()) if count else 0
    if full[start : start + count].all():
        return start, start + count
    runs = np.flatnonzero(np.diff(full, prepend=False, append=False)).reshape(-1, 2)
    start, end = runs[np.argmax(runs[:, 1] - runs[:, 0])].tolist()
    return start, end


def pair_counts(chosen: NDArray[np.int16], experts: int) -> NDArray[np.int64]:
    """Count the (token, k) pairs of chosen [n, layers, k], without UNKNOWN ones: int64 [layers, experts].
    Works in chunks of bounded size."""
    _, layers, top_k = chosen.shape
    counts = np.zeros((layers, experts), np.int64)
    step = max(1, CELLS // (layers * top_k))
    for at in range(0, len(chosen), step):
        counts += count_pairs(chosen[at : at + step], experts)
    return counts


def _computed(routed: NDArray[np.int16], block_size: int) -> _Computed:
    known = np.flatnonzero(routed[:, 0, 0] != UNKNOWN)
    if not len(known):
        return _Computed(routed[:0], known, 0)
    start, blocks = int(known[0]), known // block_size
    chosen = routed[start:] if len(known) == len(routed) - start else routed[known]
    return _Computed(chosen, blocks - blocks[0], start // block_size)


def _tables(computed: Sequence[_Computed], model: ClusterModel, block_size: int) -> _Tables:
    """Count and pack the signatures in chunks of as many rows as CELLS allows."""
    _, layers, experts = model.profiles.shape
    cells = layers * experts
    chosen, rows, owner = _stacked(computed)
    counts = np.zeros((len(computed), layers, experts), np.int64)
    packed = np.empty((len(owner), PACKED), np.uint8)
    step = max(1, CELLS // cells)
    layer_places = np.arange(layers) * experts
    for top in range(0, len(owner), step):
        height = min(step, len(owner) - top)
        begin, end = np.searchsorted(rows, (top, top + height)).tolist()
        places = chosen[begin:end] + ((rows[begin:end, None] - top) * cells + layer_places)[:, :, None]
        table = np.bincount(places.ravel(), minlength=height * cells).reshape(height, layers, experts)
        packed[top : top + height] = pack(model.signature(table))
        owners, firsts = np.unique(owner[top : top + height], return_index=True)
        for one, own in zip(owners.tolist(), np.split(table, firsts[1:]), strict=True):
            counts[one] += own.sum(axis=0)  # np.add.reduceat takes nine times as long over large rows.
    return _Tables(counts, packed, np.bincount(rows, minlength=len(owner)) == block_size)


def _stacked(computed: Sequence[_Computed]) -> tuple[NDArray[np.int16], NDArray[np.int64], NDArray[np.int64]]:
    """Concatenate the tokens of all requests. Return the tokens, the row of each token in one table, and the
    request of each row."""
    heights = [own.height for own in computed]
    owner = np.repeat(np.arange(len(computed)), heights)
    if len(computed) == 1:  # Possibly large, so it is not copied.
        return computed[0].chosen, computed[0].rows, owner
    tops = np.cumsum([0, *heights[:-1]])
    rows = np.concatenate([own.rows + top for own, top in zip(computed, tops.tolist(), strict=True)])
    return np.concatenate([own.chosen for own in computed]), rows, owner


def _sample(one: EndedRequest, counts: NDArray[np.int64]) -> SampledProfile:
    prompt = pair_counts(one.routed[: one.prompt_tokens], counts.shape[1])
    return SampledProfile(prompt=ExpertCounts.of(prompt), completion=ExpertCounts.of(counts - prompt))


def _hashes(blocks: Sequence[KvBlock]) -> bytes:
    return np.fromiter((block.block_hash for block in blocks), "<u8", len(blocks)).tobytes()
