"""Prediction of a request's expert activations before it runs: several sources of evidence, combined by
shrinkage. Pure.

Each source s gives log-ratios r_s[k] = log(w_s[k] / share[k]) over the clusters, shrunk towards 0 when it has
little evidence. The prediction is w[k] ~ share[k] * exp(sum_s weight_s * r_s[k]): a logarithmic opinion pool
(Genest & Zidek 1986, Combining Probability Distributions) around the current traffic mix. The
source weights are learnt from outcomes. A source that does not help has weight 0. With all weights 0 the
prediction is the mix.
"""

import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, log, prod
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.arrays import Float32Array
from fleet.signatures import PACKED

SOURCES = ("prefix", "session", "tokens", "tenant")
"""Sources, best first. Index into the columns of `source_weights`, `reliability` and `ratios`."""
PREFIX, SESSION, TOKENS, TENANT = range(len(SOURCES))
PATTERNS = 1 << len(SOURCES)
STRIDE = 64
"""Maximum step, in blocks, of the search for the longest known prefix."""
MAX_TOKENS = 128
"""Prompt tokens that are looked up in the token table: those after the longest known prefix."""
SHRINK = (16.0, 64.0, 64.0, 512.0)
"""Tokens of evidence at which a source counts half. The sum over a prompt's tokens counts as `half` tokens at
most: the tokens of one text are redundant, and n of them together count n * half / (n + half) (measured on
the demo model: the best exponent falls from 0.4 at 8 tokens to 0.14 at 96).
"""
MIN_SHARE = 1e-6
MAX_DECODED = 1024
FLOOR = 0.01
"""Share of a source's weights that is replaced by the mix, so that no cluster gets probability 0."""

TOKEN_WEIGHTS = tuple(
    np.float32(SHRINK[TOKENS] / (SHRINK[TOKENS] + count)) for count in range(MAX_TOKENS + 1)
)
"""Weight of each token, by the number of tokens."""
_ROW = struct.Struct(f"<{PACKED}BI")
ROW = _ROW.size
"""Bytes of a row: a packed signature and its tokens of evidence (u32)."""


def row(packed: bytes, tokens: float) -> bytes:
    """Encode a row of a table: a packed signature [PACKED] and its evidence."""
    return packed + min(int(tokens), 0xFFFFFFFF).to_bytes(4, "little")


class Query(msgspec.Struct, frozen=True):
    """Features of a request. `prefix`: sequence hashes of its full blocks; `tokens`: its prompt ids (u32);
    key 0: none.
    """

    prefix: Sequence[int] = ()
    tokens: Sequence[int] = ()
    block_size: int = 16
    session: int = 0
    tenant: int = 0
    guess: int = 0
    """probable number of known blocks, tried first; only a hint"""


@dataclass(frozen=True, eq=False)
class Tables:
    """Prediction tables of one model at one version. The mappings hold rows (`row`). The owner of the replica
    may replace them.

    blocks: by sequence hash, the signature of the whole prefix that ends there. tokens: float32 [buckets, K]
    log-ratios, indexed by id modulo buckets. source_weights: float32 [sources], or [PATTERNS,
    sources] by the set of sources with evidence. reliability: float32 [sources]. gain: in [0, 1], factor on
    the expert-locality term of the cost. gains: the same per cluster, float32 [K]; None: `gain` for all.
    """

    version: int
    clusters: int
    """version of the cluster model"""
    shares: Float32Array
    blocks: Mapping[int, bytes]
    sessions: Mapping[int, bytes]
    tenants: Mapping[int, bytes]
    tokens: NDArray[np.float32]
    source_weights: NDArray[np.float32]
    reliability: NDArray[np.float32]
    gain: float = 0.0
    gains: NDArray[np.float32] | None = None

    def session_row(self, query: "Query") -> bytes | None:
        """Return the row of a request's session, if it has one and that is known."""
        return self.sessions.get(query.session) if query.session else None

    def tenant_row(self, query: "Query") -> bytes | None:
        """Return the row of a request's tenant, if it has one and that is known."""
        return self.tenants.get(query.tenant) if query.tenant else None

    @cached_property
    def patterns(self) -> int:
        """Number of sets of sources that have weights of their own; 1: all have the same."""
        return 1 if self.source_weights.ndim == 1 else len(self.source_weights)

    def weights_with(self, evidence: Sequence[float]) -> Float32Array:
        """Return the weights of the sources, float32 [sources], where these have evidence."""
        weights = self.source_weights
        return weights if weights.ndim == 1 else np.asarray(weights[pattern(evidence)])

    def gain_of(self, weights: Float32Array) -> float:
        """Return the factor on the expert-locality term for a request with weights [K], in [0, 1]."""
        return self.gain if self.gains is None else float(self.gains @ weights)

    @cached_property
    def decoded(self) -> dict[tuple[int, int], tuple[float, NDArray[np.float32]]]:
        """Cache of decoded rows at this version, by source and key; at most MAX_DECODED entries."""
        return {}

    @cached_property
    def reliabilities(self) -> list[float]:
        return [float(reliability) for reliability in self.reliability]

    @cached_property
    def log_shares(self) -> NDArray[np.float32]:
        with np.errstate(divide="ignore"):
            return np.log(self.shares)

    @cached_property
    def inverse_shares(self) -> list[float]:
        """1 / max(share, MIN_SHARE); 0 where the share is 0."""
        return [1.0 / max(share, MIN_SHARE) if share > 0 else 0.0 for share in self.shares.tolist()]


