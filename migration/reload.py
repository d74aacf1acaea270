"""Settings that may change while the planner runs. Pure."""

from fleet import reloading
from fleet.events import ConfigChanged
from migration.config import MigrationConfig

PART = "planner"
RELOADABLE = frozenset(
    {
        *("automatic", "policy", "cycle_seconds", "homes_seconds", "window_seconds", "least_pairs"),
        *("budget_bytes", "budget_seconds", "cooldown_seconds", "layer_cooldown_seconds"),
        *("judge_seconds", "settle_seconds", "lifetime_seconds", "least_gain", "target"),
    }
)
"""Settings that take effect with the next thought; the others need a restart."""


def reloaded(old: MigrationConfig, new: MigrationConfig, instance: int) -> ConfigChanged:
    """What becomes of a planner (a process, by its identity) with the old settings that is given the new ones."""
    return reloading.reloaded(PART, RELOADABLE, old, new, instance)


def refused(reason: str, instance: int) -> ConfigChanged:
    """Settings that are not used, and why."""
    return reloading.refused(PART, reason, instance)
