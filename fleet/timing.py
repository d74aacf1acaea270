"""Time model: the cost of work on a rank, in seconds. Cost functions and speed reports share this one model.

All functions are vectorised over candidates: array arguments have shape [candidates] unless a docstring
states otherwise. Costs are expected added seconds, for the request itself and for the requests that it
delays.
"""

from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.arrays import FloatArray
from fleet.dispatch import LocalReplicas, onward, own_part
from fleet.experts import ModelShape
from fleet.placement import EMPTY, FULL, Placement

_CELLS = 1 << 21
"""Limit of numbers processed at once."""
_ZERO, _ONE = np.zeros(()), np.ones(())
"""Zero and one as arrays: numpy would convert Python's numbers on every call, which takes twice as long."""
Amounts = NDArray[np.float64] | NDArray[np.int64]
Seconds = TypeVar("Seconds", float, FloatArray)
"""Seconds of one rank, or of all candidates."""
MAX_SECONDS = 1e6
"""Upper limit of every duration, so that sums stay far from infinity."""
_SURE = 1.0 - 1e-9
"""Highest probability whose complement has a finite logarithm."""


class EngineSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Measured speeds of one rank, in seconds. An engine reports its own. The defaults are those of a small
    CPU engine.
    """

    prefill_token: float = 2e-4
    """per uncached prompt token"""
    prefill_pair: float = 0.0
    """per pair of a computed prompt token and a token it attends to: the quadratic part of attention"""
    step: float = 3e-3
    """fixed part of a decode step"""
    decode_sequence: float = 2e-4
    """per running sequence, added to each step"""
    decode_block: float = 2e-6
    """per KV block in use, added to each step (reading the cache)"""
    dispatch: float = 2e-6
    """per (token, layer, distinct remote rank): sending a token's activations there and back"""
    dispatch_node: float = 0.0
    """per (token, layer, distinct remote node), in addition: the slower link between machines"""
    expert_read: float = 0.0
    """per step and distinct expert of one layer that a rank's batch activates: reading the expert's weights.
    Relevant for small batches
    """
    expert_pair: float = 0.0
    """per (token, expert) pair of one layer, on the rank that serves it: time that a layer loses per pair of
    its most loaded rank above the mean. Up to the mean load this cost is already part of `prefill_token` and
    `decode_sequence`
    """
    gather_byte: float = 1e-9
    """per byte that a rank moves in the all-gathers and reduce-scatters of sharded layers (`gathered_bytes`).
    An engine on several machines states the speed of its slowest link
    """

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not 0 <= value <= MAX_SECONDS:
                raise ValueError(
                    f"engine speed: {name} must be finite seconds >= 0 (and at most {MAX_SECONDS:g}), not"
                    f" {value}"
                )


class RearrangeSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Time that an engine takes to move its experts itself (`EngineJoined.rearranges`). It serves nothing
    meanwhile. The defaults were measured with vLLM 0.32 and gloo between two CPU processes; a network of GPUs
    is faster, and its engine should state or report its own.
    """

    layer: float = 2e-3
    """seconds per layer in which any rank receives an expert from another, whatever the number of experts"""
    byte: float = 2.7e-9
    """seconds per byte that the busiest rank of such a layer receives"""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not 0 <= value <= MAX_SECONDS:
                raise ValueError(
                    f"rearrange speed: {name} must be finite seconds >= 0 (and at most {MAX_SECONDS:g}), not"
                    f" {value}"
                )


def prefill_seconds(
    token_s: Seconds, pair_s: Seconds | None, uncached_tokens: Any, prompt_tokens: Any
) -> Seconds:
    """Time to compute the last u tokens of a prompt of N whose first N - u are cached: token_s * u + pair_s *
    (u * N - u^2 / 2).

    A token attends to all tokens before it, cached or not. So u tokens make u * N - u^2 / 2 pairs; the pair
    of a token with itself counts half. pair_s None: pairs cost nothing.
    """
    each = token_s if pair_s is None else token_s + pair_s * (prompt_tokens - 0.5 * uncached_tokens)
    seconds: Seconds = uncached_tokens * each
    return seconds


def queue_seconds(token_s: Seconds, queued_prefill_tokens: Any) -> Seconds:
    """Time until the outstanding prefill of a rank is done. Attention is left out: the lengths of its prompts
    are not known.
    """
    seconds: Seconds = token_s * queued_prefill_tokens
    return seconds


def running_seconds(
    sequence_s: FloatArray,
    block_s: FloatArray,
    running: Amounts,
    blocks: Amounts,
    steps_left: Amounts,
    output_tokens: float | Amounts,
) -> FloatArray:
    """Time that the n sequences of a rank add to the next O steps: min(O * n, S) * (sequence_s + block_s *
    blocks / n).

    blocks: KV blocks they hold. steps_left: total tokens S that they are still expected to emit. A rank whose
    sequences are nearly done therefore adds less than one whose sequences have just begun. 0 if nothing runs.
    """
    seconds: FloatArray = np.minimum(output_tokens * running, steps_left) * (
        sequence_s + block_s * (blocks / np.maximum(running, _ONE))
    )
    return seconds


def decode_step_seconds(
    step_s: Seconds, sequence_s: Seconds, block_s: Seconds, sequences: Any, blocks: Any
) -> Seconds:
    """Duration of one decode step of a rank: step_s + sequence_s * sequences + block_s * blocks.

    blocks: KV blocks that the sequences hold.
    """
    seconds: Seconds = step_s + sequence_s * sequences + block_s * blocks
    return seconds


def own_seconds(
    sequence_s: FloatArray, token_block_s: FloatArray, tokens: float | Amounts, output_tokens: float | Amounts
) -> FloatArray:
    """Time that a request itself adds to O steps of its rank: O * (sequence_s + token_block_s * tokens).

    tokens: in its KV cache at the end. token_block_s: `decode_block` divided by the tokens of a block.
    """
    seconds: FloatArray = output_tokens * (sequence_s + token_block_s * tokens)
    return seconds


def lockstep_seconds(work: FloatArray, longest: FloatArray) -> FloatArray:
    """Time lost because the ranks of an engine step in lockstep: a step is as slow as its slowest rank.

    work: [2, ranks, ...]. Row 0: outstanding prefill of each rank, plus the request's prefill. Row 1: time
    that the running sequences add to the request's steps, plus time that the request adds to theirs. longest:
    the engine's maximum of both rows without the request, of a shape that broadcasts to `work`. The result is
    the sum of two terms. The first is max(0, prefill - the engine's longest), where anything runs: the
    request extends its engine's longest prefill by this time for all that wait (it is free beside a busier
    rank). The second is max(0, the engine's longest - steps): slower ranks extend the request's steps by this
    time.
    """
    ahead = work - longest
    seconds: FloatArray = np.maximum(ahead[0], _ZERO) * (longest[1] > _ZERO) - np.minimum(ahead[1], _ZERO)
    return seconds


def dispatch_seconds(
    dispatch_s: FloatArray,
    node_s: FloatArray | None,
    tokens: Amounts,
    remote_ranks: FloatArray,
    remote_nodes: FloatArray,
) -> FloatArray:
    """Time to send `tokens` to the experts of other ranks and back.

    remote_ranks, remote_nodes: distinct destinations per token, summed over layers. A dispatch sends one copy
    per destination rank, regardless of the number of the token's experts there, and one per node over the
    slower link. node_s None: other nodes add no cost.
    """
    each = dispatch_s * remote_ranks if node_s is None else dispatch_s * remote_ranks + node_s * remote_nodes
    seconds: FloatArray = tokens * each
    return seconds


def distinct_seconds(
    read_s: FloatArray, added_experts: NDArray[np.float64], output_tokens: float
) -> FloatArray:
    """Additional time of O steps for reading experts that no other request in the batch uses: O * read_s *
    added_experts.

    added_experts: of the whole engine, per step, summed over layers. read_s: of one expert, divided by the
    number of ranks that read at once.
    """
    return output_tokens * (read_s * added_experts)


def gathered_bytes(shape: ModelShape, ranks: int, sharded: int) -> float:
    """Return the bytes that every rank of an engine moves for one token of any rank, in `sharded` layers.

    Each rank computes its part of the experts of all tokens. An all-gather brings it the hidden states of the
    others' tokens, and a reduce-scatter takes its sums to them: (ranks - 1) / ranks of a token's bytes each.
    """
    return 2.0 * sharded * shape.token_bytes * (ranks - 1) / ranks


def expected_remote(
    profile: NDArray[Any], placement: Placement, top_k: int, node: NDArray[np.intp]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the expected numbers of distinct remote ranks and of distinct remote nodes that a token reaches,
    per home rank.

    Result: float64 [..., ranks] each, summed over whole layers. profile: [..., layers, experts], probability
    of an expert per routed pair. node: int [ranks], numbers from 0.
    Replicas serve by the rule of `fleet.dispatch`; tokens served on another rank of their node cross no
    machine. A token's k experts are treated as independent draws, so a rank or node of mass m is reached with
    probability 1 - (1 - m)^k.
    """
    ranks = placement.ranks
    demand = np.asarray(profile, np.float64).reshape(-1, placement.layers, placement.experts)
    member = (node[:, None] == np.arange(int(node.max()) + 1)).astype(np.float64)
    masses, everyone = _Masses(placement, node), np.arange(ranks)
    found = np.zeros((2, ranks, len(demand)))
    for layer in placement.whole.tolist():
        for homes, away in masses.of(demand[:, layer], layer):
            found[0][homes] += _elsewhere(_reached(away, top_k), everyone[homes])
            if member.shape[1] > 1:
                found[1][homes] += _elsewhere(_reached(away @ member, top_k), node[homes])
    remote_ranks, remote_nodes = found.transpose(0, 2, 1).reshape(2, *profile.shape[:-2], ranks)
    return remote_ranks, remote_nodes


class _Masses:
    """Probability mass that ranks send to each rank, for given profiles."""

    def __init__(self, placement: Placement, node: NDArray[np.intp]) -> None:
        self._held = LocalReplicas.of(placement)
        self._ranks = placement.ranks
        self._onward = onward(placement, node)
        self._which = np.minimum(node, len(self._onward) - 1)
        self._keep = placement.split.keep / FULL
        filled: list[int] = (placement.expert_of_slot != EMPTY).sum(axis=1).tolist()
        self._replicated = [slots > placement.experts for slots in filled]

    def of(self, demand: NDArray[np.float64], layer: int) -> Iterator[tuple[slice, NDArray[np.float64]]]:
        """Yield groups of home ranks with the mass that each sends to each rank: [homes, n, ranks]. demand:
        [n, experts].

        Without replicas the shape is [1, n, ranks], since the mass that a home sends to itself is not needed.
        """
        if not self._replicated[layer]:
            yield slice(0, self._ranks), (demand @ self._held.by_rank(self._onward[0, layer], layer).T)[None]
            return
        by_expert = np.stack([self._held.by_rank(part[layer], layer).T for part in self._onward])
        sent = demand @ by_expert  # [nodes, n, ranks], if no rank kept anything
        expert, keep = (one[layer].reshape(self._ranks, -1) for one in (self._held.expert, self._keep))
        demand_by = np.ascontiguousarray(demand.T)
        step = max(1, _CELLS // (len(demand) * self._ranks))
        for start in range(0, self._ranks, step):
            homes = slice(start, min(start + step, self._ranks))
            which = self._which[homes]
            kept = (demand_by[expert[homes]] * keep[homes, :, None]).transpose(
                0, 2, 1
            )  # [homes, n, slots of a rank]
            yield homes, sent[which] - kept @ by_expert[which[:, None], expert[homes]]


def _elsewhere(reached: NDArray[np.float64], own: NDArray[np.intp]) -> NDArray[np.float64]:
    """Sum [homes or 1, n, places] over all places except each home's own: [homes, n]."""
    at = np.arange(len(own)) if len(reached) > 1 else 0
    return np.asarray(reached.sum(axis=2) - reached[at, :, own])


def _reached(mass: NDArray[np.float64], top_k: int) -> NDArray[np.float64]:
    """Return 1 - (1 - mass)^k, by repeated squaring: k is small, and numpy's own power takes ten times as
    long.
    """
    square, power = 1.0 - mass.clip(0.0, 1.0), np.ones(1)
    while top_k:
        if top_k & 1:
            power = power * square
        top_k >>= 1
        if top_k:
            square = square * square
    return np.asarray(1.0 - power)


def expected_local_share(
    profile: NDArray[Any], placement: Placement, node: NDArray[np.intp]
) -> NDArray[np.float64]:
    """Return the expected share of routed pairs that the home rank serves itself, mean over whole layers:
    float64 [..., ranks].

    Arguments as in `expected_remote`. ValueError if no layer is whole.
    """
    if not len(placement.whole):
        raise ValueError(f"local share: {placement!r} has no layer of whole experts")
    layers, experts = placement.layers, placement.experts
    demand = np.asarray(profile, np.float64).reshape(-1, layers, experts)
    held, own = LocalReplicas.of(placement), own_part(placement, node)
    local = np.zeros((len(demand), placement.ranks))
    for layer in placement.whole.tolist():
        local += demand[:, layer] @ held.by_rank(own[layer], layer).T
    return local.reshape(*profile.shape[:-2], placement.ranks) / len(placement.whole)


def surplus_pairs(served: NDArray[Any]) -> NDArray[np.float64]:
    """Return the pairs of the most loaded rank above the mean, summed over layers: float64 [...] of [...,
    layers, ranks].

    The whole engine waits for these pairs in each step.
    """
    return np.asarray((served.max(axis=-1) - served.mean(axis=-1)).sum(axis=-1), np.float64)


def log_misses(profiles: NDArray[Any], top_k: int) -> NDArray[np.float32]:
    """Return the logarithm of the probability that a token of a profile does not go to an expert: k * log(1 -
    p).

    float32 [..., layers * experts] of profiles [..., layers, experts]. The k experts are treated as
    independent draws. `expected_distinct_experts` takes profiles in this form.
    """
    likely = np.clip(np.asarray(profiles, np.float64), 0.0, _SURE).reshape(*profiles.shape[:-2], -1)
    return np.asarray(top_k * np.log1p(-likely), np.float32)


def expected_distinct_experts(misses: NDArray[np.float32], tokens: NDArray[Any]) -> NDArray[np.float64]:
    """Return the expected number of distinct experts that a step activates, summed over layers: float64
    [...].

    tokens: [..., C], of each of C profiles. misses: float32 [C, layers * experts], from `log_misses`. No
    token of the step activates an expert with probability prod_c (1 - hit_c)^n_c.
    """
    return np.asarray(-np.expm1(np.asarray(tokens, np.float32) @ misses).sum(axis=-1, dtype=np.float64))


def added_distinct_experts(misses: NDArray[np.float32], tokens: NDArray[Any]) -> NDArray[np.float64]:
    """Return the expected number of distinct experts that one more token of each profile adds to that step:
    float64 [..., C].

    It is the sum of hit_c * prod (1 - hit)^n over experts.
    """
    return np.asarray(np.exp(np.asarray(tokens, np.float32) @ misses) @ -np.expm1(misses).T, np.float64)


def step_seconds(
    speed: EngineSpeed,
    *,
    prefill_tokens: NDArray[Any],
    prefill_pairs: NDArray[Any],
    sequences: NDArray[Any],
    blocks: NDArray[Any],
    remote_ranks: NDArray[Any],
    remote_nodes: NDArray[Any],
    distinct_experts: NDArray[Any],
    surplus: float | FloatArray,
    gathered: float = 0.0,
) -> FloatArray:
    """Return the duration of one step on each rank of an engine. The engine's step takes as long as the
    longest of them.

    Every argument but the last two is [ranks]. prefill_pairs: pairs of a computed prompt token and a token it
    attends to. sequences: in decode; blocks: KV blocks they hold. remote_ranks, remote_nodes: distinct
    destinations, summed over the rank's tokens and layers. distinct_experts: to read. surplus:
    `surplus_pairs` of the engine, where all ranks have about as many tokens: all wait for the most loaded
    rank of each layer. Otherwise [ranks], the pairs of that rank above those of each rank's own tokens: below
    0 for a rank whose tokens others compute.
    gathered: `gathered_bytes` of the engine's tokens, the same for all ranks.
    """
    prefill = speed.prefill_token * prefill_tokens + speed.prefill_pair * prefill_pairs
    decode = decode_step_seconds(speed.step, speed.decode_sequence, speed.decode_block, sequences, blocks)
    experts = (
        speed.dispatch * remote_ranks
        + speed.dispatch_node * remote_nodes
        + speed.expert_read * distinct_experts
        + speed.expert_pair * surplus
        + speed.gather_byte * gathered
    )
    return np.asarray(prefill + decode + experts, np.float64)
