"""What the tracker believes: who is there, what their requests activate, and what of it is worth saying. Pure."""

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from fleet.events import DemandPublished, EngineJoined, ExpertsActivated, ProfilePublished
from fleet.popularity import ExpertTable, profile
from tracker.config import TrackerConfig
from tracker.window import Table, Window

DEPARTED = 4096
"""Workers that left and are remembered, so that a late report does not bring them back."""
MOST = float(1 << 53)
"""Numbers above this are not counts."""


class Fault(StrEnum):
    """Why a report was refused."""

    DEPARTED = "departed"
    MODEL = "model"
    """another model than the worker joined with"""
    RANK = "rank"
    INTERVAL = "interval"
    COUNTS = "counts"
    """not a table of finite numbers >= 0, or counts without tokens"""
    SHAPE = "shape"
    """another shape than the model's"""
    CAPACITY = "capacity"


class Refused(ValueError):
    """A report that cannot be used."""

    def __init__(self, fault: Fault, detail: str) -> None:
        super().__init__(detail)
        self.fault = fault


@dataclass(slots=True)
class _Rank:
    window: Window
    reported: bool = False
    """since its demand was last published"""
    said: float = 0.0
    """tokens per second last published"""


@dataclass(slots=True)
class _Worker:
    engine: str
    model: str
    heard_at: float
    ranks: int | None = None
    """None: it reported before its join was heard"""
    windows: dict[int, _Rank] = field(default_factory=dict)


@dataclass(slots=True)
class _Model:
    window: Window
    used_at: float
    reported_at: float | None = None
    changed: bool = False
    version: int = 0


