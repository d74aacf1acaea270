"""Choose the action for one engine: nothing, new shares, few copies, locality, or a full re-placement. Pure.

Strategies are tried in that order, the one with the fewest bytes first. Each is fitted to one window of
demand and judged on the next, in seconds: the time saved per step, over the expected lifetime of the demand,
less the cost of the plan. A strategy that copies more must beat the best one so far by more than noise.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

import msgspec
import numpy as np

from fleet.placement import EMPTY, Placement
from fleet.text import listed
from migration.config import MigrationConfig, Policy
from migration.model.engine_view import EngineView, PlannedHomes
from migration.model.placement_changes import made, within
from migration.model.plan import Plan, planned
from migration.model.plan_record import MemoryPoint, PlanRecord
from migration.planning.evaluation import EvaluatedPlan, appraised, least_cost, most_gained
from migration.planning.joint_homes import at_home, joint, lived_in, settled
from migration.planning.locality_report import as_before, none, saved
from migration.planning.plan_report import duration, measures, memory, named_homes, outcome, steps
from migration.planning.problem import PlanningProblem, PlanningQuestion, situation
from migration.planning.rank_loss import recover
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

_MARGIN = 0.005
"""Distance of a step's expected balance from the ceiling that chance sets, below which no gain is
noticeable."""
AT_HOME = "requests have homes, and experts go where the homes are"
NO_TRAVEL = "it would save next to nothing, as sending tokens takes hardly any time on this engine"
_DOUBT = 0.05
"""Extra gain demanded of copies, as a part of the seconds that placement decides: the rate for copying every
expert.

Every copy follows the noise of its window a little. On the demo model's routings, with traffic of one domain,
full re-placements were predicted to save up to 2.7 % of dispatch and saved 0.0 +- 1.
"""
_SURE = 2.0
"""Standard deviations, of the time that the changed layers take between two windows, by which a plan with
copies must beat one without."""
_MOST_SLOTS = 12
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


class PlannerDecision(NamedTuple):
    """Outcome of one planning run.

    record: for people. plan: None where nothing is worth doing; `why` then holds the reason code.
    """

    record: PlanRecord
    homes: PlannedHomes
    """Homes that apply under the placement served now."""
    plan: Plan | None = None
    why: ReasonCode | None = None
    homes_after: PlannedHomes | None = None
    """Homes that apply from the plan's last epoch on, changed by the plan or not; None: there is no plan."""


WAYS: dict[Policy, tuple[Maker, ...]] = {
    "roost": (shares, copies, copies_and_filling, local, joint, anew),
    "replicate": (shares, copies, copies_and_filling),
    "reweight": (shares,),
    "uniform": (uniform, anew_evenly),
    "full": (anew,),
    "eplb": (eplb,),
    "eplb_hierarchical": (eplb_by_node,),
}
"""Strategies of each policy, fewest bytes first."""
_AT_MOST: dict[Maker, tuple[str, Callable[[PlanningProblem], Placement]]] = {anew: ("all anew", anew_at_most)}
"""Strategies whose end is cheap to compute and whose changes are expensive: the name, and the end without any
limits."""


def decide(view: EngineView, question: PlanningQuestion, config: MigrationConfig) -> PlannerDecision:
    """Return a plan, or the reason for its absence. Equal views give equal answers."""
    if view.layout.attention == "tp" or view.layout.boundary >= view.shape.layers:
        sentence = "experts are sharded over all ranks in this layout: no placement is better than another"
        return _nothing(_record(view, question), none(view, sentence), ReasonCode.SHARDED, sentence)
    seen, needed = float(view.demand.pairs.sum()), config.least_pairs * view.shape.experts
    if not seen or seen < needed:
        sentence = f"insufficient data: {seen:,.0f} of {needed:,.0f} required pairs per layer"
        homes = as_before(view, sentence) if question.policy == "roost" else none(view, sentence)
        return _nothing(_record(view, question), homes, ReasonCode.DATA, sentence)
    found = situation(view, question, config)
    run = _PlanningRun(lived_in(found) if question.policy == "roost" else found)
    return run.recovery() if question.dead else run.plan()


