"""Requests of the demo model over time: Poisson arrivals, the prompt computed at once, the rest over some
seconds."""

from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from benchmarks.demo_model import DOMAINS, routings_path

LAYERS, EXPERTS = 4, 32
DECODE_SECONDS = 8
"""One token takes about 1/25 s on the demo model's target machine."""
Mix = NDArray[np.float64]
"""float64 [domains]: probability of each"""


class Flow:
    """Recorded requests to sample from: counts [requests, 1 + DECODE_SECONDS, layers * experts], the prompt
    first."""

    def __init__(self) -> None:
        with np.load(routings_path()) as recorded:
            chosen, self.prompt, self._domain = (
                recorded["experts"],
                int(recorded["prompt"]),
                recorded["domain"],
            )
        requests, self.length, _, _ = chosen.shape
        cells = chosen.astype(np.int64) + EXPERTS * np.arange(LAYERS)[:, None]
        parts = np.array_split(cells[:, self.prompt :], DECODE_SECONDS, axis=1)
        self._counts = np.stack(
            [_counted(part.reshape(requests, -1)) for part in (cells[:, : self.prompt], *parts)], axis=1
        )

    def seconds(
        self, before: Mix, after: Mix, flip: int, rate: float, length: int, random: np.random.Generator
    ) -> Iterator[tuple[NDArray[np.float64], float]]:
        """Yield counts [layers, experts] and computed tokens of each second. rate: requests per second; from
        `flip` on the mix is `after`."""
        running: deque[NDArray[np.int64]] = deque(maxlen=DECODE_SECONDS + 1)
        sizes = np.array([self.prompt, *[(self.length - self.prompt) / DECODE_SECONDS] * DECODE_SECONDS])
        of_domain = [np.flatnonzero(self._domain == domain) for domain in range(len(DOMAINS))]
        for second in range(length):
            mix = before if second < flip else after
            domains = random.choice(len(DOMAINS), random.poisson(rate), p=mix)
            running.appendleft(np.array([random.choice(of_domain[domain]) for domain in domains], np.int64))
            counts = sum(self._counts[begun, age].sum(axis=0) for age, begun in enumerate(running))
            yield (
                np.reshape(counts, (LAYERS, EXPERTS)),
                float(sum(len(begun) * sizes[age] for age, begun in enumerate(running))),
            )


def _counted(cells: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return float64 [requests, layers * experts] of cells [requests, n]."""
    requests, width = len(cells), LAYERS * EXPERTS
    flat = cells + width * np.arange(requests)[:, None]
    return np.bincount(flat.ravel(), minlength=requests * width).reshape(requests, width).astype(np.float64)


def mix(shares: dict[str, float]) -> Mix:
    """Return the mix of domains by name; shares need not add up to 1."""
    found = np.array([shares.get(name, 0.0) for name in DOMAINS])
    return np.asarray(found / found.sum())
