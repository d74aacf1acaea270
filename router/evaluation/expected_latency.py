"""Expected latencies under the uncorrected time model, to compare with measured first tokens and decode
steps. Pure.
"""

from typing import NamedTuple

from fleet.timing import EngineSpeed, decode_step_seconds, prefill_seconds, queue_seconds
from router.fleet_state.reservations import BLOCKS, PREFILL, SEQUENCES
from router.scheduling.decision import Decision

_UNTIL_A_STEP_ENDS = 0.5
"""Average share of a step that passes before an arriving request can take part in one."""


class Surcharge(NamedTuple):
    """Seconds that experts add to an engine's times, under its current traffic.

    reading: added to each decode step, for the distinct experts that it reads. all_experts: added to a step
    that reads every expert. hit: share of a layer's experts to which one token is routed. token: by rank,
    added to each token computed there, for sending the token to other ranks; empty: nothing.
    """

    reading: float = 0.0
    all_experts: float = 0.0
    hit: float = 0.0
    token: tuple[float, ...] = ()

    def of_chunk(self, tokens: int) -> float:
        """Return the read time of a step that computes `tokens` prompt tokens of no particular kind."""
        return max(self.reading, self.all_experts * (1.0 - (1.0 - self.hit) ** tokens))

    def of_token(self, rank: int) -> float:
        return self.token[rank] if rank < len(self.token) else 0.0


NONE = Surcharge()


class FirstToken(NamedTuple):
    """Seconds from a decision to its first token. prefill: computing this prompt and the outstanding prompts
    ahead of it. beside: the steps that this takes, which other sequences share, and the experts.
    """

    prefill: float
    beside: float


def first_token(decision: Decision, surcharge: Surcharge = NONE) -> FirstToken:
    """Return the expected time to first token of the chosen rank, under the load known at the decision."""
    speed, rank, limit = decision.target.speed, decision.target.rank, max(decision.target.max_batch_tokens, 1)
    uncached = int(decision.uncached[decision.chosen])
    load: list[int] = decision.load[:, decision.chosen].tolist()
    tokens = uncached + load[PREFILL]
    prefill = queue_seconds(speed.prefill_token, load[PREFILL]) + prefill_seconds(
        speed.prefill_token, speed.prefill_pair, uncached, decision.ask.prompt_tokens
    )
    chunks = -(-tokens // limit)
    reading = chunks * (surcharge.of_chunk(min(tokens, limit)) - surcharge.reading)
    steps = (chunks + _UNTIL_A_STEP_ENDS) * _step(speed, load, surcharge, rank)
    return FirstToken(prefill, steps + reading + tokens * surcharge.of_token(rank))


def step(decision: Decision, surcharge: Surcharge = NONE) -> float:
    """Return the seconds of a decode step of the chosen rank, this request included, under the load known at
    the decision.
    """
    target = decision.target
    return _step(target.speed, decision.load[:, decision.chosen].tolist(), surcharge, target.rank)


def _step(speed: EngineSpeed, load: list[int], surcharge: Surcharge, rank: int) -> float:
    return decode_step_seconds(
        speed.step + surcharge.reading,
        speed.decode_sequence + surcharge.of_token(rank),
        speed.decode_block,
        load[SEQUENCES] + 1,
        load[BLOCKS],
    )


class ExpectedStepTime:
    """Expected decode step time of one engine, from the reports of its ranks. Ranks step together, so the
    slowest one sets the time.
    """

    def __init__(self, speed: EngineSpeed, ranks: int) -> None:
        self.speed = speed
        self._steps = [0.0] * ranks

    def reported(self, rank: int, running: int, blocks: int, surcharge: Surcharge = NONE) -> float:
        """Record the sequences and KV blocks of a rank. Return the expected seconds of a step."""
        speed = self.speed
        self._steps[rank] = decode_step_seconds(
            speed.step, speed.decode_sequence + surcharge.of_token(rank), speed.decode_block, running, blocks
        )
        return surcharge.reading + max(self._steps)
