"""Pure model of the control loop.

It has requests with recorded routings, a router that sends predicted requests to their home, a tracker with
perfect clusters, and the planner itself. Time passes in windows; nothing else is simulated.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.demo_model import routings_path
from fleet.dispatch import Chooser, reached
from fleet.experts import ModelShape
from fleet.placement import Placement, linear
from fleet.routings import sampled_tokens
from fleet.signatures import ClusterModel
from fleet.timing import EngineSpeed
from migration.config import MigrationConfig
from migration.model.engine_view import Demand, EngineView, PlannedHomes
from migration.model.move_history import MoveHistory
from migration.model.plan import replay
from migration.planning.planner import decide
from migration.planning.planner_decision import PlannerDecision
from migration.planning.problem import PlanningQuestion
from migration.solvers.eplb import as_placement, eplb_global

RANKS, SLOTS, EXPERTS, LAYERS, TOP_K = 4, 10, 32, 4, 4
NODE = np.zeros(RANKS, np.intp)
SHAPE = ModelShape(layers=LAYERS, experts=EXPERTS, top_k=TOP_K, hidden=256, expert_intermediate=128)
SPEED = EngineSpeed(step=1e-3, decode_sequence=1e-5, expert_pair=2e-6, dispatch=7.5e-6)
SECONDS = 30.0
"""planning interval; the default setting"""
TOKENS_PER_SECOND = 4000.0
Routings = NDArray[np.int64]
"""[requests, tokens, layers, k]: experts"""


@cache
def recorded() -> tuple[Routings, NDArray[np.intp], NDArray[np.intp], tuple[str, ...]]:
    """Return (routings, domain of each request, split of each request, domain names) of the demo model."""
    with np.load(routings_path()) as found:
        experts, domain, part, names = (found[name] for name in ("experts", "domain", "part", "domains"))
    return (
        experts.astype(np.int64),
        domain.astype(np.intp),
        part.astype(np.intp),
        tuple(str(name) for name in names),
    )


def counted(routings: Routings) -> NDArray[np.float64]:
    """Return the pairs of some requests, float64 [layers, experts]."""
    flat = routings.transpose(2, 0, 1, 3).reshape(LAYERS, -1) + EXPERTS * np.arange(LAYERS)[:, None]
    return np.bincount(flat.ravel(), minlength=LAYERS * EXPERTS).reshape(LAYERS, EXPERTS).astype(np.float64)


@cache
def profiles() -> NDArray[np.float32]:
    """Return the profiles of the training requests, float32 [domains, layers, experts]."""
    routings, domain, part, names = recorded()
    found = np.stack([counted(routings[(part == 0) & (domain == at)]) for at in range(len(names))])
    return np.asarray(found / found.sum(axis=2, keepdims=True), np.float32)


def eplb() -> Placement:
    """Return the placement of the published algorithm for the demand of all domains together."""
    routings, _, part, _ = recorded()
    raw = eplb_global(counted(routings[part == 0]), RANKS * SLOTS, RANKS)
    return Placement(as_placement(raw.astype(np.int16), RANKS), experts=EXPERTS, ranks=RANKS)


class Reached(msgspec.Struct, frozen=True):
    """Actual figures of a window."""

    remote_ranks: float
    """distinct other ranks that a token reached per layer, mean"""
    local: float
    balance: float
    """mean / highest rank load, mean over layers"""


@dataclass
class Loop:
    """One fleet. mix: share of each domain in the traffic, [domains]."""

    mix: NDArray[np.float64]
    foretold: float = 0.9
    """share of the requests whose cluster is known before they run"""
    steered: float = 0.85
    """share of the predicted requests that are sent home"""
    seed: int = 0
    requests: int = 64
    """requests per half window"""
    policy: Any = "roost"
    config: MigrationConfig = field(default_factory=MigrationConfig)
    clusters: ClusterModel | None = None
    speed: EngineSpeed = SPEED
    placement: Placement = field(
        default_factory=lambda: linear(layers=LAYERS, experts=EXPERTS, ranks=RANKS, slots_per_rank=SLOTS)
    )
    now: float = 0.0
    sampled: bool = False
    """sampled tokens of the requests are known to the planner"""

    def __post_init__(self) -> None:
        self._dice = np.random.default_rng(self.seed)
        self.history = MoveHistory.begin(1, self.placement)
        self.homes: PlannedHomes | None = None
        self.halves: list[tuple[float, NDArray[np.float64]]] = []
        self.bytes = 0
        self.plans = 0
        self.last: PlannerDecision | None = None
        self.reached: list[Reached] = []
        self._shares = self.mix.copy()
        self._tokens: list[NDArray[np.uint16]] = []

    def cycle(self) -> PlannerDecision | None:
        """Run half a window of traffic, plan, and serve the plan at once."""
        began, self.now = self.now, self.now + SECONDS
        domain, rows = self._arrivals()
        rank = self._routed(domain)
        self.reached.append(measured(self.placement, rows, rank))
        counts = np.stack([counted(rows[rank == at]) for at in range(RANKS)])
        self.halves = [*self.halves, (began, counts)][-4:]
        tokens = [sampled_tokens(row) for row in rows]
        self._tokens = [*self._tokens, *(one for one in tokens if one is not None)][-256:]
        self._shares += 0.4 * (self.mix - self._shares)
        if len(self.halves) < 4:
            return None
        decided = decide(self.view(), PlanningQuestion(self.policy, self.config.budget_bytes), self.config)
        self.last = decided
        self.homes = decided.homes
        if decided.plan is not None:
            self._carried_out(decided)
        return decided

    def run(self, cycles: int) -> None:
        for _ in range(cycles):
            self.cycle()

    def mean(self, last: int) -> Reached:
        """Return the mean over several cycles."""
        part = self.reached[-last:]
        return Reached(
            *(float(np.mean([getattr(one, name) for one in part])) for name in Reached.__struct_fields__)
        )

    def _arrivals(self) -> tuple[NDArray[np.intp], Routings]:
        routings, domains, part, _ = recorded()
        domain = self._dice.choice(len(self.mix), self.requests, p=self.mix)
        rows = np.array([self._dice.choice(np.flatnonzero((part == 1) & (domains == one))) for one in domain])
        return domain, routings[rows]

    def _routed(self, domain: NDArray[np.intp]) -> NDArray[np.intp]:
        """Choose ranks, [requests]: the home of a predicted request if it has room, else the emptiest
        rank."""
        load, most = np.zeros(RANKS), 1.15 * len(domain) / RANKS
        rank = np.empty(len(domain), np.intp)
        share = None if self.homes is None else self.homes.share
        for at, one in enumerate(domain):
            emptiest = int((load + 0.5 * self._dice.random(RANKS)).argmin())
            homes = None if share is None or not share[one].any() else share[one].astype(np.float64)
            known = homes is not None and self._dice.random() < self.foretold * self.steered
            home = int(self._dice.choice(RANKS, p=homes / homes.sum())) if homes is not None else emptiest
            rank[at] = home if known and load[home] < most else emptiest
            load[rank[at]] += 1
        return rank

    def view(self) -> EngineView:
        """Return the fleet as the planner sees it now."""
        fit, later = (self._window(*part) for part in (self.halves[:2], self.halves[2:]))
        clusters = self.clusters or ClusterModel(1, profiles(), self._shares.astype(np.float32), 1.0)
        return EngineView(
            engine="e",
            worker_id=1,
            model="m",
            shape=SHAPE,
            placement=self.placement,
            node=NODE,
            speed=self.speed,
            demand=fit,
            later=later,
            running=np.full(RANKS, 16.0),
            waiting=np.zeros(RANKS),
            clusters=clusters,
            predictability=self.foretold,
            homes=self.homes,
            history=self.history,
            now=self.now,
            tokens=np.stack(self._tokens) if self.sampled else None,
        )

    def _window(self, *halves: tuple[float, NDArray[np.float64]]) -> Demand:
        counts = np.sum([half for _, half in halves], axis=0)
        seconds = SECONDS * len(halves)
        scale = TOKENS_PER_SECOND * TOP_K * LAYERS / counts.sum()
        return Demand.of(counts * scale, counts.sum(axis=(1, 2)) / LAYERS, seconds, halves[0][0])

    def _carried_out(self, decided: PlannerDecision) -> None:
        plan, homes = decided.plan, decided.homes_after
        if plan is None or homes is None:
            raise ValueError("a plan comes with the homes that hold after it")
        for placement in replay(self.placement, plan):
            self.history = self.history.committed(placement, plan.id, self.now)
            self.placement = placement
        self.bytes += plan.bytes
        self.plans += 1
        self.homes = homes


def measured(placement: Placement, rows: Routings, rank: NDArray[np.intp]) -> Reached:
    """Measure the ranks that tokens reach when each token is dispatched by the split."""
    chooser, tokens = Chooser(placement, range(RANKS), NODE), rows.shape[1]
    home = np.repeat(rank, tokens)
    remote, load, local = [], np.zeros((LAYERS, RANKS)), []
    for layer in range(LAYERS):
        wanted = home[:, None] * EXPERTS + rows[:, :, layer].reshape(-1, TOP_K)
        served = chooser.choose(layer, wanted.ravel(), 0).reshape(wanted.shape) // SLOTS
        remote.append(reached(served, home).mean())
        load[layer] = np.bincount(served.ravel(), minlength=RANKS)
        local.append(float((served == home[:, None]).mean()))
    return Reached(
        float(np.mean(remote)), float(np.mean(local)), float((load.mean(axis=1) / load.max(axis=1)).mean())
    )
