"""Choose the action for one engine: nothing, new shares, few copies, locality, or a full re-placement. Pure.

Strategies are tried in that order, the one with the fewest bytes first. Each is fitted to one window of
demand and evaluated on the next, in seconds: the time saved per step, over the expected lifetime of the
demand, less the cost of the plan. A strategy that copies more must beat the best one so far by more than
noise.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec
import numpy as np

from fleet.placement import EMPTY, Placement
from migration.config import MigrationConfig, Policy
from migration.model.engine_view import EngineView, PlannedHomes
from migration.model.placement_changes import made, within
from migration.model.plan import Plan, planned
from migration.model.plan_record import MemoryPoint, PlanRecord
from migration.planning.demand_forecast import RoutingForecast
from migration.planning.evaluation import EvaluatedPlan, GainLimit, cost_floor, evaluate, gain_limit
from migration.planning.findings import Finding, FindingCode, Infeasible
from migration.planning.joint_homes import effective_homes, joint, published_homes, with_expected_demand
from migration.planning.layer_turns import SUBJECT, TurnedLayers, turned_layers
from migration.planning.locality_report import dispatch_saved, no_homes, present_homes
from migration.planning.plan_report import measures, memory, named_homes, steps
from migration.planning.problem import PlanningProblem, PlanningQuestion, prepare
from migration.planning.rank_loss import recover
from migration.planning.rearrangement import eplb_map, eplb_map_by_node, few_moves, whole_map
from migration.planning.sentences import recovery_summary, sentence
from migration.planning.slots_vs_kv_cache import curve
from migration.planning.staging_capacity import Unorderable
from migration.planning.strategies import (
    Maker,
    PlanCandidate,
    PredictedEffect,
    anew,
    anew_at_most,
    anew_evenly,
    copies,
    copies_and_filling,
    eplb,
    eplb_by_node,
    local,
    shared,
    shares,
    uniform,
)
from migration.solvers.full_placement import bound

_CEILING_MARGIN = 0.005
"""Distance of a step's expected balance from the ceiling that chance sets, below which no gain is
noticeable: half a per cent of the slowest rank's time. In balance, so of no unit and for engines of any
size; the ceiling itself follows from the tokens of a step."""
_COPY_MARGIN = 0.05
"""Extra gain demanded of copies, as a part of the seconds that placement decides: the rate for copying every
expert.

Every copy follows the noise of its window a little. On the demo model's routings, with traffic of one domain,
full re-placements were predicted to save up to 2.7 % of dispatch and saved 0.0 +- 1.
Measured on that model only; elsewhere an assumption. It is a floor: where windows are short,
`_NOISE_MARGIN` asks for more, from the counts of the window.
"""
_NOISE_MARGIN = 2.0
"""Standard deviations, of the time that the changed layers take between two windows, by which a plan with
copies must beat one without. Derived from the counts of the window (`PlanningProblem.noise_seconds`), so for
engines and windows of any size: a one-sided error of 2.3 %."""
_MAX_FURTHER_SLOTS = 12
"""Further slots per rank on the memory curve."""


class ReasonCode(StrEnum):
    """Reason for the absence of a plan."""

    SHARDED = "sharded"
    """Experts are sharded over all ranks: no rank is nearer to them than another."""
    DATA = "data"
    """Too few pairs were observed."""
    NOISE = "noise"
    """No gain exceeds sampling noise."""
    COST = "cost"
    """The possible gain is less than its cost."""
    UNABLE = "unable"
    """The policy cannot plan for this engine."""


REFUSALS = {
    FindingCode.SHARDED: ReasonCode.SHARDED,
    FindingCode.TOO_FEW_PAIRS: ReasonCode.DATA,
    FindingCode.AT_CEILING: ReasonCode.NOISE,
    FindingCode.BELOW_LEAST_GAIN: ReasonCode.NOISE,
    FindingCode.DOES_NOT_PAY: ReasonCode.COST,
    FindingCode.POLICY_UNABLE: ReasonCode.UNABLE,
    FindingCode.IMPOSSIBLE: ReasonCode.UNABLE,
}
"""Reason code of each finding that ends a run without a plan."""


class PlannerDecision(NamedTuple):
    """Outcome of one planning run.

    record: for people. plan: None where nothing is worth doing; `why` then holds the reason code. turned: the
    change of single layers that the plan makes, instead of moving experts.
    """

    record: PlanRecord
    homes: PlannedHomes
    """Homes that apply under the placement served now."""
    plan: Plan | None = None
    why: ReasonCode | None = None
    homes_after: PlannedHomes | None = None
    """Homes that apply from the plan's last epoch on, changed by the plan or not; None: there is no plan."""
    turned: TurnedLayers | None = None


