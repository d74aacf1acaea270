"""Requests under a closed load, decided by the router's code on a clock of the time model: their
destinations, and the cost.

Pure. Every user belongs to one domain and sends the next request as soon as an answer is complete. A
request's predicted activations and its actual dispatch both come from its own recorded routing. The ranks of
the engine step together.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import Float32Array
from fleet.blocks import BLOCK_SIZE
from fleet.dispatch import Chooser, reached
from fleet.experts import ModelShape
from fleet.facts.engines import EngineJoined
from fleet.layout import DP_ATTENTION, EP
from fleet.placement import Placement, linear
from fleet.routings import count_pairs
from fleet.signatures import ClusterModel
from fleet.timing import EngineSpeed, step_seconds
from migration.planning.cluster_homes import ClusterTraffic, homes
from migration.solvers.locality_placement import LocalityProblem
from router.fleet_state.cluster_homes import MIN_HOME_LIFT, ClusterHomes
from router.fleet_state.dispatch_cost import locality
from router.fleet_state.reservations import AMOUNTS, BLOCKS, PREFILL, SEQUENCES, STEPS, Reservations
from router.fleet_state.view import FleetView
from router.prediction.predictor import RequestPrediction
from router.scheduling.cost import TERMS
from router.scheduling.decision import Ask, Conditions, Decision, TargetPredictions, decide
from router.scheduling.filters import SaturationLimits, candidates
from router.scheduling.policies import PolicyRules

RANKS = 4
BLOCKS_HELD = 16
"""KV blocks of a running request"""
MAX_PREFILL = 512
"""prompt tokens that a rank computes in a step"""
SPEED = EngineSpeed(prefill_token=1.5e-4, step=2e-2, decode_sequence=5e-4, decode_block=2e-6, dispatch=3e-5)
"""roughly the measured speeds of four ranks on two cores, with the stated link costs"""


class World(NamedTuple):
    """Recorded requests [R] under a placement. weights: [R, K] prediction for each; remote: [R, ranks] mean
    number of distinct remote ranks per token and layer, for each possible rank of the request. share: [K,
    ranks] homes, as the planner finds them."""

    model: ClusterModel
    placement: Placement
    share: NDArray[np.float64]
    weights: Float32Array
    remote: NDArray[np.float64]
    domain: NDArray[np.intp]


def world(
    experts: NDArray[Any], domain: NDArray[Any], *, width: int, slots: int, follows: bool = True
) -> World:
    """Build a world in which each domain is a cluster, all equally frequent.

    experts: int [R, tokens, layers, k], recorded routings; domain: int [R], of each, from 0. width: experts
    of a layer; slots: of a rank. follows: the placement follows the homes that the planner finds; else it is
    the linear one. Raises ValueError if the planner finds no homes.
    """
    counts = np.stack([count_pairs(each.astype(np.int16), width) for each in experts]).astype(np.float64)
    domain, domains = domain.astype(np.intp), int(domain.max()) + 1
    profiles = np.stack([counts[domain == each].sum(axis=0) + 0.5 for each in range(domains)])
    profiles /= profiles.sum(axis=2, keepdims=True)
    shares = np.full(domains, 1 / domains)
    model = ClusterModel(1, profiles.astype(np.float32), shares.astype(np.float32), 0.02)
    share, placed = homes(
        ClusterTraffic(profiles, shares, leak=0.1), LocalityProblem(np.zeros(RANKS, np.intp), slots)
    )
    placement = linear(layers=experts.shape[2], experts=width, ranks=RANKS, slots_per_rank=slots)
    if follows:
        placement = Placement(placed.table, experts=width, ranks=RANKS, epoch=1, split=placed.split)
    return World(
        model,
        placement,
        share,
        model.signature(counts),
        _sent(experts.astype(np.int64), placement),
        domain,
    )


def _sent(experts: NDArray[np.int64], placement: Placement) -> NDArray[np.float64]:
    """Return `World.remote`, by the rule of `fleet.dispatch`."""
    found = np.zeros((len(experts), RANKS))
    for rank in range(RANKS):
        chooser = Chooser(placement, [rank], np.zeros(RANKS, np.intp))
        for layer in range(placement.layers):
            demand = experts[:, :, layer].reshape(-1, experts.shape[-1])
            served = (
                chooser.choose(layer, demand.reshape(-1), 0).reshape(demand.shape) // placement.slots_per_rank
            )
            away = reached(served, np.full(len(demand), rank, np.int64))
            found[:, rank] += away.reshape(len(experts), -1).mean(axis=1) / placement.layers
    return found


class LoadResult(NamedTuple):
    """Steady-state results: means over requests, or over steps."""

    is_home: float
    """share of the requests routed to a home of their domain"""
    remote_ranks: float
    """distinct remote ranks per token and layer"""
    tokens_per_second: float
    first_token_seconds: float
    balance: float
    """mean / highest number of sequences of a rank"""
    swing_ms: float
    """largest difference of the expert term between ranks"""


@dataclass(frozen=True)
class Setting:
    """A closed load. gain: of the tables; given: whether the planner has published homes. uneven: standard
    deviation of the measured prefill speeds of ranks, relative to the model; varies: relative deviation of
    answer lengths from `output`, unknown to the router."""

    users: int
    gain: float
    given: bool = True
    rules: PolicyRules = PolicyRules()  # noqa: RUF009 immutable
    speed: EngineSpeed = SPEED
    prompt: int = 192
    output: int = 64
    varies: float = 0.5
    uneven: float = 0.03
    seed: int = 0


@dataclass
class _Running:
    """Running request. to_compute: prompt tokens; to_emit: tokens after the first."""

    row: int
    user: int
    asked_at: float
    to_compute: int
    to_emit: int


class _Router:
    """Router with exact knowledge of every rank's load."""

    def __init__(self, world: World, setting: Setting, random: np.random.Generator) -> None:
        self._world, self._setting, self._random = world, setting, random
        self._view = FleetView(Reservations(settle_seconds=0.1, stale_seconds=5.0))
        engine, placement = joined(world.placement, setting.speed), world.placement
        self._view.learn(engine.model, world.model)
        self._view.join(engine, 0.0)
        self._view.sign_of_life(engine.worker_id, 0.0)
        self._view.price(
            engine.worker_id,
            placement.epoch,
            locality((0,) * RANKS, engine.shape, EP, placement, world.model),
        )
        if setting.given:
            self._view.set_homes(
                engine.worker_id, ClusterHomes(1, placement.epoch, (RANKS * world.share.T).astype(np.float32))
            )
        self._factors = np.stack([1.0 + setting.uneven * random.normal(size=RANKS), np.ones(RANKS)])

    def decide(self, row: int, load: NDArray[np.int64]) -> Decision:
        setting, target_table, prices, weights = (
            self._setting,
            self._view.target_table("m"),
            self._view.prices("m"),
            self._world.weights[row],
        )
        evidence, reliabilities = (0.0, 0.0, 128.0, 0.0), [0.0, 0.0, 0.9, 0.0]
        request_prediction = RequestPrediction(
            weights,
            self._world.model.shares,
            setting.gain,
            1,
            1,
            0,
            0,
            slice(0, 128),
            evidence,
            reliabilities,
        )
        prior, home = prices.prior_local(request_prediction.shares), prices.home(weights)
        prediction = TargetPredictions(
            request_prediction, prices.of(weights), prior, prices.priced, home, prices.versions
        )
        seed = int(self._random.integers(1 << 32))
        ask = Ask(
            decision_id="d", seed=seed, model="m", prompt_tokens=setting.prompt, output_tokens=setting.output
        )
        found = candidates(target_table, load, 1, SaturationLimits(requests=512, queue_seconds=60.0))
        return decide(
            ask,
            target_table,
            found,
            np.zeros(RANKS, np.int64),
            Conditions(load, factors=self._factors),
            setting.rules,
            1,
            prediction,
        )


