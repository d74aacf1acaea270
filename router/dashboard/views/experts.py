"""View *Experts*: demand for experts against their placement.

The feed carries figures per model and engine. Maps of one engine, by layer, expert and rank, are large, and
pages ask for them one at a time (`expert_maps`).
"""

import base64
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.arrays import FloatArray
from fleet.dispatch import as_dispatched, numbered
from fleet.facts.engines import EngineJoined
from fleet.layout import layer_ranges
from fleet.placement import EMPTY, Placement
from fleet.popularity import ExpertTable
from fleet.requests.demand import PopularityDescribed, RankPopularity
from router.dashboard.views.rank_load import expected_load

HOTTEST = 6
"""Experts named per layer."""
MOST_HOLDERS = 8
"""Ranks named per expert."""
_LEVELS = 255
DIGITS = 4
"""Significant digits of figures."""


class ModelDemand(msgspec.Struct, frozen=True, kw_only=True):
    """Demand for the experts of one model, as the tracker knows it."""

    model: str
    silence: str
    """why nothing newer is known; empty: the tracker answers"""
    tokens: float
    """decayed exposure behind the long-term profile"""
    tokens_per_second: float
    divergence: float | None
    """of the last seconds from the long-term profile, nats, mean over layers; None: too little data"""
    threshold: float | None
    """divergence that sampling noise alone would rarely exceed"""
    shifted: bool
    """the demand differs from before beyond noise"""
    skew: float
    """demand for the most popular expert of a layer, in even shares, mean over layers; 0: no data"""
    top_tenth: float
    """share of the most popular tenth of the experts, mean over layers"""
    clusters: int
    """groups of requests with different experts"""
    gain: float
    """in [0, 1]: proven value of predictions"""


class EngineExperts(msgspec.Struct, frozen=True, kw_only=True):
    """Placement of one engine."""

    engine: str
    model: str
    epoch: int
    maps: str
    """changes when the engine's maps do"""
    layers: int
    experts: int
    ranks: int
    slots_per_rank: int
    sharded: str
    """sharded layers; empty: none"""
    replicated: int
    """(layer, expert) pairs with more than one replica"""
    most_replicas: int
    empty_slots: int
    tokens_per_second: float
    remote: float | None
    """share of the demand for experts without a replica on the rank of the request; None: unknown"""


