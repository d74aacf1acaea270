"""The time model: what work costs on a rank, in seconds. One model, used by whoever prices and by whoever reports speeds.

Everything is vectorised over candidates: array arguments have shape [candidates] unless a docstring says otherwise.
"""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]


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

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"engine speed: {name} must be finite seconds >= 0, not {value}")


def prefill_seconds(token_s: NDArray[Any], uncached_tokens: NDArray[Any]) -> Seconds:
    """Time to prefill the prompt tokens that are not in the rank's KV cache."""
    return np.asarray(token_s * uncached_tokens, np.float64)


def queue_seconds(token_s: NDArray[Any], queued_prefill_tokens: NDArray[Any]) -> Seconds:
    """Time until the prefill already promised to a rank is done."""
    return np.asarray(token_s * queued_prefill_tokens, np.float64)


def decode_seconds(sequence_s: NDArray[Any], block_s: NDArray[Any], running: NDArray[Any], blocks: NDArray[Any], output_tokens: float) -> Seconds:
    """Time that a rank's present decode load adds to a request of `output_tokens` steps.

    running: sequences decoding on the rank; blocks: KV blocks they hold. The fixed part of a step is the same wherever
    the request goes and is left out.
    """
    return np.asarray(output_tokens * (sequence_s * running + block_s * blocks), np.float64)


def expected_remote_ranks(profile: NDArray[Any], share: NDArray[np.float64], top_k: int) -> NDArray[np.float64]:
    """Expected number of distinct remote ranks a token must reach, summed over layers, per home rank: float64 [..., ranks].

    profile: [..., layers, experts] probability of an expert per routed pair. share: [layers, ranks, experts] of an expert's
    tokens that a rank serves. A rank that holds a replica serves its own tokens itself (local first). A token's k
    experts are taken as independent draws, so a rank of mass m is reached with probability 1 - (1 - m)^k.
    """
    layers, ranks, experts = share.shape
    wanted = np.asarray(profile, np.float64).reshape(-1, layers, experts)
    held = share > 0
    remote = np.zeros((len(wanted), ranks))
    for layer in range(layers):
        mass = wanted[:, layer] @ share[layer].T
        several = held[layer].sum(axis=0) > 1
        if not several.any():  # nobody's own experts are served by others: the mass of a rank is the same for every home
            reached = _reached(mass, top_k)
            remote += reached.sum(axis=1, keepdims=True) - reached
            continue
        for home in range(ranks):
            here = np.flatnonzero(several & held[layer, home])
            away = _reached(mass - wanted[:, layer, here] @ share[layer][:, here].T, top_k)
            remote[:, home] += away.sum(axis=1) - away[:, home]
    return remote.reshape(*profile.shape[:-2], ranks)


def _reached(mass: NDArray[np.float64], top_k: int) -> NDArray[np.float64]:
    return np.asarray(1.0 - (1.0 - np.clip(mass, 0.0, 1.0)) ** top_k)


def expected_local_share(profile: NDArray[Any], share: NDArray[np.float64]) -> NDArray[np.float64]:
    """Expected share of routed pairs whose expert has a replica on the home rank, mean over layers: float64 [..., ranks]. Arguments as above."""
    layers, ranks, experts = share.shape
    held = (share > 0).transpose(0, 2, 1).reshape(layers * experts, ranks)
    return np.asarray(np.asarray(profile, np.float64).reshape(*profile.shape[:-2], -1) @ held / layers)


def dispatch_seconds(dispatch_s: NDArray[Any], tokens: NDArray[Any], remote_ranks: NDArray[Any]) -> Seconds:
    """Time spent sending `tokens` to the experts of other ranks and back (remote_ranks: per token, summed over layers)."""
    return np.asarray(dispatch_s * tokens * remote_ranks, np.float64)