def joined(placement: Placement, speed: EngineSpeed) -> EngineJoined:
    """Return the event of an engine whose ranks step together, one target each."""
    return EngineJoined(
        engine="e",
        worker_id=1,
        model="m",
        node="h",
        urls=tuple(f"http://h:{rank + 1}" for rank in range(placement.ranks)),
        block_size=BLOCK_SIZE,
        kv_blocks=4096,
        max_context=1024,
        max_batch_tokens=MAX_PREFILL,
        attention=DP_ATTENTION,
        shape=ModelShape(
            layers=placement.layers, experts=placement.experts, top_k=4, hidden=8, expert_intermediate=8
        ),
        placement=placement.record(),
        speed=speed,
    )


class _Engine:
    """Ranks that step together: each computes some prompt tokens and emits a token of every running
    request."""

    def __init__(self, world: World, setting: Setting) -> None:
        self._world, self._setting = world, setting
        self.computing: list[list[_Running]] = [[] for _ in range(RANKS)]
        self.running: list[list[_Running]] = [[] for _ in range(RANKS)]

    def held(self) -> list[int]:
        """Return the number of requests of each rank."""
        return [
            len(computing) + len(running)
            for computing, running in zip(self.computing, self.running, strict=True)
        ]

    def load(self) -> NDArray[np.int64]:
        """Return int64 [AMOUNTS, ranks]."""
        found = np.zeros((AMOUNTS, RANKS), np.int64)
        for rank, (computing, running) in enumerate(zip(self.computing, self.running, strict=True)):
            found[PREFILL, rank] = sum(one.to_compute for one in computing)
            found[STEPS, rank] = self._setting.output * len(computing) + sum(
                max(one.to_emit, 1) for one in running
            )
        found[SEQUENCES] = self.held()
        found[BLOCKS] = BLOCKS_HELD * found[SEQUENCES]
        return found

    def step(self) -> tuple[float, list[_Running], list[_Running]]:
        """Run one step; return its seconds, the requests that got their first token, and those that ended."""
        computed, sent, begun = np.zeros(RANKS), np.zeros(RANKS), []
        sequences = np.array([len(running) for running in self.running])
        for rank in range(RANKS):
            sent[rank] = sum(self._world.remote[one.row, rank] for one in self.running[rank])
            first = self._compute(rank, computed, sent)
            begun += first
            self.running[rank] += first
        ended = self._emit(begun)
        nothing = np.zeros(RANKS)
        took = step_seconds(
            self._setting.speed,
            prefill_tokens=computed,
            prefill_pairs=nothing,
            sequences=sequences,
            blocks=BLOCKS_HELD * sequences,
            remote_ranks=self._world.placement.layers * sent,
            remote_nodes=nothing,
            distinct_experts=nothing,
            surplus=0.0,
        )
        return float(took.max()), begun, ended

    def _compute(self, rank: int, computed: NDArray[np.float64], sent: NDArray[np.float64]) -> list[_Running]:
        """Compute prompts in order; return the completed ones."""
        done, queue = [], self.computing[rank]
        while queue and computed[rank] < MAX_PREFILL:
            part = min(MAX_PREFILL - int(computed[rank]), queue[0].to_compute)
            queue[0].to_compute -= part
            computed[rank] += part
            sent[rank] += part * self._world.remote[queue[0].row, rank]
            if not queue[0].to_compute:
                done.append(queue.pop(0))
        return done

    def _emit(self, begun: list[_Running]) -> list[_Running]:
        ended = []
        for rank, running in enumerate(self.running):
            for one in running:
                one.to_emit -= one not in begun
            ended += [one for one in running if one.to_emit <= 0]
            self.running[rank] = [one for one in running if one.to_emit > 0]
        return ended