STRATEGIES: dict[Policy, tuple[Maker, ...]] = {
    "roost": (shares, copies, copies_and_filling, local, joint, anew),
    "replicate": (shares, copies, copies_and_filling),
    "reweight": (shares,),
    "uniform": (uniform, anew_evenly),
    "full": (anew,),
    "eplb": (eplb,),
    "eplb_hierarchical": (eplb_by_node,),
}
"""Strategies of each policy, fewest bytes first."""
REARRANGING: dict[Policy, tuple[Maker, ...]] = {
    "roost": (few_moves,),
    "replicate": (few_moves,),
    "reweight": (),
    "uniform": (few_moves, whole_map),
    "full": (whole_map,),
    "eplb": (eplb_map,),
    "eplb_hierarchical": (eplb_map_by_node,),
}
"""The same for engines that move their experts themselves: every candidate is one map with even shares."""
_ENDS: dict[Maker, tuple[str, Callable[[PlanningProblem], Placement]]] = {anew: ("all anew", anew_at_most)}
"""Strategies whose end is cheap to compute and whose changes are expensive: the name, and the end without any
limits."""


def decide(view: EngineView, question: PlanningQuestion, config: MigrationConfig) -> PlannerDecision:
    """Return a plan, or the reason for its absence. Equal views give equal answers."""
    if not len(view.placement.whole):
        reason = Finding.of(FindingCode.SHARDED)
        return _nothing(_record(view, question), no_homes(view, sentence(reason)), reason)
    seen, needed = float(view.demand.pairs.sum()), config.min_pairs * view.shape.experts
    if not seen or seen < needed:
        reason = Finding.of(FindingCode.TOO_FEW_PAIRS, seen=seen, needed=needed)
        keep = present_homes if question.policy == "roost" else no_homes
        return _nothing(_record(view, question), keep(view, sentence(reason)), reason)
    found = prepare(view, question, config)
    moved_by_homes = question.policy == "roost" and not view.rearranges
    run = _PlanningRun(with_expected_demand(found) if moved_by_homes else found)
    return run.recovery() if question.dead else run.plan()


