"""The cost of what hindsight would have reached: recorded requests under a closed load, on the clock of the
time model.

The oracle (`rig.live.oracle`) says how few ranks tokens could reach, and not what that costs: prompts that
wait for each other at their home, and steps in which one rank serves most. Here the same requests run on
ranks that step together, with the tokens of every step counted where they were served, as the live figures
are.

Three ways to choose ranks, so that differences of placement, knowledge and price can be told apart:
- `Emptiest` counts requests, as a router does that knows no experts and finds no cached prompt;
- `AtHome` sends every request to the home that hindsight gives it, whatever that costs;
- `Priced` is the router's own decision with true destinations in place of predicted ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.rig.homes import joined
from benchmarks.rig.live.oracle import Hindsight, Recorded, away_from, remote_by_rank, served_by
from fleet.arrays import FloatArray, IntArray
from fleet.placement import Placement
from fleet.timing import EngineSpeed, step_seconds, surplus_pairs
from router.fleet_state.reservations import AMOUNTS, BLOCKS, PREFILL, SEQUENCES, STEPS, Reservations
from router.fleet_state.view import FleetView
from router.prediction.predictor import RequestPrediction
from router.scheduling.cost import Weights
from router.scheduling.decision import Ask, Conditions, TargetPredictions, decide
from router.scheduling.filters import SaturationLimits, candidates
from router.scheduling.policies import PolicyRules

WEIGHTS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
"""Weights of the expert term that `best_priced` tries."""
LOSES = 0.01
"""Part of the tokens per second of the fastest weight that counts as none: seeds differ by as much."""
MAX_BATCH_TOKENS = 512
"""tokens that a rank computes in a step"""
Chooser = Callable[[int, IntArray], int]
"""Choice of a rank: (request, load int64 [AMOUNTS, ranks]) -> rank."""


class ClosedLoad(NamedTuple):
    """A closed load. users: concurrent requests; prompt, output: tokens, mean of the answers."""

    users: int
    prompt: int
    output: int
    block_size: int = 16

    @property
    def blocks(self) -> int:
        """KV blocks of a request halfway through its answer."""
        return (self.prompt + self.output // 2) // self.block_size


class ClockFigures(NamedTuple):
    """Figures of a run, as those of a live phase are defined (`rig.live.figures.Sent`)."""

    remote_ranks: float
    step_balance: float
    decode_balance: float
    """balance of the steps that compute no prompt"""
    balance: float
    tokens_per_second: float
    first_token_seconds: float
    """median"""


class Destinations(NamedTuple):
    """Where tokens of R requests are served under a placement, by the rank that computes them."""

    away: NDArray[np.uint8]
    """uint8 [R, ranks, tokens, layers], distinct remote ranks"""
    served: NDArray[np.uint8]
    """uint8 [R, ranks, tokens, layers, ranks], pairs by serving rank"""

    @classmethod
    def of(cls, found: Recorded, placement: Placement) -> "Destinations":
        everyone = np.arange(placement.ranks)
        by_rank = [served_by(found, placement, rank) for rank in range(placement.ranks)]
        away = [away_from(served, rank) for rank, served in enumerate(by_rank)]
        pairs = [(served[..., None] == everyone).sum(axis=3) for served in by_rank]
        return cls(np.stack(away, axis=1).astype(np.uint8), np.stack(pairs, axis=1).astype(np.uint8))


class Emptiest:
    """Choice of one of the ranks with the fewest requests."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def __call__(self, request: int, load: IntArray) -> int:
        fewest = np.flatnonzero(load[SEQUENCES] == load[SEQUENCES].min())
        return int(self._random.choice(fewest))


class AtHome:
    """Choice of the home of a request. share: float64 [R, ranks]; a request with several is sent to any of
    them, in that proportion."""

    def __init__(self, share: FloatArray, seed: int) -> None:
        self._share = share / share.sum(axis=1, keepdims=True)
        self._random = np.random.default_rng(seed)

    def __call__(self, request: int, load: IntArray) -> int:
        return int(self._random.choice(self._share.shape[1], p=self._share[request]))