class ExpertsPicture(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the feed."""

    models: list[ModelDemand]
    engines: list[EngineExperts]


class LevelMap(msgspec.Struct, frozen=True, kw_only=True):
    """A table as bytes: a value is `level * unit`."""

    rows: int
    columns: int
    unit: float
    levels: str
    """base64 of u8 [rows, columns]"""


class HotExpert(msgspec.Struct, frozen=True, kw_only=True):
    """One of the most popular experts of a layer."""

    expert: int
    demand: float
    """in even shares"""
    replicas: int
    """0: the layer is sharded"""
    ranks: list[int]
    """some of the ranks that hold it"""


class LayerDemand(msgspec.Struct, frozen=True, kw_only=True):
    """One layer."""

    layer: int
    skew: float
    """demand for its most popular expert, in even shares"""
    top_tenth: float
    balance: float
    """mean / highest expected load of a rank"""
    busiest: int
    """rank with the highest expected load"""
    hottest: list[HotExpert]


class RankDemand(msgspec.Struct, frozen=True, kw_only=True):
    """One rank."""

    rank: int
    node: str
    tokens_per_second: float | None
    """of its own requests; None: it has not reported"""
    remote: float | None
    load: float
    """expected, over all layers; 1 is the mean of the engine"""


class ExpertMaps(msgspec.Struct, frozen=True, kw_only=True):
    """Maps of one engine."""

    engine: str
    model: str
    epoch: int
    maps: str
    known: bool
    """False: the tracker has told nothing yet, and demand is taken as even"""
    demand: LevelMap
    """[layers, experts], in even shares"""
    recent: LevelMap
    """the same over the last seconds"""
    load: LevelMap
    """[layers, ranks]: expected, in units of the mean over ranks"""
    replicas: LevelMap
    """[layers, experts]; 0 in sharded layers"""
    layers: list[LayerDemand]
    ranks: list[RankDemand]


class PlacedEngine(NamedTuple):
    """An engine and the placement that it serves."""

    joined: EngineJoined
    placement: Placement
    nodes: tuple[str, ...]
    """machine of each rank"""


class Popularity(NamedTuple):
    """Last answer of the tracker about a model, and what is derived from it once."""

    described: PopularityDescribed | None = None
    silence: str = "the tracker has not answered yet"
    version: int = 0
    """counts answers with other figures"""
    skew: float = 0.0
    top_tenth: float = 0.0
    ranks: Mapping[str, Sequence[RankPopularity]] = {}
    """by engine"""

    def answered(self, answer: PopularityDescribed) -> "Popularity":
        """Return what is known after an answer. ValueError for damaged tables."""
        before = self.described
        if before is not None and (before.fast, before.slow, before.ranks) == (
            answer.fast,
            answer.slow,
            answer.ranks,
        ):
            return self._replace(described=answer, silence="")
        demand, _ = in_even_shares(answer.slow), in_even_shares(answer.fast)
        seen = answer.tokens > 0
        by_engine: defaultdict[str, list[RankPopularity]] = defaultdict(list)
        for one in answer.ranks:
            by_engine[one.engine].append(one)
        return Popularity(
            answer,
            "",
            self.version + 1,
            short(float(demand.max(axis=1).mean())) if seen else 0.0,
            short(float(_top_tenth(demand).mean())) if seen else 0.0,
            by_engine,
        )


def experts_picture(
    engines: Iterable[PlacedEngine], popularity: Mapping[str, Popularity], replicas: Mapping[int, "Replicas"]
) -> ExpertsPicture:
    """Return what the feed carries. replicas: by worker_id."""
    shown = sorted(engines, key=lambda one: one.joined.engine)
    models = sorted({one.joined.model for one in shown})
    return ExpertsPicture(
        models=[_model(model, popularity.get(model, Popularity())) for model in models],
        engines=[
            _engine(one, replicas[one.joined.worker_id], popularity.get(one.joined.model, Popularity()))
            for one in shown
        ],
    )


class Replicas(NamedTuple):
    """Figures of a placement that do not change within its epoch."""

    epoch: int
    replicated: int
    most: int
    empty: int

    @classmethod
    def of(cls, placement: Placement) -> "Replicas":
        copies = replica_counts(placement)
        empty = (placement.expert_of_slot[placement.whole] == EMPTY).sum()
        return cls(placement.epoch, int((copies > 1).sum()), int(copies.max(initial=0)), int(empty))


def replica_counts(placement: Placement) -> NDArray[np.int64]:
    """Return the replicas of each expert: int64 [layers, experts]; 0 in sharded layers."""
    layer, slot = np.nonzero(placement.expert_of_slot != EMPTY)
    index = layer * placement.experts + placement.expert_of_slot[layer, slot]
    counts = np.bincount(index, minlength=placement.layers * placement.experts)
    return counts.reshape(placement.layers, placement.experts)


def maps_version(engine: PlacedEngine, popularity: Popularity) -> str:
    """Return a text that changes when the maps of an engine do."""
    return f"{engine.joined.worker_id:x}-{engine.placement.epoch}-{popularity.version}"


def _model(model: str, known: Popularity) -> ModelDemand:
    described = known.described
    if described is None:
        return ModelDemand(
            model=model,
            silence=known.silence,
            tokens=0.0,
            tokens_per_second=0.0,
            divergence=None,
            threshold=None,
            shifted=False,
            skew=0.0,
            top_tenth=0.0,
            clusters=0,
            gain=0.0,
        )
    return ModelDemand(
        model=model,
        silence=known.silence,
        tokens=short(described.tokens),
        tokens_per_second=short(described.tokens_per_second),
        divergence=described.divergence,
        threshold=described.threshold,
        shifted=described.shifted,
        skew=known.skew,
        top_tenth=known.top_tenth,
        clusters=sum(cluster.share > 0 for cluster in described.clusters),
        gain=short(described.gain),
    )


def _engine(engine: PlacedEngine, replicas: Replicas, known: Popularity) -> EngineExperts:
    placement = engine.placement
    ranks = known.ranks.get(engine.joined.engine, ())
    tokens = sum(rank.tokens_per_second for rank in ranks)
    measured = [rank for rank in ranks if rank.remote is not None and rank.tokens_per_second > 0]
    weight = sum(rank.tokens_per_second for rank in measured)
    remote = sum((rank.remote or 0.0) * rank.tokens_per_second for rank in measured)
    return EngineExperts(
        engine=engine.joined.engine,
        model=engine.joined.model,
        epoch=placement.epoch,
        maps=maps_version(engine, known),
        layers=placement.layers,
        experts=placement.experts,
        ranks=placement.ranks,
        slots_per_rank=placement.slots_per_rank,
        sharded=layer_ranges(placement.sharded),
        replicated=replicas.replicated,
        most_replicas=replicas.most,
        empty_slots=replicas.empty,
        tokens_per_second=short(tokens),
        remote=short(remote / weight) if weight else None,
    )


def expert_maps(engine: PlacedEngine, known: Popularity) -> ExpertMaps:
    """Return the maps of an engine. ValueError for damaged tables of the tracker."""
    placement, described = engine.placement, known.described
    shape = (placement.layers, placement.experts)
    fits = described is not None and (described.slow.layers, described.slow.experts) == shape
    if described is None or not fits:
        demand = recent = np.ones(shape)
    else:
        demand, recent = in_even_shares(described.slow), in_even_shares(described.fast)
    ranks = {one.rank: one for one in known.ranks.get(engine.joined.engine, ())}
    load = _load(engine, recent, ranks)
    replicas = replica_counts(placement)
    return ExpertMaps(
        engine=engine.joined.engine,
        model=engine.joined.model,
        epoch=placement.epoch,
        maps=maps_version(engine, known),
        known=fits and described is not None and described.tokens > 0,
        demand=level_map(demand),
        recent=level_map(recent),
        load=level_map(load),
        replicas=level_map(replicas, unit=1.0),
        layers=_layers(placement, demand, load, replicas),
        ranks=[
            RankDemand(
                rank=rank,
                node=node,
                tokens_per_second=None if (one := ranks.get(rank)) is None else short(one.tokens_per_second),
                remote=None if one is None or one.remote is None else short(one.remote),
                load=short(float(load[:, rank].mean())),
            )
            for rank, node in enumerate(engine.nodes)
        ],
    )


def _load(engine: PlacedEngine, demand: FloatArray, ranks: Mapping[int, RankPopularity]) -> FloatArray:
    """Return the expected load [layers, ranks], in units of the mean."""
    placement = engine.placement
    tokens = np.array([ranks[at].tokens_per_second if at in ranks else 0.0 for at in range(placement.ranks)])
    weights = tokens / tokens.sum() if tokens.sum() > 0 else np.full(placement.ranks, 1 / placement.ranks)
    return expected_load(
        as_dispatched(placement, engine.joined.dispatch),
        demand / placement.experts,
        weights,
        np.array(numbered(engine.nodes), np.intp),
    )


def _layers(
    placement: Placement, demand: FloatArray, load: FloatArray, replicas: NDArray[Any]
) -> list[LayerDemand]:
    order = np.argsort(-demand, axis=1, kind="stable")[:, :HOTTEST]
    top = _top_tenth(demand)
    busiest, highest = load.argmax(axis=1), load.max(axis=1)
    return [
        LayerDemand(
            layer=layer,
            skew=short(float(demand[layer, order[layer, 0]])),
            top_tenth=short(float(top[layer])),
            balance=short(float(1.0 / highest[layer])) if highest[layer] > 0 else 1.0,
            busiest=int(busiest[layer]),
            hottest=[
                HotExpert(
                    expert=int(expert),
                    demand=short(float(demand[layer, expert])),
                    replicas=int(replicas[layer, expert]),
                    ranks=_holders(placement, layer, int(expert)),
                )
                for expert in order[layer]
            ],
        )
        for layer in range(placement.layers)
    ]


def _holders(placement: Placement, layer: int, expert: int) -> list[int]:
    slots = np.flatnonzero(placement.expert_of_slot[layer] == expert)
    return [int(rank) for rank in np.unique(slots // placement.slots_per_rank)[:MOST_HOLDERS]]


def in_even_shares(table: ExpertTable) -> FloatArray:
    """Return a table in units of each layer's even share: float64 [layers, experts], mean 1 per layer; 1
    everywhere in a layer without data. ValueError for a damaged table.
    """
    values = np.asarray(table.array(), np.float64)
    mean = values.mean(axis=1, keepdims=True)
    return np.where(mean > 0, values / np.where(mean > 0, mean, 1.0), 1.0)


def _top_tenth(demand: FloatArray) -> FloatArray:
    """Return the share of the most popular tenth of the experts of each layer: float64 [layers]."""
    experts = demand.shape[1]
    falling = -np.sort(-demand, axis=1)
    return np.asarray(falling[:, : -(-experts // 10)].sum(axis=1) / experts)


def level_map(values: NDArray[Any], unit: float | None = None) -> LevelMap:
    """Return a table of non-negative values as bytes. unit: None means such that the largest value fits."""
    found = short(float(values.max(initial=0.0)) / _LEVELS) or 1.0 if unit is None else unit
    levels = np.clip(np.rint(values / found), 0, _LEVELS).astype(np.uint8)
    rows, columns = levels.shape
    return LevelMap(
        rows=rows, columns=columns, unit=found, levels=base64.b64encode(levels.tobytes()).decode()
    )


def short(value: float) -> float:
    """Return a value with few digits."""
    return float(f"{value:.{DIGITS}g}")