def run_load(world: World, setting: Setting, requests: int) -> LoadResult:
    """Run until `requests` are answered; the first quarter is warm-up."""
    random = np.random.default_rng(setting.seed)
    router, engine, now, answered, since, tokens = (
        _Router(world, setting, random),
        _Engine(world, setting),
        0.0,
        0,
        0.0,
        0,
    )
    domains = random.permutation(np.resize(np.arange(world.model.clusters), setting.users))
    rows = [np.flatnonzero(world.domain == domain) for domain in range(world.model.clusters)]
    asking = [(float(at), user) for user, at in enumerate(5.0 * random.random(setting.users))]
    went: list[tuple[float, float, float]] = []
    stepped: list[float] = []
    waited: list[float] = []
    while answered < requests:
        if answered < requests // 4:
            since, tokens = now, 0
            went, stepped, waited = [], [], []
        for _, user in (one for one in asking if one[0] <= now):
            row = int(random.choice(rows[domains[user]]))
            decision = router.decide(row, engine.load())
            rank, length = (
                decision.target.rank,
                round(setting.output * (1.0 + setting.varies * (2.0 * random.random() - 1.0))),
            )
            engine.computing[rank].append(_Running(row, user, now, setting.prompt, max(1, length - 1)))
            is_home = world.share[world.domain[row], rank] >= MIN_HOME_LIFT / RANKS
            went.append(
                (
                    float(is_home),
                    float(world.remote[row, rank]),
                    float(np.ptp(decision.scores.terms[TERMS.index("experts")])),
                )
            )
        asking = [one for one in asking if one[0] > now]
        held = engine.held()
        if not any(held):
            now = min(at for at, _ in asking)
            continue
        stepped.append(float(np.mean(held)) / max(held))
        seconds, begun, ended = engine.step()
        now += seconds
        tokens += sum(map(len, engine.running)) + len(ended)
        waited += [now - one.asked_at for one in begun]
        answered += len(ended)
        asking += [(now, one.user) for one in ended]
    is_home, remote, swing = np.mean(went, axis=0).tolist()
    return LoadResult(
        is_home, remote, tokens / (now - since), float(np.mean(waited)), float(np.mean(stepped)), swing
    )
