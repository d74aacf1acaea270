"""Present activity: engines and their ranks, expert demand, placements, and the changes to publish. Pure."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import Float32Array
from fleet.facts.activity import CountsImported, ExpertsActivated
from fleet.facts.demand import DemandPublished, ProfilePublished
from fleet.facts.engines import EngineJoined
from fleet.membership import Heartbeats, Membership
from fleet.popularity import ExpertTable, profile
from fleet.requests.demand import RankPopularity
from tracker.activity.decay_window import FAST, SLOW, DecayWindow, WindowReport
from tracker.activity.local_supply import LocalSupply
from tracker.activity.report_gaps import ReportGaps
from tracker.activity.report_validation import InvalidReport, ReportFault, checked_counts
from tracker.config import TrackerConfig

SHORTEST_SECONDS, LONGEST_SECONDS = 1e-3, 3600.0
"""Reports over a shorter or longer interval are rejected."""
IDLE_TOKENS_PER_SECOND = 0.01
"""A rank with less demand counts as having none."""
DEPARTED = 4096
"""Departed workers that are remembered, so that a late report does not bring them back."""
IMPORTS = 4096
"""Imports that are remembered, so that none is counted twice."""
DIGEST = 128
"""Limit of an import's digest, in characters."""
PUBLISHERS = 8
"""Publishers that are tracked separately per rank."""


class RankKey(NamedTuple):
    worker_id: int
    rank: int


class ReportedCounts(NamedTuple):
    """Contents of a report: unsigned counts [layers, experts] of (token, k) pairs, the tokens behind them,
    and the model.
    """

    model: str
    counts: NDArray[Any]
    tokens: int


@dataclass(slots=True)
class _Rank:
    window: DecayWindow
    publishers: OrderedDict[int, ReportGaps] = field(default_factory=OrderedDict)
    """by publisher"""
    reported: bool = False
    """True if reported since its demand was last published"""
    published_rate: float = 0.0
    """last published tokens per second"""


@dataclass(slots=True)
class _Worker:
    engine: str
    model: str
    ranks: int | None = None
    """None: it reported before its join arrived"""
    windows: dict[int, _Rank] = field(default_factory=dict)


@dataclass(slots=True)
class _Model:
    window: DecayWindow
    used_at: float
    reported_at: float | None = None
    changed: bool = False
    version: int = 0