class SourceEvidence(NamedTuple):
    """Evidence of all sources for one request.

    ratios: float32 [sources, K]. evidence: tokens behind each source. blocks: length of the known prefix.
    hash: of its last block, 0 if none. looked_up: prompt tokens that were looked up in the token table.
    """

    ratios: NDArray[np.float32]
    evidence: tuple[float, ...]
    blocks: int
    hash: int
    looked_up: slice


class Prediction(NamedTuple):
    """Predicted cluster weights of a request. weights: float32 [K]. reliabilities: by source, as in
    `Tables`."""

    weights: Float32Array
    known: SourceEvidence
    reliabilities: list[float]

    @property
    def confidences(self) -> tuple[float, ...]:
        """Confidence by source, in [0, 1]."""
        return confidences(self.reliabilities, self.known.evidence)

    @property
    def confidence(self) -> float:
        """Confidence of all sources together, in [0, 1]."""
        return confidence(self.reliabilities, self.known.evidence)


def confidences(reliabilities: Sequence[float], evidence: Sequence[float]) -> tuple[float, ...]:
    """Return the confidence in each source, in [0, 1]: its reliability, shrunk by its evidence (tokens)."""
    return tuple(
        reliability * seen / (seen + half)
        for reliability, seen, half in zip(reliabilities, evidence, SHRINK, strict=True)
    )


def together(confidences: Sequence[float]) -> float:
    """Return the joint confidence of sources that all have evidence, in [0, 1]."""
    return 1.0 - prod(1.0 - confidence for confidence in confidences)


def confidence(reliabilities: Sequence[float], evidence: Sequence[float]) -> float:
    """Return `together` of the `confidences`. Written for speed: it runs for every request."""
    left = 1.0
    for reliability, seen, half in zip(reliabilities, evidence, SHRINK, strict=True):
        if seen:
            left -= left * reliability * seen / (seen + half)
    return 1.0 - left


def predict(tables: Tables, query: Query) -> Prediction:
    """Predict the clusters that a request will activate. Without evidence this is the traffic mix."""
    known = know(tables, query)
    weighted = tables.weights_with(known.evidence)[:, None] * known.ratios
    likely = np.add.reduce(weighted, axis=0) + tables.log_shares
    likely -= likely.max()
    # Sums in order and exponentials of the C library: `router/kernels/prediction.c` gives the same bits.
    powers = np.array([exp(one) for one in likely.tolist()])
    weights = (powers / np.add.accumulate(powers)[-1]).astype(np.float32)
    return Prediction(weights, known, tables.reliabilities)


def pattern(evidence: Sequence[float]) -> int:
    """Return the set of sources with evidence, as bits: bit s for source s. A source's weight depends on the
    set, since sources overlap.
    """
    found = 0
    for source, seen in enumerate(evidence):
        if seen:
            found |= 1 << source
    return found


