"""Settings that can change while the planner runs. Pure."""

from fleet import reloading
from fleet.facts.engines import ConfigChanged
from migration.config import MigrationConfig

PART = "planner"
RELOADABLE = frozenset(
    {
        *("automatic", "policy", "cycle_seconds", "homes_seconds", "window_seconds", "min_pairs"),
        *("budget_bytes", "budget_seconds", "cooldown_seconds", "layer_cooldown_seconds"),
        *("layout_policy", "layout_threshold"),
        *("evaluation_seconds", "settle_seconds", "lifetime_seconds", "min_gain", "target"),
    }
)
"""Settings that take effect in the next planning cycle. All others need a restart."""


def reloaded(old: MigrationConfig, new: MigrationConfig, instance: int) -> ConfigChanged:
    """Return the result of applying new settings to a planner. instance: identity of the process."""
    return reloading.reloaded(PART, RELOADABLE, old, new, instance)


def refused(reason: str, instance: int) -> ConfigChanged:
    """Return the result for rejected settings, with the reason."""
    return reloading.refused(PART, reason, instance)
