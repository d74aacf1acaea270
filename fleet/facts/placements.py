"""Facts about placement: which placement an engine serves, and where its clusters have their homes."""

import msgspec

from fleet.event import Event
from fleet.layout import AttentionLayout, Layout
from fleet.placement import PlacementRecord, as_stated


class PlacementCommitted(Event, frozen=True, kw_only=True):
    """An engine committed a placement and serves it from now on. Stored."""

    engine: str
    worker_id: int
    attention: AttentionLayout = msgspec.field(name="layout")
    """that of `placement`"""
    placement: PlacementRecord
    plan: str | None = None

    @property
    def served(self) -> PlacementRecord:
        """`placement` with the attention of the event (`fleet.placement.as_stated`)."""
        return as_stated(self.placement, self.attention)

    @property
    def layout(self) -> Layout:
        """Layout of the epoch."""
        return Layout(self.attention.kind, self.placement.sharded)


class HomesPublished(Event, frozen=True, kw_only=True):
    """Home ranks of an engine's clusters: the share of each cluster's traffic that each rank should serve.
    Not stored. The planner publishes homes when they change, and repeats them every cycle for late
    subscribers.
    """

    engine: str
    worker_id: int
    model: str
    version: int
    """increases with every change, also across restarts of the planner"""
    epoch: int
    """placement epoch for which the homes were computed"""
    clusters: int
    """version of the cluster model to which the clusters belong"""
    count: int
    """K, the number of clusters in that model"""
    ranks: int
    """targets of requests; where several ranks are one target there are no homes"""
    homes: bytes
    """float32 little endian [K, ranks]: shares that sum to 1 per cluster; a row of zeros: no preference.
    Empty: no cluster has a home. The homes are valid from `epoch` on. A reader at an older epoch keeps its
    previous homes until it reaches `epoch`
    """
    reason: str = ""
    """explanation in one sentence: why these homes, or why none"""
