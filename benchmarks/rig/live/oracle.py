"""Least distinct remote ranks that requests could have reached with hindsight: the best alternation of homes
and placement that is found on their own recorded routings.

Every request has a home of its own, and the tokens of all homes are equally many. The placement is what the
planner's solvers find for exactly the demand that these homes make, and for the experts that these tokens
need together. The rule that chooses replicas is the engine's (`fleet.dispatch`). A better assignment may
exist: the alternation finds local optima from several starts.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, Qwen3MoeForCausalLM

from benchmarks.demo_model.architecture import load_model, router_outputs
from benchmarks.rig.live.client import Lengths
from benchmarks.rig.live.document_traffic import Request
from deploy.demo_model import checkpoint_path
from fleet.arrays import FloatArray, IntArray, SlotTable
from fleet.dispatch import Chooser, reached
from fleet.placement import Placement
from fleet.routings import count_pairs
from migration.model.sampled_traffic import SampledTokens, drawn_homes
from migration.planning.cluster_homes import ClusterTraffic, homes, laid_along, routed
from migration.solvers.locality_placement import BALANCE, LocalityProblem, locality_table, measured
from migration.solvers.token_swaps import exchanged

ROUNDS, STARTS = 6, 4
"""alternations from a start, and random starts beside that of the planner's own search"""
BATCH = 24
TOKENS = 32
"""of a request, at even distances, for which experts are exchanged"""
STILL = 1e-4
"""distinct remote ranks by which a further round must be better"""


class Recorded(NamedTuple):
    """Routings of R requests. experts: uint8 [R, tokens, layers, k], of prompt and answer; computed: bool [R,
    tokens], tokens that an engine computes (the last token of an answer is not, and answers differ in
    length)."""

    experts: NDArray[np.uint8]
    computed: NDArray[np.bool_]
    width: int
    """experts of a layer"""

    @property
    def tokens(self) -> NDArray[np.float64]:
        """Return float64 [R], computed tokens of each request."""
        return self.computed.sum(axis=1).astype(np.float64)


def recorded(requests: Iterable[Request], lengths: Lengths) -> Recorded:
    """Compute greedy answers to these requests and the experts of every token, as the engine would."""
    model, several = load_model(checkpoint_path()), list(requests)
    answers = np.array([lengths.of(request) for request in several])
    computed = np.array([len(one.prompt) for one in several]) + answers - 1
    batches = [several[at : at + BATCH] for at in range(0, len(several), BATCH)]
    experts = np.concatenate([_experts(model, batch, int(answers.max())) for batch in batches])
    return Recorded(experts, np.arange(experts.shape[1]) < computed[:, None], int(model.config.num_experts))


def _experts(model: Qwen3MoeForCausalLM, requests: list[Request], tokens: int) -> NDArray[np.uint8]:
    """Return the experts of prompts of one length and of greedy answers of `tokens` tokens: uint8 [requests,
    computed tokens, layers, k]."""
    cache, fed = DynamicCache(), torch.tensor([one.prompt for one in requests])
    found = []
    for _ in range(tokens):
        with torch.no_grad(), router_outputs(model) as chosen:
            logits = model(input_ids=fed, past_key_values=cache, use_cache=True).logits[:, -1]
        layers = [indices.view(*fed.shape, -1) for _, indices in chosen]
        found.append(torch.stack(layers, dim=2).to(torch.uint8).numpy())
        fed = logits.argmax(dim=-1, keepdim=True)
    return np.concatenate(found, axis=1)


class Hindsight(NamedTuple):
    """Homes of R requests, the placement, and what their tokens reach."""

    share: FloatArray
    """float64 [R, ranks], rows sum to 1"""
    placement: Placement
    remote_ranks: float
    """distinct remote ranks per token, mean over tokens and layers"""


def served_by(found: Recorded, placement: Placement, rank: int) -> IntArray:
    """Return int64 [R, tokens, layers, k]: the rank that serves each pair of the requests if `rank` computes
    them."""
    experts = found.experts.astype(np.int64)
    chooser = Chooser(placement, [rank], np.zeros(placement.ranks, np.intp))
    slots = [
        chooser.choose(layer, experts[:, :, layer].reshape(-1), 0).reshape(experts[:, :, layer].shape)
        for layer in range(placement.layers)
    ]
    return np.stack(slots, axis=2) // placement.slots_per_rank