class Priced:
    """The router's decision by all its prices, where the destinations of every request are known. remote:
    float64 [R, ranks], distinct remote ranks of a token, summed over layers; weight: of the expert term."""

    def __init__(
        self,
        placement: Placement,
        remote: FloatArray,
        speed: EngineSpeed,
        load: ClosedLoad,
        weight: float,
        seed: int,
    ) -> None:
        view = FleetView(Reservations(settle_seconds=0.1, stale_seconds=5.0))
        engine = joined(placement, speed)
        view.join(engine, 0.0)
        view.sign_of_life(engine.worker_id, 0.0)
        self._table = view.target_table(engine.model)
        self._rules = PolicyRules(weights=Weights.of(experts=weight))
        self._remote, self._load, self._random = remote, load, np.random.default_rng(seed)

    def __call__(self, request: int, load: IntArray) -> int:
        ranks = self._remote.shape[1]
        nothing, seed = np.zeros(ranks), int(self._random.integers(1 << 32))
        known = np.ones(1, np.float32)
        certain = RequestPrediction(
            known, known, 1.0, 1, 1, 0, 0, slice(0, 0), (0.0, 0.0, 1.0, 0.0), [0.0, 0.0, 1.0, 0.0]
        )
        prediction = TargetPredictions(
            certain,
            np.stack([self._remote[request], nothing, nothing, nothing]),
            nothing,
            np.ones(ranks, np.bool_),
        )
        ask = Ask(
            decision_id="d",
            seed=seed,
            model="m",
            prompt_tokens=self._load.prompt,
            output_tokens=self._load.output,
        )
        found = candidates(self._table, load, 1, SaturationLimits(requests=512, queue_seconds=60.0))
        cached = np.zeros(ranks, np.int64)
        decision = decide(ask, self._table, found, cached, Conditions(load), self._rules, 1, prediction)
        return decision.target.rank


@dataclass
class _Running:
    """Running request. computed: its tokens so far; all: tokens to compute."""

    number: int
    asked_at: float
    computed: int
    all: int


class _Ranks:
    """Ranks that step together. Prompts are computed in order, in what the step of a rank leaves."""

    def __init__(self, found: Recorded, placement: Placement, load: ClosedLoad, speed: EngineSpeed) -> None:
        self._to, self._load, self._speed = Destinations.of(found, placement), load, speed
        self._tokens: list[int] = found.tokens.astype(int).tolist()
        self._held: list[list[_Running]] = [[] for _ in range(placement.ranks)]
        self.served = np.zeros((placement.layers, placement.ranks))
        self.forget()

    def forget(self) -> None:
        """Count from here on."""
        self.served = np.zeros_like(self.served)
        self.balances: list[float] = []
        self.with_prompt: list[bool] = []
        self.away = self.tokens = 0.0

    def begin(self, request: int, rank: int, now: float) -> None:
        self._held[rank].append(_Running(request, now, 0, self._tokens[request]))

    def load(self) -> IntArray:
        """Return int64 [AMOUNTS, ranks], as a router with fresh reports knows it."""
        found = np.zeros((AMOUNTS, len(self._held)), np.int64)
        for rank, held in enumerate(self._held):
            found[PREFILL, rank] = sum(max(self._load.prompt - one.computed, 0) for one in held)
            found[STEPS, rank] = sum(
                max(self._load.output - max(one.computed - self._load.prompt, 0), 1) for one in held
            )
            found[SEQUENCES, rank] = len(held)
        found[BLOCKS] = self._load.blocks * found[SEQUENCES]
        return found

    def step(self) -> tuple[float, int, list[_Running], list[_Running]]:
        """Run one step; return its seconds, the answers' tokens, the requests that got their first token, and
        those that ended."""
        ranks = len(self._held)
        prefill, sequences, sent = np.zeros(ranks), np.zeros(ranks), np.zeros(ranks)
        served, answered, begun = np.zeros_like(self.served), 0, []
        for rank, held in enumerate(self._held):
            for one, count in self._planned(held):
                tokens = slice(one.computed, one.computed + count)
                sent[rank] += self._to.away[one.number, rank, tokens].sum()
                served += self._to.served[one.number, rank, tokens].sum(axis=0)
                is_prompt = one.computed < self._load.prompt
                prefill[rank] += count * is_prompt
                sequences[rank] += not is_prompt
                one.computed += count
                answered += one.computed >= self._load.prompt
                begun += [one] if is_prompt and one.computed >= self._load.prompt else []
        self._count(served, sent, prefill + sequences)
        self.with_prompt.append(bool(prefill.any()))
        ended = [one for held in self._held for one in held if one.computed >= one.all]
        self._held = [[one for one in held if one.computed < one.all] for held in self._held]
        return self._seconds(prefill, sequences, sent, served), answered, begun, ended

    def _planned(self, held: list[_Running]) -> list[tuple[_Running, int]]:
        """Return the tokens that each request of a rank computes in this step."""
        decoding = [(one, 1) for one in held if one.computed >= self._load.prompt]
        left, prompts = MAX_BATCH_TOKENS - len(decoding), []
        for one in held:
            if one.computed < self._load.prompt and left > 0:
                prompts.append((one, min(left, self._load.prompt - one.computed)))
                left -= prompts[-1][1]
        return decoding + prompts

    def _count(self, served: FloatArray, sent: FloatArray, tokens: FloatArray) -> None:
        self.balances.append(float((served.mean(axis=1) / served.max(axis=1)).mean()))
        self.served += served
        self.away += float(sent.sum()) / len(served)
        self.tokens += float(tokens.sum())

    def _seconds(
        self, prefill: FloatArray, sequences: FloatArray, sent: FloatArray, served: FloatArray
    ) -> float:
        nothing = np.zeros(len(sent))
        took = step_seconds(
            self._speed,
            prefill_tokens=prefill,
            prefill_pairs=nothing,
            sequences=sequences,
            blocks=self._load.blocks * sequences,
            remote_ranks=sent,
            remote_nodes=nothing,
            distinct_experts=nothing,
            surplus=float(surplus_pairs(served)),
        )
        return float(took.max())


