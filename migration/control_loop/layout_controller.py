"""Choice of the layout of one engine: follows its load and its steps, and asks the policy.

Prices and policies are in `migration.layouts`. A switch itself is a plan of the engine's control loop.
"""

from collections.abc import Callable
from itertools import permutations

from fleet.facts.activity import DispatchMeasured
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.engines import EngineJoined
from fleet.facts.migrations import LoopFigures
from fleet.layout import Layout, head_groups, held_limit
from fleet.layout_times import LayoutName
from fleet.requests.layouts import EngineLayout, LayoutOption
from migration.config import LayoutPolicyName, MigrationConfig
from migration.control_loop.context import LoopContext
from migration.engine_state.engine_loads import EngineLoads, MeasuredStep
from migration.engine_state.placement_registry import EngineEntry
from migration.layouts.costs import SwitchCost
from migration.layouts.curve_report import crossings_at, curves_at
from migration.layouts.curves_record import CurveKey, CurvesRecord
from migration.layouts.engine_layouts import layout_name, layout_of_name, limits_of, made_policy
from migration.layouts.live_curves import LiveCurves
from migration.layouts.policy import LayoutDecision, LayoutLoad, LayoutPolicy
from migration.layouts.regret import RegretPolicy
from migration.loop_state.switch_trial import SwitchTrial
from migration.model.cost_model import LinkSpeeds
from migration.planning.layout_switch import choices
from migration.planning.problem import LayerTurning
from migration.planning.switch_costs import PricedSwitch, priced_switch

_PRICE_SECONDS = 1.0
"""Interval at which the costs of switches follow the KV in use and the measured links."""
_LEAST_SECONDS = 0.05
"""Shortest time between two decisions: the targets of an engine report one after another, and some steps must
lie between."""
_LONGEST_SECONDS = 2.0
"""Longest time between two reports for which steps are counted: an idle engine reports once a second."""
_NOT_ASKED = "the policy has not been asked yet: no load was reported"