class _PlanningRun:
    """One planning run, with a sentence for every step of it."""

    def __init__(self, found: PlanningProblem) -> None:
        self._found = found
        self._reasons: list[str] = []
        self._tables: set[bytes] = set()
        """End placements of the strategies tried so far, as bytes."""
        self._most_gained = -np.inf
        """Largest gain of any strategy tried, in seconds of a step; -inf: none could be tried."""
        self._gain_too_small = False
        """True if a strategy was rejected because it gains little and copies much."""

    def plan(self) -> PlannerDecision:
        """Return the first of the policy's strategies that no later one beats by more than noise."""
        found, policy = self._found, self._found.question.policy
        if found.view.later is None:
            self._reasons.append(
                "only one window of demand so far: plans are judged on the window they are fitted to, which"
                " overestimates gains"
            )
        if not found.terms.speed.expert_pair:
            self._reasons.append(
                "the engine reports no compute time per pair (expert_pair 0): even loads save it nothing"
            )
        # Availability before speed: second replicas of critical experts are planned whatever they gain.
        if (safe := self._safe()) is not None:
            return self._at_home(safe)
        # Stop before any search where steps are as even as their few tokens allow and nothing could become
        # more local.
        if (
            policy == "roost"
            and self._at_ceiling()
            and not self._may_move_nearer()
            and not self._may_go_home()
            and not self._may_fill()
        ):
            return self._refused(
                ReasonCode.NOISE,
                "no gain beyond sampling noise: loads are as even as the few tokens of a step allow",
            )
        best = self._best(WAYS[policy])
        if best is not None:
            return self._at_home(self._decided(best), best)
        if self._most_gained == -np.inf:
            return self._refused(ReasonCode.UNABLE, f"the policy {policy} cannot plan for this engine")
        if self._gain_too_small or self._worth(self._most_gained) < self._margin:
            least = f"{found.config.least_gain:.2%} of a step"
            return self._refused(
                ReasonCode.NOISE, f"no gain beyond sampling noise: no plan makes a step shorter by {least}"
            )
        return self._refused(
            ReasonCode.COST,
            f"nothing pays for itself in the {found.config.lifetime_seconds:.0f} s that the demand is"
            " expected to last",
        )

    def recovery(self) -> PlannerDecision:
        """Plan for the loss of ranks. The plan is made whether or not it pays."""
        found, dead = self._found, ~np.asarray(self._found.limits.live, bool)
        way = recover(
            found.placement,
            dead,
            found.load,
            found.node,
            found.limits.least_replicas,
            most_copies=found.limits.most_copies,
        )
        self._reasons.append(
            f"without {'rank' if len(found.question.dead) == 1 else 'ranks'} {listed(found.question.dead)}:"
            f" {way.summary}"
        )
        try:
            split = (
                shared(found, way.table) if way.possible and found.question.policy == "roost" else way.split
            )
            chosen = appraised(found, PlanCandidate("recovery", way.changes, split))
        except Unorderable as error:
            return self._refused(ReasonCode.UNABLE, str(error))
        decided = self._decided(chosen)
        return decided._replace(record=msgspec.structs.replace(decided.record, before=None, lost=way.summary))

    def _safe(self) -> PlannerDecision | None:
        """Plan second replicas for experts that must survive the loss of any one rank.

        This comes before every other strategy, and regardless of its gain. None: all have a second replica,
        or may not get one.
        """
        found = self._found
        if found.limits.least_replicas is None or found.question.policy == "reweight":
            return None
        least = np.where(found.chosen[:, None], found.limits.least_replicas, 1)
        if (found.placement.replicas_on_rank.sum(axis=1) >= np.minimum(least, found.ranks)).all():
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
            way.changes if found.limits.most_copies is None else within(way.changes, found.limits.most_copies)
        )
        if not changes:
            return None
        try:
            split = None if found.question.policy == "uniform" else shared(found, made(found.table, changes))
            chosen = appraised(found, PlanCandidate("second replicas", changes, split))
        except Unorderable as error:
            self._reasons.append(
                f"some experts that must survive the loss of a rank have no second replica: {error}"
            )
            return None
        self._reasons.append(
            f"{found.config.critical_experts:.0%} of the experts, those of most demand, must survive the loss"
            " of a rank"
        )
        return self._decided(chosen)

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
            if tried.net_seconds >= beaten + self._margin + self._doubt(tried, best):
                best = tried
            elif tried.net_seconds >= beaten + self._margin:
                self._gain_too_small = True
                self._reasons.append(f"{tried.candidate.name}: that is too little for its number of copies")
        return best

    def _doubt(self, tried: EvaluatedPlan, best: EvaluatedPlan | None) -> float:
        """Extra seconds that a strategy must gain because it copies more than the best one so far."""
        found = self._found
        if found.question.policy != "roost":
            return 0.0
        more = max(tried.copies - (0 if best is None else best.copies), 0) / max(self._cells, 1)
        spent, layers = found.before.figures.seconds, tried.candidate.changes.layer
        touched = 0.0 if not more else len(np.unique(layers)) / len(found.chosen)
        return self._worth(
            max(
                _DOUBT * more * (spent.experts + spent.dispatch),
                _SURE * np.sqrt(touched) * found.noise_seconds,
            )
        )

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
            if self._tables and way in _AT_MOST and self._cannot_win(best, *_AT_MOST[way]):
                return None
            candidate = way(found)
            end = candidate.placement(found)
            if (same := end.expert_of_slot.tobytes()) in self._tables and candidate.split is not None:
                # Another strategy led to the same placement with freely chosen shares.
                return None
            self._tables.add(same)
            after = candidate.situation(found).judge(end)
            gain = float((candidate.before(found).seconds - after.seconds).sum())
            self._most_gained = max(self._most_gained, gain)
            # A lower bound of the cost first: ordering handovers is the expensive part.
            if best is not None and (enough := self._enough(best, gain, least_cost(found, candidate))):
                self._reasons.append(f"{candidate.name}: {enough}")
                return None
            tried = appraised(found, candidate, after)
        except ValueError as error:
            if str(error) not in self._reasons:
                self._reasons.append(str(error))
            return None
        self._reasons.append(outcome(found, tried))
        return tried

    def _cannot_win(
        self, best: EvaluatedPlan | None, name: str, at_most: Callable[[PlanningProblem], Placement]
    ) -> bool:
        """True if a strategy would not be worth its changes even without any limits. Adds a sentence that
        says so."""
        gain = most_gained(self._found, at_most(self._found))
        if best is not None:
            reason = self._enough(best, gain)
        else:
            reason = (
                f"gains at most {duration(gain)} per step within the budget"
                if self._worth(gain) < self._margin
                else ""
            )
        if reason:
            self._most_gained = max(self._most_gained, gain)
            self._reasons.append(f"{name}: {reason}")
        return bool(reason)

    def _enough(self, best: EvaluatedPlan, gain: float, cost_seconds: float = 0.0) -> str:
        """Reason to stop evaluating a strategy beside `best`, which copies less; empty: none.

        gain: seconds per step that the strategy would gain. cost_seconds: a lower bound of its cost.
        """
        target, name = self._found.limits.target, best.candidate.name
        if self._worth(gain) < best.net_seconds + self._margin:
            least = (
                ""
                if gain <= best.gain_seconds
                else f": the difference is less than {self._found.config.least_gain:.2%} of a step"
            )
            return f"gains {duration(gain)} per step, {name} {duration(best.gain_seconds)}{least}"
        if self._worth(gain) - cost_seconds < best.net_seconds + self._margin:
            return (
                f"gains {duration(gain)} per step, {name} {duration(best.gain_seconds)}: its copies cost more"
                " time than that is worth"
            )
        if best.gain_seconds >= target * gain:
            return (
                f"not needed, {name} reaches {best.gain_seconds / gain:.1%} of what it would gain (enough is"
                f" {target:.0%})"
            )
        return ""

    def _worth(self, gain_seconds: float) -> float:
        """Seconds saved over the lifetime of the demand by a predicted gain per step, discounted by
        `trust`."""
        return (
            gain_seconds
            * self._found.question.trust
            * self._found.steps_per_second
            * self._found.config.lifetime_seconds
        )

    @property
    def _margin(self) -> float:
        """Seconds by which a strategy must beat another one that copies less."""
        return (
            self._found.config.least_gain
            * self._found.even_step
            * self._found.steps_per_second
            * self._found.config.lifetime_seconds
        )

    def _at_ceiling(self) -> bool:
        """True if every layer's expected balance is as good as the few tokens of a step allow."""
        even = self._found.before.figures.least_balance
        chance = 1.0 / self._found.before.figures.step_ceiling - 1.0
        return bool(
            1.0 / (1.0 + np.hypot(1.0 / even - 1.0, chance))
            >= self._found.before.figures.step_ceiling - _MARGIN
        )

    def _may_move_nearer(self) -> bool:
        """True if locality can pay without homes: sending tokens takes time, and ranks demand different
        experts.

        Where homes hold, ranks differ because of them, and experts go where the homes are. Adds the reason to
        the record, once.
        """
        steered = not isinstance(self._found.steering, str) and self._found.steering.known is not None
        reason = NO_TRAVEL if not self._travel_costs else AT_HOME if steered else self._found.gate.reason
        self._note_once(f"locality: {reason}")
        return self._travel_costs and not steered and self._found.gate.specialised

    def _may_go_home(self) -> bool:
        """True if requests could be sent to where their experts are. Adds the reason to the record, once."""
        steering = self._found.steering
        if not self._travel_costs or isinstance(steering, str):
            self._note_once(f"homes: {steering if isinstance(steering, str) else NO_TRAVEL}")
            return False
        seen = "as observed" if steering.followed.seen else "an expectation before any observation"
        self._note_once(f"homes: {steering.followed.part:.0%} of the requests reach their home, {seen}")
        return True

    def _note_once(self, sentence: str) -> None:
        if sentence not in self._reasons:
            self._reasons.append(sentence)

    def _may_fill(self) -> bool:
        """True if there are empty slots in which replicas could keep tokens local."""
        found = self._found
        return self._travel_costs and bool((found.table[found.chosen] == EMPTY).any())

    @property
    def _travel_costs(self) -> bool:
        """True if sending tokens takes a noticeable part of a step."""
        return (
            self._found.before.figures.seconds.dispatch
            > self._found.config.least_gain * self._found.even_step
        )

    # The record

    def _decided(self, best: EvaluatedPlan) -> PlannerDecision:
        found, before, after, paid = self._found, self._found.before.figures, best.after.figures, best.payback
        reason = f"{best.candidate.name} gains most for its cost"
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
        return PlannerDecision(record, none(found.view, ""), plan)

    def _refused(self, why: ReasonCode, sentence: str) -> PlannerDecision:
        return self._at_home(
            _nothing(
                self._common_record(self._found.placement), none(self._found.view, sentence), why, sentence
            )
        )

    def _at_home(self, decided: PlannerDecision, best: EvaluatedPlan | None = None) -> PlannerDecision:
        """Add the homes of clusters to a decision: those that hold now, and those that hold after the
        plan."""
        now, after = self._homes(decided.plan, None if best is None else best.candidate.foretold)
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
            now = none(found.view, f"the policy {found.question.policy} assigns no homes")
        elif not self._travel_costs:
            now = none(found.view, NO_TRAVEL)
        elif predicted is not None:
            known = None if isinstance(found.steering, str) else found.steering.known
            now = at_home(found, known, "they stay until the plan's last handover")
        else:
            now = at_home(found, *settled(found))
        if plan is None:
            return now, None
        last = found.view.placement.epoch + len(plan.handovers)
        if predicted is not None:
            return now, at_home(
                found, predicted.homes, "they go with the placement that the plan leads to", last
            )
        return now, now._replace(epoch=last)

    def _common_record(self, placement: Placement) -> PlanRecord:
        """Return the parts of the record that do not depend on the outcome. placement: at the end of the
        plan."""
        found = self._found
        points = () if not found.question.memory else self._memory()
        near = saved(found, placement) if found.question.bounds and self._travel_costs else (None, None)
        return msgspec.structs.replace(
            _record(found.view, found.question),
            saved=near[0],
            saved_bound=near[1],
            reasons=tuple(self._reasons),
            before=measures(found, found.before.figures),
            balance_bound=float(
                bound(
                    found.load, found.ranks, found.placement.slots_per_rank, found.limits.most_replicas
                ).mean()
            ),
            step_ceiling=found.before.figures.step_ceiling,
            specialisation=found.gate.divergence - found.gate.floor,
            memory=points,
        )

    def _memory(self) -> tuple[MemoryPoint, ...]:
        found, present = self._found, self._found.placement.slots_per_rank
        if found.cache is None:
            self._reasons.append(
                "the value of further slots is unknown: the engine does not report the size or the use of its"
                " KV blocks"
            )
            return ()
        slots = range(found.fewest_slots, max(present, found.fewest_slots) + _MOST_SLOTS + 1)
        return memory(
            found,
            curve(
                found.judged,
                found.terms,
                found.cache,
                slots,
                present=present,
                expert_bytes=found.view.shape.expert_bytes,
            ),
        )


def _nothing(record: PlanRecord, homes: PlannedHomes, why: ReasonCode, sentence: str) -> PlannerDecision:
    if homes.share is not None:
        record = msgspec.structs.replace(record, homes=named_homes(homes.share), homes_note=homes.note)
    return PlannerDecision(msgspec.structs.replace(record, refused=sentence), homes, why=why)


def _record(view: EngineView, question: PlanningQuestion) -> PlanRecord:
    return PlanRecord(
        engine=view.engine,
        worker_id=str(view.worker_id),
        model=view.model,
        epoch=view.placement.epoch,
        policy=question.policy,
        trust=question.trust,
        tokens_per_second=view.judged.tokens_per_second(view.shape.top_k),
        pairs=float(view.demand.pairs.sum()),
        judged_pairs=float(view.judged.pairs.sum()),
        next_window=view.later is not None,
    )
