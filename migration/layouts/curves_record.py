"""Calibrated step times and their corrections, as they are stored."""

from collections.abc import Iterable

import msgspec

from fleet.layout_times import LayoutName, LayoutTimes

MOST_LOG = 5.0
"""Highest log correction that is believed: a factor of about 150."""
_REMEDY = "remove the record, and the curves begin anew"


class CurveKey(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of measured step times: figures of another key do not apply."""

    weights: str
    """digest of the model's weights, dtype and quantisation (`EngineJoined.weights_digest`)"""
    hardware: str
    """`EngineJoined.hardware`"""
    ranks: int


class LayoutCorrection(msgspec.Struct, frozen=True, kw_only=True):
    """Correction of one layout, as it is stored."""

    layout: LayoutName
    measured: float
    """Unix time of the calibration, or of the last live step"""
    logs: tuple[float, ...]
    """log factor at every calibrated batch, beside the machine's"""
    variances: tuple[float, ...]
    updated: tuple[float, ...]
    """Unix time of each"""


class CurvesRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Calibrated times and their corrections, as they are stored. ValueError names a figure out of range."""

    key: CurveKey
    times: tuple[LayoutTimes, ...]
    machine: float
    """log factor"""
    machine_variance: float
    machine_updated: float
    corrections: tuple[LayoutCorrection, ...]

    def __post_init__(self) -> None:
        layouts = [one.layout for one in self.times]
        if [one.layout for one in self.corrections] != layouts:
            raise ValueError(
                f"stored layout curves: corrections of {[one.layout for one in self.corrections]} beside"
                f" times of {layouts}; {_REMEDY}"
            )
        for times, one in zip(self.times, self.corrections, strict=True):
            lengths = {len(one.logs), len(one.variances), len(one.updated)}
            if lengths != {len(times.sequences)}:
                raise ValueError(
                    f"stored layout curves: {sorted(lengths)} corrections of {one.layout} for"
                    f" {len(times.sequences)} batches; {_REMEDY}"
                )
        _check("log factor", -MOST_LOG, MOST_LOG, self.machine, *(one.logs for one in self.corrections))
        _check("variance", 0.0, 1.0, self.machine_variance, *(one.variances for one in self.corrections))
        for one in self.corrections:
            _check("time", 0.0, 1e11, self.machine_updated, one.updated, (one.measured,))


def _check(name: str, low: float, high: float, machine: float, *others: Iterable[float]) -> None:
    """Raise ValueError for a figure out of range; nan is out of every range."""
    for value in (machine, *(each for one in others for each in one)):
        if not low <= value <= high:
            raise ValueError(
                f"stored layout curves: a {name} must be from {low:g} to {high:g}, not {value}; {_REMEDY}"
            )
