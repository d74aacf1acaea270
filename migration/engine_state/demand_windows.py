"""What was heard of the engines, as far as plans need it: demand by rank in windows, load, clusters. Pure; bounded; the time is an argument.

The tracker says a rank's demand when it changes, so the last word holds until the next; after `stale_seconds` nothing is known any more,
unless the last word was that nothing is wanted, or the rank itself says that it is idle. Words are integrated over windows: what a window
holds are pairs, as many as were really routed, and so its sampling noise is that of a count.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.events import DemandPublished, EngineJoined, KvMetrics
from fleet.experts import ModelShape
from fleet.placement import Placement
from fleet.prediction import SOURCES, together
from fleet.signatures import ClusterModel
from fleet.timing import EngineSpeed
from migration.config import MigrationConfig
from migration.engine_state.demand_counts import DemandByRank
from migration.engine_state.placement_registry import EngineEntry, InvalidPlacementEvent, PlacementFault
from migration.model.engine_view import CacheUse, Demand, EngineView, PlannedHomes
from migration.model.move_history import MoveHistory

MOST_MODELS = 64
"""Models whose clusters are kept."""
HURRIED = 2
"""Windows after a shift that are shorter than others,"""
SHORTER = 6
"""by this factor."""


@dataclass(slots=True)
class _Engine:
    joined: EngineJoined
    shape: tuple[int, int, int]
    node: NDArray[np.intp]
    began: float
    """when the window did that is open"""
    ranks: list[DemandByRank]
    history: MoveHistory
    since: Demand | None = None
    """the first window that was closed after the last plan; None: none was"""
    homes: PlannedHomes | None = None
    closed: list[Demand] = field(default_factory=list)
    """the last two windows, the older first"""
    hurried: int = 0
    """windows that are short, because what is wanted has shifted"""

    @property
    def windows(self) -> list[Demand]:
        """All that are over and are kept."""
        return self.closed if self.since is None or self.since in self.closed else [self.since, *self.closed]

    @property
    def cells(self) -> int:
        """Numbers of one window."""
        ranks, layers, experts = self.shape
        return ranks * layers * experts

    @property
    def pairs(self) -> float:
        """(token, k) pairs of the last layer, which is sharded last of all, in the window that is open."""
        return sum(rank.counted_pairs for rank in self.ranks)

    def demand(self, now: float) -> Demand:
        """The window that is open, as it stands."""
        return Demand(tuple(rank.counted for rank in self.ranks), np.array([rank.pairs for rank in self.ranks]), now - self.began, self.began)


class DemandWindows:
    """Engines that are present and hold experts. `now` is seconds of one clock that never goes back."""

    def __init__(self, config: MigrationConfig) -> None:
        self._config = config
        self._engines: dict[int, _Engine] = {}
        """by worker_id"""
        self._clusters: OrderedDict[str, ClusterModel] = OrderedDict()
        self._foreseen: OrderedDict[str, float] = OrderedDict()

    def reconfigure(self, config: MigrationConfig) -> None:
        """Other lengths of windows and rests, from now on."""
        self._config = config

    @property
    def models(self) -> set[str]:
        """Models of the engines that are watched."""
        return {engine.joined.model for engine in self._engines.values()}

    @property
    def models_without_clusters(self) -> set[str]:
        """Of these, the ones whose clusters were never heard."""
        return self.models - self._clusters.keys()

    @property
    def stored_bytes(self) -> int:
        """Of demand, at most: a word, what was counted before it, and of windows that are over the rates that were reckoned from these too."""
        return sum(4 * engine.cells * (2 + 3 * len(engine.windows)) for engine in self._engines.values())

    # Who is there

    def joined(self, joined: EngineJoined, entry: EngineEntry, now: float) -> None:
        """An incarnation serves experts; it replaces the one before. Refused when its demand would take too much room."""
        for worker_id in [worker_id for worker_id, engine in self._engines.items() if engine.joined.engine == joined.engine and worker_id != joined.worker_id]:
            del self._engines[worker_id]
        if joined.worker_id in self._engines:
            return
        placement = entry.placement
        shape = placement.ranks, placement.layers, placement.experts
        cells = sum(engine.cells for engine in self._engines.values()) + int(np.prod(shape))
        if cells > self._config.most_cells:
            raise InvalidPlacementEvent(
                PlacementFault.CAPACITY,
                f"the demand of engine {joined.engine!r} has {np.prod(shape)} cells, {cells} with all others; raise planner.most_cells to plan for it",
            )
        nothing = np.zeros(shape[1:], np.float32)
        ranks = [DemandByRank(rates=nothing, counted_at=now) for _ in range(shape[0])]
        self._engines[joined.worker_id] = _Engine(joined, shape, _nodes(joined, shape[0]), now, ranks, MoveHistory.begin(joined.worker_id, placement))

    def placed(self, worker_id: int, placement: Placement, plan: str | None, now: float) -> None:
        """An engine serves another epoch, of a plan of ours or (None) not. What it cannot have served changes nothing."""
        engine = self._engines.get(worker_id)
        if engine is not None and placement.epoch > engine.history.epoch:
            goes_on = plan is not None and plan == engine.history.plan
            try:
                engine.history = engine.history.committed(placement, plan, now)
            except ValueError as error:
                raise InvalidPlacementEvent(PlacementFault.SHAPE, f"engine {engine.joined.engine!r}: {error}") from error
            engine.since = engine.since if goes_on else None

    def housed(self, worker_id: int, homes: PlannedHomes) -> None:
        """The homes that are said of an engine from now on."""
        if worker_id in self._engines:
            self._engines[worker_id].homes = homes

    def left(self, worker_id: int) -> None:
        """An incarnation is gone."""
        self._engines.pop(worker_id, None)

    def machines(self, worker_id: int) -> tuple[ModelShape, NDArray[np.intp]] | None:
        """What an engine serves, and the number of each rank's node [ranks]; None: it is not watched."""
        engine = self._engines.get(worker_id)
        return None if engine is None or engine.joined.shape is None else (engine.joined.shape, engine.node)

    def wanted(self, worker_id: int) -> NDArray[np.float32] | None:
        """float32 [ranks, layers, experts]: pairs per second that each rank's requests want, by the last word of each; None: nobody has said."""
        engine = self._engines.get(worker_id)
        if engine is None or not any(rank.wants for rank in engine.ranks):
            return None
        return np.stack([rank.rates for rank in engine.ranks])

    def harmed(self, worker_id: int, cells: NDArray[np.bool_], until: float) -> None:
        """These experts [layers, experts] rest until then: a plan that moved them did harm. What does not fit the engine changes nothing."""
        engine = self._engines.get(worker_id)
        if engine is not None and cells.shape == engine.shape[1:]:
            engine.history = engine.history.harmed(cells, until)

    def resting(self, worker_id: int, now: float) -> int:
        """Experts of an engine that stay where they are for a while."""
        engine, config = self._engines.get(worker_id), self._config
        return 0 if engine is None else int(engine.history.frozen(now, config.cooldown_seconds, config.layer_cooldown_seconds).sum())

    def model(self, worker_id: int) -> str:
        """Of an engine; empty: it is not watched."""
        engine = self._engines.get(worker_id)
        return "" if engine is None else engine.joined.model

    def retraced(self, worker_id: int, history: MoveHistory | None) -> None:
        """What the log tells of an engine, in the place of a history that begins today. What does not lead to what is served changes nothing."""
        engine = self._engines.get(worker_id)
        if engine is not None and history is not None and history.epoch == engine.history.epoch and np.array_equal(history.table, engine.history.table):
            engine.history = replace(history, rests=engine.history.rests)

    # What is said of them

    def demand(self, said: DemandPublished, now: float) -> None:
        """Refused when it cannot be used, or is older than what is known; then nothing changed."""
        engine, rank = self._rank(said.worker_id, said.rank, f"a demand of engine {said.engine!r}")
        if (said.engine, said.model) != (engine.joined.engine, engine.joined.model):
            raise InvalidPlacementEvent(
                PlacementFault.CONTRADICTION,
                f"worker {said.worker_id} is engine {engine.joined.engine!r} of model {engine.joined.model!r}, not {said.engine!r} of {said.model!r}",
            )
        if said.version <= rank.version:
            raise InvalidPlacementEvent(PlacementFault.STALE, f"version {said.version} of the demand of {said.engine}/{said.rank}; {rank.version} is known")
        if (said.demand.layers, said.demand.experts) != engine.shape[1:]:
            raise InvalidPlacementEvent(
                PlacementFault.SHAPE,
                f"a demand of {said.demand.layers} x {said.demand.experts} experts; engine {said.engine!r} has {engine.shape[1]} x {engine.shape[2]}",
            )
        try:
            rates = said.demand.array()
        except ValueError as error:
            raise InvalidPlacementEvent(PlacementFault.DEMAND, f"the demand of {said.engine}/{said.rank}: {error}") from error
        if not 0 <= said.pairs < np.inf:
            raise InvalidPlacementEvent(
                PlacementFault.DEMAND, f"the demand of {said.engine}/{said.rank} comes of {said.pairs} pairs; it must be finite and not negative"
            )
        self._count(engine, said.rank, now)
        rank.speak(rates)
        rank.version, rank.heard_at, rank.pairs = said.version, now, said.pairs

    def load(self, said: KvMetrics, now: float) -> None:
        """Load of a rank; of engines that are not watched it means nothing here."""
        if said.worker_id in self._engines:
            engine, rank = self._rank(said.worker_id, said.dp_rank, "a load")
            self._count(engine, said.dp_rank, now)
            rank.load, rank.load_at = said, now

    def clusters(self, model: str, clusters: ClusterModel) -> None:
        """The tracker's clusters of a model; an older version than is known is ignored."""
        known = self._clusters.get(model)
        if known is None or clusters.version > known.version:
            self._clusters[model] = clusters
            _bound(self._clusters, model)

    def foreseen(self, model: str, reliability: Mapping[str, float]) -> None:
        """How well requests of a model can be foretold: by source, as the tables say it."""
        said = [reliability.get(source, 0.0) for source in SOURCES]
        self._foreseen[model] = together([min(max(part, 0.0), 1.0) if np.isfinite(part) else 0.0 for part in said])
        _bound(self._foreseen, model)

    def shifted(self, model: str, now: float) -> None:
        """What is wanted of a model is not what it was: windows of before say nothing any more. The next two are short, so that there is soon something
        to plan from and to judge on; while they are open nothing begins anew, however often that is said."""
        for engine in self._engines.values():
            if engine.joined.model == model and not engine.hurried:
                self._count_all(engine, now)
                engine.closed, engine.hurried = [], HURRIED
                self._begin(engine, now)

    def turn(self, now: float) -> None:
        """Close the windows that are long enough."""
        for engine in self._engines.values():
            if now - engine.began >= self._window_seconds(engine):
                self._count_all(engine, now)
                if engine.hurried and now - engine.began < self._config.window_seconds and engine.pairs < self._config.least_pairs * engine.shape[2]:
                    continue  # too few requests for so short a window
                engine.closed = [*engine.closed, engine.demand(now)][-2:]
                engine.since = engine.since or engine.closed[-1]
                engine.hurried = max(engine.hurried - 1, 0)
                self._begin(engine, now)

    def hurried(self, worker_id: int) -> float | None:
        """Seconds from a shift on after which there are two windows again; None: it is not known to have shifted, or there are."""
        engine = self._engines.get(worker_id)
        return None if engine is None or not engine.hurried else HURRIED * self._window_seconds(engine)

    def _window_seconds(self, engine: _Engine) -> float:
        return self._config.window_seconds / (SHORTER if engine.hurried else 1)

    def _begin(self, engine: _Engine, now: float) -> None:
        """A new window."""
        engine.began = now
        for rank in engine.ranks:
            rank.begin()

    # What that makes

    def view(self, entry: EngineEntry, now: float) -> EngineView:
        """One engine as it is now. Refused when too little is known: the text says what is missing."""
        engine = self._engines.get(entry.worker_id)
        if engine is None or engine.joined.shape is None:
            raise InvalidPlacementEvent(
                PlacementFault.UNKNOWN, f"engine {entry.engine!r} is not watched: it is gone, or its demand takes more than planner.most_cells allows"
            )
        if entry.layout.targets_are_ranks:
            self._check_known(engine, now)
        self._count_all(engine, now)
        fit, later = self._windows(engine, now)
        joined = engine.joined
        return EngineView(
            engine=joined.engine,
            worker_id=joined.worker_id,
            model=joined.model,
            shape=engine.joined.shape,
            layout=entry.layout,
            placement=entry.placement,
            node=engine.node,
            speed=joined.speed or EngineSpeed(),
            demand=fit,
            later=later,
            running=_loads(engine, "running"),
            waiting=_loads(engine, "waiting"),
            cache=_cache(engine),
            clusters=self._clusters.get(joined.model),
            foreseen=self._foreseen.get(joined.model, 0.0),
            homes=engine.homes,
            history=engine.history,
            since=engine.since,
            now=now,
        )

    def _windows(self, engine: _Engine, now: float) -> tuple[Demand, Demand | None]:
        """What to plan from and what to judge on: the last two windows, the one that is open among them once half of it is over."""
        found = list(engine.closed)
        if len(found) < 2 or now - engine.began >= self._window_seconds(engine) / 2:
            found.append(engine.demand(now))
        return (found[-2], found[-1]) if len(found) > 1 and found[-1].told.any() else (found[0], None)

    def _check_known(self, engine: _Engine, now: float) -> None:
        unknown = [number for number, rank in enumerate(engine.ranks) if not (self._holds(rank, now) or self._is_idle(rank, now))]
        if unknown:
            heard = max(engine.ranks[number].heard_at for number in unknown)
            said = "nobody has said yet" if heard == -np.inf else f"nobody has said for {now - heard:.0f} s"
            raise InvalidPlacementEvent(
                PlacementFault.DEMAND,
                f"{said} what ranks {_listed(unknown)} of engine {engine.joined.engine!r} want: send requests, and see that the tracker runs (roost status)",
            )

    def _holds(self, rank: DemandByRank, now: float) -> bool:
        """Whether the last word about a rank's demand still holds; that it wants nothing holds until the rank says that it is busy."""
        busy = rank.load is not None and now - rank.load_at <= self._config.stale_seconds and not _idle(rank.load)
        return now - rank.heard_at <= self._config.stale_seconds or (rank.version >= 0 and not rank.wants and not busy)

    def _is_idle(self, rank: DemandByRank, now: float) -> bool:
        return rank.load is not None and now - rank.load_at <= self._config.stale_seconds and _idle(rank.load)

    def _count(self, engine: _Engine, number: int, now: float) -> None:
        """Enter what a rank wanted since it was last counted into the window."""
        rank = engine.ranks[number]
        began = max(rank.counted_at, engine.began)
        rank.counted_at = now
        until = min(now, rank.heard_at + self._config.stale_seconds) if rank.wants else now
        if rank.version >= 0 and until > began and (rank.wants or self._holds(rank, now)):
            rank.known += until - began
            rank.lasted += until - began
        elif now > began and self._is_idle(rank, now):
            rank.speak(np.zeros_like(rank.rates))
            rank.pairs = 0.0
            rank.known += now - began

    def _count_all(self, engine: _Engine, now: float) -> None:
        for number in range(len(engine.ranks)):
            self._count(engine, number, now)

    def _rank(self, worker_id: int, rank: int, what: str) -> tuple[_Engine, DemandByRank]:
        engine = self._engines.get(worker_id)
        if engine is None:
            raise InvalidPlacementEvent(PlacementFault.UNKNOWN, f"{what}: worker {worker_id} has not joined, or has left")
        if not 0 <= rank < len(engine.ranks):
            raise InvalidPlacementEvent(PlacementFault.SHAPE, f"{what}: rank {rank} of worker {worker_id}, which has ranks 0..{len(engine.ranks) - 1}")
        return engine, engine.ranks[rank]


