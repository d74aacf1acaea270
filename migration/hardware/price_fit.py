"""Prices of units of work, fitted to timings. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from migration.hardware.step_form import Units


class Fitted(NamedTuple):
    """Prices of units in seconds, and how well they reproduce the timings."""

    prices: tuple[float, ...]
    error: float
    """root mean square of the relative error"""


def fitted(units: Sequence[Sequence[float]], seconds: Sequence[float]) -> Fitted:
    """Fit prices of at least 0 by least squares of the relative error (Lawson and Hanson 1974).

    units: [timings][units]; a price whose unit is always 0 is 0. ValueError if there is no timing.
    """
    if not seconds:
        raise ValueError("fit: there are no timings")
    times = np.asarray(seconds, np.float64)
    amounts = np.asarray(units, np.float64) / times[:, None]
    scale = np.linalg.norm(amounts, axis=0)
    scale[scale == 0.0] = 1.0
    prices, _ = nnls(amounts / scale, np.ones(len(times)))
    prices = prices / scale
    error = float(np.sqrt(np.mean((amounts @ prices - 1.0) ** 2)))
    return Fitted(tuple(float(one) for one in prices), error)


def priced(prices: Sequence[float], units: Units) -> float:
    """Return the seconds of some work."""
    return sum(price * amount for price, amount in zip(prices, units, strict=True))