def away_from(served: IntArray, rank: int) -> IntArray:
    """Return int64 [R, tokens, layers]: distinct ranks other than `rank` that serve a token. served: as
    `served_by` returns it."""
    pairs = served.reshape(-1, served.shape[-1])
    return np.asarray(reached(pairs, np.full(len(pairs), rank, np.int64)), np.int64).reshape(
        served.shape[:-1]
    )


def remote_by_rank(found: Recorded, placement: Placement) -> FloatArray:
    """Return float64 [R, ranks]: distinct remote ranks of a request's token, mean over its tokens and layers,
    for each rank that may compute it."""
    remote = [
        np.where(found.computed, away_from(served_by(found, placement, rank), rank).sum(axis=2), 0).sum(
            axis=1
        )
        for rank in range(placement.ranks)
    ]
    return np.asarray(np.stack(remote, axis=1) / (found.tokens[:, None] * placement.layers))


def best_ranks(found: Recorded, placement: Placement, room: float = 1.0) -> Hindsight:
    """Return the best homes of the requests under a placement. room: tokens of a rank, at most, over an even
    part of all."""
    remote, share = remote_by_rank(found, placement), found.tokens / found.tokens.sum()
    ranks = placement.ranks
    chosen = routed(ranks - remote, share, np.full(ranks, room / ranks))
    return Hindsight(chosen, placement, float(share @ (chosen * remote).sum(axis=1)))


def best_alternation(
    found: Recorded, *, ranks: int, slots: int, balance: float = BALANCE, seed: int = 0
) -> Hindsight:
    """Return the best homes and placement that the alternation finds from all starts. slots: of a rank.
    balance: mean over highest load of a rank that every layer must have, if it can."""
    counts = np.stack(
        [
            count_pairs(one[kept].astype(np.int16), found.width)
            for one, kept in zip(found.experts, found.computed, strict=True)
        ]
    ).astype(np.float64)
    profiles = counts / np.maximum(counts.sum(axis=2, keepdims=True), 1.0)
    traffic = ClusterTraffic(profiles, found.tokens / found.tokens.sum())
    room = LocalityProblem(np.zeros(ranks, np.intp), slots, balance=balance)
    return min(
        (_alternated(found, traffic, room, start) for start in _starts(traffic, room, seed)),
        key=lambda one: one.remote_ranks,
    )


def _starts(traffic: ClusterTraffic, room: LocalityProblem, seed: int) -> Iterator[FloatArray]:
    yield homes(traffic, room, least=-1.0)[0]
    random = np.random.default_rng(seed)
    for _ in range(STARTS):
        yield laid_along(traffic, random.permutation(len(traffic.shares)), room.ranks)


def _alternated(
    found: Recorded, traffic: ClusterTraffic, room: LocalityProblem, start: FloatArray
) -> Hindsight:
    best, share = None, start
    for _ in range(ROUNDS):
        demand = traffic.demand(share)
        table = _for_tokens(found, share, locality_table(demand, room), demand, room)
        placed = measured(table, None, demand, room)
        placement = Placement(
            placed.table, experts=found.width, ranks=room.ranks, epoch=1, split=placed.split
        )
        reached_now = best_ranks(found, placement)
        if best is not None and reached_now.remote_ranks > best.remote_ranks - STILL:
            break
        best, share = reached_now, reached_now.share
    assert best is not None
    return best


def _for_tokens(
    found: Recorded, share: FloatArray, table: SlotTable, demand: FloatArray, room: LocalityProblem
) -> SlotTable:
    """Exchange experts so that tokens of the requests, at these homes, reach fewer ranks."""
    kept = [np.flatnonzero(one) for one in found.computed]
    at = np.stack([one[np.linspace(0, len(one) - 1, TOKENS).round().astype(np.intp)] for one in kept])
    experts = found.experts[np.arange(len(at))[:, None], at]
    tokens = SampledTokens(experts.reshape(-1, *experts.shape[2:]), drawn_homes(share, TOKENS).ravel())
    return exchanged(table, tokens, tokens, demand.sum(axis=0), room)
