"""Array types of all parts, by what their elements are. Shapes are given where an array is used.

Numbers that numpy computes are 64 bits wide. Narrower types are for what is stored or sent by the thousand.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
"""Seconds, loads, shares or probabilities: usually [layers, experts], [layers, ranks] or [ranks]."""
Float32Array = NDArray[np.float32]
"""The same where many are kept: activation counts and profiles [layers, experts], signatures [clusters]."""
FloatingArray = NDArray[np.floating[Any]]
"""Floats of either width."""
IntArray = NDArray[np.int64]
"""Counts: of (token, k) pairs [layers, experts], of tokens, of blocks."""
IndexArray = NDArray[np.intp]
"""Indices, as numpy's own functions return them."""
BoolArray = NDArray[np.bool_]
"""Masks."""
SlotTable = NDArray[np.int16]
"""A placement: [layers, slots], the expert in each slot or `fleet.placement.EMPTY`."""
ByteArray = NDArray[np.uint8]
"""Packed rows: [rows, bytes of a row]."""
KeyArray = NDArray[np.uint64]
"""Keys of hash tables and hashes of blocks."""
AnyArray = NDArray[Any]
"""Arrays whose element type follows from another argument."""
