"""From a request's routed trace to what is said of it on the bus: signatures over the tracker's clusters. Pure.

What is reported is what this rank computed, no more. A position that the KV cache had activated nothing here; its block's signature was
reported by whoever computed it. A position that was computed twice counts once. The request's signature is that of all computed
tokens, prompt and completion; a block's is that of its own tokens alone.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_adapter.engine import EndedRequest
from fleet.events import KvBlock, RequestProfile, SampledProfile
from fleet.placement import Placement
from fleet.popularity import ExpertCounts
from fleet.routings import UNKNOWN, count_pairs
from fleet.signatures import ClusterModel, pack

CELLS = 1 << 18
"""Counters of a table that is filled at once: it fits the processor's cache, and no call of numpy is long."""


def request_profile(
    ended: EndedRequest, model: ClusterModel, placement: Placement, rank: int, *, block_size: int, most_blocks: int, sampled: bool = False
) -> RequestProfile:
    """What `rank` says of a request that it ended. Model and placement must be of the shape of the trace.

    most_blocks: blocks reported at most, the first ones behind the reused prefix. sampled: carry the counts themselves.
    58 layers of 256 experts, K = 32: some 50 ms for 8,192 tokens; the demo model: a quarter of a millisecond.
    """
    routed, known = ended.routed, ended.routed[:, 0, 0] != UNKNOWN
    experts = placement.experts
    prompt = pair_counts(routed[: ended.prompt_tokens][known[: ended.prompt_tokens]], experts)
    completion = pair_counts(routed[ended.prompt_tokens :][known[ended.prompt_tokens :]], experts)
    counts = prompt + completion
    first, end = computed_blocks(known, block_size)
    end = min(end, len(ended.blocks), first + most_blocks)
    tokens = int(np.count_nonzero(known))
    return RequestProfile(
        decision=ended.decision,
        tokens=tokens,
        cached_tokens=len(known) - tokens,
        signature=pack(model.signature(counts)).tobytes(),
        local=local_share(counts, placement, rank),
        parent=ended.blocks[first - 1].block_hash if 0 < first < end else None,
        blocks=_hashes(ended.blocks[first:end]),
        block_signatures=block_signatures(routed[first * block_size : end * block_size], model, block_size).tobytes(),
        block_size=block_size,
        sample=SampledProfile(prompt=ExpertCounts.of(prompt), completion=ExpertCounts.of(completion)) if sampled else None,
    )


def pair_counts(chosen: NDArray[np.int16], experts: int) -> NDArray[np.int64]:
    """int64 [layers, experts]: (token, k) pairs of chosen [n, layers, k], all known."""
    _, layers, top_k = chosen.shape
    counts = np.zeros((layers, experts), np.int64)
    step = max(1, CELLS // (layers * top_k))
    for at in range(0, len(chosen), step):
        counts += count_pairs(chosen[at : at + step], experts)
    return counts


def computed_blocks(known: NDArray[np.bool_], block_size: int) -> tuple[int, int]:
    """(first, end) of the longest run of full blocks all of whose positions are known: bool [positions]; (0, 0) when there is none.

    There is one run, behind the prefix that was reused, unless a preempted request found more of its prompt in the cache when it came back.
    """
    full = known[: len(known) // block_size * block_size].reshape(-1, block_size).all(axis=1)
    edges = np.flatnonzero(np.diff(full, prepend=False, append=False))
    if not len(edges):
        return 0, 0
    runs = edges.reshape(-1, 2)
    first, end = runs[np.argmax(runs[:, 1] - runs[:, 0])].tolist()
    return first, end


def block_signatures(chosen: NDArray[np.int16], model: ClusterModel, block_size: int) -> NDArray[np.uint8]:
    """uint8 [blocks, PACKED]: packed signatures of chosen [blocks * block_size, layers, k], all known, each of its own block."""
    _, layers, top_k = chosen.shape
    experts = model.profiles.shape[2]
    cells = layers * experts
    blocks = chosen.reshape(-1, block_size, layers, top_k)
    step = max(1, CELLS // cells)
    offsets = np.arange(step)[:, None, None, None] * cells + np.arange(layers)[:, None] * experts
    parts = [pack(_signatures(blocks[at : at + step], offsets, model)) for at in range(0, len(blocks), step)]
    return np.concatenate(parts) if parts else pack(np.empty((0, model.clusters)))


def _signatures(blocks: NDArray[np.int16], offsets: NDArray[np.int64], model: ClusterModel) -> NDArray[np.float32]:
    _, layers, experts = model.profiles.shape
    places = blocks + offsets[: len(blocks)]
    counts = np.bincount(places.ravel(), minlength=len(blocks) * layers * experts)
    return model.signature(counts.reshape(len(blocks), layers, experts))


def local_share(counts: NDArray[Any], placement: Placement, rank: int) -> float | None:
    """Share of the (token, k) pairs in counts [layers, experts] whose expert has a replica on the rank; None without any."""
    pairs = int(counts.sum())
    return int(counts[placement.replicas_on_rank[:, rank] > 0].sum()) / pairs if pairs else None


def _hashes(blocks: Sequence[KvBlock]) -> bytes:
    return np.fromiter((block.block_hash for block in blocks), "<u8", len(blocks)).tobytes()