class EngineActivity:
    """Workers, ranks and models, all bounded. `now` is seconds of one monotonic clock.

    first_version: start of the version numbers of published messages, common to all models. A restarted
    tracker must not repeat them.
    """

    def __init__(self, config: TrackerConfig, first_version: int = 1) -> None:
        self._config = config
        self._constants = (config.fast_seconds, config.slow_seconds)
        self._version = first_version
        self._workers: Membership[_Worker] = Membership()
        self._heartbeats = Heartbeats()
        self._models: dict[str, _Model] = {}
        self._departed: OrderedDict[int, None] = OrderedDict()
        self._supplies: OrderedDict[int, LocalSupply] = OrderedDict()
        """by worker; a placement may arrive before its worker is known"""
        self._imports: OrderedDict[str, None] = OrderedDict()

    @property
    def ranks(self) -> int:
        """Ranks with a window."""
        return sum(len(worker.windows) for worker in self._workers.values())

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """(layers, experts) of the tracked models."""
        return {name: (model.window.layers, model.window.experts) for name, model in self._models.items()}

    @property
    def stored_bytes(self) -> int:
        """Bytes of all windows and placements."""
        windows = sum(
            rank.window.stored_bytes for worker in self._workers.values() for rank in worker.windows.values()
        )
        models = sum(model.window.stored_bytes for model in self._models.values())
        return windows + models + sum(supply.held.nbytes for supply in self._supplies.values())

    def ages(self, now: float) -> dict[str, float | None]:
        """Return the seconds since the last report for each model; None: no report."""
        return {
            name: None if model.reported_at is None else now - model.reported_at
            for name, model in self._models.items()
        }

    # Membership and placements

    def engine_of(self, worker_id: int) -> str | None:
        """Return the engine of a known worker."""
        return self._workers.engine_of(worker_id)

    def joined(self, joined: EngineJoined, now: float) -> None:
        """Add an incarnation of an engine, which replaces the previous one. Repetitions have no effect."""
        if joined.worker_id in self._departed:
            return
        worker = self._workers.get(joined.worker_id) or _Worker(joined.engine, joined.model)
        for ended in self._workers.join(joined.engine, joined.worker_id, worker):
            self.left(ended)
        worker.engine, worker.model, worker.ranks = joined.engine, joined.model, len(joined.urls)
        self._heartbeats.beat(joined.worker_id, now)
        if joined.shape is not None:
            self._shaped(joined.model, joined.shape.layers, joined.shape.experts, now)

    def placed(self, worker_id: int, supply: LocalSupply) -> None:
        """Record a worker's placement; only the newest epoch counts. InvalidReport if it exceeds the
        limits."""
        if worker_id in self._departed:
            return
        ranks, layers, experts = supply.held.shape
        if ranks > self._config.max_ranks or layers * experts > self._config.max_cells:
            raise InvalidReport(
                ReportFault.CAPACITY,
                f"a placement of {ranks} ranks, {layers} x {experts} experts; raise tracker.max_ranks or"
                " max_cells to follow it",
            )
        known = self._supplies.get(worker_id)
        if known is not None and known.epoch >= supply.epoch:
            return
        self._supplies[worker_id] = supply
        while sum(len(supply.held) for supply in self._supplies.values()) > 2 * self._config.max_ranks:
            unknown = (known for known in self._supplies if known not in self._workers)
            del self._supplies[next(unknown, next(iter(self._supplies)))]

    def left(self, worker_id: int) -> None:
        """Drop the demand of a worker's ranks. The model's profile keeps what it learnt."""
        self._workers.end(worker_id)
        self._supplies.pop(worker_id, None)
        self._departed[worker_id] = None
        while len(self._departed) > DEPARTED:
            self._departed.popitem(last=False)

    def beat(self, worker_id: int, now: float) -> None:
        """Record a heartbeat."""
        if worker_id in self._workers:
            self._heartbeats.beat(worker_id, now)

    def forget_silent(self, now: float) -> list[int]:
        """Drop and return the workers silent for too long. A new report brings a worker back."""
        silent = [
            worker_id
            for worker_id in self._workers
            if self._heartbeats.silence(worker_id, now) > self._config.forget_seconds
        ]
        for worker_id in silent:
            self._workers.end(worker_id)
        self._heartbeats.keep_only(self._workers)
        return silent

    # Activations

    def report(
        self, report: ExpertsActivated, now: float, publisher: int = 0, sequence: int | None = None
    ) -> ReportedCounts:
        """Add a report whose interval ends now. Reports may arrive in any order, each only once.

        publisher, sequence: of the message; None: losses are not tracked. InvalidReport if it is unusable,
        without any change.
        """
        worker = self._workers.get(report.worker_id)
        self._check_origin(report, worker)
        counts = checked_counts(report.counts, report.tokens, report.cached_tokens, self._config.max_cells)
        if worker is None or report.rank not in worker.windows:
            self._check_room()
        layers, experts = counts.shape
        model = self._models.get(report.model) or self._shaped(report.model, layers, experts, now)
        self._check_shape(report.model, model, layers, experts)
        if worker is None:
            worker = _Worker(report.engine, report.model)
            self._workers.add(report.engine, report.worker_id, worker)
        rank = worker.windows.get(report.rank)
        if rank is None:
            rank = worker.windows[report.rank] = _Rank(DecayWindow(layers, experts, self._constants))
            model.window.sources = max(
                model.window.sources,
                sum(len(each.windows) for each in self._workers.values() if each.model == report.model),
            )
        self._heartbeats.beat(report.worker_id, now)
        model.used_at = model.reported_at = now
        rank.reported = model.changed = True
        if sequence is not None:
            _note_losses(rank, model, publisher, sequence, now - report.seconds, now)
        weighed = WindowReport(counts, report.tokens, report.seconds, now)
        rank.window.observe(weighed)
        model.window.observe(weighed)
        return ReportedCounts(report.model, counts, report.tokens)

    def imported(self, imported: CountsImported, now: float) -> bool:
        """Add imported counts to a model's slow profile. False if they were added before. InvalidReport if
        they are unusable.
        """
        if not 1 <= len(imported.digest) <= DIGEST:
            raise InvalidReport(
                ReportFault.COUNTS,
                f"an import's digest must have 1 to {DIGEST} characters, not {len(imported.digest)}",
            )
        if imported.digest in self._imports:
            return False
        counts = checked_counts(imported.counts, imported.tokens, 0, self._config.max_cells)
        layers, experts = counts.shape
        model = self._models.get(imported.model) or self._shaped(imported.model, layers, experts, now)
        self._check_shape(imported.model, model, layers, experts)
        model.window.take(counts, imported.tokens, now, SLOW)
        model.used_at, model.changed = now, True
        self._imports[imported.digest] = None
        while len(self._imports) > IMPORTS:
            self._imports.popitem(last=False)
        return True

    def _check_origin(self, report: ExpertsActivated, worker: _Worker | None) -> None:
        if report.worker_id in self._departed:
            raise InvalidReport(
                ReportFault.DEPARTED, f"worker {report.worker_id} of engine {report.engine!r} has left"
            )
        if worker is not None and worker.model != report.model:
            raise InvalidReport(
                ReportFault.MODEL,
                f"worker {report.worker_id} joined with model {worker.model!r} and reports for"
                f" {report.model!r}",
            )
        ranks = self._config.max_ranks if worker is None or worker.ranks is None else worker.ranks
        if not 0 <= report.rank < ranks:
            raise InvalidReport(
                ReportFault.RANK,
                f"worker {report.worker_id} has ranks 0..{ranks - 1} and reports for rank {report.rank}",
            )
        if not SHORTEST_SECONDS <= report.seconds <= LONGEST_SECONDS:
            raise InvalidReport(
                ReportFault.INTERVAL,
                f"an interval of {report.seconds} s; it must be {SHORTEST_SECONDS} to {LONGEST_SECONDS} s",
            )

    def _check_room(self) -> None:
        if self.ranks >= self._config.max_ranks:
            raise InvalidReport(
                ReportFault.CAPACITY,
                f"{self.ranks} ranks are followed already; raise tracker.max_ranks to follow more",
            )

    def _check_shape(self, name: str, model: _Model, layers: int, experts: int) -> None:
        if (model.window.layers, model.window.experts) != (layers, experts):
            known = f"[{model.window.layers}, {model.window.experts}]"
            raise InvalidReport(
                ReportFault.SHAPE, f"counts have shape [{layers}, {experts}]; model {name!r} has {known}"
            )

    def _shaped(self, name: str, layers: int, experts: int, now: float) -> _Model:
        """Return the model of this name and shape. A different shape is a different model, which starts
        empty.
        """
        known = self._models.get(name)
        if known is not None and (known.window.layers, known.window.experts) == (layers, experts):
            return known
        if layers * experts > self._config.max_cells:
            raise InvalidReport(
                ReportFault.CAPACITY,
                f"model {name!r} has {layers} x {experts} experts; raise tracker.max_cells to follow it",
            )
        if known is None and len(self._models) >= self._config.max_models:
            self._evict_model()
        for worker in self._workers.values():
            if worker.model == name:
                worker.windows.clear()
        self._models[name] = _Model(DecayWindow(layers, experts, self._constants), now)
        return self._models[name]

    def _evict_model(self) -> None:
        served = {worker.model for worker in self._workers.values()}
        idle = [name for name in self._models if name not in served]
        if not idle:
            raise InvalidReport(
                ReportFault.CAPACITY,
                f"{len(self._models)} models are followed already; raise tracker.max_models to follow more",
            )
        del self._models[min(idle, key=lambda name: self._models[name].used_at)]

    # Publishing

    def profile(self, name: str, now: float) -> ProfilePublished | None:
        """Return a model's slow profile: uniform, with 0 tokens, before the first report; None for an unknown
        model.
        """
        model = self._models.get(name)
        if model is None:
            return None
        table = profile(model.window.counts(SLOW, now), self._config.prior_pairs)
        return ProfilePublished(
            model=name,
            version=model.version,
            tokens=model.window.tokens(SLOW, now),
            profile=ExpertTable.of(table),
        )

    def fast_profile(self, name: str, now: float) -> ExpertTable | None:
        """Return the present popularity, shrunk towards the slow profile by `prior_pairs` per layer; None for
        an unknown model.
        """
        model = self._models.get(name)
        if model is None:
            return None
        slow = profile(model.window.counts(SLOW, now), self._config.prior_pairs)
        mixed = model.window.counts(FAST, now) + self._config.prior_pairs * slow
        return ExpertTable.of(mixed / mixed.sum(axis=1, keepdims=True))

    def changed(self, now: float) -> Iterator[ProfilePublished | DemandPublished]:
        """Yield the changes since the last call: profiles of models, demands of ranks. Each gets its own
        version.
        """
        for name, model in list(self._models.items()):
            if model.changed:
                model.changed, model.version = False, self.next_version()
                if (published := self.profile(name, now)) is not None:
                    yield published
        due = [
            (worker_id, worker, number, rank)
            for worker_id, worker in self._workers.items()
            for number, rank in worker.windows.items()
            if self._is_due(rank, now)
        ]
        for worker_id, worker, number, rank in due:
            yield self._demand(worker_id, worker, number, rank, now)

    def _is_due(self, rank: _Rank, now: float) -> bool:
        """Return True if the rank reported since the last publication, or its demand fell noticeably; once
        when it reaches zero.
        """
        return rank.reported or (
            rank.published_rate > 0
            and rank.window.tokens_per_second(FAST, now) < (1 - self._config.change) * rank.published_rate
        )

    def _demand(
        self, worker_id: int, worker: _Worker, number: int, rank: _Rank, now: float
    ) -> DemandPublished:
        speed, rates = self._demand_rates(rank, now)
        pairs = float(rank.window.counts(FAST, now).sum(dtype=np.float64)) / len(rates) if speed else 0.0
        rank.reported, rank.published_rate = False, speed
        supply = self._supply(worker_id, worker, number, rank.window)
        return DemandPublished(
            engine=worker.engine,
            worker_id=worker_id,
            rank=number,
            model=worker.model,
            version=self.next_version(),
            tokens_per_second=speed,
            demand=ExpertTable.of(rates),
            pairs=pairs,
            remote=None if supply is None else supply.remote(number, rates),
        )

    def _demand_rates(self, rank: _Rank, now: float) -> tuple[float, Float32Array]:
        """Return the tokens per second of a rank, in total and to each expert."""
        speed, rates = rank.window.tokens_per_second(FAST, now), rank.window.rates(FAST, now)
        return (speed, rates) if speed >= IDLE_TOKENS_PER_SECOND else (0.0, np.zeros_like(rates))

    def _supply(self, worker_id: int, worker: _Worker, rank: int, window: DecayWindow) -> LocalSupply | None:
        """Return a worker's placement, if it is known and has matching ranks and experts."""
        supply = self._supplies.get(worker_id)
        if (
            supply is None
            or rank >= len(supply.held)
            or supply.held.shape[1:] != (window.layers, window.experts)
        ):
            return None
        return supply if worker.ranks in (None, len(supply.held)) else None

    def rank_keys(self, name: str) -> list[RankKey]:
        """Return the ranks that serve a model and have reported, by engine and number."""
        found = [
            (worker.engine, number, worker_id)
            for worker_id, worker in self._workers.items()
            if worker.model == name
            for number in worker.windows
        ]
        return [RankKey(worker_id, number) for _, number, worker_id in sorted(found)]

    def rank_popularity(self, key: RankKey, now: float) -> RankPopularity | None:
        """Compare the demand of one rank's requests with its placement; None if the rank has left
        meanwhile."""
        worker = self._workers.get(key.worker_id)
        rank = None if worker is None else worker.windows.get(key.rank)
        if worker is None or rank is None:
            return None
        speed, rates = self._demand_rates(rank, now)
        supply = self._supply(key.worker_id, worker, key.rank, rank.window)
        if supply is None:
            return RankPopularity(engine=worker.engine, rank=key.rank, tokens_per_second=speed, remote=None)
        pairs = rank.window.counts(FAST, now) * np.float32(speed > 0)
        return RankPopularity(
            engine=worker.engine,
            rank=key.rank,
            tokens_per_second=speed,
            remote=supply.remote(key.rank, rates),
            wanted_remote=supply.wanted_remote(key.rank, rates, pairs),
            local_idle=supply.local_idle(key.rank, rates, pairs),
        )

    def next_version(self) -> int:
        """Return the version for the next published message."""
        self._version += 1
        return self._version - 1

    # Saving and restoring

    def state(self) -> Iterator[tuple[str, Any]]:
        """Yield the complete state piece by piece, for msgpack. With many ranks it takes a while; the caller
        may pause in between.
        """
        yield "constants", list(self._constants)
        yield "departed", list(self._departed)
        yield "imports", list(self._imports)
        for name, model in list(self._models.items()):
            yield (
                "model",
                [name, model.window.state(), model.used_at, model.reported_at, model.changed, model.version],
            )
        for worker_id, worker in list(self._workers.items()):
            yield (
                "worker",
                [
                    worker_id,
                    worker.engine,
                    worker.model,
                    self._heartbeats.last(worker_id),
                    worker.ranks,
                ],
            )
            for number, rank in list(worker.windows.items()):
                publishers = [[publisher, gaps.state()] for publisher, gaps in rank.publishers.items()]
                yield (
                    "rank",
                    [worker_id, number, rank.window.state(), publishers, rank.reported, rank.published_rate],
                )

    def restore(self, pieces: Iterable[tuple[str, Any]]) -> None:
        """Restore a state. ValueError if it is invalid or exceeds the limits; then this object must not be
        used.
        """
        kinds: dict[str, Callable[..., None]] = {
            "model": self._restore_model,
            "worker": self._restore_worker,
            "rank": self._restore_rank,
        }
        try:
            for kind, piece in pieces:
                if kind == "constants":
                    self._check_constants(*piece)
                elif kind == "departed":
                    self._departed.update((int(worker_id), None) for worker_id in piece[-DEPARTED:])
                elif kind == "imports":
                    self._imports.update((str(digest), None) for digest in piece[-IMPORTS:])
                else:
                    kinds[kind](*piece)
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no state of activity: {error}") from error
        if self.ranks > self._config.max_ranks or len(self._models) > self._config.max_models:
            raise ValueError(
                f"state of {self.ranks} ranks and {len(self._models)} models; tracker.max_ranks and"
                " max_models allow fewer"
            )

    def _check_constants(self, fast: float, slow: float) -> None:
        if (fast, slow) != self._constants:
            raise ValueError(
                f"counts faded with time constants of {fast} and {slow} s; the settings are {self._constants}"
            )

    def _restore_model(
        self,
        name: str,
        window: dict[str, Any],
        used_at: float,
        reported_at: float | None,
        changed: bool,
        version: int,
    ) -> None:
        restored = DecayWindow.restore(self._constants, window)
        if restored.layers * restored.experts > self._config.max_cells:
            raise ValueError(f"model {name!r} is larger than tracker.max_cells allows")
        self._models[str(name)] = _Model(
            restored,
            float(used_at),
            None if reported_at is None else float(reported_at),
            bool(changed),
            int(version),
        )

    def _restore_worker(
        self, worker_id: int, engine: str, model: str, seen_at: float, ranks: int | None
    ) -> None:
        worker = _Worker(str(engine), str(model), None if ranks is None else int(ranks))
        self._workers.add(worker.engine, int(worker_id), worker)
        self._heartbeats.beat(int(worker_id), float(seen_at))

    def _restore_rank(
        self,
        worker_id: int,
        number: int,
        window: dict[str, Any],
        publishers: list[Any],
        reported: bool,
        published_rate: float,
    ) -> None:
        worker = self._workers[worker_id]
        restored, model = DecayWindow.restore(self._constants, window), self._models[worker.model].window
        if (restored.layers, restored.experts) != (model.layers, model.experts):
            raise ValueError(f"rank {number} of worker {worker_id} has another shape than its model")
        last_sequences = OrderedDict(
            (int(publisher), ReportGaps.restore(gaps)) for publisher, gaps in publishers[-PUBLISHERS:]
        )
        worker.windows[int(number)] = _Rank(restored, last_sequences, bool(reported), float(published_rate))

    def last_sequences(self) -> Iterator[tuple[int, int]]:
        """Yield the publishers of reports, each with its highest sequence."""
        for worker in self._workers.values():
            for rank in worker.windows.values():
                yield from ((publisher, gaps.last) for publisher, gaps in rank.publishers.items())


def _note_losses(rank: _Rank, model: _Model, publisher: int, sequence: int, start: float, end: float) -> None:
    """Report unobserved time to rank and model, from the gaps in the publisher's sequence."""
    gaps = rank.publishers.get(publisher)
    if gaps is None:
        gaps = rank.publishers[publisher] = ReportGaps()
        if len(rank.publishers) > PUBLISHERS:
            rank.publishers.popitem(last=False)
        rank.window.sources = len(rank.publishers)
    for span in gaps.observe(sequence, start, end):
        for window in (rank.window, model.window):
            window.lose(span.start, span.end, recovered=span.recovered)
