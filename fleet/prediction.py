"""Predicting what a request will activate, before it runs: several sources of evidence, combined by shrinkage. Pure.

Each source s gives log-ratios r_s[k] = log(w_s[k] / share[k]) over the clusters, shrunk towards 0 when it has little evidence.
The prediction is w[k] ~ share[k] * exp(sum_s trust_s * r_s[k]): a logarithmic opinion pool (Genest & Zidek 1986, Combining
Probability Distributions) around the traffic's present mix. The trusts are learnt from outcomes; a source that does not help
has trust 0, and with no trust at all the prediction is the mix.
"""

import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.signatures import PACKED, Weights

SOURCES = ("prefix", "session", "tokens", "tenant")
"""Best first; an index into the columns of `trust`, `reliability` and `ratios`."""
PREFIX, SESSION, TOKENS, TENANT = range(len(SOURCES))
PATTERNS = 1 << len(SOURCES)
STRIDE = 64
"""Blocks by which the longest known prefix is felt for, at most."""
MOST_TOKENS = 128
"""Prompt tokens that are looked up in the token table: those after the longest known prefix."""
SHRINK = (16.0, 64.0, 64.0, 512.0)
"""Tokens of evidence at which a source counts half. The sum over a prompt's tokens is held to so many at most: tokens of one text say
much the same, and what n of them add up to is worth n * half / (n + half) (measured on the demo model: the best exponent falls
from 0.4 at 8 tokens to 0.14 at 96)."""
LEAST_SHARE = 1e-6
MOST_HEARD = 1024
FLOOR = 0.01
"""Share of a source's weights that is replaced by the mix, so that nothing is ever called impossible."""

_INDEPENDENT = tuple(np.full(count, SHRINK[TOKENS] / (SHRINK[TOKENS] + count), np.float32) for count in range(MOST_TOKENS + 1))
"""By number of tokens, what each of them counts for."""
_ROW = struct.Struct(f"<{PACKED}BI")
ROW = _ROW.size
"""Bytes of a row: a packed signature and the tokens behind it (u32)."""


def row(packed: bytes, tokens: float) -> bytes:
    """A row of a table: a packed signature [PACKED] and its evidence."""
    return packed + min(int(tokens), 0xFFFFFFFF).to_bytes(4, "little")


class Query(NamedTuple):
    """What is known of a request. `prefix`: sequence hashes of its full blocks; `tokens`: its prompt ids (u32); keys 0: none."""

    prefix: Sequence[int] = ()
    tokens: Sequence[int] = ()
    block_size: int = 16
    session: int = 0
    tenant: int = 0
    guess: int = 0
    """how many blocks are probably known; looked at first, and no more than a hint"""


@dataclass(frozen=True, eq=False)
class Tables:
    """What the tracker has learnt of one model, at one version. The mappings give rows (`row`); the replica's owner may replace them.

    blocks: by sequence hash, the signature of the whole prefix that ends there. tokens: float32 [buckets, K] log-ratios, id modulo
    buckets. trust: float32 [sources], or [PATTERNS, sources] by who has something to say; reliability: float32 [sources]. gain: in [0, 1],
    what the expert term is multiplied with; gains: the same for requests of each cluster, float32 [K], None: `gain` for all.
    """

    version: int
    clusters: int
    """version of the cluster model"""
    shares: Weights
    blocks: Mapping[int, bytes]
    sessions: Mapping[int, bytes]
    tenants: Mapping[int, bytes]
    tokens: NDArray[np.float32]
    trust: NDArray[np.float32]
    reliability: NDArray[np.float32]
    gain: float = 0.0
    gains: NDArray[np.float32] | None = None

    def gain_of(self, weights: Weights) -> float:
        """In [0, 1]: what the expert term is worth for a request of these weights [K]."""
        return self.gain if self.gains is None else float(self.gains @ weights)

    @cached_property
    def heard(self) -> dict[tuple[int, int], tuple[float, NDArray[np.float32]]]:
        """What rows were found to say at this version, by source and key; at most MOST_HEARD."""
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
        """1 / share, of a share of LEAST_SHARE at least; 0 where the share is 0."""
        return [1.0 / max(share, LEAST_SHARE) if share > 0 else 0.0 for share in self.shares.tolist()]


class SourceEvidence(NamedTuple):
    """What the sources say of one request. ratios: float32 [sources, K]; evidence: tokens behind each; blocks: length of the known prefix;
    hash: of its last block, 0 without; looked_up: prompt tokens that were read from the token table."""

    ratios: NDArray[np.float32]
    evidence: tuple[float, ...]
    blocks: int
    hash: int
    looked_up: slice


class Prediction(NamedTuple):
    """weights: float32 [K]. reliabilities: by source, as `Tables` has them."""

    weights: Weights
    known: SourceEvidence
    reliabilities: list[float]

    @property
    def confidences(self) -> tuple[float, ...]:
        """In [0, 1], by source."""
        return confidences(self.reliabilities, self.known.evidence)

    @property
    def confidence(self) -> float:
        """In [0, 1], of all sources together."""
        return confidence(self.reliabilities, self.known.evidence)


