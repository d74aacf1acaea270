"""Engine data that plans need: demand by rank in windows, load and clusters. Pure; bounded; time is an
argument.

The tracker publishes the demand of a rank when it changes, so the last report stays valid until the next.
After `stale_seconds` the demand is unknown, unless the last report was zero demand or the rank itself reports
that it is idle. Reports are integrated over windows. A window thus holds pairs, as many as were actually
routed, and its sampling noise is that of a count.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.experts import ModelShape
from fleet.facts.activity import DispatchMeasured, ExpertsActivated, TokensSampled
from fleet.facts.demand import DemandPublished
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.engines import EngineJoined
from fleet.placement import Placement
from fleet.prediction import SOURCES, together
from fleet.signatures import ClusterModel
from fleet.text import listed
from fleet.timing import EngineSpeed, RearrangeSpeed
from migration.config import MigrationConfig
from migration.engine_state.demand_counts import DemandByRank
from migration.engine_state.demand_samples import DemandSamples
from migration.engine_state.measured_rearrangements import MeasuredRearrangements
from migration.engine_state.placement_registry import EngineEntry, InvalidPlacementEvent, PlacementFault
from migration.engine_state.token_samples import TokenSamples
from migration.model.engine_view import CacheUse, Demand, EngineView, PlannedHomes
from migration.model.move_history import MoveHistory

MAX_MODELS = 64
"""Limit on the models whose clusters are kept."""
SHORT_WINDOWS = 2
"""Number of shortened windows after a demand shift."""
SHORT_WINDOW_FACTOR = 6
"""Factor by which these windows are shorter."""


class KvUse(NamedTuple):
    """KV cache and requests of each target."""

    pages: list[int]
    """pages in use"""
    running: list[int]
    """running requests"""


@dataclass(slots=True)
class _Engine:
    joined: EngineJoined
    shape: tuple[int, int, int]
    """targets, layers, experts"""
    node: NDArray[np.intp]
    """[ranks that hold experts]"""
    began: float
    """start of the current window"""
    ranks: list[DemandByRank]
    """demand of each target"""
    history: MoveHistory
    sharded: tuple[int, ...] = ()
    """layers that are sharded"""
    since: Demand | None = None
    """first window closed after the last plan; None: none yet"""
    homes: PlannedHomes | None = None
    closed: list[Demand] = field(default_factory=list)
    """last two windows, oldest first"""
    short_windows: int = 0
    """remaining shortened windows, after a demand shift"""
    rearrangements: MeasuredRearrangements = field(default_factory=MeasuredRearrangements)
    samples: DemandSamples = field(init=False)
    tokens: TokenSamples | None = field(init=False)
    """None: the engine does not describe its model, or moves its experts itself"""

    def __post_init__(self) -> None:
        self.samples = DemandSamples(self.shape[0])
        model = None if self.joined.rearranges else self.joined.shape
        self.tokens = None if model is None else TokenSamples(model)

    @property
    def windows(self) -> list[Demand]:
        """Stored windows that are closed."""
        return self.closed if self.since is None or self.since in self.closed else [self.since, *self.closed]

    @property
    def cells(self) -> int:
        """Number of values in one window."""
        targets, layers, experts = self.shape
        return targets * layers * experts

    @property
    def pairs(self) -> float:
        """(token, k) pairs of a layer in the current window."""
        return sum(rank.counted_pairs for rank in self.ranks)

    def demand(self, now: float) -> Demand:
        """Return the current window so far."""
        return Demand(
            tuple(rank.window for rank in self.ranks),
            np.array([rank.stated_pairs for rank in self.ranks]),
            now - self.began,
            self.began,
        )


class DemandWindows:
    """Demand of the present engines that hold experts. `now` is seconds of a monotonic clock."""

    def __init__(self, config: MigrationConfig) -> None:
        self._config = config
        self._engines: dict[int, _Engine] = {}
        """by worker_id"""
        self._clusters: OrderedDict[str, ClusterModel] = OrderedDict()
        self._predictability: OrderedDict[str, float] = OrderedDict()

    def reconfigure(self, config: MigrationConfig) -> None:
        """Use new window lengths and cooldowns from now on."""
        self._config = config

    @property
    def models(self) -> set[str]:
        """Models of the tracked engines."""
        return {engine.joined.model for engine in self._engines.values()}

    @property
    def models_without_clusters(self) -> set[str]:
        """Models of the tracked engines without known clusters."""
        return self.models - self._clusters.keys()

    @property
    def stored_models(self) -> set[str]:
        """Models with stored clusters or predictability, tracked or not."""
        return self._clusters.keys() | self._predictability.keys()

    @property
    def stored_bytes(self) -> int:
        """Upper bound on the memory of the stored demand, in bytes.

        It covers the last report, the counts before it, and the rates computed from closed windows.
        """
        return sum(4 * engine.cells * (2 + 3 * len(engine.windows)) for engine in self._engines.values())

    # Membership and placements

    def joined(self, joined: EngineJoined, entry: EngineEntry, now: float) -> None:
        """Add an incarnation that serves experts, replacing the previous one.

        Raises InvalidPlacementEvent if the demand of all engines would exceed the limit.
        """
        for worker_id in [
            worker_id
            for worker_id, engine in self._engines.items()
            if engine.joined.engine == joined.engine and worker_id != joined.worker_id
        ]:
            del self._engines[worker_id]
        if joined.worker_id in self._engines:
            return
        placement = entry.placement
        shape = len(joined.urls), placement.layers, placement.experts
        cells = sum(engine.cells for engine in self._engines.values()) + int(np.prod(shape))
        if cells > self._config.max_cells:
            raise InvalidPlacementEvent(
                PlacementFault.CAPACITY,
                f"the demand of engine {joined.engine!r} has {np.prod(shape)} cells, {cells} with all others;"
                " raise planner.max_cells to plan for it",
            )
        nothing = np.zeros(shape[1:], np.float32)
        ranks = [DemandByRank(rates=nothing, counted_at=now) for _ in range(shape[0])]
        self._engines[joined.worker_id] = _Engine(
            joined,
            shape,
            _nodes(joined, placement.ranks),
            now,
            ranks,
            MoveHistory.begin(joined.worker_id, placement),
            placement.sharded,
        )

    def placed(self, worker_id: int, placement: Placement, plan: str | None, now: float) -> None:
        """Record a new epoch of an engine, from one of our plans or (None) from elsewhere.

        Windows begin anew where layers change their form. Epochs that are not newer are ignored. Raises
        InvalidPlacementEvent if the shape does not fit.
        """
        engine = self._engines.get(worker_id)
        if engine is not None and placement.epoch > engine.history.epoch:
            same_plan = plan is not None and plan == engine.history.plan
            try:
                engine.history = engine.history.committed(placement, plan, now)
            except ValueError as error:
                raise InvalidPlacementEvent(
                    PlacementFault.SHAPE, f"engine {engine.joined.engine!r}: {error}"
                ) from error
            engine.since = engine.since if same_plan else None
            if placement.sharded != engine.sharded:
                engine.sharded = placement.sharded
                self._count_all(engine, now)
                engine.closed, engine.since = [], None
                self._begin(engine, now)

    def homes_published(self, worker_id: int, homes: PlannedHomes) -> None:
        """Set the published homes of an engine."""
        if worker_id in self._engines:
            self._engines[worker_id].homes = homes

    def left(self, worker_id: int) -> None:
        """Remove an incarnation."""
        self._engines.pop(worker_id, None)

    def machines(self, worker_id: int) -> tuple[ModelShape, NDArray[np.intp]] | None:
        """Return the model shape of an engine and the node number of each rank [ranks]; None: it is not
        tracked."""
        engine = self._engines.get(worker_id)
        return None if engine is None or engine.joined.shape is None else (engine.joined.shape, engine.node)

    def reported_rates(self, worker_id: int) -> NDArray[np.float32] | None:
        """Return the last reported demand, float32 [targets, layers, experts] in pairs per second; None: no
        demand is known."""
        engine = self._engines.get(worker_id)
        if engine is None or not any(rank.active for rank in engine.ranks):
            return None
        return np.stack([rank.rates for rank in engine.ranks])

    def harmed(self, worker_id: int, cells: NDArray[np.bool_], until: float) -> None:
        """Freeze experts [layers, experts] that a harmful plan moved. A mask of another shape is ignored."""
        engine = self._engines.get(worker_id)
        if engine is not None and cells.shape == engine.shape[1:]:
            engine.history = engine.history.harmed(cells, until)

    def resting(self, worker_id: int, now: float) -> int:
        """Count the experts of an engine that are in cooldown."""
        engine, config = self._engines.get(worker_id), self._config
        return (
            0
            if engine is None
            else int(engine.history.frozen(now, config.cooldown_seconds, config.layer_cooldown_seconds).sum())
        )

    def model(self, worker_id: int) -> str:
        """Return the model of an engine; empty: it is not tracked."""
        engine = self._engines.get(worker_id)
        return "" if engine is None else engine.joined.model

    def retraced(self, worker_id: int, history: MoveHistory | None) -> None:
        """Replace a fresh move history by the one from the log. It is ignored if it does not end at the
        served placement."""
        engine = self._engines.get(worker_id)
        if (
            engine is not None
            and history is not None
            and history.epoch == engine.history.epoch
            and np.array_equal(history.table, engine.history.table)
        ):
            engine.history = replace(history, rests=engine.history.rests)

    # Reports

    def demand(self, report: DemandPublished, now: float) -> None:
        """Apply a demand report. Raises InvalidPlacementEvent, without any change, if it is invalid or
        outdated."""
        engine, rank = self._rank(report.worker_id, report.rank, f"a demand of engine {report.engine!r}")
        if (report.engine, report.model) != (engine.joined.engine, engine.joined.model):
            raise InvalidPlacementEvent(
                PlacementFault.CONTRADICTION,
                f"worker {report.worker_id} is engine {engine.joined.engine!r} of model"
                f" {engine.joined.model!r}, not {report.engine!r} of {report.model!r}",
            )
        if report.version <= rank.version:
            raise InvalidPlacementEvent(
                PlacementFault.STALE,
                f"version {report.version} of the demand of {report.engine}/{report.rank};"
                f" {rank.version} is known",
            )
        if (report.demand.layers, report.demand.experts) != engine.shape[1:]:
            raise InvalidPlacementEvent(
                PlacementFault.SHAPE,
                f"a demand of {report.demand.layers} x {report.demand.experts} experts; engine"
                f" {report.engine!r} has {engine.shape[1]} x {engine.shape[2]}",
            )
        try:
            rates = report.demand.array()
        except ValueError as error:
            raise InvalidPlacementEvent(
                PlacementFault.DEMAND, f"the demand of {report.engine}/{report.rank}: {error}"
            ) from error
        if not 0 <= report.pairs < np.inf:
            raise InvalidPlacementEvent(
                PlacementFault.DEMAND,
                f"the demand of {report.engine}/{report.rank} comes of {report.pairs} pairs; it must be"
                " finite and not negative",
            )
        self._count(engine, report.rank, now)
        rank.report(rates)
        rank.version, rank.reported_at, rank.stated_pairs = report.version, now, report.pairs

    def kv_use(self, worker_id: int, targets: int) -> KvUse | None:
        """Return the KV pages in use at each target, as last reported; None: not all are known. targets: of
        the served layout."""
        engine = self._engines.get(worker_id)
        loads = [] if engine is None else [rank.load for rank in engine.ranks[:targets]]
        known = [
            (load.kv_used_blocks, load.running or 0)
            for load in loads
            if load is not None and load.kv_used_blocks is not None
        ]
        if not known or len(known) < len(loads):
            return None
        return KvUse([pages for pages, _ in known], [running for _, running in known])

    def load(self, report: KvMetrics, now: float) -> None:
        """Apply the load report of a rank. Reports of engines that are not tracked are ignored."""
        if report.worker_id in self._engines:
            engine, rank = self._rank(report.worker_id, report.dp_rank, "a load")
            self._count(engine, report.dp_rank, now)
            rank.load, rank.load_at = report, now

    def activated(self, report: ExpertsActivated, now: float) -> None:
        """Keep the demand of an interval, of engines that move their experts themselves: they cannot steer
        tokens, so that a plan must suit what is in demand together. Raises InvalidPlacementEvent for invalid
        reports."""
        engine = self._engines.get(report.worker_id)
        if engine is None or not engine.joined.rearranges:
            return
        try:
            counts = report.counts.array()
        except ValueError as error:
            name = f"the activations of {report.engine}/{report.rank}"
            raise InvalidPlacementEvent(PlacementFault.DEMAND, f"{name}: {error}") from error
        if counts.shape != engine.shape[1:] or not 0 <= report.rank < engine.shape[0]:
            raise InvalidPlacementEvent(
                PlacementFault.SHAPE,
                f"activations {counts.shape} of target {report.rank} of engine {report.engine!r}, which has"
                f" {engine.shape} (targets, layers, experts)",
            )
        engine.samples.add(report.rank, counts.astype(np.float32), now)

    def sampled(self, report: TokensSampled, now: float) -> None:
        """Keep the experts of sampled tokens, for about two windows. Raises InvalidPlacementEvent if they do
        not fit the model, and keeps none then."""
        engine = self._engines.get(report.worker_id)
        if engine is None or engine.tokens is None:
            return
        try:
            engine.tokens.add(report.requests, now, 2 * self._config.window_seconds)
        except ValueError as error:
            raise InvalidPlacementEvent(PlacementFault.SHAPE, f"engine {report.engine!r}: {error}") from error

    def rearranged(self, report: DispatchMeasured) -> None:
        """Apply the measured map changes of an engine that moves its experts itself. Raises
        InvalidPlacementEvent for impossible ones."""
        engine = self._engines.get(report.worker_id)
        if engine is None:
            return
        stated = engine.joined.rearrange_speed or RearrangeSpeed()
        try:
            for time in report.rearrangements:
                engine.rearrangements.add(time, stated)
        except ValueError as error:
            raise InvalidPlacementEvent(
                PlacementFault.DEMAND, f"engine {report.engine!r}: {error}"
            ) from error

    def clusters(self, model: str, clusters: ClusterModel) -> None:
        """Store the tracker's clusters of a model, unless a newer version is known."""
        known = self._clusters.get(model)
        if known is None or clusters.version > known.version:
            self._clusters[model] = clusters
            _bound(self._clusters, model)

    def predictability(self, model: str, reliability: Mapping[str, float]) -> None:
        """Store the predictability of a model's requests, from the reliability of each source in the
        tables."""
        parts = [reliability.get(source, 0.0) for source in SOURCES]
        self._predictability[model] = together(
            [min(max(part, 0.0), 1.0) if np.isfinite(part) else 0.0 for part in parts]
        )
        _bound(self._predictability, model)

    def shifted(self, model: str, now: float) -> None:
        """Discard the closed windows after a demand shift, because they say nothing about the new demand.

        The next two windows are short, so that planning and evaluation can resume soon. Repeated shifts are
        ignored meanwhile.
        """
        for engine in self._engines.values():
            if engine.joined.model == model and not engine.short_windows:
                self._count_all(engine, now)
                engine.closed, engine.short_windows = [], SHORT_WINDOWS
                if engine.tokens is not None:
                    engine.tokens.clear()
                self._begin(engine, now)

    def turn(self, now: float) -> None:
        """Close the windows that are long enough."""
        for engine in self._engines.values():
            if now - engine.began >= self._window_seconds(engine):
                self._count_all(engine, now)
                if (
                    engine.short_windows
                    and now - engine.began < self._config.window_seconds
                    and engine.pairs < self._config.min_pairs * engine.shape[2]
                ):
                    continue  # too few requests for such a short window
                engine.closed = [*engine.closed, engine.demand(now)][-2:]
                engine.since = engine.since or engine.closed[-1]
                engine.short_windows = max(engine.short_windows - 1, 0)
                self._begin(engine, now)

    def hurried(self, worker_id: int) -> float | None:
        """Return the time from a shift until two windows are available again; None: no shift, or they are
        available."""
        engine = self._engines.get(worker_id)
        return (
            None
            if engine is None or not engine.short_windows
            else SHORT_WINDOWS * self._window_seconds(engine)
        )

    def _window_seconds(self, engine: _Engine) -> float:
        return self._config.window_seconds / (SHORT_WINDOW_FACTOR if engine.short_windows else 1)

    def _begin(self, engine: _Engine, now: float) -> None:
        """Start a new window."""
        engine.began = now
        for rank in engine.ranks:
            rank.begin()

    # Results

    def view(self, entry: EngineEntry, now: float) -> EngineView:
        """Return a snapshot of one engine. Raises InvalidPlacementEvent naming the missing data if too little
        is known."""
        engine = self._engines.get(entry.worker_id)
        if engine is None or engine.joined.shape is None:
            raise InvalidPlacementEvent(
                PlacementFault.UNKNOWN,
                f"engine {entry.engine!r} is not tracked: it is gone, or its demand exceeds"
                " planner.max_cells",
            )
        if len(entry.placement.whole):
            self._check_known(engine, now)
        self._count_all(engine, now)
        fit, later = self._windows(engine, now)
        joined, ranks = engine.joined, entry.placement.ranks
        return EngineView(
            engine=joined.engine,
            worker_id=joined.worker_id,
            model=joined.model,
            shape=engine.joined.shape,
            placement=entry.placement,
            node=engine.node,
            speed=joined.speed or EngineSpeed(),
            demand=fit.over(ranks),
            later=None if later is None else later.over(ranks),
            running=_loads(engine, "running"),
            waiting=_loads(engine, "waiting"),
            cache=_cache(engine),
            clusters=self._clusters.get(joined.model),
            predictability=self._predictability.get(joined.model, 0.0),
            homes=engine.homes,
            history=engine.history,
            since=None if engine.since is None else engine.since.over(ranks),
            now=now,
            step_seconds=_longest_step(engine),
            samples=engine.samples.between(fit.began, now if later is None else later.began),
            later_samples=None if later is None else engine.samples.between(later.began, now),
            tokens=None if engine.tokens is None else engine.tokens.recent(),
            targets=len(joined.urls),
            dispatch=joined.dispatch,
            rearranges=joined.rearranges,
            gathers_all=joined.gathers_all,
            rearrange_speed=engine.rearrangements.correct(joined.rearrange_speed or RearrangeSpeed()),
        )

    def _windows(self, engine: _Engine, now: float) -> tuple[Demand, Demand | None]:
        """Return the windows for planning and for evaluation: the last two.

        The current window counts as soon as half of it has passed.
        """
        found = list(engine.closed)
        if len(found) < 2 or now - engine.began >= self._window_seconds(engine) / 2:
            found.append(engine.demand(now))
        return (found[-2], found[-1]) if len(found) > 1 and found[-1].stated_pairs.any() else (found[0], None)

    def _check_known(self, engine: _Engine, now: float) -> None:
        unknown = [
            number
            for number, rank in enumerate(engine.ranks)
            if not (self._holds(rank, now) or self._is_idle(rank, now))
        ]
        if unknown:
            last = max(engine.ranks[number].reported_at for number in unknown)
            since = "was never reported" if last == -np.inf else f"was not reported for {now - last:.0f} s"
            raise InvalidPlacementEvent(
                PlacementFault.DEMAND,
                f"the demand of ranks {listed(unknown)} of engine {engine.joined.engine!r} {since}: send"
                " requests, and check the tracker (roost status)",
            )

    def _holds(self, rank: DemandByRank, now: float) -> bool:
        """Return True if the last demand report of a rank is still valid.

        A report of zero demand stays valid until the rank reports that it is busy.
        """
        busy = (
            rank.load is not None
            and now - rank.load_at <= self._config.stale_seconds
            and not _idle(rank.load)
        )
        return now - rank.reported_at <= self._config.stale_seconds or (
            rank.version >= 0 and not rank.active and not busy
        )

    def _is_idle(self, rank: DemandByRank, now: float) -> bool:
        return rank.load is not None and now - rank.load_at <= self._config.stale_seconds and _idle(rank.load)

    def _count(self, engine: _Engine, number: int, now: float) -> None:
        """Add the demand of a rank since it was last counted to the window."""
        rank = engine.ranks[number]
        began = max(rank.counted_at, engine.began)
        rank.counted_at = now
        until = min(now, rank.reported_at + self._config.stale_seconds) if rank.active else now
        if rank.version >= 0 and until > began and (rank.active or self._holds(rank, now)):
            rank.exposure += until - began
            rank.lasted += until - began
        elif now > began and self._is_idle(rank, now):
            rank.report(np.zeros_like(rank.rates))
            rank.stated_pairs = 0.0
            rank.exposure += now - began

    def _count_all(self, engine: _Engine, now: float) -> None:
        for number in range(len(engine.ranks)):
            self._count(engine, number, now)

    def _rank(self, worker_id: int, rank: int, what: str) -> tuple[_Engine, DemandByRank]:
        engine = self._engines.get(worker_id)
        if engine is None:
            raise InvalidPlacementEvent(
                PlacementFault.UNKNOWN, f"{what}: worker {worker_id} has not joined, or has left"
            )
        if not 0 <= rank < len(engine.ranks):
            raise InvalidPlacementEvent(
                PlacementFault.SHAPE,
                f"{what}: rank {rank} of worker {worker_id}, which has ranks 0..{len(engine.ranks) - 1}",
            )
        return engine, engine.ranks[rank]


