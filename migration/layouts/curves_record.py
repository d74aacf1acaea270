"""Calibrated step times and their corrections, as they are stored."""

import msgspec

from fleet.layout_times import LayoutName, LayoutTimes
from migration.layouts.log_factor import LogFactor


class CurveKey(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of measured step times: figures of another key do not apply."""

    weights: str
    """digest of the model's weights, dtype and quantisation (`EngineJoined.weights_digest`)"""
    hardware: str
    """`EngineJoined.hardware`"""
    ranks: int


class LayoutCorrection(msgspec.Struct, frozen=True, kw_only=True):
    """Correction of one layout, beside the machine's factor."""

    layout: LayoutName
    measured: float
    """Unix time of the calibration, or of the last live step"""
    level: LogFactor
    """at every batch"""
    knots: tuple[LogFactor, ...]
    """beside the level: at each calibrated batch, with lines in log B between them"""

    def __post_init__(self) -> None:
        if not 0.0 <= self.measured < float("inf"):
            raise ValueError(
                f"stored layout curves: {self.layout} was measured at Unix time {self.measured}; remove the"
                " record, and the curves begin anew"
            )


class CurvesRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Calibrated times and their corrections. ValueError names what does not fit together."""

    key: CurveKey
    times: tuple[LayoutTimes, ...]
    machine: LogFactor
    corrections: tuple[LayoutCorrection, ...]
    """in the order of `times`"""

    def __post_init__(self) -> None:
        expected = [(one.layout, len(one.sequences)) for one in self.times]
        stored = [(one.layout, len(one.knots)) for one in self.corrections]
        if stored != expected:
            raise ValueError(
                f"stored layout curves: corrections (layout, batches) {stored} beside times {expected};"
                " remove the record, and the curves begin anew"
            )
