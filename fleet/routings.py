"""Expert routings as engines report them, per token or counted. Pure numpy."""

import base64
import binascii
import io
from math import prod
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

UNKNOWN = -1
"""Expert of a position that was not computed but reused from the prefix cache, which activates nothing."""
MAX_EXPERTS = 1 << 15
SAMPLED_TOKENS = 16
"""Tokens of a request that `sampled_tokens` takes."""


def sampled_tokens(chosen: NDArray[Any]) -> NDArray[np.uint16] | None:
    """Return computed tokens at even distances: uint16 [SAMPLED_TOKENS, layers, k]. None: there are fewer.

    chosen: int [tokens, layers, k], UNKNOWN for tokens that were not computed.
    """
    known = np.flatnonzero(chosen[:, 0, 0] != UNKNOWN)
    if len(known) < SAMPLED_TOKENS:
        return None
    at = np.linspace(0, len(known) - 1, SAMPLED_TOKENS).round().astype(np.intp)
    return chosen[known[at]].astype(np.uint16)


def count_pairs(chosen: NDArray[Any], experts: int) -> NDArray[np.int64]:
    """Count the pairs in chosen, int [tokens, layers, k], without UNKNOWN ones: int64 [layers, experts]."""
    layers = chosen.shape[1]
    places = chosen.astype(np.int64) + np.arange(layers)[None, :, None] * experts
    flat = places.ravel() if chosen.dtype.kind == "u" else places[chosen != UNKNOWN]
    return np.bincount(flat, minlength=layers * experts).astype(np.int64, copy=False).reshape(layers, experts)


def from_vllm(text: str, experts: int | None = None) -> NDArray[np.int32]:
    """Parse vLLM's `routed_experts` (base64 of a .npy): int32 [tokens, layers, k].

    ValueError for other data, or for an expert outside 0..experts - 1.
    """
    try:
        table = read_npy(_decoded(text))
    except ValueError as error:
        raise ValueError(f"routed_experts: not the base64 of a .npy file ({error})") from error
    if table.dtype.kind not in "iu":
        raise ValueError("routed_experts: the .npy holds no integers")
    return _checked(table, experts)


def read_npy(content: bytes) -> NDArray[Any]:
    """Read the array of a .npy file, read-only.

    ValueError for other data, for arrays of objects (which would be unpickled), and for a header whose size
    differs from the data: `numpy.load` would allocate the claimed size.
    """
    file = io.BytesIO(content)
    try:
        version = npy.read_magic(file)
        header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran_order, dtype = header(file)
    except (
        ValueError,
        EOFError,
        OSError,
        MemoryError,
        RecursionError,
        OverflowError,
        SyntaxError,
        TokenError,
    ) as error:
        raise ValueError(f"no .npy header: {error}") from error
    if dtype.hasobject:
        raise ValueError("a .npy of Python objects, which are never unpickled")
    rest = content[file.tell() :]
    if prod(shape) * dtype.itemsize != len(rest):
        raise ValueError(f"its header claims {dtype} {shape}, and {len(rest)} bytes follow")
    return np.frombuffer(rest, dtype).reshape(shape, order="F" if fortran_order else "C")


def from_sglang(text: str, layers: int, top_k: int, experts: int | None = None) -> NDArray[np.int32]:
    """Parse SGLang's `routed_experts` (base64 of raw little-endian int32, row-major): int32 [tokens, layers,
    k].

    ValueError as in `from_vllm`.
    """
    raw = _decoded(text)
    if layers < 1 or top_k < 1 or len(raw) % (4 * layers * top_k):
        raise ValueError(f"routed_experts: {len(raw)} bytes are no rows of {layers} layers x {top_k} int32")
    return _checked(np.frombuffer(raw, "<i4").reshape(-1, layers, top_k), experts)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"routed_experts: not base64 ({error})") from error


def _checked(table: NDArray[Any], experts: int | None) -> NDArray[np.int32]:
    if table.ndim != 3 or 0 in table.shape[1:]:
        raise ValueError(f"routed_experts: shape {table.shape}; expected [tokens, layers, k]")
    limit = MAX_EXPERTS if experts is None else experts
    if table.size and (table.min() < 0 or table.max() >= limit):
        raise ValueError(
            f"routed_experts: ids run from {table.min()} to {table.max()}; expected 0 to {limit - 1}"
        )
    return table.astype(np.int32)
