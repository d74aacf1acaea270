"""Validation of reports, and the reasons for rejection. Pure."""

from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.popularity import ExpertCounts

MAX_COUNT = float(1 << 53)
"""Numbers above this are not counts."""


class ReportFault(StrEnum):
    """Reason for rejecting a report."""

    DEPARTED = "departed"
    MODEL = "model"
    """a model other than the one the worker joined with"""
    SPEAKER = "speaker"
    """sent by one engine about the worker of another"""
    RANK = "rank"
    INTERVAL = "interval"
    COUNTS = "counts"
    """not a table of finite numbers >= 0, or counts without tokens"""
    SHAPE = "shape"
    """a shape other than the model's"""
    PLACEMENT = "placement"
    """inconsistent, or not matching the engine"""
    CLUSTERS = "clusters"
    """a profile or an outcome that cannot be learnt from"""
    CAPACITY = "capacity"


class InvalidReport(ValueError):
    """A report that cannot be used."""

    def __init__(self, fault: ReportFault, detail: str) -> None:
        super().__init__(detail)
        self.fault = fault


def checked_counts(
    table: ExpertCounts, tokens: int, cached_tokens: int, max_cells: int
) -> NDArray[np.unsignedinteger[Any]]:
    """Return the counts in place: unsigned [layers, experts]. InvalidReport if they are impossible or exceed
    `max_cells`.
    """
    for name, value in (("tokens", tokens), ("cached_tokens", cached_tokens)):
        if not 0 <= value <= MAX_COUNT:
            raise InvalidReport(ReportFault.COUNTS, f"{name} must be a count, not {value}")
    if table.layers * table.experts > max_cells:
        raise InvalidReport(
            ReportFault.CAPACITY,
            f"a table of {table.layers} x {table.experts}; raise tracker.max_cells to follow such a model",
        )
    try:
        counts = table.array()
    except ValueError as error:
        raise InvalidReport(ReportFault.COUNTS, str(error)) from error
    if (table.width == 8 and counts.max() > MAX_COUNT) or (tokens == 0 and counts.any()):
        raise InvalidReport(
            ReportFault.COUNTS, f"{tokens} tokens cannot have activated experts {counts.sum():g} times"
        )
    return counts
