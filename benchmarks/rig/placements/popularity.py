"""Synthetic expert demand from stated generators: skew, difference between domains, drift, sampling.

A *load* is float64 [layers, experts], probabilities that sum to 1 per layer. Shapes of skew, over a random
order of the experts per layer:

- `mild`: an eighth of the experts takes 23 %, falling geometrically from the first to the last.
- `topheavy`: an eighth takes 40 %, in the same way.
- `zipf`: the n-th has 1/n of the first one's demand.
- `lognormal`: independent, sigma 1.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Load = NDArray[np.float64]
SKEWS = ("mild", "topheavy", "zipf", "lognormal")
_TOP = {"mild": 0.23, "topheavy": 0.40}
_SCALE = 1.0
"""sigma of the log-normal skew"""


def load(skew: str, layers: int, experts: int, dice: np.random.Generator) -> Load:
    """Return one domain's load."""
    if skew == "lognormal":
        raw = np.exp(_SCALE * dice.standard_normal((layers, experts)))
    else:
        ranked = 1.0 / np.arange(1, experts + 1) if skew == "zipf" else _geometric(experts, _TOP[skew])
        raw = np.stack([dice.permutation(ranked) for _ in range(layers)])
    return np.asarray(raw / raw.sum(axis=1, keepdims=True))


def _geometric(experts: int, top: float) -> Load:
    """Return a geometrically falling load whose first eighth of the experts takes `top` of all."""
    low, high = 1e-9, 50.0 / experts
    while high - low > 1e-12:
        rate = 0.5 * (low + high)
        falling = np.exp(-rate * np.arange(experts))
        low, high = (low, rate) if falling[: experts // 8].sum() > top * falling.sum() else (rate, high)
    return np.asarray(np.exp(-low * np.arange(experts)))


def drifted(before: Load, foreign: Load, drift: str, dice: np.random.Generator) -> Load:
    """Return the load after a drift. `noise`: unchanged; `jitter10`, `jitter30`: each expert's times
    exp(sigma * normal), sigma .1 and .3; `mix25`: a quarter of the traffic is of the foreign domain; `full`:
    all of it."""
    match drift:
        case "noise":
            return before
        case "jitter10" | "jitter30":
            raw = before * np.exp(int(drift[6:]) / 100 * dice.standard_normal(before.shape))
            return np.asarray(raw / raw.sum(axis=1, keepdims=True))
        case "mix25":
            return np.asarray(0.75 * before + 0.25 * foreign)
        case "full":
            return foreign
    raise ValueError(f"drift: {drift!r} is unknown")


def sampled(truth: Load, pairs: float, dice: np.random.Generator) -> Load:
    """Return float64 [layers, experts] counts of a window of `pairs` (token, k) pairs per layer: Poisson."""
    return np.asarray(dice.poisson(truth * pairs), np.float64)


def domains(
    skew: str, count: int, special: float, layers: int, experts: int, dice: np.random.Generator
) -> NDArray[np.float64]:
    """Return float64 [count, layers, experts]: domains that share (1 - special) of their popularity and have
    `special` of their own, in unrelated orders."""
    common = load(skew, layers, experts, dice)
    return np.stack(
        [(1.0 - special) * common + special * load(skew, layers, experts, dice) for _ in range(count)]
    )


def by_rank(kinds: NDArray[Any], ranks: int, leak: float) -> NDArray[np.float64]:
    """Return float64 [ranks, layers, experts]: demand if domain d has its home on the ranks d, d + count, ...
    and a share `leak` of all traffic goes to any rank.

    With fewer ranks than domains, a rank is the home of several.
    """
    count = len(kinds)
    own = np.stack(
        [kinds[rank % count] if ranks >= count else kinds[rank::ranks].mean(axis=0) for rank in range(ranks)]
    )
    return np.asarray((1.0 - leak) * own + leak * own.mean(axis=0))
