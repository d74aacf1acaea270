"""Cost of a switch of layout before it is planned: bytes, duration, and time lost. Pure.

`migration.planning.layout_switch` plans the handovers themselves, which takes half a second for a large
model. A choice of layouts needs a few numbers at every epoch: in closed form, as if every rank held as many
experts.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.blocks import BLOCK_SIZE
from fleet.experts import ModelShape
from fleet.layout import KV_PAGE_SECONDS, AttentionKind, Layout, head_groups, kv_units_read
from migration.layouts.costs import SwitchCost
from migration.model.cost_model import LinkSpeeds

HANDOVER_SECONDS = 5e-3
"""Time that the step which adopts a handover takes longer: Roost's own engine, docs/measurements.md."""


class PricedSwitch(NamedTuple):
    """Effort of a change from one layout to another."""

    bytes: int
    """experts that ranks read from each other: what counts towards the byte budget"""
    handovers: int
    weights_seconds: float
    """time in which layers turn over while the engine serves"""
    page_bytes: float
    """KV that the busiest rank reads for each page in use; 0: the attention stays"""
    links: LinkSpeeds

    def cost(self, pages: int, contention: float) -> SwitchCost:
        """Return the cost with this many KV pages in use. contention: share by which steps take longer beside
        copying. Full pages are copied ahead; the step that switches keeps the books of all."""
        bookkeeping = KV_PAGE_SECONDS * pages if self.page_bytes else 0.0
        return SwitchCost(
            weights_seconds=self.weights_seconds,
            kv_token_seconds=self.page_bytes / self.links.same_node / BLOCK_SIZE,
            pause=HANDOVER_SECONDS * self.handovers + bookkeeping,
            slowdown=contention,
        )


def priced_switch(
    before: Layout,
    after: Layout,
    shape: ModelShape,
    node: NDArray[np.intp],
    links: LinkSpeeds,
    kv_block_bytes: int,
) -> PricedSwitch:
    """Price the change from one layout to another, a layer in each handover.

    node: int [ranks]. kv_block_bytes: of a KV block over all layers; 0: unknown, and reading costs nothing.

    In either direction a rank reads E / P * (P - 1) parts of a layer's E experts from P - 1 others, and as
    many are read from it; the time is that of `migration.model.cost_model.transfer_seconds`.
    """
    ranks, turned = len(node), len(set(before.sharded) ^ set(after.sharded))
    attends = before.attention != after.attention
    near = np.bincount(node)[node]
    per_peer = shape.experts / ranks * shape.expert_bytes / ranks
    same, cross = (near.max() - 1) * per_peer, (ranks - near.min()) * per_peer
    slowest = max(same / links.same_node, cross / links.cross_node)
    layer = slowest + (ranks - 1) * per_peer / links.checksum + links.handover_seconds
    return PricedSwitch(
        bytes=round(turned * ranks * (ranks - 1) * per_peer),
        handovers=turned + attends,
        weights_seconds=float(turned * layer),
        page_bytes=_units_per_page(after.attention, ranks, shape) * kv_block_bytes if attends else 0.0,
        links=links,
    )


def _units_per_page(after: AttentionKind, ranks: int, shape: ModelShape) -> float:
    """Return the part of a page that the busiest rank reads for each page of the engine, if all ranks have as
    many."""
    groups = head_groups(ranks, shape.kv_heads)
    pages = [ranks] * ranks if after == "tp" else [ranks * ranks]
    return float(kv_units_read(pages, after, ranks, groups).max()) / sum(pages) / groups
