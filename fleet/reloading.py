"""Reload of a running part's settings, and its audit record. Settings are frozen dataclasses. Pure.

A reload is atomic: if one setting needs a restart or has a bad value, nothing changes.
"""

import json
from collections.abc import Set as AbstractSet
from dataclasses import fields
from typing import Any, TypeVar

from fleet.facts.engines import ConfigChanged

Settings = TypeVar("Settings")


def reloaded(
    part: str, reloadable: AbstractSet[str], old: Settings, new: Settings, instance: int
) -> ConfigChanged:
    """Return the audit record of a reload from the old settings to the new ones.

    reloadable: fields that may change at run time. instance: identity of the process.
    """
    changed = differing(old, new)
    fixed = [
        f"{name} (now {before}, asked for {after})"
        for name, (before, after) in changed.items()
        if name not in reloadable
    ]
    if fixed:
        return refused(
            part, f"these settings need a restart: {', '.join(fixed)}; nothing was changed", instance
        )
    return ConfigChanged(part=part, instance=instance, changed=changed)


def refused(part: str, reason: str, instance: int) -> ConfigChanged:
    """Return the audit record of refused settings."""
    return ConfigChanged(part=part, instance=instance, changed={}, refused=reason)


def differing(old: Any, new: Any) -> dict[str, tuple[str, str]]:
    """Return the fields that differ: by name, the values before and after, as TOML literals.

    Only the names of secret files appear. The files are not read.
    """
    pairs = {field.name: (getattr(old, field.name), getattr(new, field.name)) for field in fields(old)}
    return {name: (_toml(before), _toml(after)) for name, (before, after) in pairs.items() if before != after}


def _toml(value: Any) -> str:
    """Format a value as a TOML literal; None, which TOML lacks, as in `roost config`."""
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
