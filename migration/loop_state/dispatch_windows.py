"""Measured dispatch and step times, in windows of one epoch each. Pure; bounded; time is an argument.

Reports of the ranks are summed in slices of about a second. A window of slices gives means and their standard
errors. Neighbouring seconds are correlated, because the same requests run in them. The slices are therefore
merged into about a dozen batches, and the spread of the batches gives the error (batch means; for a ratio of
sums, by linearisation).
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import FloatArray
from fleet.facts.activity import DispatchMeasured
from fleet.facts.migrations import LoopFigures
from fleet.requests.control_loop import LayerFigures
from migration.config import MigrationConfig
from migration.engine_state.placement_registry import EngineEntry, InvalidPlacementEvent, PlacementFault
from migration.loop_state.verdict import Measurement

SLICES = 128
"""Slices kept per engine, over all epochs."""
BATCHES = 12
"""Batches of a window, whose spread gives its error."""
MIN_SLICES = 4
"""Minimum number of slices of a window; fewer give no error estimate."""
MAX_SECONDS = 3600.0
"""Longest valid interval of a report; ranks report every second."""
_TOLERANCE = 1e-3


class DispatchWindow(NamedTuple):
    """Means over a window: totals and by layer."""

    measured: Measurement
    layers: LayerFigures


@dataclass(slots=True, eq=False)
class _Slice:
    """Reports of about a second of one epoch: sums over the ranks."""

    epoch: int
    began: float
    sums: FloatArray = field(default_factory=lambda: np.zeros(5))
    """[steps, step seconds, tokens, pairs, communication seconds: NaN if the engine cannot measure them]"""
    layers: FloatArray = field(default_factory=lambda: np.zeros((3, 0)))
    """[balance | remote ranks | local, layers]"""


@dataclass(slots=True)
class _Engine:
    engine: str
    ranks: int
    """that hold experts"""
    targets: int
    """that report"""
    layers: int
    sharded: tuple[int, ...]
    """layers that are sharded"""
    first: int
    """epoch from which on they are"""
    slices: deque[_Slice] = field(default_factory=lambda: deque(maxlen=SLICES))


class DispatchWindows:
    """Measurements of the present engines. `now` is seconds of a monotonic clock."""

    def __init__(self, config: MigrationConfig) -> None:
        self._config = config
        self._engines: dict[int, _Engine] = {}
        """by worker_id"""

    def reconfigure(self, config: MigrationConfig) -> None:
        """Use new window lengths from the next slice on."""
        self._config = config

    def keep_only(self, entries: Iterable[EngineEntry]) -> None:
        """Track exactly the present engines."""
        present = {entry.worker_id: entry for entry in entries}
        for worker_id in self._engines.keys() - present.keys():
            del self._engines[worker_id]
        for worker_id in present.keys() - self._engines.keys():
            entry = present[worker_id]
            self._engines[worker_id] = _Engine(
                entry.engine,
                entry.placement.ranks,
                entry.targets,
                entry.placement.layers,
                entry.placement.sharded,
                entry.epoch,
            )

    def placed(self, entry: EngineEntry) -> None:
        """Record a new epoch of an engine. Measurements begin anew where layers change their form, and with
        other attention."""
        engine = self._engines.get(entry.worker_id)
        if engine is None:
            return
        if (engine.targets, engine.sharded) != (entry.targets, entry.placement.sharded):
            engine.targets, engine.sharded, engine.first = (
                entry.targets,
                entry.placement.sharded,
                entry.epoch,
            )
            for one in [one for one in engine.slices if one.epoch < engine.first]:
                engine.slices.remove(one)

    def add(self, report: DispatchMeasured, now: float) -> None:
        """Add one interval of one rank. Reports of engines without a recorded epoch are ignored, and those of
        epochs in which layers had other forms, or the engine other attention.

        Raises InvalidPlacementEvent, without any change, if the report is invalid.
        """
        engine = self._engines.get(report.worker_id)
        if engine is None or 0 <= report.epoch < engine.first:
            return
        layers = _checked(report, engine)
        # ranks report the last interval of an epoch at different times
        last = next((one for one in reversed(engine.slices) if one.epoch == report.epoch), None)
        if last is None or now - last.began >= self._slice_seconds:
            last = _Slice(report.epoch, now, layers=np.zeros((3, engine.layers)))
            engine.slices.append(last)
        communication = np.nan if report.communication_seconds is None else report.communication_seconds
        last.sums += (report.steps, report.step_seconds, report.tokens, report.pairs, communication)
        last.layers += layers

    @property
    def _slice_seconds(self) -> float:
        """Length of a slice, so that the stored slices cover every window that may be requested."""
        longest = max(self._config.window_seconds, self._config.evaluation_seconds)
        return max(longest / (SLICES / 2), 0.9)

    def window(
        self,
        worker_id: int,
        now: float,
        *,
        epoch: int | None = None,
        seconds: float | None = None,
        since: float | None = None,
    ) -> DispatchWindow | None:
        """Return the recent measurements of an engine; None: too little was measured.

        Sharded layers are left out. epoch: the epoch served meanwhile; None: any. seconds: length of the
        window; None: everything known. since: ignore slices that began earlier.
        """
        engine = self._engines.get(worker_id)
        if engine is None:
            return None
        oldest = max(-np.inf if seconds is None else now - seconds, -np.inf if since is None else since)
        taken = [
            one for one in engine.slices if one.began >= oldest and (epoch is None or one.epoch == epoch)
        ]
        if len(taken) < MIN_SLICES or not any(one.sums[2] for one in taken):
            return None
        return _window(taken, engine.targets, engine.sharded)


def _checked(report: DispatchMeasured, engine: _Engine) -> FloatArray:
    """Return balance, remote ranks and local pairs of a report, float64 [3, layers].

    Raises InvalidPlacementEvent naming the invalid value.
    """
    who = f"a measurement of {report.engine}/{report.rank}"
    if report.engine != engine.engine:
        raise InvalidPlacementEvent(
            PlacementFault.CONTRADICTION, f"{who}: worker {report.worker_id} is engine {engine.engine!r}"
        )
    if not 0 <= report.rank < engine.targets:
        raise InvalidPlacementEvent(
            PlacementFault.SHAPE, f"{who}: rank {report.rank} of an engine of {engine.targets}"
        )
    parts = (report.balance, report.remote_ranks, report.local, report.served)
    if any(len(part) != engine.layers for part in parts):
        raise InvalidPlacementEvent(
            PlacementFault.SHAPE,
            f"{who}: {[len(part) for part in parts]} layers; the engine has {engine.layers}",
        )
    numbers = np.array(parts, np.float64)
    counts = np.array(
        [report.steps, report.tokens, report.pairs, report.epoch, report.seconds, report.step_seconds],
        np.float64,
    )
    if (
        not (np.isfinite(numbers).all() and np.isfinite(counts).all())
        or (numbers < 0).any()
        or (counts < 0).any()
        or report.steps < 1
    ):
        raise InvalidPlacementEvent(
            PlacementFault.DEMAND,
            f"{who}: all numbers must be finite and not negative, and its steps at least 1",
        )
    if not report.step_seconds <= report.seconds <= MAX_SECONDS:
        raise InvalidPlacementEvent(
            PlacementFault.DEMAND,
            f"{who}: steps of {report.step_seconds} s in {report.seconds} s; the steps must fit in the"
            f" interval, which is at most {MAX_SECONDS:g} s",
        )
    if (
        report.communication_seconds is not None
        and not 0 <= report.communication_seconds <= report.step_seconds * (1.0 + _TOLERANCE)
    ):
        raise InvalidPlacementEvent(
            PlacementFault.DEMAND,
            f"{who}: {report.communication_seconds} s of communication in steps of {report.step_seconds} s",
        )
    upper = np.array([report.steps, report.tokens * (engine.ranks - 1), report.pairs])[:, None]
    if (numbers[:3] > upper * (1.0 + _TOLERANCE) + _TOLERANCE).any():
        raise InvalidPlacementEvent(
            PlacementFault.DEMAND,
            f"{who}: more than its {report.steps} steps, {report.tokens} tokens and {report.pairs} pairs"
            " allow",
        )
    return np.asarray(numbers[:3])


def _window(slices: list[_Slice], targets: int, sharded: Sequence[int]) -> DispatchWindow:
    """Return the means over these slices, without the sharded layers."""
    parts = [np.array([one.sums for one in slices]), np.array([one.layers for one in slices])]
    batches = min(BATCHES, len(slices))
    edges = np.linspace(0, len(slices), batches + 1).astype(np.intp)[:-1]
    sums, layers = (np.add.reduceat(part, edges, axis=0) for part in parts)
    steps, took, tokens, pairs, communication = sums.T
    whole = np.delete(layers, sharded, axis=2)
    count = max(whole.shape[2], 1)
    # Each target reports the steps of the whole engine, but only its own tokens.
    token = _ratio(took, tokens * targets)
    means = {
        "remote_ranks": _ratio(whole[:, 1].sum(axis=1) / count, tokens),
        "local": _ratio(whole[:, 2].sum(axis=1) / count, pairs),
        "balance": _ratio(whole[:, 0].sum(axis=1) / count, steps),
        "step_seconds": _ratio(took, steps),
    }
    if np.isfinite(communication).all():
        means["communication"] = _ratio(communication, took)
    total = layers.sum(axis=0)
    return DispatchWindow(
        measured=Measurement(
            figures=LoopFigures(
                **{name: mean for name, (mean, _) in means.items()}, tokens=float(tokens.sum())
            ),
            errors=LoopFigures(**{name: error for name, (_, error) in means.items()}),
            token_seconds=token[0],
            token_error=token[1],
            pairs=float(pairs.sum()),
        ),
        layers=LayerFigures(
            balance=_shares(total[0], steps.sum()),
            remote_ranks=_shares(total[1], tokens.sum()),
            local=_shares(total[2], pairs.sum()),
        ),
    )


def _ratio(part: FloatArray, whole: FloatArray) -> tuple[float, float]:
    """Return (sum of part / sum of whole, its standard error) over batches; 0 without data."""
    total, n = float(whole.sum()), len(whole)
    if not total:
        return 0.0, 0.0
    mean = float(part.sum()) / total
    spread = float(((part - mean * whole) ** 2).sum()) * n / max(n - 1, 1)
    return mean, float(np.sqrt(spread)) / total


def _shares(part: NDArray[Any], whole: float) -> tuple[float, ...]:
    return tuple((part / whole if whole else part).tolist())
