"""From logits to tokens: greedy, temperature, top-k, top-p, log-probabilities; vectorised over the rows of a step.

The random number of a draw depends on (seed, position) alone, and the draw inverts the cumulative distribution in order of token
ids, so that a continuation on another rank samples what this one would have, up to the rounding of its logits.
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
"""xxh3 seed of the draws, so that they share nothing with block hashes"""
_U64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request's tokens are chosen. temperature 0: greedy; top_k 0 and top_p 1: no limit; logprobs: how many beside the chosen one."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    logprobs: int | None = None


GREEDY = Sampling(temperature=0.0)


class Draw(NamedTuple):
    """One row's wish: the token at `position` (from 0, prompt included) of a request."""

    sampling: Sampling
    position: int


class TokenLogprobs(NamedTuple):
    """Natural logarithms of the model's own distribution, before temperature and limits."""

    chosen: float
    top: tuple[tuple[int, float], ...]
    """(token, log-probability), the most likely first, ties by id"""


def uniform(seed: int, position: int) -> float:
    """The draw's random number in [0, 1): 53 bits of xxh3_64(seed mod 2^64, position). Equal on every machine."""
    return (xxhash.xxh3_64_intdigest(_KEY.pack(seed & _U64, position), _STREAM) >> 11) * 2.0**-53


def sample(logits: NDArray[np.float32], draws: Sequence[Draw]) -> NDArray[np.int64]:
    """int64 [n]: a token for each row of logits [n, V]. ArithmeticError when a row holds no usable distribution (NaN, all -inf)."""
    tokens = np.asarray(logits.argmax(axis=1), np.int64)
    peak = logits[np.arange(len(tokens)), tokens]
    if not np.isfinite(peak).all():
        raise ArithmeticError(f"logits of row {int(np.argmin(np.isfinite(peak)))} peak at {peak.min()}: the forward pass produced no numbers")
    drawn = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if drawn:
        wishes = [draws[row].sampling for row in drawn]
        chances = probabilities(
            logits[drawn],
            np.array([wish.temperature for wish in wishes]),
            np.array([wish.top_k for wish in wishes]),
            np.array([wish.top_p for wish in wishes]),
        )
        tokens[drawn] = _invert(chances, np.array([uniform(draws[row].sampling.seed, draws[row].position) for row in drawn]))
    return tokens


def probabilities(logits: NDArray[Any], temperature: NDArray[Any], top_k: NDArray[Any], top_p: NDArray[Any]) -> NDArray[np.float64]:
    """float64 [n, V] that a row is drawn from: temperature > 0, then top-k, then top-p of what is left.

    Tokens as likely as the last one inside a limit stay in, so that the result does not depend on how ties are sorted.
    """
    scaled = logits.astype(np.float64)
    scaled -= scaled.max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):  # a tiny temperature leaves the peak at 0 and sends the rest to -inf, which is right
        scaled /= temperature[:, None]
    _keep_top_k(scaled, top_k)
    chances = np.exp(scaled)
    chances /= chances.sum(axis=1, keepdims=True)
    _keep_top_p(chances, top_p)
    return np.asarray(chances)


def logprobs(logits: NDArray[np.float32], tokens: NDArray[np.int64], top: Sequence[int]) -> list[TokenLogprobs]:
    """For each row of logits [n, V] the log-probability of its token and of the `top` most likely ones."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return [TokenLogprobs(float(row[token]), _best(row, count)) for row, token, count in zip(shifted, tokens, top, strict=True)]


def _best(row: NDArray[np.float64], count: int) -> tuple[tuple[int, float], ...]:
    count = min(count, len(row))
    if not count:
        return ()
    least = np.partition(row, len(row) - count)[len(row) - count]
    candidates = np.nonzero(row >= least)[0]
    order = candidates[np.argsort(-row[candidates], kind="stable")][:count]
    return tuple((int(token), float(row[token])) for token in order)


def _keep_top_k(scaled: NDArray[np.float64], top_k: NDArray[Any]) -> None:
    vocabulary = scaled.shape[1]
    for row in np.nonzero((top_k > 0) & (top_k < vocabulary))[0]:
        least = np.partition(scaled[row], vocabulary - top_k[row])[vocabulary - top_k[row]]
        scaled[row, scaled[row] < least] = -np.inf


def _keep_top_p(chances: NDArray[np.float64], top_p: NDArray[Any]) -> None:
    rows = np.nonzero(top_p < 1)[0]
    if not len(rows):
        return
    descending = -np.sort(-chances[rows], axis=1)
    reached = (np.cumsum(descending, axis=1) < top_p[rows, None]).sum(axis=1)
    least = descending[np.arange(len(rows)), np.minimum(reached, chances.shape[1] - 1)]
    kept = chances[rows]
    kept[kept < least[:, None]] = 0.0
    chances[rows] = kept


def _invert(chances: NDArray[np.float64], numbers: NDArray[np.float64]) -> NDArray[np.int64]:
    """The first token, by id, whose cumulative chance exceeds the row's number in [0, 1) times the row's sum."""
    cumulative = np.cumsum(chances, axis=1)
    target = numbers * cumulative[:, -1]
    found = (cumulative <= target[:, None]).sum(axis=1)
    last = chances.shape[1] - 1 - np.argmax(chances[:, ::-1] > 0, axis=1)
    return np.asarray(np.minimum(found, last), np.int64)
