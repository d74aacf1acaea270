"""Reload of settings at run time: only settings of router and planner may change, as far as `router.reload`
and `migration.reload` permit."""

from collections.abc import Callable
from typing import TypeVar

import migration.reload
import router.reload
from deploy.configuration_loader import ConfigError, Configuration
from migration.config import MigrationConfig
from router.config import RouterConfig

Read = Callable[[], Configuration]
"""Function that reads the current defaults, file, environment and flags. Raises ConfigError if they are
invalid."""
Part = TypeVar("Part")
_RELOADED = ("router", "planner")
"""sections of parts that reload them"""


def router_settings(old: Configuration, read: Read) -> Callable[[], RouterConfig]:
    """Return a function that reads the settings for a router that runs with `old`. It raises ValueError for
    invalid settings, or if settings that need a restart differ."""
    return _settings(RouterConfig, old, read)


def planner_settings(old: Configuration, read: Read) -> Callable[[], MigrationConfig]:
    """Return the same function for a planner."""
    return _settings(MigrationConfig, old, read)


def _settings(kind: type[Part], old: Configuration, read: Read) -> Callable[[], Part]:
    def settings() -> Part:
        try:
            new = read()
            _check_elsewhere(old, new)
            return new.part(kind)
        except ConfigError as error:
            raise ValueError(str(error)) from error

    return settings


def check(old: Configuration, new: Configuration) -> None:
    """Raise ConfigError if a process that runs with the old settings could not apply the new ones without a
    restart."""
    new.check()
    _check_elsewhere(old, new)
    for report in (
        router.reload.reloaded(old.part(RouterConfig), new.part(RouterConfig), 0),
        migration.reload.reloaded(old.part(MigrationConfig), new.part(MigrationConfig), 0),
    ):
        if report.refused is not None:
            raise ConfigError(report.refused)


def _check_elsewhere(old: Configuration, new: Configuration) -> None:
    """Check the sections of parts that do not reload."""
    before = dict(old.items())
    fixed = [
        f"{section}.{key} ({setting.source})"
        for (section, key), setting in new.items()
        if section not in _RELOADED
        and ((section, key) not in before or setting.value != before[section, key].value)
    ]
    if fixed:
        raise ConfigError(f"these settings need a restart: {', '.join(fixed)}; nothing was changed")