def know(tables: Tables, query: Query) -> SourceEvidence:
    """Collect the evidence of every source."""
    blocks, found = longest_known(tables.blocks, query.prefix, query.guess)
    last = query.prefix[blocks - 1] if blocks else 0
    evidence = [0.0] * len(SOURCES)
    ratios = np.zeros((len(SOURCES), len(tables.shares)), np.float32)
    for source, key, held in (
        (PREFIX, last, found),
        (SESSION, query.session, tables.session_row(query)),
        (TENANT, query.tenant, tables.tenant_row(query)),
    ):
        if held is not None:
            evidence[source], ratios[source] = _decoded(tables, source, key, held)
    looked_up = slice(blocks * query.block_size, blocks * query.block_size + MAX_TOKENS)
    ids = query.tokens[looked_up]
    if len(ids) and len(tables.tokens):
        evidence[TOKENS] = len(ids)
        ratios[TOKENS] = np.add.reduce(_rows_of(tables.tokens, ids), axis=0) * TOKEN_WEIGHTS[len(ids)]
    return SourceEvidence(ratios, tuple(evidence), blocks, last, looked_up)


def longest_known(
    blocks: Mapping[int, bytes], prefix: Sequence[int], guess: int = 0
) -> tuple[int, bytes | None]:
    """Return the number of leading blocks that are known, and the row of the last of them.

    The search tries the guess first, then growing steps up to the first unknown block, then bisection. A
    `prefix` whose elements are computed on access is therefore read little further than it is known. A list
    or tuple costs nothing to read and is bisected immediately, unless there is a guess. Precondition: the
    owner of `blocks` evicts the end of a prefix first. Otherwise a shorter prefix may be found.
    """
    low, high, best = 0, len(prefix), None
    step, next_step = max(guess, 0 if type(prefix) in (list, tuple) else 1), 1
    while low < high:
        middle = min(low + step, high) if step else (low + high + 1) // 2
        found = blocks.get(prefix[middle - 1])
        if found is None:
            high, step = middle - 1, 0
        else:
            low, best = middle, found
            if step:
                step, next_step = next_step, min(2 * next_step, STRIDE)
    return low, best


def _rows_of(table: NDArray[np.float32], ids: Sequence[int]) -> NDArray[np.float32]:
    """Look up rows by token id: float32 [n, K]. `array` is the fastest conversion from a list to numpy.

    Ids rarely exceed the table, so the modulo is taken only after an IndexError.
    """
    buckets = np.frombuffer(array("I", ids), np.uint32)
    try:
        return table.take(buckets, axis=0)
    except IndexError:
        return table.take(buckets % len(table), axis=0)


def _decoded(tables: Tables, source: int, key: int, held: bytes) -> tuple[float, NDArray[np.float32]]:
    """Return the row of a key, decoded: its evidence and log-ratios. Cached, since session rows and above all
    tenant rows recur.
    """
    found = tables.decoded.get((source, key))
    if found is None:
        *packed, tokens = _ROW.unpack(held)
        found = float(tokens), _shrunk(tables.inverse_shares, packed, tokens / (tokens + SHRINK[source]))
        if len(tables.decoded) >= MAX_DECODED:
            tables.decoded.clear()  # otherwise rows used once would keep out rows that recur
        tables.decoded[source, key] = found
    return found


def _shrunk(inverse_shares: Sequence[float], packed: Sequence[int], share: float) -> NDArray[np.float32]:
    """Return log(w / shares) as float32 [K]. The weights w are `share` of the unpacked signature and the mix
    for the rest.

    Outside the named clusters w / shares is a constant, so only NAMED logarithms are computed.
    """
    named = [
        (packed[at], packed[at + 1])
        for at in range(0, PACKED, 2)
        if packed[at + 1] and packed[at] < len(inverse_shares)
    ]
    total = sum(weight for _, weight in named)
    scale = 1.0 / max(255, total)
    believed = share * (1.0 - FLOOR)
    unnamed = believed * (1.0 - total * scale) + (1.0 - believed)
    weights: dict[int, int] = {}
    for cluster, weight in named:
        weights[cluster] = weights.get(cluster, 0) + weight
    ratios = np.empty(len(inverse_shares), np.float32)
    ratios.fill(log(unnamed))
    for cluster, weight in weights.items():
        ratios[cluster] = log(unnamed + believed * weight * scale * inverse_shares[cluster])
    return ratios
