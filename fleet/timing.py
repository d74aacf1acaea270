"""The time model: what work costs on a rank, in seconds. One model, used by whoever prices and by whoever reports speeds.

Everything is vectorised over candidates: array arguments have shape [candidates] unless a docstring says otherwise. Prices are expected
added seconds: of the request, and of those it makes wait.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.dispatch import LocalReplicas, onward, own_part
from fleet.placement import EMPTY, FULL, Placement

Seconds = NDArray[np.float64]
_CELLS = 1 << 21
"""Numbers that are worked on at once."""
_ZERO, _ONE = np.zeros(()), np.ones(())
"""As arrays: numpy takes half as long as to make them of Python's numbers."""
Amounts = NDArray[np.float64] | NDArray[np.int64]
MOST_SECONDS = 1e6
"""Nothing that is taken seriously takes longer; sums of it stay far from infinity."""
_SURE = 1.0 - 1e-9
"""A probability no larger than this has a finite logarithm of its complement."""


class EngineSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Measured speeds of one rank, in seconds. An engine reports its own; the defaults are a small CPU engine's."""

    prefill_token: float = 2e-4
    """per uncached prompt token"""
    prefill_pair: float = 0.0
    """added per pair of a computed prompt token and a token it attends to: the quadratic part of attention"""
    step: float = 3e-3
    """fixed part of a decode step"""
    decode_sequence: float = 2e-4
    """added to a step by each running sequence"""
    decode_block: float = 2e-6
    """added to a step by each KV block in use (reading the cache)"""
    dispatch: float = 2e-6
    """per (token, layer, distinct remote rank): sending a token's activations there and back"""
    dispatch_node: float = 0.0
    """added per (token, layer, distinct remote node): the slower link between machines"""
    expert_read: float = 0.0
    """per step and distinct expert of one layer that a rank's batch activates: reading its weights; it matters while batches are small"""
    expert_pair: float = 0.0
    """of one (token, expert) pair of one layer, on the rank that serves it: what a layer loses per pair that its fullest rank has above the mean. It
    is part of `prefill_token` and `decode_sequence` already, as far as ranks are equally loaded"""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not 0 <= value <= MOST_SECONDS:
                raise ValueError(f"engine speed: {name} must be finite seconds >= 0 (and at most {MOST_SECONDS:g}), not {value}")


def prefill_seconds(token_s: Seconds, pair_s: Seconds | None, uncached_tokens: Amounts, prompt_tokens: float | Amounts) -> Seconds:
    """Time to compute the u last tokens of a prompt of N whose first N - u are cached: token_s * u + pair_s * (u * N - u^2 / 2).

    A token attends to all before it, cached or not: u tokens make u * N - u^2 / 2 pairs, half a pair each of a token with itself.
    pair_s None: pairs cost nothing.
    """
    each = token_s if pair_s is None else token_s + pair_s * (prompt_tokens - 0.5 * uncached_tokens)
    seconds: Seconds = uncached_tokens * each
    return seconds


def queue_seconds(token_s: Seconds, queued_prefill_tokens: Amounts) -> Seconds:
    """Time until the prefill already promised to a rank is done, each token at its price without attention: its prompts are not known apart."""
    seconds: Seconds = token_s * queued_prefill_tokens
    return seconds


def running_seconds(sequence_s: Seconds, block_s: Seconds, running: Amounts, blocks: Amounts, steps_left: Amounts, output_tokens: float | Amounts) -> Seconds:
    """Time that the n sequences of a rank add to the next O steps: min(O * n, S) * (sequence_s + block_s * blocks / n).

    blocks: KV blocks they hold. steps_left: tokens S they are expected to emit yet, all together: a rank whose sequences are nearly
    done adds less than one whose sequences have just begun. 0 where nothing runs.
    """
    seconds: Seconds = np.minimum(output_tokens * running, steps_left) * (sequence_s + block_s * (blocks / np.maximum(running, _ONE)))
    return seconds


def own_seconds(sequence_s: Seconds, token_block_s: Seconds, tokens: float | Amounts, output_tokens: float | Amounts) -> Seconds:
    """Time that a request itself adds to O steps of its rank: O * (sequence_s + token_block_s * tokens).

    tokens: what its cache holds in the end. token_block_s: `decode_block` divided by the tokens of a block.
    """
    seconds: Seconds = output_tokens * (sequence_s + token_block_s * tokens)
    return seconds


