"""Validation of ranks' and routers' reports about a request: data from the bus is not trusted. Pure."""

from math import isfinite
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import ByteArray
from fleet.facts.activity import RequestOutcome, RequestProfile, SampledProfile
from fleet.prediction import MAX_TOKENS
from fleet.signatures import NAMED, PACKED

MAX_BLOCKS = 1 << 16
"""limit for one request"""
MAX_COUNT = 1 << 48
MAX_BLOCK_SIZE = 1 << 16
LONGEST_ID = 128
MAX_SUM = 255 + NAMED
"""Limit for the sum of the weights of a packed signature, each of which is rounded."""
_ONES = np.ones(NAMED, np.int32)


class PendingProfile(NamedTuple):
    """Part of a `RequestProfile` that is kept until its outcome arrives."""

    signature: bytes
    version: int
    """of the cluster model"""
    tokens: int
    local: float | None
    sample: bytes
    """(token, k) pairs [layers, experts] as u32 little endian; empty if absent"""


class PendingOutcome(NamedTuple):
    """Part of a `RequestOutcome` that is kept until its profile arrives."""

    prefix: int
    tokens: bytes
    session: int
    tenant: int
    predicted: bytes
    predicted_local: float | None
    prior_local: float | None
    spread: float | None


class Blocks(NamedTuple):
    """Consecutive full blocks and their signatures."""

    keys: NDArray[np.uint64]
    signatures: ByteArray
    parent: int | None
    size: int


def profile_of(
    report: RequestProfile, version: int, clusters: int, shape: tuple[int, int]
) -> tuple[PendingProfile, Blocks]:
    """Validate a rank's report, over `clusters` clusters of shape [layers, experts]. ValueError names the
    invalid field.
    """
    _check_id(report.decision)
    _check_within("tokens", report.tokens, 0, MAX_COUNT)
    _check_within("cached_tokens", report.cached_tokens, 0, MAX_COUNT)
    _check_share("local", report.local)
    signature = packed("signature", report.signature, 1, clusters)
    return PendingProfile(
        signature.tobytes(), version, report.tokens, report.local, _pairs(report.sample, shape)
    ), _blocks(report, clusters)


def outcome_of(report: RequestOutcome, clusters: int) -> PendingOutcome:
    """Validate a router's report. ValueError names the invalid field."""
    _check_id(report.decision)
    if not report.decision:
        raise ValueError("decision: an outcome without the id of its decision goes with no request")
    for name, key in (("prefix", report.prefix), ("session", report.session), ("tenant", report.tenant)):
        _check_key(name, key)
    if len(report.tokens) % 4 or len(report.tokens) > 4 * MAX_TOKENS:
        raise ValueError(f"tokens: {len(report.tokens)} bytes; expected u32 of at most {MAX_TOKENS} tokens")
    packed("predicted", report.predicted, 1, clusters)
    _check_share("predicted_local", report.predicted_local)
    _check_share("prior_local", report.prior_local)
    _check_share("spread", report.spread)
    shares = report.predicted_local, report.prior_local, report.spread
    return PendingOutcome(
        report.prefix, report.tokens, report.session, report.tenant, report.predicted, *shares
    )


def packed(field: str, raw: bytes, count: int, clusters: int) -> ByteArray:
    """Validate packed signatures [count, PACKED] over `clusters` clusters. ValueError names the invalid
    field.
    """
    if len(raw) != count * PACKED:
        raise ValueError(f"{field}: {len(raw)} bytes; {count} signatures have {count * PACKED}")
    signatures = np.frombuffer(raw, np.uint8).reshape(count, PACKED)
    named, weights = signatures[:, 0::2], signatures[:, 1::2]
    last, heaviest = (int(values.max(initial=0)) for values in (named * (weights > 0), weights @ _ONES))
    if last >= clusters:
        raise ValueError(f"{field}: names cluster {last}; there are {clusters}")
    if heaviest > MAX_SUM:
        raise ValueError(f"{field}: weights add up to {heaviest}; at most {MAX_SUM} are allowed")
    return signatures


def _blocks(report: RequestProfile, clusters: int) -> Blocks:
    count = len(report.blocks) // 8
    if len(report.blocks) % 8 or count > MAX_BLOCKS:
        raise ValueError(f"blocks: {len(report.blocks)} bytes; expected u64 of at most {MAX_BLOCKS} blocks")
    if report.parent is not None:
        _check_key("parent", report.parent)
    if count:
        _check_within("block_size", report.block_size, 1, MAX_BLOCK_SIZE)
    keys = np.frombuffer(report.blocks, "<u8")
    distinct = {*keys.tolist(), report.parent or 0}
    if 0 in keys or len(distinct) != count + 1:
        raise ValueError(f"blocks: {count} hashes with their parent must all differ, and none be 0")
    return Blocks(
        keys,
        packed("block_signatures", report.block_signatures, count, clusters),
        report.parent,
        report.block_size,
    )


def _pairs(sample: SampledProfile | None, shape: tuple[int, int]) -> bytes:
    """Return the total counts of a sampled request."""
    if sample is None:
        return b""
    counted = np.zeros(shape, np.float64)
    for name, counts in (("prompt", sample.prompt), ("completion", sample.completion)):
        if (counts.layers, counts.experts) != shape:
            raise ValueError(
                f"sample.{name}: counts of shape [{counts.layers}, {counts.experts}]; the clusters have"
                f" {list(shape)}"
            )
        try:
            counted += counts.array()
        except ValueError as error:
            raise ValueError(f"sample.{name}: {error}") from error
    return counted.clip(0, 0xFFFFFFFF).astype("<u4").tobytes()


def _check_id(decision: str) -> None:
    if len(decision) > LONGEST_ID:
        raise ValueError(f"decision: an id of {len(decision)} characters; at most {LONGEST_ID} are allowed")


def _check_within(field: str, value: Any, minimum: int, maximum: int) -> None:
    if not minimum <= value <= maximum:
        raise ValueError(f"{field}: {value} is not between {minimum} and {maximum}")


def _check_key(field: str, key: int) -> None:
    if not 0 <= key < 1 << 64:
        raise ValueError(f"{field}: {key} is no hash of 64 bits")


def _check_share(field: str, value: float | None) -> None:
    if value is not None and not (isfinite(value) and 0.0 <= value <= 1.0):
        raise ValueError(f"{field}: {value} is no share between 0 and 1")
