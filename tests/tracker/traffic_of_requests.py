"""Traffic of whole requests, second by second, as engines report it: input for drift detection."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.demo_model import DOMAINS, routings_path
from tracker.config import TrackerConfig
from tracker.drift.detector import DriftDetector, PopularityShift

Mix = Callable[[float], NDArray[np.float64]]
"""shares of the domains at a time"""


class Requests(NamedTuple):
    """Requests to draw from. pieces: float32 [requests, pieces, layers * experts] counts, the first of the
    prompt; tokens [requests, pieces].
    """

    pieces: NDArray[np.float32]
    tokens: NDArray[np.float64]
    of_domain: tuple[NDArray[np.int64], ...]
    layers: int
    experts: int


def of_the_demo_model(pieces: int = 8) -> Requests:
    """Return requests recorded of the demo model: 192 prompt tokens at once, 192 more in pieces."""
    with np.load(routings_path()) as recorded:
        chosen, domain, prompt = recorded["experts"], recorded["domain"], int(recorded["prompt"])
    requests, length, layers, _ = chosen.shape
    experts = 32
    cuts = [0, prompt, *(prompt + (length - prompt) * (piece + 1) // pieces for piece in range(pieces))]
    places = chosen.astype(np.int64) + experts * np.arange(layers)[:, None]
    table = np.zeros((requests, len(cuts) - 1, layers * experts), np.float32)
    for number, (start, end) in enumerate(pairwise(cuts)):
        flat = places[:, start:end].reshape(requests, -1) + layers * experts * np.arange(requests)[:, None]
        table[:, number] = np.bincount(flat.ravel(), minlength=requests * layers * experts).reshape(
            requests, -1
        )
    tokens = np.broadcast_to(np.diff(cuts).astype(np.float64), (requests, len(cuts) - 1))
    return Requests(
        table,
        tokens,
        tuple(np.flatnonzero(domain == number) for number in range(len(DOMAINS))),
        layers,
        experts,
    )


def synthetic(
    chance: np.random.Generator,
    layers: int,
    experts: int,
    domains: int,
    *,
    apart: float = 1.0,
    per_domain: int = 24,
    pieces: int = 4,
) -> Requests:
    """Log-normal popularity (sigma 0.5), domains `apart`, requests 0.5 from their domain, log-normal lengths,
    draws of top 8.
    """
    popular = 0.5 * chance.standard_normal((layers, experts))
    tables, tokens = [], []
    for _ in range(domains):
        of_domain = popular + apart * chance.standard_normal((layers, experts))
        for _ in range(per_domain):
            logits = of_domain + 0.5 * chance.standard_normal((layers, experts))
            likely = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
            sizes = np.maximum(
                8, np.array([400.0, *[400.0 / pieces] * pieces]) * np.exp(0.7 * chance.standard_normal())
            ).astype(np.int64)
            tables.append([chance.poisson(8 * size * likely).ravel() for size in sizes])
            tokens.append(sizes)
    numbers = np.arange(domains * per_domain).reshape(domains, per_domain)
    return Requests(
        np.array(tables, np.float32), np.array(tokens, np.float64), tuple(numbers), layers, experts
    )


def seconds_of(
    requests: Requests,
    mix: Mix,
    rate: Callable[[float], float],
    seconds: int,
    chance: np.random.Generator,
    shortest: float = 5.0,
    longest: float = 20.0,
) -> Iterator[tuple[int, NDArray[np.float64], float]]:
    """Yield second, counts [layers, experts] and tokens computed in it: Poisson arrivals, prompts at once,
    the rest over 5 to 20 s.
    """
    pieces = requests.pieces.shape[1]
    flat, sizes = requests.pieces.reshape(-1, requests.pieces.shape[2]), requests.tokens.ravel()
    begun = np.repeat(np.arange(seconds), chance.poisson([rate(second) for second in range(seconds)]))
    shares = np.cumsum([mix(second) for second in range(seconds)], axis=1)
    domains = np.minimum(
        (chance.random(len(begun))[:, None] >= shares[begun]).sum(axis=1), len(requests.of_domain) - 1
    )
    known = np.array([len(numbers) for numbers in requests.of_domain])
    first = np.cumsum(known) - known
    chosen = np.concatenate(requests.of_domain)[
        first[domains] + (chance.random(len(begun)) * known[domains]).astype(np.int64)
    ]
    lasting = chance.uniform(shortest, longest, len(begun))[:, None] * np.arange(pieces) / max(1, pieces - 1)
    at = np.floor(begun[:, None] + chance.random(len(begun))[:, None] + lasting).ravel()
    rows = (chosen[:, None] * pieces + np.arange(pieces)).ravel()[np.argsort(at, kind="stable")]
    ends = np.searchsorted(np.sort(at), np.arange(seconds + 1))
    for second in range(seconds):
        now = rows[ends[second] : ends[second + 1]]
        yield (
            second,
            flat[now].sum(axis=0, dtype=np.float64).reshape(requests.layers, requests.experts),
            float(sizes[now].sum()),
        )


class Course(NamedTuple):
    """Output of a detector: (second, shift), and per second its divergence and threshold (nan: no
    verdict)."""

    said: list[tuple[int, PopularityShift]]
    divergence: NDArray[np.float64]
    threshold: NDArray[np.float64]

    @property
    def alarms(self) -> list[int]:
        return [second for second, shift in self.said if not shift.settled]

    @property
    def settled(self) -> list[int]:
        return [second for second, shift in self.said if shift.settled]


def watch(
    drift: DriftDetector, traffic: Iterator[tuple[int, NDArray[np.float64], float]], judge_every: int = 2
) -> Course:
    """Run a detector on traffic."""
    said, divergences, thresholds = [], [], []
    for second, counts, tokens in traffic:
        drift.observe(counts, tokens, float(second))
        if second % judge_every == 0 and (shift := drift.evaluate(float(second) + 0.5)) is not None:
            said.append((second, shift))
        divergences.append(np.nan if drift.divergence is None else drift.divergence)
        thresholds.append(np.nan if drift.threshold is None else drift.threshold)
    return Course(said, np.array(divergences), np.array(thresholds))


def constant(*shares: float) -> Mix:
    """Return a constant mix; shares need not sum to 1."""
    fixed = np.array(shares) / sum(shares)
    return lambda _: fixed


def flipped(before: Mix, after: Mix, second: float) -> Mix:
    return lambda now: before(now) if now < second else after(now)


def rotating(before: Mix, after: Mix, start: float, end: float) -> Mix:
    """Move from one mix to the other, linearly."""

    def mix(now: float) -> NDArray[np.float64]:
        share = min(1.0, max(0.0, (now - start) / (end - start)))
        return (1.0 - share) * before(now) + share * after(now)

    return mix


def detector(requests: Requests, **settings: float) -> DriftDetector:
    return DriftDetector(TrackerConfig(**settings), requests.layers, requests.experts)  # type: ignore[arg-type]
