"""What the time model, uncorrected, says of the times that are measured: first tokens and decode steps. Pure."""

from typing import NamedTuple

from fleet.timing import EngineSpeed
from router.decision import Decision
from router.reservations import BLOCKS, PREFILL, SEQUENCES

_UNTIL_A_STEP_ENDS = 0.5
"""of a step passes on average before a request that arrives can take part in one"""


class FirstToken(NamedTuple):
    """Seconds from a decision to its first token. prefill: of the prompt, and of the prompts promised before it. beside: of the steps that
    this takes, which other sequences share."""

    prefill: float
    beside: float


def first_token(decision: Decision) -> FirstToken:
    """Of the chosen rank, with the load that was known."""
    chosen, roster, engine = decision.chosen, decision.roster, decision.target.engine
    at = int(decision.at[chosen])
    uncached, queued = int(decision.uncached[chosen]), int(decision.load[PREFILL, chosen])
    pairs = uncached * (decision.ask.prompt_tokens - 0.5 * uncached)
    prefill = float(roster.prefill_token_s[at]) * (uncached + queued) + float(roster.prefill_pair_s[at]) * pairs
    steps = _UNTIL_A_STEP_ENDS - (-(uncached + queued) // max(engine.max_batch_tokens, 1))
    return FirstToken(prefill, steps * step(decision))


def step(decision: Decision) -> float:
    """Seconds of a decode step of the chosen rank, this request included, with the load that was known."""
    chosen, roster = decision.chosen, decision.roster
    at = int(decision.at[chosen])
    running, blocks = int(decision.load[SEQUENCES, chosen]) + 1, int(decision.load[BLOCKS, chosen])
    return float(roster.step_s[at]) + float(roster.decode_sequence_s[at]) * running + float(roster.decode_block_s[at]) * blocks


class Pace:
    """How long one engine's decode steps should take, by what its ranks report. They step together: the slowest one's load counts."""

    def __init__(self, speed: EngineSpeed, ranks: int) -> None:
        self._speed = speed
        self._added = [0.0] * ranks
        self.reading_seconds = 0.0
        """of a step, for the distinct experts that it reads"""

    def reported(self, rank: int, running: int, blocks: int) -> float:
        """Seconds of a step, now that a rank has so many sequences and KV blocks."""
        self._added[rank] = self._speed.decode_sequence * running + self._speed.decode_block * blocks
        return self._speed.step + self.reading_seconds + max(self._added)
