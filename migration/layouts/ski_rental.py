"""Plain ski rental, for comparison: regret of decode steps until it reaches the cost of the switch."""

from collections.abc import Mapping

from fleet.layout_times import LayoutName
from migration.layouts.costs import LayoutLimits, StepCosts, SwitchCost
from migration.layouts.policy import LayoutDecision, LayoutLoad


class SkiRental:
    """Switches once the regret `max(0, regret + t_current - t_other)`, summed over steps, reaches the loss
    of the switch. It sees neither queues nor caps, except that a target must hold what runs."""

    def __init__(
        self,
        costs: StepCosts,
        limits: Mapping[LayoutName, LayoutLimits],
        switches: Mapping[tuple[LayoutName, LayoutName], SwitchCost],
    ) -> None:
        self._costs, self._limits, self._switches = costs, limits, switches
        self._regrets: dict[LayoutName, float] = dict.fromkeys(limits, 0.0)
        self._layout: LayoutName | None = None

    def decide(self, load: LayoutLoad) -> LayoutDecision:
        """Return the decision at this report."""
        layout, regrets = load.layout, self._regrets
        if layout != self._layout:
            self._layout = layout
            for other in regrets:
                regrets[other] = 0.0
        context = load.context
        now = self._costs.step_seconds(layout, load.running, context) if load.running else 0.0
        best, most, its_cost = None, 0.0, 0.0
        for other, limit in self._limits.items():
            if other == layout:
                continue
            then = self._costs.step_seconds(other, load.running, context) if load.running else 0.0
            regrets[other] = max(0.0, regrets[other] + load.steps * (now - then))
            cost = self._switches[layout, other].loss(load.kv_tokens)
            if (
                regrets[other] - cost >= most
                and regrets[other] > 0
                and limit.holds(load.running, load.kv_tokens)
            ):
                best, most, its_cost = other, regrets[other] - cost, cost
        if best is None:
            return LayoutDecision(None, None, max(regrets.values()), 0.0, "stays: no regret exceeds its cost")
        reason = f"turns to {best}: regret {regrets[best]:.3f} s reaches the cost {its_cost:.3f} s"
        return LayoutDecision(best, best, regrets[best], its_cost, reason)
