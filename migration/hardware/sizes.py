"""Bytes of a model's parts on a GPU in each layout, and bytes that a switch of layout moves. Pure.

Conventions: P ranks, one per GPU. EP has whole experts and data-parallel attention; TP shards both.
"""

from dataclasses import dataclass

from fleet.layout import head_groups
from fleet.layout_times import LayoutName
from migration.hardware.models import ConsideredModel


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Bytes of routed experts on one GPU of an engine. Both forms of a layer have the same size if P divides
    the experts and the parts need no padding."""

    layer: float
    """one layer: also the size of a spare layer, which a turn of a layer needs"""
    total: float
    moved: float
    """received by a GPU as all layers turn over, in either direction: of every expert it has 1 / P already"""


def expert_sizes(model: ConsideredModel, ranks: int) -> ExpertSizes:
    """Return the sizes of experts. A layer of whole experts has ceil(E / P) on the fullest GPU."""
    layer = -(-model.experts // ranks) * model.expert_bytes
    total = model.moe_layers * layer
    return ExpertSizes(layer, total, total * (ranks - 1) / ranks)


@dataclass(frozen=True, slots=True)
class KvSizes:
    """Bytes of KV per token of context, 16 bits a value."""

    ep: float
    """in the engine, under data-parallel attention: each head once"""
    tp: float
    """in the engine, under tensor-parallel attention, all ranks together"""
    copies: int
    """ranks that hold the same head under tensor-parallel attention: P / min(P, KV heads); P for a latent"""
    moved_to_tp: float
    """between GPUs, all together, per token: each of the P - 1 others reads its head group from the owner"""
    moved_to_ep: float
    """the new owner has one head group already, and reads each other one from one of its holders"""

    def moved(self, after: LayoutName) -> float:
        """Return the bytes moved per token by a change of the attention. EP and experts-tp have the same."""
        return self.moved_to_tp if after == "tp" else self.moved_to_ep


def kv_sizes(model: ConsideredModel, ranks: int) -> KvSizes:
    """Return the sizes of KV. The direction towards TP is the dear one where P exceeds the KV heads."""
    groups = head_groups(ranks, model.kv_heads)
    token = float(model.cached_token_bytes)
    unit = token / groups
    return KvSizes(token, ranks * unit, ranks // groups, (ranks - 1) * unit, (groups - 1) * unit)


def attention_bytes(model: ConsideredModel, ranks: int = 1) -> float:
    """Return the bytes of all attention weights on a GPU, sharded over the ranks; 1: the full copy.

    A rank holds its query heads and the KV heads that they attend to, at least one. The projections into a
    latent are on every rank.
    """
    heads, hidden = model.heads / ranks, model.hidden
    if model.latent is None:
        kv_heads = max(1.0, model.kv_heads / ranks)
        weights = hidden * (heads + 2 * kv_heads) * model.head_dim + heads * model.head_dim * hidden
    else:
        one = model.latent
        weights = (
            hidden * (one.query_rank + one.cached)
            + one.query_rank * heads * (one.nope + one.rope)
            + one.latent * heads * (one.nope + one.value)
            + heads * one.value * hidden
        )
    return model.layers * weights * model.dense_bits / 8


def dense_bytes(model: ConsideredModel) -> float:
    """Return the bytes of routers, shared experts and layers without experts: a full copy on every GPU, of
    which tensor-parallel ranks use their rows."""
    routers = 2.0 * model.moe_layers * model.experts * model.hidden
    shared = 3.0 * model.moe_layers * model.shared_intermediate * model.hidden
    dense = 3.0 * (model.layers - model.moe_layers) * model.dense_intermediate * model.hidden
    return routers + (shared + dense) * model.dense_bits / 8


def vocabulary_bytes(model: ConsideredModel) -> float:
    """Return the bytes of embedding and output matrix in 16 bits: a full copy on every GPU."""
    return 2.0 * 2.0 * model.vocabulary * model.hidden