class _PlanningRun:
    """One planning run, with a finding for every step of it."""

    def __init__(self, found: PlanningProblem) -> None:
        self._found = found
        self._findings: list[Finding] = []
        self._tables: set[bytes] = set()
        """End placements of the strategies tried so far, as bytes."""
        self._max_gain = -np.inf
        """Largest gain of any strategy tried, in seconds of a step; -inf: none could be tried."""
        self._single_layers = ""
        """What was found about single layers; empty: they were not considered."""
        self._gain_too_small = False
        """True if a strategy was rejected because it gains little and copies much."""

    def plan(self) -> PlannerDecision:
        """Return the first of the policy's strategies that no later one beats by more than noise, or the
        change of single layers that beats it."""
        found = self._found
        if found.view.later is None:
            self._note(FindingCode.ONE_WINDOW)
        if not found.terms.speed.expert_pair:
            self._note(FindingCode.NO_PAIR_TIME)
        if found.view.rearranges and found.config.critical_experts:
            self._note(FindingCode.CRITICAL_UNABLE, error="the engine moves its experts itself")
        # Availability before speed: second replicas of critical experts are planned whatever they gain.
        if (safe := self._safe()) is not None:
            return self._at_home(safe)
        best = self._moves()
        moves = best if isinstance(best, EvaluatedPlan) else None
        if (turned := self._turned(moves)) is not None:
            return self._at_home(self._turning(turned))
        return self._refused(best) if isinstance(best, Finding) else self._at_home(self._decided(best), best)

    def _moves(self) -> EvaluatedPlan | Finding:
        """Return the best of the policy's strategies, or why none is worth it."""
        found, policy = self._found, self._found.question.policy
        # Stop before any search where steps are as even as their few tokens allow and nothing could become
        # more local.
        if policy == "roost" and self._may_be_noise() and not self._may_be_more_local():
            return Finding.of(FindingCode.AT_CEILING)
        best = self._best((REARRANGING if found.view.rearranges else STRATEGIES)[policy])
        if best is not None:
            return best
        if self._max_gain == -np.inf:
            return Finding.of(FindingCode.POLICY_UNABLE, policy=policy)
        if self._gain_too_small or self._worth(self._max_gain) < self._margin:
            return Finding.of(FindingCode.BELOW_LEAST_GAIN, least_gain=found.config.min_gain)
        return Finding.of(FindingCode.DOES_NOT_PAY, lifetime_seconds=found.config.lifetime_seconds)

    def recovery(self) -> PlannerDecision:
        """Plan for the loss of ranks. The plan is made whether or not it pays."""
        found, dead = self._found, ~np.asarray(self._found.limits.live, bool)
        if found.view.rearranges:
            error = "an engine that moves its experts itself ends with any of its ranks; restart it"
            return self._refused(Finding.of(FindingCode.IMPOSSIBLE, error=error))
        if found.view.placement.sharded:
            error = (
                "the lost ranks alone held their parts of the experts in"
                f" {len(found.view.placement.sharded)} sharded layers; restart the engine"
            )
            return self._refused(Finding.of(FindingCode.IMPOSSIBLE, error=error))
        way = recover(
            found.placement,
            dead,
            found.load,
            found.node,
            found.limits.min_replicas,
            max_copies=found.limits.max_copies,
        )
        self._note(FindingCode.RANKS_LOST, dead=found.question.dead, recovery=way)
        try:
            split = (
                shared(found, way.table) if way.possible and found.question.policy == "roost" else way.split
            )
            chosen = evaluate(found, PlanCandidate("recovery", way.changes, split))
        except Unorderable as error:
            return self._refused(Finding.of(FindingCode.IMPOSSIBLE, error=error))
        decided = self._decided(chosen)
        return decided._replace(
            record=msgspec.structs.replace(decided.record, before=None, lost=recovery_summary(way))
        )

    def _safe(self) -> PlannerDecision | None:
        """Plan second replicas for experts that must survive the loss of any one rank.

        This comes before every other strategy, and regardless of its gain. None: all have a second replica,
        or may not get one.
        """
        found = self._found
        unable = found.question.policy == "reweight" or found.view.rearranges
        if found.limits.min_replicas is None or unable:
            return None
        least = np.where(found.chosen[:, None], found.limits.min_replicas, 1)
        if (found.placement.holding_ranks >= np.minimum(least, found.ranks)).all():
            return None
        way = recover(
            found.placement,
            np.zeros(found.ranks, bool),
            found.load,
            found.node,
            least,
            frozen=found.limits.frozen,
        )
        changes = (
            way.changes if found.limits.max_copies is None else within(way.changes, found.limits.max_copies)
        )
        if not changes:
            return None
        try:
            split = None if found.question.policy == "uniform" else shared(found, made(found.table, changes))
            chosen = evaluate(found, PlanCandidate("second replicas", changes, split))
        except Unorderable as error:
            self._note(FindingCode.CRITICAL_UNABLE, error=error)
            return None
        self._note(FindingCode.CRITICAL, part=found.config.critical_experts)
        return self._decided(chosen)

    # Single layers

    def _turned(self, best: EvaluatedPlan | None) -> TurnedLayers | None:
        """Return the change of single layers if it gains more than the best move of experts. Adds what was
        found about them to the record."""
        found, turning = self._found, self._found.question.turning
        if turning is None:
            return None
        try:
            turned = turned_layers(found, turning)
        except Infeasible as error:
            self._single_layers = sentence(error.finding)
            return None
        values: dict[str, Any] = {"gains": turned.gains, "net_seconds": turned.net_seconds}
        moved = 0.0 if best is None else best.net_seconds
        if turned.net_seconds < self._margin:
            finding = Finding.of(FindingCode.LAYERS_DO_NOT_PAY, **values, least_seconds=self._margin)
        elif best is not None and turned.net_seconds < moved + self._margin:
            name = best.candidate.name
            finding = Finding.of(FindingCode.LAYERS_GAIN_NO_MORE, **values, best=name, best_seconds=moved)
        else:
            lifetime = found.config.lifetime_seconds
            paid = turned.payback
            finding = Finding.of(
                FindingCode.LAYERS_TURN, **values, bytes=paid.bytes, lifetime_seconds=lifetime
            )
        self._single_layers = sentence(finding.of_subject(SUBJECT))
        return turned if finding.code is FindingCode.LAYERS_TURN else None

    def _turning(self, turned: TurnedLayers) -> PlannerDecision:
        """Return the decision to change the form of single layers."""
        paid, plan = turned.payback, msgspec.structs.replace(turned.plan, payback=turned.payback)
        record = msgspec.structs.replace(
            self._common_record(self._found.placement),
            id=plan.id,
            copies=plan.transfers,
            copied_share=len(turned.gains) / turned.goal.layers,
            copied_bytes=plan.bytes,
            handovers=len(plan.handovers),
            gain_seconds=turned.gain_seconds,
            gain_per_second=paid.gain_per_second,
            cost_seconds=paid.cost_seconds,
            net_seconds=turned.net_seconds,
            payback_seconds=paid.after_seconds,
            transfer_seconds=paid.transfer_seconds,
            steps=steps(plan),
        )
        return PlannerDecision(record, no_homes(self._found.view, ""), plan, turned=turned)

    # Which way

    def _best(self, ways: tuple[Maker, ...]) -> EvaluatedPlan | None:
        best: EvaluatedPlan | None = None
        for way in ways:
            if (way is local and not self._may_move_nearer()) or (way is joint and not self._may_go_home()):
                continue
            tried = self._tried(way, best)
            if tried is None or not tried.handovers or tried.net_seconds <= 0:
                continue
            beaten = 0.0 if best is None else best.net_seconds
            if tried.net_seconds >= beaten + self._margin + self._doubt(tried.copies, tried.layers, best):
                best = tried
            elif tried.net_seconds >= beaten + self._margin:
                self._gain_too_small = True
                self._note(FindingCode.TOO_MANY_COPIES, tried.candidate.name)
        return best

    def _doubt(self, copies: float, layers: int, best: EvaluatedPlan | None) -> float:
        """Extra seconds that a strategy must gain because it copies more than the best one so far.

        copies, layers: number of its copies, and of the layers that they change.
        """
        found = self._found
        # Moves that were found on samples were tested one by one, and each brings what its copy must.
        if found.question.policy != "roost" or found.samples is not None:
            return 0.0
        more = max(copies - (0 if best is None else best.copies), 0) / max(self._cells, 1)
        spent = found.before.figures.seconds
        touched = 0.0 if not more else layers / len(found.chosen)
        noise = _NOISE_MARGIN * np.sqrt(touched) * found.noise_seconds
        return self._worth(max(_COPY_MARGIN * more * (spent.experts + spent.dispatch), noise))

    @property
    def _cells(self) -> int:
        """Number of slots in the layers that may change."""
        return int(self._found.chosen.sum()) * int(self._found.table.shape[1])

    def _tried(self, way: Maker, best: EvaluatedPlan | None) -> EvaluatedPlan | None:
        """Evaluate one strategy; None where it is impossible, or could not beat the best even at no cost."""
        found = self._found
        try:
            # The end of a full re-placement is cheap to compute and its changes are not: reject by the end
            # first.
            if self._tables and way in _ENDS and self._cannot_win(best, *_ENDS[way]):
                return None
            candidate = way(found)
            end = candidate.placement(found)
            chosen_freely = candidate.split is not None or candidate.table is not None
            if (same := end.expert_of_slot.tobytes()) in self._tables and chosen_freely:
                # Another strategy led to the same placement with freely chosen shares, or to the same map.
                return None
            self._tables.add(same)
            after = candidate.problem(found).price(end)
            gain = float((candidate.before(found).seconds - after.seconds).sum())
            self._max_gain = max(self._max_gain, gain)
            # A lower bound of the cost first: ordering handovers is the expensive part.
            if best is not None and (enough := self._enough(best, gain, cost_floor(found, candidate))):
                self._findings.append(enough.of_subject(candidate.name))
                return None
            tried = evaluate(found, candidate, end, after)
        except Infeasible as error:
            self._note_once(error.finding)
            return None
        except ValueError as error:
            self._note_once(Finding.of(FindingCode.IMPOSSIBLE, error=str(error)))
            return None
        self._findings.append(self._outcome(tried))
        return tried

    def _outcome(self, tried: EvaluatedPlan) -> Finding:
        """Return the numbers of a candidate that was evaluated as a whole."""
        before, after = self._found.before.figures, tried.after.figures
        return Finding.of(
            FindingCode.OUTCOME,
            tried.candidate.name,
            copies=tried.copies,
            bytes=tried.payback.bytes,
            balance=(before.balance, after.balance),
            local=(before.local, after.local),
            gain_seconds=tried.gain_seconds,
            net_seconds=tried.net_seconds,
            lifetime_seconds=tried.payback.lifetime_seconds,
        )

    def _cannot_win(
        self, best: EvaluatedPlan | None, name: str, at_most: Callable[[PlanningProblem], Placement]
    ) -> bool:
        """True if a strategy would not be worth its changes even without any limits. Adds the finding."""
        limit = gain_limit(self._found, at_most(self._found))
        reason = self._enough(best, limit.most)
        if reason is None and self._outweighed(best, limit):
            self._gain_too_small = True
            reason = Finding.of(FindingCode.COPIES_OUTWEIGH, gain=limit.most, copies=int(limit.copies[-1]))
        if reason is None:
            return False
        self._max_gain = max(self._max_gain, limit.most)
        self._findings.append(reason.of_subject(name))
        return True

    def _outweighed(self, best: EvaluatedPlan | None, limit: GainLimit) -> bool:
        """True if no number of copies gains as much more than `best` as that number must.

        The line of gains is concave and what copies must gain rises evenly, so their difference is greatest
        at a point of the line, or where copies begin to exceed those of `best`.
        """
        beaten, fewest = (0.0, 0) if best is None else (best.net_seconds, best.copies)
        points = [(fewest, limit.at(fewest)), *zip(limit.copies.tolist(), limit.gain.tolist(), strict=True)]
        return all(
            self._worth(gain) < beaten + self._margin + self._doubt(copies, 0, best)
            for copies, gain in points
        )

    def _enough(self, best: EvaluatedPlan | None, gain: float, cost_seconds: float = 0.0) -> Finding | None:
        """Reason to stop evaluating a strategy beside `best`, which copies less; None: there is none.

        gain: seconds per step that the strategy would gain. cost_seconds: a lower bound of its cost.
        """
        if best is None:
            small = self._worth(gain) < self._margin
            return Finding.of(FindingCode.SMALL_AT_MOST, gain=gain) if small else None
        target, least_gain = self._found.limits.target, self._found.config.min_gain
        both: dict[str, Any] = {"gain": gain, "best": best.candidate.name, "best_gain": best.gain_seconds}
        if self._worth(gain) < best.net_seconds + self._margin:
            return Finding.of(FindingCode.GAINS_NO_MORE, **both, least_gain=least_gain)
        if self._worth(gain) - cost_seconds < best.net_seconds + self._margin:
            return Finding.of(FindingCode.COSTS_MORE, **both)
        if best.gain_seconds >= target * gain:
            part = best.gain_seconds / gain
            return Finding.of(FindingCode.NOT_NEEDED, best=best.candidate.name, part=part, target=target)
        return None

    def _worth(self, gain_seconds: float) -> float:
        """Seconds saved over the lifetime of the demand by a predicted gain per step, discounted by
        `plan_discount`."""
        return (
            gain_seconds
            * self._found.question.plan_discount
            * self._found.steps_per_second
            * self._found.config.lifetime_seconds
        )

    @property
    def _margin(self) -> float:
        """Seconds by which a strategy must beat another one that copies less."""
        return (
            self._found.config.min_gain
            * self._found.even_step
            * self._found.steps_per_second
            * self._found.config.lifetime_seconds
        )

    def _may_be_noise(self) -> bool:
        """True if nothing is known of single steps, and they are expected to be as even as chance allows."""
        return self._found.samples is None and self._at_ceiling()

    def _at_ceiling(self) -> bool:
        """True if every layer's expected balance is as good as the few tokens of a step allow."""
        even = self._found.before.figures.least_balance
        chance = 1.0 / self._found.before.figures.step_ceiling - 1.0
        return bool(
            1.0 / (1.0 + np.hypot(1.0 / even - 1.0, chance))
            >= self._found.before.figures.step_ceiling - _CEILING_MARGIN
        )

    def _may_move_nearer(self) -> bool:
        """True if locality can pay without homes: sending tokens takes time, and ranks demand different
        experts.

        Where homes hold, ranks differ because of them, and experts go where the homes are. Adds the reason to
        the record, once.
        """
        homes = self._found.routing
        steered = isinstance(homes, RoutingForecast) and homes.known is not None
        if not self._travel_costs:
            reason = Finding.of(FindingCode.CHEAP_DISPATCH)
        elif steered:
            reason = Finding.of(FindingCode.FOLLOWS_HOMES)
        else:
            reason = Finding.of(FindingCode.SPECIALISATION, test=self._found.gate, of="ranks")
        self._note_once(reason.of_subject("locality"))
        return self._travel_costs and not steered and self._found.gate.specialised

    def _may_go_home(self) -> bool:
        """True if requests could be sent to where their experts are. Adds the reason to the record, once."""
        homes = self._found.routing
        if isinstance(homes, Finding):
            reason = homes
        elif not self._travel_costs:
            reason = Finding.of(FindingCode.CHEAP_DISPATCH)
        else:
            reached = homes.followed
            reason = Finding.of(FindingCode.REACH_HOME, part=reached.part, seen=reached.seen)
        self._note_once(reason.of_subject("homes"))
        return self._travel_costs and isinstance(homes, RoutingForecast)

    def _note(self, code: FindingCode, about: str = "", **values: Any) -> None:
        self._findings.append(Finding.of(code, about, **values))

    def _note_once(self, finding: Finding) -> None:
        if finding not in self._findings:
            self._findings.append(finding)

    def _may_be_more_local(self) -> bool:
        """True if a plan could save the sending of tokens. Adds the reasons to the record, once."""
        if self._found.view.rearranges:
            return False
        return self._may_move_nearer() or self._may_go_home() or self._may_fill()

    def _may_fill(self) -> bool:
        """True if there are empty slots in which replicas could keep tokens local."""
        found = self._found
        return self._travel_costs and bool((found.table[found.chosen] == EMPTY).any())

    @property
    def _travel_costs(self) -> bool:
        """True if sending tokens takes a noticeable part of a step."""
        return (
            self._found.before.figures.seconds.dispatch > self._found.config.min_gain * self._found.even_step
        )

    # The record

    def _decided(self, best: EvaluatedPlan) -> PlannerDecision:
        found, before, after, paid = self._found, self._found.before.figures, best.after.figures, best.payback
        reason = sentence(Finding.of(FindingCode.CHOSEN, name=best.candidate.name))
        plan = planned(
            found.view.placement, best.handovers, before=before, after=after, payback=paid, reason=reason
        )
        record = msgspec.structs.replace(
            self._common_record(best.placement),
            id=plan.id,
            after=measures(found, after),
            copies=best.copies,
            copied_share=best.copies / max(self._cells, 1),
            copied_bytes=paid.bytes,
            handovers=len(plan.handovers),
            gain_seconds=best.gain_seconds,
            gain_per_second=paid.gain_per_second,
            cost_seconds=paid.cost_seconds,
            net_seconds=best.net_seconds,
            payback_seconds=paid.after_seconds,
            transfer_seconds=paid.transfer_seconds,
            steps=steps(plan),
        )
        return PlannerDecision(record, no_homes(found.view, ""), plan)

    def _refused(self, reason: Finding) -> PlannerDecision:
        homes = no_homes(self._found.view, sentence(reason))
        return self._at_home(_nothing(self._common_record(self._found.placement), homes, reason))

    def _at_home(self, decided: PlannerDecision, best: EvaluatedPlan | None = None) -> PlannerDecision:
        """Add the homes of clusters to a decision: those that hold now, and those that hold after the
        plan."""
        now, after = self._homes(decided.plan, None if best is None else best.candidate.predicted)
        homes = now if after is None else after
        named = () if homes.share is None else named_homes(homes.share)
        return decided._replace(
            record=msgspec.structs.replace(decided.record, homes=named, homes_note=homes.note),
            homes=now,
            homes_after=after,
        )

    def _homes(
        self, plan: Plan | None, predicted: PredictedEffect | None
    ) -> tuple[PlannedHomes, PlannedHomes | None]:
        """Return (homes now, homes after the plan). While a plan leads to other homes, the present ones
        stay."""
        found = self._found
        if found.question.policy != "roost":
            reason = Finding.of(FindingCode.POLICY_WITHOUT_HOMES, policy=found.question.policy)
            now = no_homes(found.view, sentence(reason))
        elif not self._travel_costs:
            now = no_homes(found.view, sentence(Finding.of(FindingCode.CHEAP_DISPATCH)))
        elif predicted is not None:
            known = found.routing.known if isinstance(found.routing, RoutingForecast) else None
            now = published_homes(found, known, Finding.of(FindingCode.UNTIL_LAST_HANDOVER))
        else:
            now = published_homes(found, *effective_homes(found))
        if plan is None:
            return now, None
        last = found.view.placement.epoch + len(plan.handovers)
        if predicted is not None:
            return now, published_homes(
                found, predicted.homes, Finding.of(FindingCode.WITH_THE_PLACEMENT), last
            )
        return now, now._replace(epoch=last)

    def _common_record(self, placement: Placement) -> PlanRecord:
        """Return the parts of the record that do not depend on the outcome. placement: at the end of the
        plan."""
        found = self._found
        points = () if not found.question.memory else self._memory()
        near = (
            dispatch_saved(found, placement) if found.question.bounds and self._travel_costs else (None, None)
        )
        return msgspec.structs.replace(
            _record(found.view, found.question),
            saved=near[0],
            saved_bound=near[1],
            reasons=tuple(map(sentence, self._findings)),
            single_layers=self._single_layers,
            before=measures(found, found.before.figures),
            balance_bound=float(
                bound(
                    found.load, found.ranks, found.placement.slots_per_rank, found.limits.max_replicas
                ).mean()
            ),
            step_ceiling=found.before.figures.step_ceiling,
            specialisation=found.gate.divergence - found.gate.floor,
            memory=points,
        )

    def _memory(self) -> tuple[MemoryPoint, ...]:
        found, present = self._found, self._found.placement.slots_per_rank
        if found.cache is None:
            self._note(FindingCode.CACHE_UNKNOWN)
            return ()
        slots = range(found.fewest_slots, max(present, found.fewest_slots) + _MAX_FURTHER_SLOTS + 1)
        return memory(
            found,
            curve(
                found.evaluation,
                found.terms,
                found.cache,
                slots,
                present=present,
                expert_bytes=found.view.shape.expert_bytes,
                sharded=len(found.view.placement.sharded),
            ),
        )


def _nothing(record: PlanRecord, homes: PlannedHomes, reason: Finding) -> PlannerDecision:
    if homes.share is not None:
        record = msgspec.structs.replace(record, homes=named_homes(homes.share), homes_note=homes.note)
    return PlannerDecision(
        msgspec.structs.replace(record, refused=sentence(reason)), homes, why=REFUSALS[reason.code]
    )


def _record(view: EngineView, question: PlanningQuestion) -> PlanRecord:
    return PlanRecord(
        engine=view.engine,
        worker_id=str(view.worker_id),
        model=view.model,
        epoch=view.placement.epoch,
        policy=question.policy,
        plan_discount=question.plan_discount,
        tokens_per_second=view.evaluation.tokens_per_second(view.shape.top_k),
        pairs=float(view.demand.pairs.sum()),
        judged_pairs=float(view.evaluation.pairs.sum()),
        next_window=view.later is not None,
    )
