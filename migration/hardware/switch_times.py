"""Durations of a switch of layout over each link, from the bytes that it moves. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from migration.hardware.machines import NODE_GPUS, LinkRate, Machine, links
from migration.hardware.models import ConsideredModel
from migration.hardware.sizes import expert_sizes, kv_sizes

KV_TOKENS = 100_000
"""tokens in flight for which the time of KV is stated; it is proportional to them"""


@dataclass(frozen=True, slots=True)
class SwitchTime:
    """Seconds of a switch over one link: bytes that a GPU receives over the rate of the link, without
    launches and bookkeeping. None: the rate is unknown."""

    rate: LinkRate
    weights: float | None
    """all layers, in either direction"""
    kv_to_tp: float | None
    """KV of `KV_TOKENS` tokens, to tensor-parallel attention, read evenly by the GPUs"""
    kv_to_ep: float | None


def switch_times(model: ConsideredModel, machine: Machine, ranks: int) -> Iterator[SwitchTime]:
    """Yield the switch over each link. In one node: if all bytes take that link. In several nodes: of the
    bytes within nodes over NVLink, and of those between nodes over the network, which overlap."""
    weights, kv = expert_sizes(model, ranks).moved, kv_sizes(model, ranks)
    for rate in links(machine, ranks):
        share = share_over(rate, ranks)
        yield SwitchTime(
            rate,
            rate.seconds(share * weights),
            rate.seconds(share * KV_TOKENS * kv.moved_to_tp / ranks),
            rate.seconds(share * KV_TOKENS * kv.moved_to_ep / ranks),
        )


def share_over(rate: LinkRate, ranks: int) -> float:
    """Return the share of a GPU's received bytes that takes a link. It receives as much from each other
    GPU."""
    if ranks <= NODE_GPUS:
        return 1.0
    others = NODE_GPUS - 1 if rate.is_within_node else ranks - NODE_GPUS
    return others / (ranks - 1)
