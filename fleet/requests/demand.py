"""Requests to the tracker for clusters, tables, profiles and popularity."""

import msgspec

from fleet.event import Event
from fleet.popularity import ExpertTable


class DescribeClusters(Event, frozen=True, kw_only=True):
    """Request to the tracker for the `ClustersPublished` of a model. `RequestRefused` if there is none
    yet."""

    model: str


class DescribeTables(Event, frozen=True, kw_only=True):
    """Request to the tracker for the snapshot `TablesPublished` of a model. `RequestRefused` if there is none
    yet.
    """

    model: str


class DescribeProfile(Event, frozen=True, kw_only=True):
    """Request to the tracker for the `ProfilePublished` of a model: uniform, with 0 tokens, before the first
    report. `RequestRefused` for a model that no engine has named.
    """

    model: str


class DescribePopularity(Event, frozen=True, kw_only=True):
    """Request to the tracker for the `PopularityDescribed` of a model."""

    model: str


class RankPopularity(msgspec.Struct, frozen=True, kw_only=True):
    """Expert demand and placement of one rank. Experts as (layer, expert, tokens per second), most demand
    first.
    """

    engine: str
    rank: int
    tokens_per_second: float
    remote: float | None
    wanted_remote: tuple[tuple[int, int, float], ...] = ()
    """in demand on this rank, placed on another"""
    local_idle: tuple[tuple[int, int, float], ...] = ()
    """placed on this rank, lowest demand here"""


class ClusterPopularity(msgspec.Struct, frozen=True, kw_only=True):
    """One cluster: its share of the traffic, and its distance from the mix (Jensen-Shannon, nats, mean over
    layers).
    """

    cluster: int
    share: float
    distance: float


class SourceQuality(msgspec.Struct, frozen=True, kw_only=True):
    """Measured quality of one source of prediction."""

    source: str
    requests: int
    """outcomes for which it had evidence"""
    trust: float
    reliability: float


class PopularityDescribed(Event, frozen=True, kw_only=True):
    """Complete tracker state of a model, for display and for `roost popularity`."""

    model: str
    tokens: float
    """decayed exposure behind the slow profile"""
    tokens_per_second: float
    fast: ExpertTable
    """probabilities per layer over the last seconds"""
    slow: ExpertTable
    ranks: tuple[RankPopularity, ...]
    clusters: tuple[ClusterPopularity, ...]
    shifted: bool
    divergence: float | None
    """divergence of the fast from the slow profile, nats, mean over layers; None: too little data"""
    threshold: float | None
    sources: tuple[SourceQuality, ...]
    gain: float
    outcomes: int
    """requests whose prediction was compared with the measured activations"""
    recall: float | None
    """predicted mass of the true most popular half of a layer's experts / its whole mass, mean over sampled
    requests
    """
    prior_recall: float | None
    """the same for the traffic mix"""
    stored_blocks: int
    stored_bytes: int
