"""Prepare a view for planning: the numbers that every candidate is made from and evaluated by. Pure."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.arrays import FloatArray, SlotTable
from fleet.dispatch import as_dispatched
from fleet.placement import FULL, Placement, Split, even_split
from fleet.timing import EngineSpeed, gathered_bytes
from migration.config import MigrationConfig, Policy
from migration.model.constraints import Constraints
from migration.model.cost_model import (
    CostTerms,
    LinkSpeeds,
    PricedPlacement,
    StepSeconds,
    balance,
    priced,
    priced_by_samples,
    priced_by_tokens,
)
from migration.model.engine_view import EngineView
from migration.model.placement_changes import PlacementChanges
from migration.model.sampled_traffic import SampledTraffic, sampled_traffic
from migration.model.sampling_noise import LoadNoise, deviation, scatter
from migration.planning.demand_forecast import DESIGN_EFFECT, RoutingForecast, routing_forecast
from migration.planning.findings import Finding
from migration.planning.rank_loss import critical
from migration.planning.slots_vs_kv_cache import KvCacheModel, memory_seconds
from migration.planning.staging_capacity import StagingRoom
from migration.solvers.full_placement import full_placement
from migration.solvers.full_tables import completed
from migration.solvers.load_cap import held_of
from migration.solvers.rank_relabelling import relabelled
from migration.solvers.specialisation_test import SpecialisationTest, gate
from migration.solvers.split_copies import copies_for
from migration.solvers.split_weights import DemandPull, check

_MAX_SCATTER = 4 * DESIGN_EFFECT
"""Largest overdispersion between two windows that counts as noise; more is a change of demand. On the usual
value of texts (`DESIGN_EFFECT`); below this, the measured value is used."""
_MAX_BUSY = 0.9
"""Largest part of the time that decoding takes in the estimate of a step's tokens: towards 1 it diverges."""


MIN_SAMPLES, MAX_SAMPLES = 12, 128
"""Samples of demand from which a plan can be made, and that are used at most: the search takes time in
proportion."""
ASSUMED_EXPERT_SHARE = 0.5
"""Part of a step that an engine without stated times is assumed to spend on experts. An assumption: it scales
gains against costs, and so decides only how small a gain still pays."""
ASSUMED_STEP = 1.5e-2
"""Seconds of a step of an engine that reports no steps: a decode step of a GPU server."""


class LayerTurning(NamedTuple):
    """Permission to change the form of single layers, and what that is worth in a layer like all others."""

    even_gain: float
    """Measured seconds of a step that sharding saves in a layer whose load is even in every step; below 0: it
    costs."""
    error: float = 0.0
    """Standard error of `even_gain`, in seconds: a layer must gain more than this."""
    resting: frozenset[int] = frozenset()
    """Layers that changed their form a short time ago, and keep it."""


class PlanningQuestion(NamedTuple):
    """One planning request."""

    policy: Policy
    budget_bytes: int
    memory: bool = False
    dead: tuple[int, ...] = ()
    """Ranks that count as lost."""
    layers: tuple[int, ...] = ()
    """Only these layers may change; empty: all."""
    bounds: bool = False
    """Also report how near locality comes to its bound, which takes a linear programme."""
    plan_discount: float = 1.0
    """Discount from 0 on: recently measured gains as a part of the gains predicted. Predicted gains are
    multiplied by this."""
    turning: LayerTurning | None = None
    """None: no layer may change its form."""


