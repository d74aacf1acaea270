"""Choose the action for one engine: nothing, new shares, few copies, locality, or a full re-placement. Pure.

Strategies are tried in that order, the one with the fewest bytes first. Each is fitted to one window of
demand and evaluated on the next, in seconds: the time saved per step, over the expected lifetime of the
demand, less the cost of the plan. A strategy that copies more must beat the best one so far by more than
noise.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from fleet.placement import EMPTY, Placement
from migration.config import MigrationConfig, Policy
from migration.model.engine_view import EngineView
from migration.model.placement_changes import made, within
from migration.model.plan import planned
from migration.model.plan_record import PlanRecord
from migration.planning.demand_forecast import RoutingForecast
from migration.planning.evaluation import (
    EvaluatedPlan,
    at_ceiling,
    cost_floor,
    doubt,
    enough,
    evaluate,
    gain_limit,
    margin,
    outweighed,
    travel_costs,
    worth,
)
from migration.planning.findings import Finding, FindingCode, Infeasible
from migration.planning.joint_homes import joint, with_expected_demand
from migration.planning.layer_turns import SUBJECT, TurnedLayers, turned_layers
from migration.planning.locality_report import no_homes, present_homes
from migration.planning.plan_report import problem_record, run_record, with_moves, with_turned_layers
from migration.planning.planner_decision import PlannerDecision, no_plan, with_homes
from migration.planning.problem import PlanningProblem, PlanningQuestion, prepare
from migration.planning.rank_loss import recover
from migration.planning.rearrangement import eplb_map, eplb_map_by_node, few_moves, whole_map
from migration.planning.sentences import recovery_summary, sentence
from migration.planning.staging_capacity import Unorderable
from migration.planning.strategies import (
    Maker,
    PlanCandidate,
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
        return no_plan(run_record(view, question), no_homes(view, sentence(reason)), reason)
    seen, needed = float(view.demand.pairs.sum()), config.min_pairs * view.shape.experts
    if not seen or seen < needed:
        reason = Finding.of(FindingCode.TOO_FEW_PAIRS, seen=seen, needed=needed)
        keep = present_homes if question.policy == "roost" else no_homes
        return no_plan(run_record(view, question), keep(view, sentence(reason)), reason)
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
            return with_homes(safe, found)
        best = self._moves()
        moves = best if isinstance(best, EvaluatedPlan) else None
        if (turned := self._turned(moves)) is not None:
            return with_homes(self._turning(turned), found)
        if isinstance(best, Finding):
            return self._refused(best)
        return with_homes(self._decided(best), found, best)

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
        if self._gain_too_small or worth(found, self._max_gain) < margin(found):
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
        moved, least = 0.0 if best is None else best.net_seconds, margin(found)
        if turned.net_seconds < least:
            finding = Finding.of(FindingCode.LAYERS_DO_NOT_PAY, **values, least_seconds=least)
        elif best is not None and turned.net_seconds < moved + least:
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
        plan = msgspec.structs.replace(turned.plan, payback=turned.payback)
        record = with_turned_layers(self._record(self._found.placement), turned, plan)
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
            least = (0.0 if best is None else best.net_seconds) + margin(self._found)
            if tried.net_seconds >= least + doubt(self._found, tried.copies, tried.layers, best):
                best = tried
            elif tried.net_seconds >= least:
                self._gain_too_small = True
                self._note(FindingCode.TOO_MANY_COPIES, tried.candidate.name)
        return best

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
            if best is not None and (reason := enough(found, best, gain, cost_floor(found, candidate))):
                self._findings.append(reason.of_subject(candidate.name))
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
        reason = enough(self._found, best, limit.most)
        if reason is None and outweighed(self._found, best, limit):
            self._gain_too_small = True
            reason = Finding.of(FindingCode.COPIES_OUTWEIGH, gain=limit.most, copies=int(limit.copies[-1]))
        if reason is None:
            return False
        self._max_gain = max(self._max_gain, limit.most)
        self._findings.append(reason.of_subject(name))
        return True

    def _may_be_noise(self) -> bool:
        """True if nothing is known of single steps, and they are expected to be as even as chance allows."""
        return self._found.samples is None and at_ceiling(self._found)

    def _may_move_nearer(self) -> bool:
        """True if locality can pay without homes: sending tokens takes time, and ranks demand different
        experts.

        Where homes hold, ranks differ because of them, and experts go where the homes are. Adds the reason to
        the record, once.
        """
        homes = self._found.routing
        steered = isinstance(homes, RoutingForecast) and homes.known is not None
        if not travel_costs(self._found):
            reason = Finding.of(FindingCode.CHEAP_DISPATCH)
        elif steered:
            reason = Finding.of(FindingCode.FOLLOWS_HOMES)
        else:
            reason = Finding.of(FindingCode.SPECIALISATION, test=self._found.gate, of="ranks")
        self._note_once(reason.of_subject("locality"))
        return travel_costs(self._found) and not steered and self._found.gate.specialised

    def _may_go_home(self) -> bool:
        """True if requests could be sent to where their experts are. Adds the reason to the record, once."""
        homes = self._found.routing
        if isinstance(homes, Finding):
            reason = homes
        elif not travel_costs(self._found):
            reason = Finding.of(FindingCode.CHEAP_DISPATCH)
        else:
            reached = homes.followed
            reason = Finding.of(FindingCode.REACH_HOME, part=reached.part, seen=reached.seen)
        self._note_once(reason.of_subject("homes"))
        return travel_costs(self._found) and isinstance(homes, RoutingForecast)

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
        return travel_costs(self._found) and bool((found.table[found.chosen] == EMPTY).any())

    # The record

    def _decided(self, best: EvaluatedPlan) -> PlannerDecision:
        """Return the decision to carry out a candidate."""
        plan = planned(
            self._found.view.placement,
            best.handovers,
            before=self._found.before.figures,
            after=best.after.figures,
            payback=best.payback,
            reason=sentence(Finding.of(FindingCode.CHOSEN, name=best.candidate.name)),
        )
        record = with_moves(self._record(best.placement), self._found, best, plan)
        return PlannerDecision(record, no_homes(self._found.view, ""), plan)

    def _refused(self, reason: Finding) -> PlannerDecision:
        """Return the decision to do nothing."""
        homes = no_homes(self._found.view, sentence(reason))
        return with_homes(no_plan(self._record(self._found.placement), homes, reason), self._found)

    def _record(self, placement: Placement) -> PlanRecord:
        """Return the parts of the record that do not depend on the outcome. placement: at the end of the
        plan."""
        if self._found.question.memory and self._found.cache is None:
            self._note(FindingCode.CACHE_UNKNOWN)
        return msgspec.structs.replace(
            problem_record(self._found, placement),
            reasons=tuple(map(sentence, self._findings)),
            single_layers=self._single_layers,
        )