def lockstep_seconds(work: Seconds, added: Seconds, first: NDArray[np.intp], engine: NDArray[np.intp]) -> Seconds:
    """Time that is lost because the ranks of an engine step together, and a step is as slow as its slowest rank.

    work, added: [2, ranks]; row 0: prefill promised to each rank, and that of the request; row 1: what the running sequences add to the
    request's steps, and what the request adds to them. It is max(0, prefill promised + added - the engine's most) where anything runs: by
    so much the request makes its engine's longest prefill longer for whoever waits for it (beside a busier rank it is free); and
    max(0, the engine's most - decode - added): so much longer the request's steps take for others' sake.
    first: where the ranks of each engine begin, [engines] in row 0 and then [engines] in row 1, both rows laid one after another;
    engine: [2, ranks], which of these each rank belongs to.
    """
    most = np.maximum.reduceat(work.reshape(-1), first).take(engine)
    ahead = work + added - most
    seconds: Seconds = np.maximum(ahead[0], _ZERO) * (most[1] > _ZERO) - np.minimum(ahead[1], _ZERO)
    return seconds


def dispatch_seconds(dispatch_s: Seconds, node_s: Seconds | None, tokens: Amounts, remote_ranks: Seconds, remote_nodes: Seconds) -> Seconds:
    """Time spent sending `tokens` to the experts of other ranks and back; remote_ranks, remote_nodes: distinct, per token, summed over layers.

    A dispatch sends one copy per destination, however many of a token's experts live there, and one per node over the slower link.
    node_s None: other nodes cost no more than other ranks.
    """
    each = dispatch_s * remote_ranks if node_s is None else dispatch_s * remote_ranks + node_s * remote_nodes
    seconds: Seconds = tokens * each
    return seconds


def distinct_seconds(read_s: Seconds, added_experts: NDArray[np.float64], output_tokens: float) -> Seconds:
    """Time that O steps take longer because they read experts that nobody else in the batch wants: O * read_s * added_experts.

    added_experts: of the whole engine, per step, summed over layers; read_s: of one expert, divided by the ranks that read at once.
    """
    return output_tokens * (read_s * added_experts)