def replayed(
    found: Recorded, placement: Placement, choose: Chooser, load: ClosedLoad, speed: EngineSpeed
) -> ClockFigures:
    """Run all requests in order, twice or as often as the users need, and return the figures of the second
    half. Every user sends the next request as soon as an answer is complete."""
    ranks, each = _Ranks(found, placement, load, speed), max(len(found.experts), 2 * load.users)
    now, since, answered = 0.0, 0.0, 0
    waits: list[float] = []
    waiting = [0.0] * load.users
    for number in range(2 * each):
        while not waiting:
            seconds, tokens, begun, ended = ranks.step()
            now += seconds
            answered += tokens
            waits += [now - one.asked_at for one in begun]
            waiting = [now] * len(ended)
        if number == each:  # the first half was to fill the ranks
            since, answered, waits = now, 0, []
            ranks.forget()
        request = number % len(found.experts)
        ranks.begin(request, choose(request, ranks.load()), waiting.pop())
    served, balances = ranks.served, np.array(ranks.balances)
    return ClockFigures(
        ranks.away / ranks.tokens,
        float(balances.mean()),
        float(balances[~np.array(ranks.with_prompt)].mean()),
        float((served.mean(axis=1) / served.max(axis=1)).mean()),
        answered / (now - since),
        float(np.median(waits)),
    )


class OnTheClock(NamedTuple):
    """Figures of the same requests in three ways."""

    eplb: ClockFigures
    """a given placement, the emptiest rank"""
    at_home: ClockFigures
    """homes and placement of the oracle"""
    priced: ClockFigures
    """placement of the oracle, the router's prices and true destinations: the fewest remote ranks that cost
    no tokens per second"""


def on_the_clock(
    found: Recorded, eplb: Placement, best: Hindsight, load: ClosedLoad, speed: EngineSpeed, seed: int = 0
) -> OnTheClock:
    """Replay the requests under EPLB's placement and under the oracle's."""
    return OnTheClock(
        replayed(found, eplb, Emptiest(seed), load, speed),
        replayed(found, best.placement, AtHome(best.share, seed), load, speed),
        best_priced(found, best.placement, load, speed, seed),
    )


def best_priced(
    found: Recorded, placement: Placement, load: ClosedLoad, speed: EngineSpeed, seed: int = 0
) -> ClockFigures:
    """Return the fewest remote ranks at which no more than `LOSES` of the tokens per second is lost, over
    weights of the expert term."""
    remote = remote_by_rank(found, placement) * placement.layers
    tried = [
        replayed(found, placement, Priced(placement, remote, speed, load, weight, seed), load, speed)
        for weight in WEIGHTS
    ]
    fastest = max(one.tokens_per_second for one in tried)
    return min(
        (one for one in tried if one.tokens_per_second >= (1.0 - LOSES) * fastest),
        key=lambda one: one.remote_ranks,
    )
