"""Routed experts of Dynamo's workers, as `router.foreign_api.routed_experts_parser` reads them. Pure.

Two encodings pass through Dynamo unchanged, those of vLLM and SGLang. A third is Dynamo's own for vLLM: an
object of raw numbers, their shape and their type.
"""

import base64
import io
from math import prod
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from router.dynamo.wire.malformed import UNDECODABLE, Malformed

_MAX_ROWS = 2**24


class _Raw(msgspec.Struct, frozen=True):
    data: str
    shape: tuple[
        Annotated[int, msgspec.Meta(ge=0, le=_MAX_ROWS)],
        Annotated[int, msgspec.Meta(ge=1, le=4096)],
        Annotated[int, msgspec.Meta(ge=1, le=256)],
    ]
    dtype: Literal["uint8", "uint16", "int16", "int32", "int64"]


def as_answer(experts: Any) -> bytes:
    """Return one event of an answer that names these experts. Malformed for an unknown encoding."""
    held = _as_npy(experts) if isinstance(experts, dict) else experts
    if not isinstance(held, str | list):
        raise Malformed(f"experts as {type(held).__name__}")
    return msgspec.json.encode({"nvext": {"routed_experts": held}}) + b"\n\n"


def _as_npy(experts: dict[str, Any]) -> str:
    """Return vLLM's encoding, base64 of a .npy file, of Dynamo's."""
    try:
        raw = msgspec.convert(experts, _Raw)
        data = base64.b64decode(raw.data, validate=True)
    except UNDECODABLE as error:
        raise Malformed(f"experts: {error}") from error
    kind = np.dtype(raw.dtype)
    if len(data) != prod(raw.shape) * kind.itemsize:
        raise Malformed(f"experts: {len(data)} bytes for the shape {raw.shape} of {raw.dtype}")
    file = io.BytesIO()
    np.save(file, np.frombuffer(data, kind).reshape(raw.shape), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()
