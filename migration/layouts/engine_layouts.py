"""Layouts that an engine as a whole can be in: names, limits, and the policy that chooses among them."""

from collections.abc import Mapping
from math import inf

from fleet.facts.engines import EngineJoined
from fleet.layout import EP, Layout, experts_tp, tp
from fleet.layout_times import LayoutName
from migration.config import LayoutPolicyName
from migration.layouts.costs import LayoutLimits, StepCosts, SwitchCost
from migration.layouts.policy import FixedLayout, LayoutPolicy
from migration.layouts.regret import RegretPolicy
from migration.layouts.threshold import ThresholdRule, Thresholds, rollout_thresholds

_UNLIMITED = 1 << 40
"""Sequences and tokens of an engine that states no limit."""
_LOW = 0.8
"""Lower threshold of the published rule, as a part of the higher one."""


def layout_name(layout: Layout, layers: int) -> LayoutName | None:
    """Return the name of the layout that is nearest to one of an engine's; None: tensor-parallel attention
    with whole experts, which has no measured times. layers: MoE layers of the model.

    Single sharded layers are hot ones of an engine in ep.
    """
    if layout.attention == "tp":
        return "tp" if not layout.has_whole(layers) else None
    return "experts-tp" if 2 * len(layout.sharded) > layers else "ep"


def layout_of_name(name: LayoutName, layers: int) -> Layout:
    """Return a layout by its name. layers: MoE layers of the model."""
    return {"ep": EP, "experts-tp": experts_tp(layers), "tp": tp(layers)}[name]


def limits_of(joined: EngineJoined, name: LayoutName) -> LayoutLimits:
    """Return the sequences and the KV that an engine holds in a layout, of all its targets together."""
    layers = 0 if joined.shape is None else joined.shape.layers
    layout = layout_of_name(name, layers)
    ranks = joined.expert_ranks
    targets = ranks if layout.targets_are_ranks else 1
    kv_blocks = targets * joined.target_kv_blocks(layout)
    return LayoutLimits(
        max_running=_UNLIMITED if joined.max_requests is None else joined.max_requests * ranks,
        kv_tokens=kv_blocks * joined.block_size if kv_blocks else _UNLIMITED,
        prompt_tokens=targets * joined.max_batch_tokens or inf,
    )


def made_policy(
    name: LayoutPolicyName,
    costs: StepCosts,
    limits: Mapping[LayoutName, LayoutLimits],
    switches: Mapping[tuple[LayoutName, LayoutName], SwitchCost],
    threshold: float,
) -> LayoutPolicy:
    """Return a policy that chooses among the layouts of `limits`.

    switches: costs from the layout in force; kept up to date by the caller. threshold: requests at which the
    published rules turn to ep.
    """
    room: dict[LayoutName, float] = {one: limit.kv_tokens for one, limit in limits.items()}
    match name:
        case "regret":
            return RegretPolicy(costs, limits, switches)
        case "threshold":
            return ThresholdRule(Thresholds(threshold, _LOW * threshold), room)
        case "rollout":
            return ThresholdRule(rollout_thresholds(threshold), room)
        case "static":
            return FixedLayout()
