"""Settings that may change while a router runs, and the audit of their changes. Pure.

A reload takes effect as a whole or not at all: one setting that needs a restart, or a bad value, and nothing is changed.
"""

import json
from dataclasses import fields
from typing import Any

from fleet.events import ConfigChanged
from router.config import RouterConfig

RELOADABLE = frozenset(
    {
        *("policy", "prefill_weight", "queue_weight", "decode_weight", "experts_weight", "distinct_weight", "lockstep_weight", "handover_weight"),
        *("classic_alpha", "classic_beta", "classic_gamma", "temperature_ms", "session_affinity_seconds", "session_affinity_ms"),
        *("correction_limit", "expected_output_tokens", "max_choices", "kept_decisions", "kept_bytes"),
        *("max_requests_per_rank", "max_queue_seconds", "max_kv_share"),
        *("queue_requests", "queue_bytes", "queue_wait_seconds", "no_engine_wait_seconds", "classes", "default_class"),
        *("max_attempts", "retry_share", "least_retries"),
        *("breaker_failures", "breaker_seconds", "outlier_factor", "max_ejected_share"),
        *("stale_load_seconds", "settle_seconds", "connect_seconds", "first_token_seconds", "between_tokens_seconds"),
    }
)
"""Settings that take effect between two decisions; the others need a restart."""


def differing(old: RouterConfig, new: RouterConfig) -> dict[str, tuple[str, str]]:
    """The settings that differ: the value before and the value after, as TOML writes them. Files of secrets are named, never read."""
    pairs = {field.name: (getattr(old, field.name), getattr(new, field.name)) for field in fields(RouterConfig)}
    return {name: (_toml(before), _toml(after)) for name, (before, after) in pairs.items() if before != after}


def reloaded(old: RouterConfig, new: RouterConfig, instance: int) -> ConfigChanged:
    """What becomes of a router (a process, by its identity) with the old settings that is given the new ones."""
    changed = differing(old, new)
    fixed = [f"{name} (now {before}, asked for {after})" for name, (before, after) in changed.items() if name not in RELOADABLE]
    if fixed:
        return refused(f"these settings need a restart: {', '.join(fixed)}; nothing was changed", instance)
    return ConfigChanged(part="router", instance=instance, changed=changed)


def refused(reason: str, instance: int) -> ConfigChanged:
    """Settings that are not used, and why."""
    return ConfigChanged(part="router", instance=instance, changed={}, refused=reason)


def _toml(value: Any) -> str:
    """A value as TOML writes it; None, which TOML does not have, as in `roost config`."""
    match value:
        case None:
            return "unset"
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case tuple():
            return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(str(value), ensure_ascii=False)