def _nodes(joined: EngineJoined, ranks: int) -> NDArray[np.intp]:
    """Number the nodes of the ranks from 0, in the order in which they are named."""
    names = joined.nodes if len(joined.nodes) == ranks else (joined.node,) * ranks
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], np.intp)


def _longest_step(engine: _Engine) -> float | None:
    """Return the duration of recent steps on the slowest target; None: not reported."""
    found = [rank.load.step_seconds for rank in engine.ranks if rank.load is not None]
    return max((seconds for seconds in found if seconds is not None), default=None)


def _idle(load: KvMetrics) -> bool:
    return not (load.running or load.waiting or load.active_prefill_tokens)


def _loads(engine: _Engine, what: str) -> NDArray[np.float64] | None:
    """Return one value of the last load reports, float64 [targets]; None if one has not reported it."""
    values = [None if rank.load is None else getattr(rank.load, what) for rank in engine.ranks]
    return None if any(value is None for value in values) else np.array(values, np.float64)


def _cache(engine: _Engine) -> CacheUse | None:
    """Return the cache use by requests. Blocks that are only kept for prefix reuse can be evicted, so they do
    not count."""
    used = _loads(engine, "active_decode_blocks")
    return (
        None
        if used is None
        else CacheUse(engine.joined.kv_blocks, used, engine.joined.block_size, engine.joined.kv_block_bytes)
    )


def _bound(kept: "OrderedDict[str, Any]", newest: str) -> None:
    kept.move_to_end(newest)
    while len(kept) > MAX_MODELS:
        kept.popitem(last=False)
