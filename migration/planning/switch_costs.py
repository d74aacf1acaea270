"""Cost of a switch of layout before it is planned: bytes, duration, and time lost. Pure.

`migration.planning.layout_switch` plans the handovers themselves. A choice of layouts looks often, and needs
a few numbers that stay the same for an epoch.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.blocks import BLOCK_SIZE
from fleet.experts import ModelShape
from fleet.layout import KV_PAGE_SECONDS, AttentionKind, Layout, head_groups, kv_units_read
from fleet.placement import Placement
from migration.layouts.costs import SwitchCost
from migration.model.cost_model import LinkSpeeds
from migration.model.plan import replay
from migration.planning.layout_switch import Switch, switch
from migration.planning.staging_capacity import StagingRoom

HANDOVER_SECONDS = 5e-3
"""Time that the step which adopts a handover takes longer: Roost's own engine, docs/measurements.md."""


class PricedSwitch(NamedTuple):
    """Effort of a change to a layout from the one that is served."""

    bytes: int
    """experts that are copied, also within ranks: what counts towards the byte budget"""
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


class PricedRoundTrip(NamedTuple):
    """Switches to a layout and back to the one that is served."""

    there: PricedSwitch
    back: PricedSwitch


def priced_round_trip(
    placement: Placement,
    wanted: Layout,
    shape: ModelShape,
    node: NDArray[np.intp],
    links: LinkSpeeds,
    kv_block_bytes: int,
) -> PricedRoundTrip:
    """Price the change of a served placement to another layout, and back.

    node: int [ranks]. kv_block_bytes: of a KV block over all layers; 0: unknown, and reading costs nothing.
    ValueError if the layout is served already, or cannot be reached.
    """
    room = StagingRoom(node=node, expert_bytes=shape.expert_bytes)
    there = switch(placement, wanted.sharded, room, attention=wanted.attention)
    after = replay(placement, there.plan)[-1]
    back = switch(after, placement.sharded, room, attention=placement.attention, goal=placement)

    def priced(found: Switch, attention: AttentionKind) -> PricedSwitch:
        reads = 0.0
        if wanted.attention != placement.attention:
            reads = _units_per_page(attention, placement.ranks, shape) * kv_block_bytes
        handovers = found.plan.handovers
        return PricedSwitch(
            bytes=sum(handover.bytes for handover in handovers),
            handovers=len(handovers),
            weights_seconds=found.seconds(node, links),
            page_bytes=reads,
            links=links,
        )

    return PricedRoundTrip(priced(there, wanted.attention), priced(back, placement.attention))


def _units_per_page(after: AttentionKind, ranks: int, shape: ModelShape) -> float:
    """Return the part of a page that the busiest rank reads for each page of the engine, if all ranks have as
    many."""
    groups = head_groups(ranks, shape.kv_heads)
    pages = [ranks] * ranks if after == "tp" else [ranks * ranks]
    return float(kv_units_read(pages, after, ranks, groups).max()) / sum(pages) / groups
