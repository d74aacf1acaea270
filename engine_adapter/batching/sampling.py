"""Sampling: greedy, temperature, top-k, top-p and log-probabilities, vectorized over the rows of a step.

The random number of a draw depends on (seed, position) only. The draw inverts the cumulative distribution in
order of token IDs. So a continuation on another rank samples the same tokens, up to the rounding of its
logits.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

_KEY = struct.Struct("<QQ")
_STREAM = 0x726F6F7374
"""xxh3 seed of the draws, distinct from that of block hashes."""
_U64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one request. temperature 0: greedy. top_k 0 and top_p 1: no limit. logprobs:
    number of alternatives beside the chosen token."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    logprobs: int | None = None


GREEDY = Sampling(temperature=0.0)


class Draw(NamedTuple):
    """One row's sampling request: the token at `position` (from 0, prompt included) of a request."""

    sampling: Sampling
    position: int


class TokenLogprobs(NamedTuple):
    """Natural logarithms of the model's own distribution, before temperature and limits."""

    chosen: float
    top: tuple[tuple[int, float], ...]
    """(token, log-probability), the most likely first. Ties are ordered by ID."""


def uniform(seed: int, position: int) -> float:
    """Return the random number of a draw, in [0, 1): 53 bits of xxh3_64(seed mod 2^64, position). Equal on
    every machine."""
    return (xxhash.xxh3_64_intdigest(_KEY.pack(seed & _U64, position), _STREAM) >> 11) * 2.0**-53


def sample(logits: NDArray[np.float32], draws: Sequence[Draw]) -> NDArray[np.int64]:
    """Sample a token for each row of logits [n, V], as int64 [n]. ArithmeticError when a row has no usable
    distribution (NaN, all -inf)."""
    tokens = np.asarray(logits.argmax(axis=1), np.int64)
    peak = logits[np.arange(len(tokens)), tokens]
    if not np.isfinite(peak).all():
        raise ArithmeticError(
            f"logits of row {int(np.argmin(np.isfinite(peak)))} peak at {peak.min()}: the forward pass"
            " produced no numbers"
        )
    drawn = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if drawn:
        requested = [draws[row].sampling for row in drawn]
        chances = probabilities(
            logits[drawn],
            np.array([demand.temperature for demand in requested]),
            np.array([demand.top_k for demand in requested]),
            np.array([demand.top_p for demand in requested]),
        )
        tokens[drawn] = _invert(
            chances, np.array([uniform(draws[row].sampling.seed, draws[row].position) for row in drawn])
        )
    return tokens


def probabilities(
    logits: NDArray[Any], temperature: NDArray[Any], top_k: NDArray[Any], top_p: NDArray[Any]
) -> NDArray[np.float64]:
    """Return the distribution that each row is drawn from, float64 [n, V]: temperature > 0, then top-k, then
    top-p of the rest.

    Tokens that tie with the last one inside a limit are kept, so that the result does not depend on the sort
    order of ties.
    """
    scaled = logits.astype(np.float64)
    scaled -= scaled.max(axis=1, keepdims=True)
    # A tiny temperature leaves the peak at 0 and overflows the rest to -inf, which is correct.
    with np.errstate(over="ignore"):
        scaled /= temperature[:, None]
    _keep_top_k(scaled, top_k)
    chances = np.exp(scaled)
    chances /= chances.sum(axis=1, keepdims=True)
    _keep_top_p(chances, top_p)
    return np.asarray(chances)


def logprobs(
    logits: NDArray[np.float32], tokens: NDArray[np.int64], top: Sequence[int]
) -> list[TokenLogprobs]:
    """Return, for each row of logits [n, V], the log-probability of its token and of the `top` most likely
    tokens."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return [
        TokenLogprobs(float(row[token]), _best(row, count))
        for row, token, count in zip(shifted, tokens, top, strict=True)
    ]


def _best(row: NDArray[np.float64], count: int) -> tuple[tuple[int, float], ...]:
    count = min(count, len(row))
    if not count:
        return ()
    smallest = np.partition(row, len(row) - count)[len(row) - count]
    candidates = np.nonzero(row >= smallest)[0]
    order = candidates[np.argsort(-row[candidates], kind="stable")][:count]
    return tuple((int(token), float(row[token])) for token in order)


def _keep_top_k(scaled: NDArray[np.float64], top_k: NDArray[Any]) -> None:
    vocabulary = scaled.shape[1]
    for row in np.nonzero((top_k > 0) & (top_k < vocabulary))[0]:
        smallest = np.partition(scaled[row], vocabulary - top_k[row])[vocabulary - top_k[row]]
        scaled[row, scaled[row] < smallest] = -np.inf


def _keep_top_p(chances: NDArray[np.float64], top_p: NDArray[Any]) -> None:
    rows = np.nonzero(top_p < 1)[0]
    if not len(rows):
        return
    descending = -np.sort(-chances[rows], axis=1)
    reached = (np.cumsum(descending, axis=1) < top_p[rows, None]).sum(axis=1)
    smallest = descending[np.arange(len(rows)), np.minimum(reached, chances.shape[1] - 1)]
    kept = chances[rows]
    kept[kept < smallest[:, None]] = 0.0
    chances[rows] = kept


def _invert(chances: NDArray[np.float64], numbers: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the first token ID whose cumulative probability exceeds the row's number in [0, 1) times the
    row's sum."""
    cumulative = np.cumsum(chances, axis=1)
    target = numbers * cumulative[:, -1]
    found = (cumulative <= target[:, None]).sum(axis=1)
    last = chances.shape[1] - 1 - np.argmax(chances[:, ::-1] > 0, axis=1)
    return np.asarray(np.minimum(found, last), np.int64)
