"""Experts of a request's tokens in the form of Dynamo's vLLM workers: raw numbers as base64, with shape, type
and the position of the first row. Pure.
"""

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.routings import UNKNOWN

FIELD = "routed_experts"
"""Name of the field, and of the wish for it in `nvext.extra_fields`."""


def encoded(chosen: NDArray[np.int16], positions: int, experts: int) -> dict[str, Any] | None:
    """Return the experts of the positions before `positions`, in order.

    chosen: [positions, layers, k], UNKNOWN where nothing was computed. The rows begin after the last such
    position, since the form has no number for it: usually after the cached prefix. experts: of a layer. None
    when the rank did not compute all of the request, e.g. because it went to another rank in between.
    """
    if len(chosen) < positions:
        return None
    rows = chosen[:positions]
    unknown = np.flatnonzero(rows[:, 0, 0] == UNKNOWN)
    start = int(unknown[-1]) + 1 if len(unknown) else 0
    held = np.ascontiguousarray(rows[start:], np.uint8 if experts <= 256 else np.dtype("<i2"))
    return {
        "data": base64.b64encode(held.tobytes()).decode("ascii"),
        "shape": list(held.shape),
        "start": start,
        "dtype": held.dtype.name,
    }
