"""What becomes of a part that is given other settings while it runs, and the audit of that. Settings are frozen dataclasses. Pure.

A reload takes effect as a whole or not at all: one setting that needs a restart, or a bad value, and nothing is changed.
"""

import json
from collections.abc import Set as AbstractSet
from dataclasses import fields
from typing import Any, TypeVar

from fleet.events import ConfigChanged

Settings = TypeVar("Settings")


def reloaded(part: str, reloadable: AbstractSet[str], old: Settings, new: Settings, instance: int) -> ConfigChanged:
    """What becomes of a process (by its identity) of a part with the old settings that is given the new ones. reloadable: fields that may differ."""
    changed = differing(old, new)
    fixed = [f"{name} (now {before}, asked for {after})" for name, (before, after) in changed.items() if name not in reloadable]
    if fixed:
        return refused(part, f"these settings need a restart: {', '.join(fixed)}; nothing was changed", instance)
    return ConfigChanged(part=part, instance=instance, changed=changed)


def refused(part: str, reason: str, instance: int) -> ConfigChanged:
    """Settings that are not used, and why."""
    return ConfigChanged(part=part, instance=instance, changed={}, refused=reason)


def differing(old: Any, new: Any) -> dict[str, tuple[str, str]]:
    """The fields that differ: the value before and the value after, as TOML writes them. Files of secrets are named, never read."""
    pairs = {field.name: (getattr(old, field.name), getattr(new, field.name)) for field in fields(old)}
    return {name: (_toml(before), _toml(after)) for name, (before, after) in pairs.items() if before != after}


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