class Activity:
    """Workers, ranks and models, all bounded. `now` is seconds of one clock that never goes back.

    first_version: versions of what is published count from here, over all models; a restarted tracker must not repeat them.
    """

    def __init__(self, config: TrackerConfig, first_version: int = 1) -> None:
        self._config = config
        self._version = first_version
        self._workers: dict[int, _Worker] = {}
        self._models: dict[str, _Model] = {}
        self._departed: OrderedDict[int, None] = OrderedDict()

    @property
    def ranks(self) -> int:
        """Ranks with a window."""
        return sum(len(worker.windows) for worker in self._workers.values())

    def ages(self, now: float) -> dict[str, float | None]:
        """Seconds since the last report for each model; None: there was none."""
        return {name: None if model.reported_at is None else now - model.reported_at for name, model in self._models.items()}

    # Who is there

    def joined(self, joined: EngineJoined, now: float) -> None:
        """An incarnation of an engine: it replaces the one before. Hearing it again changes nothing."""
        if joined.worker_id in self._departed:
            return
        for worker_id in [worker_id for worker_id, worker in self._workers.items() if worker.engine == joined.engine and worker_id != joined.worker_id]:
            self.left(worker_id)
        worker = self._workers.setdefault(joined.worker_id, _Worker(joined.engine, joined.model, now))
        worker.engine, worker.model, worker.heard_at, worker.ranks = joined.engine, joined.model, now, len(joined.urls)
        if joined.shape is not None:
            self._shaped(joined.model, joined.shape.layers, joined.shape.experts, now)

    def left(self, worker_id: int) -> None:
        """What a worker's ranks asked for is forgotten; the model's profile keeps what it learnt."""
        self._workers.pop(worker_id, None)
        self._departed[worker_id] = None
        while len(self._departed) > DEPARTED:
            self._departed.popitem(last=False)

    def beat(self, worker_id: int, now: float) -> None:
        """A sign of life."""
        if worker_id in self._workers:
            self._workers[worker_id].heard_at = now

    def forget_silent(self, now: float) -> list[int]:
        """Drop the workers that gave no sign of life for too long; they may come back by reporting. Returns who was dropped."""
        silent = [worker_id for worker_id, worker in self._workers.items() if now - worker.heard_at > self._config.forget_seconds]
        for worker_id in silent:
            del self._workers[worker_id]
        return silent

    # What they activate

    def report(self, report: ExpertsActivated, now: float, *, lost: bool = False) -> None:
        """Take a report into account. lost: earlier reports of this rank are missing. Refused when it cannot be used; then nothing changed."""
        if report.worker_id in self._departed:
            raise Refused(Fault.DEPARTED, f"worker {report.worker_id} of engine {report.engine!r} has left")
        worker = self._workers.get(report.worker_id)
        self._check_origin(report, worker)
        counts = self._checked_counts(report)
        if worker is None:
            worker = _Worker(report.engine, report.model, now)
        if report.rank not in worker.windows and self.ranks >= self._config.most_ranks:
            raise Refused(Fault.CAPACITY, f"{self.ranks} ranks are followed already; raise tracker.most_ranks to follow more")
        layers, experts = counts.shape
        model = self._models.get(report.model) or self._shaped(report.model, layers, experts, now)
        if (model.window.layers, model.window.experts) != (layers, experts):
            known = f"[{model.window.layers}, {model.window.experts}]"
            raise Refused(Fault.SHAPE, f"counts of worker {report.worker_id} have shape [{layers}, {experts}]; model {report.model!r} has {known}")
        self._workers[report.worker_id] = worker
        worker.heard_at = model.used_at = model.reported_at = now
        rank = worker.windows.setdefault(report.rank, _Rank(Window(layers, experts, self._config.fast_seconds)))
        rank.window.observe(counts, report.tokens, report.seconds, now, lost=lost)
        model.window.observe(counts, report.tokens, report.seconds, now)
        rank.reported = model.changed = True

    def _check_origin(self, report: ExpertsActivated, worker: _Worker | None) -> None:
        if worker is not None and worker.model != report.model:
            raise Refused(Fault.MODEL, f"worker {report.worker_id} joined with model {worker.model!r} and reports for {report.model!r}")
        ranks = self._config.most_ranks if worker is None or worker.ranks is None else worker.ranks
        if not 0 <= report.rank < ranks:
            raise Refused(Fault.RANK, f"worker {report.worker_id} has ranks 0..{ranks - 1} and reports for rank {report.rank}")
        least, most = self._config.shortest_interval_seconds, self._config.longest_interval_seconds
        if not least <= report.seconds <= most:
            raise Refused(Fault.INTERVAL, f"an interval of {report.seconds} s; it must be between {least} and {most} s")

    def _checked_counts(self, report: ExpertsActivated) -> Table:
        for name, value in (("tokens", report.tokens), ("cached_tokens", report.cached_tokens)):
            if not 0 <= value <= MOST:
                raise Refused(Fault.COUNTS, f"{name} must be a count, not {value}")
        if report.counts.layers * report.counts.experts > self._config.most_cells:
            raise Refused(Fault.CAPACITY, f"a table of {report.counts.layers} x {report.counts.experts}; raise tracker.most_cells to follow such a model")
        try:
            counts = report.counts.array().astype(np.float64)
        except ValueError as error:
            raise Refused(Fault.COUNTS, str(error)) from error
        if counts.max() > MOST or (report.tokens == 0 and counts.any()):
            raise Refused(Fault.COUNTS, f"{report.tokens} tokens cannot have activated experts {counts.sum():g} times")
        return counts

    def _shaped(self, name: str, layers: int, experts: int, now: float) -> _Model:
        """The model of this name and shape; another shape than before is another model, which starts afresh."""
        known = self._models.get(name)
        if known is not None and (known.window.layers, known.window.experts) == (layers, experts):
            return known
        if layers * experts > self._config.most_cells:
            raise Refused(Fault.CAPACITY, f"model {name!r} has {layers} x {experts} experts; raise tracker.most_cells to follow it")
        if known is None and len(self._models) >= self._config.most_models:
            self._evict_model()
        for worker in self._workers.values():
            if worker.model == name:
                worker.windows.clear()
        self._models[name] = _Model(Window(layers, experts, self._config.slow_seconds), now)
        return self._models[name]

    def _evict_model(self) -> None:
        served = {worker.model for worker in self._workers.values()}
        idle = [name for name in self._models if name not in served]
        if not idle:
            raise Refused(Fault.CAPACITY, f"{len(self._models)} models are followed already; raise tracker.most_models to follow more")
        del self._models[min(idle, key=lambda name: self._models[name].used_at)]

    # What is worth saying

    def profile(self, name: str, now: float) -> ProfilePublished | None:
        """A model's profile (uniform, with 0 tokens, before the first report); None for a model nobody named."""
        model = self._models.get(name)
        if model is None:
            return None
        table = profile(model.window.counts(now), self._config.prior_pairs)
        return ProfilePublished(model=name, version=model.version, tokens=model.window.tokens(now), profile=ExpertTable.of(table))

    def changed(self, now: float) -> list[ProfilePublished | DemandPublished]:
        """What changed since the last call: profiles of models, demands of ranks. Each is new under a version of its own."""
        said: list[ProfilePublished | DemandPublished] = []
        for name, model in self._models.items():
            if model.changed:
                model.changed, model.version = False, self._next_version()
                if (published := self.profile(name, now)) is not None:
                    said.append(published)
        for worker_id, worker in self._workers.items():
            said.extend(self._demand(worker_id, worker, number, rank, now) for number, rank in worker.windows.items() if self._is_due(rank, now))
        return said

    def _is_due(self, rank: _Rank, now: float) -> bool:
        """Reported since, or fallen noticeably in silence; at last, once, to nothing."""
        return rank.reported or (rank.said > 0 and rank.window.tokens_per_second(now) < (1 - self._config.change) * rank.said)

    def _demand(self, worker_id: int, worker: _Worker, number: int, rank: _Rank, now: float) -> DemandPublished:
        speed, rates = rank.window.tokens_per_second(now), rank.window.rates(now)
        if speed < self._config.least_tokens_per_second:
            speed, rates = 0.0, np.zeros_like(rates)
        rank.reported, rank.said = False, speed
        return DemandPublished(
            engine=worker.engine,
            worker_id=worker_id,
            rank=number,
            model=worker.model,
            version=self._next_version(),
            tokens_per_second=speed,
            demand=ExpertTable.of(rates),
        )

    def _next_version(self) -> int:
        self._version += 1
        return self._version - 1