def expected_remote(
    profile: NDArray[Any], placement: Placement, top_k: int, node: NDArray[np.intp], boundary: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Expected numbers of distinct remote ranks and of distinct remote nodes a token must reach, summed over layers, per home rank:
    float64 [..., ranks] each.

    profile: [..., layers, experts] probability of an expert per routed pair. node: int [ranks], numbers from 0. boundary: layers below it
    are left out. Replicas serve by the rule of `fleet.dispatch`; what other ranks of its node serve crosses no machine. A token's k
    experts are taken as independent draws, so a rank, or a node, of mass m is reached with probability 1 - (1 - m)^k.
    """
    ranks = placement.ranks
    wanted = np.asarray(profile, np.float64).reshape(-1, placement.layers, placement.experts)
    member = (node[:, None] == np.arange(int(node.max()) + 1)).astype(np.float64)
    masses, everyone = _Masses(placement, node), np.arange(ranks)
    found = np.zeros((2, ranks, len(wanted)))
    for layer in range(boundary, placement.layers):
        for homes, away in masses.of(wanted[:, layer], layer):
            found[0][homes] += _elsewhere(_reached(away, top_k), everyone[homes])
            if member.shape[1] > 1:
                found[1][homes] += _elsewhere(_reached(away @ member, top_k), node[homes])
    remote_ranks, remote_nodes = found.transpose(0, 2, 1).reshape(2, *profile.shape[:-2], ranks)
    return remote_ranks, remote_nodes


class _Masses:
    """What ranks send to each rank, of profiles."""

    def __init__(self, placement: Placement, node: NDArray[np.intp]) -> None:
        self._held = LocalReplicas.of(placement)
        self._ranks = placement.ranks
        self._onward = onward(placement, node)
        self._which = np.minimum(node, len(self._onward) - 1)
        self._keep = placement.split.keep / FULL
        filled: list[int] = (placement.expert_of_slot != EMPTY).sum(axis=1).tolist()
        self._replicated = [slots > placement.experts for slots in filled]

    def of(self, wanted: NDArray[np.float64], layer: int) -> Iterator[tuple[slice, NDArray[np.float64]]]:
        """Some homes, and the mass that each of them sends to each rank: [homes, n, ranks]. wanted: [n, experts].

        Without replicas [1, n, ranks], since what a home sends to itself is of no interest.
        """
        if not self._replicated[layer]:
            yield slice(0, self._ranks), (wanted @ self._held.by_rank(self._onward[0, layer], layer).T)[None]
            return
        by_expert = np.stack([self._held.by_rank(part[layer], layer).T for part in self._onward])
        sent = wanted @ by_expert  # [nodes, n, ranks], if nobody kept anything
        expert, keep = (one[layer].reshape(self._ranks, -1) for one in (self._held.expert, self._keep))
        wanted_by = np.ascontiguousarray(wanted.T)
        most = max(1, _CELLS // (len(wanted) * self._ranks))
        for start in range(0, self._ranks, most):
            homes = slice(start, min(start + most, self._ranks))
            which = self._which[homes]
            kept = (wanted_by[expert[homes]] * keep[homes, :, None]).transpose(0, 2, 1)  # [homes, n, slots of a rank]
            yield homes, sent[which] - kept @ by_expert[which[:, None], expert[homes]]


def _elsewhere(reached: NDArray[np.float64], own: NDArray[np.intp]) -> NDArray[np.float64]:
    """[homes, n] of [homes or 1, n, places]: of all places but each home's own."""
    at = np.arange(len(own)) if len(reached) > 1 else 0
    return np.asarray(reached.sum(axis=2) - reached[at, :, own])


def _reached(mass: NDArray[np.float64], top_k: int) -> NDArray[np.float64]:
    """1 - (1 - mass)^k, the power by squaring: k is small, and numpy's own takes ten times as long."""
    square, power = 1.0 - mass.clip(0.0, 1.0), np.ones(1)
    while top_k:
        if top_k & 1:
            power = power * square
        top_k >>= 1
        if top_k:
            square = square * square
    return np.asarray(1.0 - power)


def expected_local_share(profile: NDArray[Any], placement: Placement, node: NDArray[np.intp], boundary: int = 0) -> NDArray[np.float64]:
    """Expected share of routed pairs that the home rank serves itself, mean over layers: float64 [..., ranks]. Arguments as above."""
    layers, experts = placement.layers, placement.experts
    wanted = np.asarray(profile, np.float64).reshape(-1, layers, experts)
    held, own = LocalReplicas.of(placement), own_part(placement, node)
    local = np.zeros((len(wanted), placement.ranks))
    for layer in range(boundary, layers):
        local += wanted[:, layer] @ held.by_rank(own[layer], layer).T
    return local.reshape(*profile.shape[:-2], placement.ranks) / (layers - boundary)


def surplus_pairs(served: NDArray[Any]) -> NDArray[np.float64]:
    """Pairs that the fullest rank serves above the mean rank, summed over layers: float64 [...] of [..., layers, ranks]. So many pairs a
    step of the whole engine waits for."""
    return np.asarray((served.max(axis=-1) - served.mean(axis=-1)).sum(axis=-1), np.float64)


def log_misses(profiles: NDArray[Any], top_k: int) -> NDArray[np.float32]:
    """float32 [..., layers * experts]: logarithm of the probability that a token of a profile [..., layers, experts] does not go to an
    expert: k * log(1 - p), its k experts being taken as independent draws. The form in which `expected_distinct_experts` takes profiles."""
    likely = np.clip(np.asarray(profiles, np.float64), 0.0, _SURE).reshape(*profiles.shape[:-2], -1)
    return np.asarray(top_k * np.log1p(-likely), np.float32)


def expected_distinct_experts(misses: NDArray[np.float32], tokens: NDArray[Any]) -> NDArray[np.float64]:
    """Expected number of distinct experts, summed over layers, that a step with tokens [..., C] of each of C profiles goes to: float64 [...].

    misses: float32 [C, layers * experts], `log_misses`. An expert is missed by all with probability prod_c (1 - hit_c)^n_c.
    """
    return np.asarray(-np.expm1(np.asarray(tokens, np.float32) @ misses).sum(axis=-1, dtype=np.float64))


def added_distinct_experts(misses: NDArray[np.float32], tokens: NDArray[Any]) -> NDArray[np.float64]:
    """How many more distinct experts one further token of each profile adds to that step: float64 [..., C], sum of hit_c * prod (1 - hit)^n."""
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
    surplus: float,
) -> Seconds:
    """What one step takes each rank of an engine, every argument but the last [ranks]; the engine's step is as long as the longest.

    prefill_pairs: pairs of a computed prompt token and one it attends to. sequences: that decode; blocks: KV blocks they hold.
    remote_ranks, remote_nodes: distinct destinations, summed over the rank's tokens and layers. distinct_experts: that it must read.
    surplus: of the engine, `surplus_pairs`: in each layer all ranks wait for the fullest, so that it is the same for all.
    """
    prefill = speed.prefill_token * prefill_tokens + speed.prefill_pair * prefill_pairs
    decode = speed.step + speed.decode_sequence * sequences + speed.decode_block * blocks
    experts = speed.dispatch * remote_ranks + speed.dispatch_node * remote_nodes + speed.expert_read * distinct_experts + speed.expert_pair * surplus
    return np.asarray(prefill + decode + experts, np.float64)
