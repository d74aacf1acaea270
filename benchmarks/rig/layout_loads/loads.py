"""Loads: requests of bursty, slowly changing and steady serving, and rollouts with and without tools."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from benchmarks.rig.layout_loads.engine import Turn

SHORTEST, LONGEST = 2, 8192
"""tokens of an output"""


class Lengths(NamedTuple):
    """Log-normal tokens of prompts and outputs."""

    prompt: float
    """mean tokens"""
    output: float
    """mean tokens"""
    spread: float
    """standard deviation of the logarithm"""

    def draw(self, dice: np.random.Generator, mean: float, count: int) -> list[int]:
        """Return lengths with this mean (before they are limited)."""
        drawn = dice.lognormal(np.log(mean) - 0.5 * self.spread**2, self.spread, count)
        return np.clip(drawn, SHORTEST, LONGEST).astype(int).tolist()


def serving(
    dice: np.random.Generator,
    rate: Callable[[float], float],
    highest: float,
    seconds: float,
    lengths: Lengths,
) -> list[Turn]:
    """Return requests that arrive at random at a rate that changes (thinned Poisson process).

    rate: requests per second at a time. highest: its maximum.
    """
    count = dice.poisson(highest * seconds)
    times = np.sort(dice.uniform(0.0, seconds, count)).tolist()
    kept = [at for at, chance in zip(times, dice.random(count), strict=True) if chance * highest < rate(at)]
    kept = kept or [0.0]
    prompts = lengths.draw(dice, lengths.prompt, len(kept))
    outputs = lengths.draw(dice, lengths.output, len(kept))
    return [Turn(*one) for one in zip(kept, prompts, outputs, strict=True)]


def bursts(quiet: float, loud: float, begins: list[float], length: float) -> Callable[[float], float]:
    """Return a rate that is `loud` for some seconds from each begin on, and else `quiet`."""
    return lambda at: loud if any(begin <= at < begin + length for begin in begins) else quiet


def waves(quiet: float, loud: float, period: float) -> Callable[[float], float]:
    """Return a rate that swings between two levels: a short day."""
    return lambda at: quiet + (loud - quiet) * 0.5 * (1.0 - float(np.cos(2.0 * np.pi * at / period)))


def rollout(
    dice: np.random.Generator, count: int, lengths: Lengths, turns: int = 1, tool_seconds: float = 0.0
) -> list[Turn]:
    """Return sequences that all begin at once. turns: at most that many for each, with calls of a tool
    between them, of `tool_seconds` on average."""
    found: list[Turn] = []
    for _ in range(count):
        context, after = 0, -1
        for number in range(int(dice.integers(1, turns + 1))):
            prompt = lengths.draw(dice, lengths.prompt, 1)[0]
            output = lengths.draw(dice, lengths.output / max(1.0, 0.5 * (1 + turns)), 1)[0]
            delay = float(dice.exponential(tool_seconds)) if number else 0.0
            found.append(Turn(delay, prompt, output, context, after))
            context += prompt + output
            after = len(found) - 1
    return found
