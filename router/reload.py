"""Settings that may change while a router runs. Pure."""

from dataclasses import fields

from fleet import reloading
from fleet.facts.engines import ConfigChanged
from router.config import RouterConfig

RELOADABLE = frozenset(
    {
        *(field.name for field in fields(RouterConfig) if field.name.endswith("_weight")),
        *(
            "policy",
            "classic_alpha",
            "classic_beta",
            "classic_gamma",
            "temperature_ms",
            "session_affinity_seconds",
            "session_affinity_ms",
        ),
        *(
            "correction_limit",
            "expected_output_tokens",
            "max_choices",
            "kept_decisions",
            "kept_decisions_bytes",
        ),
        *("max_requests_per_rank", "max_queue_seconds", "max_kv_share"),
        *(
            "queue_requests",
            "queue_bytes",
            "queue_wait_seconds",
            "no_engine_wait_seconds",
            "classes",
            "default_class",
        ),
        *("max_attempts", "retry_share", "min_retries"),
        *("breaker_failures", "breaker_seconds", "outlier_factor", "max_ejected_share"),
        *(
            "stale_load_seconds",
            "settle_seconds",
            "connect_seconds",
            "first_token_seconds",
            "between_tokens_seconds",
            "answer_seconds",
            "passthrough_admin",
        ),
    }
)
"""Settings that take effect from the next decision; all others need a restart."""


def reloaded(old: RouterConfig, new: RouterConfig, instance: int) -> ConfigChanged:
    """Compare old and new settings. Return the changes, or why they are refused. instance: identity of the
    router process.
    """
    return reloading.reloaded("router", RELOADABLE, old, new, instance)


def refused(reason: str, instance: int) -> ConfigChanged:
    """Return the refusal of settings with its reason."""
    return reloading.refused("router", reason, instance)
