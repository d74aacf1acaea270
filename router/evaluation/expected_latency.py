"""What the time model, uncorrected, says of the times that are measured: first tokens and decode steps. Pure."""

from typing import NamedTuple

from fleet.timing import EngineSpeed
from router.fleet_state.reservations import BLOCKS, PREFILL, SEQUENCES
from router.scheduling.decision import Decision

_UNTIL_A_STEP_ENDS = 0.5
"""of a step passes on average before a request that arrives can take part in one"""


class Surcharge(NamedTuple):
    """What experts add to an engine's times, in seconds, as its traffic is at present.

    reading: to each decode step, for the distinct experts that it reads. all_experts: to a step that reads all there are. hit: share of a
    layer's experts that one token goes to. token: by rank, to each token that is computed there, for sending it to other ranks;
    empty: nothing.
    """

    reading: float = 0.0
    all_experts: float = 0.0
    hit: float = 0.0
    token: tuple[float, ...] = ()

    def of_chunk(self, tokens: int) -> float:
        """Of a step that computes so many prompt tokens of no particular kind, for what it reads."""
        return max(self.reading, self.all_experts * (1.0 - (1.0 - self.hit) ** tokens))

    def of_token(self, rank: int) -> float:
        return self.token[rank] if rank < len(self.token) else 0.0


NONE = Surcharge()


class FirstToken(NamedTuple):
    """Seconds from a decision to its first token. prefill: of the prompt, and of the prompts promised before it. beside: of the steps that
    this takes, which other sequences share, and of experts."""

    prefill: float
    beside: float


def first_token(decision: Decision, surcharge: Surcharge = NONE) -> FirstToken:
    """Of the chosen rank, with the load that was known."""
    engine, rank = decision.target.engine, decision.target.rank
    speed = decision.target.speed
    uncached = int(decision.uncached[decision.chosen])
    load: list[int] = decision.load[:, decision.chosen].tolist()
    tokens = uncached + load[PREFILL]
    prefill = speed.prefill_token * tokens + speed.prefill_pair * uncached * (decision.ask.prompt_tokens - 0.5 * uncached)
    chunks = -(-tokens // max(engine.max_batch_tokens, 1))
    reading = chunks * (surcharge.of_chunk(min(tokens, engine.max_batch_tokens)) - surcharge.reading)
    steps = (chunks + _UNTIL_A_STEP_ENDS) * _step(speed, load, surcharge, rank)
    return FirstToken(prefill, steps + reading + tokens * surcharge.of_token(rank))


def step(decision: Decision, surcharge: Surcharge = NONE) -> float:
    """Seconds of a decode step of the chosen rank, this request included, with the load that was known."""
    target = decision.target
    return _step(target.speed, decision.load[:, decision.chosen].tolist(), surcharge, target.rank)


def _step(speed: EngineSpeed, load: list[int], surcharge: Surcharge, rank: int) -> float:
    sequence = speed.decode_sequence + surcharge.of_token(rank)
    return speed.step + surcharge.reading + sequence * (load[SEQUENCES] + 1) + speed.decode_block * load[BLOCKS]


class ExpectedStepTime:
    """How long one engine's decode steps should take, by what its ranks report. They step together: the slowest one's load counts."""

    def __init__(self, speed: EngineSpeed, ranks: int) -> None:
        self._speed = speed
        self._added = [0.0] * ranks

    def reported(self, rank: int, running: int, blocks: int, surcharge: Surcharge = NONE) -> float:
        """Seconds of a step, now that a rank has so many sequences and KV blocks."""
        self._added[rank] = (self._speed.decode_sequence + surcharge.of_token(rank)) * running + self._speed.decode_block * blocks
        return self._speed.step + surcharge.reading + max(self._added)