@dataclass(frozen=True, eq=False)
class PlanningProblem:
    """One engine and one planning request.

    Sharded layers are left out of everything here: layer i of these numbers is layer `layers[i]` of the
    model.
    """

    view: EngineView
    question: PlanningQuestion
    config: MigrationConfig
    layers: NDArray[np.intp]
    """Layers of the model that hold whole experts, ascending."""
    placement: Placement
    """Of the layers that hold whole experts."""
    fit: FloatArray
    """Demand that plans are fitted to."""
    evaluation: FloatArray
    """Demand that plans are evaluated on."""
    terms: CostTerms
    limits: Constraints
    sending: tuple[FloatArray, float] | None = None
    """Homes [K, ranks] behind the demand, and the part of requests that goes anywhere; None: those that
    hold."""

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @property
    def table(self) -> SlotTable:
        return self.placement.expert_of_slot

    @property
    def node(self) -> NDArray[np.intp]:
        return self.view.node

    @cached_property
    def load(self) -> NDArray[np.float64]:
        """float64 [layers, experts]: `fit`, summed over ranks."""
        return np.asarray(self.fit.sum(axis=0))

    @property
    def pairs(self) -> float:
        """(token, k) pairs behind each layer of `fit`."""
        return float(self.view.demand.pairs.sum())

    @cached_property
    def scatter(self) -> float:
        """Pairs per independent pair, estimated from the difference between the two windows: pairs of one
        text are correlated.

        Limited to a small multiple of the usual value: a larger difference is a change of demand and not
        noise.
        """
        later = self.view.later
        if later is None:
            return 1.0
        first, last = (window.evidence_of(self.layers) for window in (self.view.demand, later))
        return min(scatter(first, last), _MAX_SCATTER)

    @cached_property
    def noise_seconds(self) -> float:
        """Standard deviation between two windows of the seconds that the fullest ranks' experts take in a
        step, for a fixed placement."""
        pairs = self.pairs / max(DESIGN_EFFECT, self.scatter)
        spread = deviation(self.load, self.placement.holding_ranks, self.ranks, pairs)
        return float(self.before.figures.seconds.experts * np.sqrt((spread**2).mean() / len(spread)))

    @cached_property
    def chosen(self) -> NDArray[np.bool_]:
        """bool [layers]: layers that may change."""
        if not self.question.layers:
            return np.ones(self.placement.layers, bool)
        return np.isin(self.layers, self.question.layers)

    @cached_property
    def steps_per_second(self) -> float:
        return self.view.evaluation.tokens_per_second(self.terms.top_k) / self.terms.step_tokens

    def numbered(self, changes: PlacementChanges) -> PlacementChanges:
        """Return changes with the model's numbers of layers."""
        return changes._replace(layer=self.layers[changes.layer].astype(np.int32))

    @property
    def links(self) -> LinkSpeeds:
        config = self.config
        return LinkSpeeds(
            same_node=config.rank_bytes_per_second,
            cross_node=config.node_bytes_per_second,
            contention=config.contention,
        )

    @property
    def room(self) -> StagingRoom:
        return StagingRoom(node=self.node, expert_bytes=self.view.shape.expert_bytes)

    @property
    def fewest_slots(self) -> int:
        """Slots per rank and layer without any redundancy."""
        return -(-self.placement.experts // self.ranks)

    @cached_property
    def cache(self) -> KvCacheModel | None:
        """KV cache of a rank in use; None: the engine reports too little about it."""
        cache, running, waiting = self.view.cache, self.view.running, self.view.waiting
        if cache is None or running is None or not cache.block_bytes:
            return None
        requests = float(running.mean()) + (0.0 if waiting is None else float(waiting.mean()))
        return KvCacheModel(
            blocks=float(cache.blocks),
            block_bytes=cache.block_bytes,
            used=float(cache.used.mean()),
            requests=requests,
        )

    def step_seconds(self, spent: StepSeconds) -> float:
        """Return the duration of one step at the present load under a placement with these costs."""
        cache = self.view.cache
        blocks = 0.0 if cache is None else float(cache.used.mean())
        return self.terms.step_seconds(spent, self.placement.layers, blocks)

    @cached_property
    def even_step(self) -> float:
        """Seconds of a step with evenly loaded ranks and free dispatch: the unit that gains are measured
        in."""
        return self.step_seconds(StepSeconds())

    @cached_property
    def anew(self) -> SlotTable:
        """int16 [layers, slots]: the full placement of best balance under the even split."""
        limits, per = self.limits, self.placement.slots_per_rank
        return full_placement(
            self.load,
            self.ranks,
            per,
            max_replicas=limits.max_replicas,
            min_replicas=limits.min_replicas,
            node=self.several_nodes,
            live=limits.live,
        )

    @cached_property
    def anew_relabelled(self) -> SlotTable:
        """int16 [layers, slots]: `anew`, assigned to the ranks that hold most of it already."""
        return relabelled(self.table, self.anew, self.ranks, self.several_nodes)

    @cached_property
    def anew_balance(self) -> NDArray[np.float64]:
        """float64 [layers]: balance of `anew`."""
        return balance(self._even_loads(self.anew))

    @cached_property
    def pull(self) -> DemandPull:
        """Demand that weights and copies are fitted to, as their solvers read it."""
        check(self.table, self.fit, self.ranks, self.placement.experts)
        return DemandPull(self.fit, self.ranks, self.several_nodes, self.limits.live)

    @cached_property
    def splits(self) -> dict[tuple[bytes, float], Split]:
        """Shares that were found for tables under a slack: strategies may lead to the same table."""
        return {}

    @cached_property
    def few_copies(self) -> PlacementChanges:
        """Changes that bring the balance near to that of `anew`, with freely chosen shares."""
        return copies_for(
            self.table, self.pull, self.limits, goal=self.anew_balance, noise=LoadNoise(self.pairs)
        )

    def _even_loads(self, table: SlotTable) -> NDArray[np.float64]:
        """float64 [layers, ranks]: loads under the even split, regardless of where demand originates."""
        split = even_split(table, self.placement.experts)
        part = np.where(
            table >= 0, np.take_along_axis(self.load, np.maximum(table, 0).astype(np.intp), axis=1), 0.0
        ) * (split.spill / FULL)
        return np.asarray(part.reshape(len(table), self.ranks, -1).sum(axis=2))

    @cached_property
    def gate(self) -> SpecialisationTest:
        """Test for different demand on different ranks, beyond what chance explains."""
        return gate(self.fit, self.view.demand.pairs, dispersion=max(DESIGN_EFFECT, self.scatter))

    @cached_property
    def routing(self) -> RoutingForecast | Finding:
        """Forecast for requests sent to their homes, or the reason why there is none."""
        return routing_forecast(self.view, self.fit, self.evaluation)

    @cached_property
    def together(self) -> dict[bytes, FloatArray]:
        """Corrections by sampled tokens that were found for tables: several splits share one."""
        return {}

    @cached_property
    def tokens(self) -> SampledTraffic | None:
        """Sampled tokens where homes send their requests; None: too few, or homes cannot be planned."""
        if self.view.tokens is None:
            return None
        if self.sending is not None:
            return sampled_traffic(self.view, self.layers, *self.sending)
        known = self.routing
        if isinstance(known, Finding):
            return None
        return sampled_traffic(self.view, self.layers, known.known, known.later.leak)

    @property
    def several_nodes(self) -> NDArray[np.intp] | None:
        return self.node if int(self.node.max()) else None

    @cached_property
    def before(self) -> PricedPlacement:
        return self.price(self.placement)

    @cached_property
    def completed(self) -> SlotTable:
        """int16 [layers, slots]: the present placement without empty slots, and with no expert twice on a
        rank. ValueError where a rank has more slots than there are experts."""
        return completed(self.table, self.load, self.ranks)

    def price(self, placement: Placement) -> PricedPlacement:
        """Price a placement of these layers under the demand that plans are evaluated on."""
        return self._priced(placement, self.evaluation, self.later_samples)

    def price_fit(self, placement: Placement) -> PricedPlacement:
        """Price a placement of these layers under the demand that plans are fitted to."""
        return self._priced(placement, self.fit, self.samples)

    @cached_property
    def samples(self) -> FloatArray | None:
        """float64 [n, layers, experts]: samples of the demand that plans are fitted to; None: too few."""
        return _usable(self.view.samples, self.layers)

    @cached_property
    def later_samples(self) -> FloatArray | None:
        """The same of the demand that plans are evaluated on; None as well if there are none to fit to."""
        if self.samples is None:
            return None
        found = _usable(self.view.later_samples, self.layers)
        return self.samples if found is None else found

    def _priced(
        self, placement: Placement, demand: FloatArray, samples: FloatArray | None
    ) -> PricedPlacement:
        view = self.view
        # Where every rank receives every token, experts are selected for all rows of the step.
        rows = self.terms.step_tokens / (1 if view.gathers_all else max(view.targets, 1))
        served = as_dispatched(placement, view.dispatch, max(1, round(rows)))
        found = priced(served, demand, self.terms, self._memory)
        if self.tokens is not None:
            table = served.expert_of_slot.tobytes()
            if table not in self.together:
                held = held_of(served.expert_of_slot, self.ranks, served.experts)
                self.together[table] = self.tokens.together(held)
            found = priced_by_tokens(found, self.together[table])
        return found if samples is None else priced_by_samples(found, served, samples, self.terms)

    @cached_property
    def _memory(self) -> float:
        """Seconds of a step that redundant slots cost by taking memory from the KV cache, whatever the slots
        hold."""
        if self.cache is None:
            return 0.0
        spare = (
            (self.placement.slots_per_rank - self.fewest_slots)
            * self.view.placement.layers
            * self.view.shape.expert_bytes
        )
        return memory_seconds(self.cache, spare, self.even_step)


def prepare(view: EngineView, question: PlanningQuestion, config: MigrationConfig) -> PlanningProblem:
    """Prepare a view for planning. Some layer must be whole, and demand must not be zero."""
    layers = view.placement.whole
    placement = of_layers(view.placement, layers)
    fit, evaluation = (_of_layers(demand.by_layer, layers) for demand in (view.demand, view.evaluation))
    step_tokens = tokens_of_a_step(view)
    speed = priced_speed(view, step_tokens)
    gathered = step_tokens * gathered_bytes(view.shape, len(view.node), len(view.placement.sharded))
    terms = CostTerms(
        speed=speed,
        node=view.node,
        top_k=view.shape.top_k,
        step_tokens=step_tokens,
        shape=view.shape,
        gather_seconds=speed.gather_byte * gathered,
    )
    limits = _limits(view, question, config, placement, fit, evaluation)
    return PlanningProblem(view, question, config, layers, placement, fit, evaluation, terms, limits)


def _of_layers(by_layer: FloatArray, layers: NDArray[np.intp]) -> FloatArray:
    """Return the demand of some layers, float64 [ranks, layers, experts]."""
    return (by_layer if len(layers) == len(by_layer) else by_layer[layers]).swapaxes(0, 1)


def _usable(samples: NDArray[np.float32] | None, layers: NDArray[np.intp]) -> FloatArray | None:
    """Return the samples of some layers, evenly chosen ones if there are many; None if there are too few."""
    if samples is None or len(samples) < MIN_SAMPLES:
        return None
    some = np.unique(np.linspace(0, len(samples) - 1, MAX_SAMPLES).round().astype(np.intp))
    return np.asarray(samples[np.ix_(some, layers)], np.float64)


def priced_speed(view: EngineView, step_tokens: float) -> EngineSpeed:
    """Return the speed that placements are priced with.

    Sending costs nothing where every rank receives every token, or where several ranks are one target, so
    that none is nearer. An engine that moves its experts itself and states no time per pair is assumed to
    spend `ASSUMED_EXPERT_SHARE` of its steps on experts. Verdicts correct that (`plan_discount`).
    """
    speed, ranks = view.speed, len(view.node)
    if view.gathers_all or view.targets not in (0, ranks):
        speed = msgspec.structs.replace(speed, dispatch=0.0, dispatch_node=0.0)
    if not view.rearranges or speed.expert_pair:
        return speed
    step = view.step_seconds or ASSUMED_STEP
    pairs = view.shape.layers * step_tokens * view.shape.top_k / ranks
    return msgspec.structs.replace(
        speed,
        step=step,
        decode_sequence=0.0,
        decode_block=0.0,
        expert_pair=step * ASSUMED_EXPERT_SHARE / pairs,
    )


def _limits(
    view: EngineView,
    question: PlanningQuestion,
    config: MigrationConfig,
    placement: Placement,
    fit: FloatArray,
    evaluation: FloatArray,
) -> Constraints:
    layers, experts = view.placement.whole, placement.experts
    resting = (
        None
        if view.history is None
        else view.history.frozen(view.now, config.cooldown_seconds, config.layer_cooldown_seconds)
    )
    frozen = np.zeros((len(layers), experts), bool) if resting is None else resting[layers]
    if question.layers:
        frozen = frozen | ~np.isin(layers, question.layers)[:, None]
    live = ~np.isin(np.arange(len(view.node)), question.dead) if question.dead else None
    return Constraints(
        max_copies=question.budget_bytes // view.shape.expert_bytes,
        max_replicas=config.max_replicas,
        frozen=frozen if frozen.any() else None,
        live=live,
        min_replicas=(
            critical(
                fit.sum(axis=0),
                round(config.critical_experts * experts),
                placement.holding_ranks,
                evaluation.sum(axis=0),
            )
            if config.critical_experts
            else None
        ),
        target=config.target,
    )


def of_layers(placement: Placement, layers: NDArray[np.intp]) -> Placement:
    """Return some layers of a placement, ascending."""
    if len(layers) == placement.layers:
        return placement
    split = None if placement.even else Split(*(part[layers] for part in placement.split))
    return Placement(
        placement.expert_of_slot[layers],
        experts=placement.experts,
        ranks=placement.ranks,
        epoch=placement.epoch,
        split=split,
        duplicates=placement.duplicates,
    )


def tokens_of_a_step(view: EngineView) -> float:
    """Estimate the tokens of one step of the engine, all ranks together: the number of decoding sequences.

    Where that number is unknown or zero, use the tokens that arrive during a step. That depends on the step's
    length: t = T * (step + decode_sequence * t / ranks).
    """
    running = 0.0 if view.running is None else float(view.running.sum())
    if running >= 1.0:
        return running
    come, ranks = view.evaluation.tokens_per_second(view.shape.top_k), len(view.node)
    busy = min(come * view.speed.decode_sequence / ranks, _MAX_BUSY)
    return max(1.0, come * view.speed.step / (1.0 - busy))