class LayoutController:
    """Used on one event loop, on the leader, for one incarnation of an engine that measured its layouts."""

    def __init__(
        self,
        context: LoopContext,
        config: MigrationConfig,
        policy: LayoutPolicyName,
        joined: EngineJoined,
        record: CurvesRecord | None,
        discount: Callable[[], float],
    ) -> None:
        """discount: returns the factor applied to the predicted gains of the engine."""
        self._context = context
        self._discount = discount
        self._config = config
        self._policy_name = policy
        self._joined = joined
        self._loads = EngineLoads(joined.block_size)
        self._limits = {one.layout: limits_of(joined, one.layout) for one in joined.layout_times}
        self._switches: dict[tuple[LayoutName, LayoutName], SwitchCost] = {}
        """costs from the layout in force, and back; the policy reads them"""
        self._priced: dict[tuple[LayoutName, LayoutName], PricedSwitch] = {}
        """switches from the layout of the served epoch, and back"""
        self._refused: dict[str, str] = {}
        """why the engine cannot change to a layout"""
        self._name: LayoutName | None = None
        self._served: Layout | None = None
        self._epoch = -1
        self.curves = self._restored(record)
        self._policy = self._made_policy()
        self._decision: LayoutDecision | None = None
        self._decided_at = self._price_at = self._settled_at = float("-inf")
        self._prefilled = 0
        """prompt tokens that the policy knows of"""
        self.withheld = ""
        """why the last switch that the policy asked for was not carried out; empty: it was"""
        self._trial: SwitchTrial | None = None
        self._before: LiveCurves | None = None
        """curves as they were when the switch under trial began"""
        self._trial_from = float("inf")
        self._surplus: dict[int, float] = {}
        """surplus pairs of each whole layer, per sequence, as last reported (`LiveCurves.imbalance`)"""
        self._turned: dict[int, float] = {}
        """the same of the layers that the switch under trial turns over, before it; 0: it was sharded"""

    # Events

    def reconfigure(self, config: MigrationConfig, policy: LayoutPolicyName) -> None:
        """Use another policy or threshold from now on."""
        again = (policy, config.layout_threshold) != (self._policy_name, self._config.layout_threshold)
        self._config, self._policy_name = config, policy
        if again:
            self._policy, self._decision = self._made_policy(), None

    def loaded(self, report: KvMetrics, entry: EngineEntry) -> bool:
        """Apply the load of a target. Returns True if the policy asks for a switch."""
        self._follow(entry)
        step, name, now = self._loads.apply(report), self._name, self._context.clock()
        if name is None or name not in self._limits:
            return False
        if step is not None:
            self._observe(name, step, now)
        if self._loads.targets < entry.targets:
            return False  # the load of the engine is not known yet
        if self._context.under_way(entry.engine):
            self._decided_at = self._settled_at = now
            return False
        if now - self._price_at >= _PRICE_SECONDS:
            self._price(name, entry, now)
        if now - self._decided_at >= _LEAST_SECONDS:
            self._decide(name, now)
        return self.wanted is not None

    def dispatched(self, report: DispatchMeasured) -> None:
        """Apply the imbalance of whole experts that a rank measured."""
        if self._name != "ep" or not report.steps or not report.tokens or not any(report.balance):
            return
        share = report.pairs / (report.tokens * self._joined.expert_ranks)
        found = self._surplus = {
            layer: share * max(report.steps / one - 1.0, 0.0)
            for layer, one in enumerate(report.balance)
            if one > 0
        }
        self.curves.imbalance(sum(found.values()))
        if self._before is not None:
            # Layers that the switch left alone would be as uneven without it; the others as they were.
            alone = sum(surplus for layer, surplus in found.items() if layer not in self._turned)
            self._before.imbalance(alone + sum(self._turned.values()))

    def switched(self, trial: SwitchTrial, layout: Layout) -> None:
        """Begin the trial of a switch to a layout that was just accepted."""
        self._trial, self._before = trial, self.curves.copied()
        self._trial_from = float("inf")
        before = () if self._served is None else self._served.sharded
        self._turned = {
            layer: 0.0 if layer in before else self._surplus.get(layer, 0.0)
            for layer in set(before) ^ set(layout.sharded)
        }

    def ended(self, plan: str) -> None:
        """Measure from now on, once older steps have settled, if the plan under trial has ended."""
        if self._trial is not None and self._trial.plan == plan:
            self._trial_from = self._context.clock() + self._config.settle_seconds

    # Questions

    @property
    def wanted(self) -> LayoutName | None:
        """Layout that the policy asks for; None: the present one."""
        decision = self._decision
        return None if decision is None or decision.target == self._name else decision.target

    @property
    def layout(self) -> LayoutName | None:
        """Layout in force; None: not known yet, or without a name."""
        return self._name

    def trial(self, plan: str) -> SwitchTrial | None:
        """Return the trial of a plan; None: this controller has not seen it begin."""
        return self._trial if self._trial is not None and self._trial.plan == plan else None

    def target(self, name: LayoutName) -> Layout:
        """Return a layout of this engine by its name."""
        return layout_of_name(name, self._layers)

    def reason(self) -> str:
        """Return why the policy stays, or what it asks for."""
        if self._decision is None:
            return _NOT_ASKED
        held = f"; not carried out: {self.withheld}" if self.wanted is not None and self.withheld else ""
        return f"{self._decision.reason}{held}"

    def figures(self, name: LayoutName) -> LoopFigures:
        """Return the predicted figures of a layout at the present load."""
        seconds = self.curves.step_seconds(name, max(self._loads.running, 1), self._loads.context)
        return LoopFigures(remote_ranks=0.0, local=0.0, balance=0.0, step_seconds=seconds)

    def turning(self, entry: EngineEntry, resting: frozenset[int]) -> LayerTurning:
        """Return the permission to change the form of single layers but these. Raises ValueError with the
        reason if there is none."""
        self._follow(entry)
        if self._name != "ep" or entry.layout.attention != "dp":
            raise ValueError("most layers are sharded, and the layout is chosen as a whole")
        gain = self.curves.even_layer_gain(
            max(self._loads.running, 1), self._loads.context, entry.placement.layers
        )
        if gain is None:
            raise ValueError("the step times of whole or of sharded layers are uncertain")
        return LayerTurning(gain.seconds, gain.error, resting)

    def describe(self, entry: EngineEntry, *, automatic: bool) -> EngineLayout:
        """Describe the choice for people and programs."""
        self._follow(entry)
        if self._name is not None:
            self._price(self._name, entry, self._context.clock())
        loads, context = self._loads, self._loads.context
        return EngineLayout(
            engine=entry.engine,
            worker_id=entry.worker_id,
            layout=str(entry.layout),
            policy=self._policy_name,
            automatic=automatic,
            running=loads.running,
            waiting=loads.waiting,
            context=context,
            options=tuple(self._option(name) for name in self._limits),
            curves=curves_at(self.curves, tuple(self._limits), context),
            crossings=crossings_at(self.curves, tuple(self._limits), context),
            decided=self.reason(),
        )

    # Parts

    def _restored(self, record: CurvesRecord | None) -> LiveCurves:
        joined, now = self._joined, self._context.wall()
        key = CurveKey(
            weights=joined.weights_digest or "", hardware=joined.hardware, ranks=joined.expert_ranks
        )
        prices = joined.speed
        pair = 0.0 if prices is None else prices.expert_pair
        if record is None:
            return LiveCurves(key, joined.layout_times, now, expert_pair=pair)
        return LiveCurves.restored(record, key, joined.layout_times, now, expert_pair=pair)

    def _made_policy(self) -> LayoutPolicy:
        threshold = self._config.layout_threshold
        return made_policy(self._policy_name, self.curves, self._limits, self._switches, threshold)

    @property
    def _layers(self) -> int:
        return 0 if self._joined.shape is None else self._joined.shape.layers

    def _follow(self, entry: EngineEntry) -> None:
        """Apply a new epoch: other costs, and other targets if the attention changed."""
        if entry.epoch == self._epoch:
            return
        if self._served is None or self._served.attention != entry.layout.attention:
            self._loads.reset()
        self._served, self._epoch, self._price_at = entry.layout, entry.epoch, float("-inf")
        self._name = layout_name(entry.layout, self._layers)
        hot = entry.layout.sharded if self._name == "ep" else ()
        self.curves.sharded_layers(len(hot) / max(self._layers, 1))

    def _observe(self, name: LayoutName, step: MeasuredStep, now: float) -> None:
        """Take a measured step: for the curves, and for the trial of the last switch."""
        trial, before = self._trial, self._before
        if trial is not None and before is not None and name == trial.after and now >= self._trial_from:
            trial.observe(
                step.seconds,
                before.step_seconds(trial.before, step.sequences, step.context),
                before.step_seconds(trial.after, step.sequences, step.context),
            )
        if name != "ep" or self.curves.knows_imbalance:
            self.curves.observe(name, step.sequences, step.context, step.seconds, self._context.wall())

    def _price(self, name: LayoutName, entry: EngineEntry, now: float) -> None:
        """Price the switches from the layout in force."""
        shape, joined = self._joined.shape, self._joined
        machines = self._context.demand.machines(entry.worker_id)
        if shape is None or machines is None:
            return
        fresh = self._price_at == float("-inf")
        self._price_at = now
        if fresh:
            self._refused = {
                choice.name: choice.refusal
                for choice in choices(
                    shape, entry.layout, entry.placement.ranks, joined.unshardable, joined.tp_refusal
                )
                if choice.refusal
            }
            speed = self._context.plans(entry.engine).read_speed
            links = LinkSpeeds(
                same_node=speed or self._config.rank_bytes_per_second,
                cross_node=speed or self._config.node_bytes_per_second,
            )
            layouts = {one: entry.layout if one == name else self.target(one) for one in self._limits}
            self._priced = {
                (one, other): priced_switch(
                    layouts[one], layouts[other], shape, machines[1], links, joined.kv_block_bytes
                )
                for one, other in permutations(layouts, 2)
                if name in (one, other) and not {one, other} & self._refused.keys()
            }
        self._switches.clear()
        for (one, other), priced in self._priced.items():
            if one != name or not self._full(name, other):
                cost = priced.cost(self._loads.used_blocks, self._config.contention)
                self._switches[one, other] = cost

    def _full(self, name: LayoutName, other: LayoutName) -> str:
        """Return why requests hold too much KV for a switch of attention; empty: they do not."""
        shape, ranks = self._joined.shape, self._joined.expert_ranks
        if shape is None or self.target(name).attention == self.target(other).attention:
            return ""
        limit = held_limit(ranks, head_groups(ranks, shape.kv_heads))
        held = self._loads.decode_blocks * self._joined.block_size / self._limits[name].kv_tokens
        return "" if held <= limit else f"requests hold {held:.0%} of the KV, and {limit:.0%} is the limit"

    def _decide(self, name: LayoutName, now: float) -> None:
        """Ask the policy."""
        loads, since = self._loads, now - max(self._decided_at, now - _LONGEST_SECONDS)
        step = self.curves.step_seconds(name, max(loads.running, 1), loads.context)
        self._decision = self._policy.decide(
            LayoutLoad(
                at=now,
                layout=name,
                running=loads.running,
                waiting=loads.waiting,
                kv_tokens=loads.decode_blocks * self._joined.block_size,
                steps=round(since / step) if loads.running else 0,
                prefilled=loads.prefilled - self._prefilled,
                settled_at=self._settled_at,
                discount=self._discount(),
            )
        )
        self._decided_at, self._prefilled = now, loads.prefilled

    def _option(self, name: LayoutName) -> LayoutOption:
        loads, policy = self._loads, self._policy
        sequences = max(loads.running, 1)
        cost = self._switches.get((self._name, name)) if self._name is not None else None
        regrets = policy.regrets if isinstance(policy, RegretPolicy) else {}
        full = "" if self._name is None else self._full(self._name, name)
        return LayoutOption(
            layout=name,
            refusal=self._refused.get(name, "") or full,
            step_seconds=self.curves.step_seconds(name, sequences, loads.context),
            deviation=self.curves.deviation(name, sequences, loads.context),
            uncertain=self.curves.uncertain(name),
            regret_seconds=0.0 if name == self._name else regrets.get(name, 0.0),
            cost_seconds=0.0
            if name == self._name
            else (None if cost is None else cost.loss(loads.decode_blocks * self._joined.block_size)),
        )