def _nodes(joined: EngineJoined, ranks: int) -> NDArray[np.intp]:
    """Number of each rank's node, from 0 in the order in which they are named."""
    names = joined.nodes if len(joined.nodes) == ranks else (joined.node,) * ranks
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], np.intp)


def _idle(load: KvMetrics) -> bool:
    return not (load.running or load.waiting or load.active_prefill_tokens)


def _loads(engine: _Engine, what: str) -> NDArray[np.float64] | None:
    """float64 [ranks] of a figure of the last load reports; None where a rank has never said it."""
    said = [None if rank.load is None else getattr(rank.load, what) for rank in engine.ranks]
    return None if any(value is None for value in said) else np.array(said, np.float64)


def _cache(engine: _Engine) -> CacheUse | None:
    """Blocks that requests hold: those that are kept in case a prefix comes again are anybody's, and soon fill every cache."""
    used = _loads(engine, "active_decode_blocks")
    return None if used is None else CacheUse(engine.joined.kv_blocks, used, engine.joined.block_size, engine.joined.kv_block_bytes)


def _bound(kept: "OrderedDict[str, Any]", newest: str) -> None:
    kept.move_to_end(newest)
    while len(kept) > MOST_MODELS:
        kept.popitem(last=False)


def _listed(numbers: list[int]) -> str:
    """The first of them."""
    return ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