def confidences(reliabilities: Sequence[float], evidence: Sequence[float]) -> tuple[float, ...]:
    """How far each source is trusted, in [0, 1]: what it was found to be worth, shrunk where it has little evidence (tokens)."""
    return tuple(reliability * seen / (seen + half) for reliability, seen, half in zip(reliabilities, evidence, SHRINK, strict=True))


def together(confidences: Sequence[float]) -> float:
    """How far sources are trusted that all have something to say, in [0, 1]."""
    return 1.0 - prod(1.0 - confidence for confidence in confidences)


def confidence(reliabilities: Sequence[float], evidence: Sequence[float]) -> float:
    """`together` of the `confidences`, in the least time: it is asked of every request."""
    left = 1.0
    for reliability, seen, half in zip(reliabilities, evidence, SHRINK, strict=True):
        if seen:
            left -= left * reliability * seen / (seen + half)
    return 1.0 - left


def predict(tables: Tables, query: Query) -> Prediction:
    """The clusters a request will activate; the mix of the traffic when nothing is known of it."""
    known = know(tables, query)
    trust = tables.trust if tables.trust.ndim == 1 else tables.trust[pattern(known.evidence)]
    likely = trust @ known.ratios
    likely += tables.log_shares
    likely -= np.maximum.reduce(likely)
    np.exp(likely, out=likely)
    likely /= np.add.reduce(likely)
    return Prediction(likely, known, tables.reliabilities)


def pattern(evidence: Sequence[float]) -> int:
    """Who has something to say: bit s for source s. What one source is worth depends on which others say much the same."""
    found = 0
    for source, seen in enumerate(evidence):
        if seen:
            found |= 1 << source
    return found


def know(tables: Tables, query: Query) -> SourceEvidence:
    """Ask every source."""
    ratios = np.zeros((len(SOURCES), len(tables.shares)), np.float32)
    evidence = [0.0] * len(SOURCES)
    blocks, found = longest_known(tables.blocks, query.prefix, query.guess)
    last = query.prefix[blocks - 1] if blocks else 0
    for source, key, rows in ((PREFIX, last, None), (SESSION, query.session, tables.sessions), (TENANT, query.tenant, tables.tenants)):
        said = tables.heard.get((source, key)) if key else None
        if said is None and key:
            held = found if rows is None else rows.get(key)
            said = None if held is None else _hear(tables, source, key, held)
        if said is not None:
            evidence[source], ratios[source] = said
    start = blocks * query.block_size
    looked_up = slice(start, start + MOST_TOKENS)
    ids = query.tokens[looked_up]
    if len(ids) and len(tables.tokens):
        evidence[TOKENS] = len(ids)
        ratios[TOKENS] = _INDEPENDENT[len(ids)] @ _rows_of(tables.tokens, ids)
    return SourceEvidence(ratios, tuple(evidence), blocks, last, looked_up)


def longest_known(blocks: Mapping[int, bytes], prefix: Sequence[int], guess: int = 0) -> tuple[int, bytes | None]:
    """How many leading blocks are known, and the row of the last of them.

    At a guess, then in growing steps until a block is unknown, then by bisection: of a `prefix` whose elements are computed as they
    are read, little more is read than is known. A list or tuple is there already, and without a guess is bisected at once. Whoever keeps
    blocks lets go of a prefix's end first; where that does not hold, a shorter one is found.
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
    """float32 [n, K]. Ids rarely exceed the table, so that is only looked at when they do; an array is the faster way from a list to numpy."""
    buckets = np.frombuffer(array("I", ids), np.uint32)
    try:
        return table.take(buckets, axis=0)
    except IndexError:
        return table.take(buckets % len(table), axis=0)


def _hear(tables: Tables, source: int, key: int, held: bytes) -> tuple[float, NDArray[np.float32]]:
    """What the row of a key says: its evidence and log-ratios. Remembered, since a session's and above all a tenant's row is asked again and again."""
    *packed, tokens = _ROW.unpack(held)
    found = float(tokens), _shrunk(tables.inverse_shares, packed, tokens / (tokens + SHRINK[source]))
    if len(tables.heard) >= MOST_HEARD:
        tables.heard.clear()  # else rows that are asked for once would keep out those that are asked for again
    tables.heard[source, key] = found
    return found


def _shrunk(inverse_shares: Sequence[float], packed: Sequence[int], share: float) -> NDArray[np.float32]:
    """float32 [K]: log(w / shares) for the weights w that count for `share` of what is `unpack`ed, the mix for the rest.

    Where nobody is named w / shares is one number; so only NAMED logarithms are taken.
    """
    named = [(packed[at], packed[at + 1]) for at in range(0, PACKED, 2) if packed[at + 1] and packed[at] < len(inverse_shares)]
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
