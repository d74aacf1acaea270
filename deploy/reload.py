"""Reading settings again while something runs with them: only the router's may differ, and only as `router.reload` says."""

from collections.abc import Callable

from deploy.config import ConfigError, Configuration
from router.config import RouterConfig
from router.reload import reloaded

Read = Callable[[], Configuration]
"""Read defaults, file, environment and flags as they are now. ConfigError when they cannot be used."""


def router_settings(old: Configuration, read: Read) -> Callable[[], RouterConfig]:
    """Reads the settings for a router that runs with the old ones. ValueError when they cannot be used, or others differ that need a restart."""

    def settings() -> RouterConfig:
        try:
            new = read()
            _check_elsewhere(old, new)
            return new.part(RouterConfig)
        except ConfigError as error:
            raise ValueError(str(error)) from error

    return settings


def check(old: Configuration, new: Configuration) -> None:
    """ConfigError when something that runs with the old settings could not take the new ones without a restart."""
    new.check()
    _check_elsewhere(old, new)
    refused = reloaded(old.part(RouterConfig), new.part(RouterConfig), 0).refused
    if refused is not None:
        raise ConfigError(refused)


def _check_elsewhere(old: Configuration, new: Configuration) -> None:
    """Sections other than the router's are read by parts that do not read again."""
    before = dict(old.items())
    fixed = [
        f"{section}.{key} ({setting.source})" for (section, key), setting in new.items() if section != "router" and setting.value != before[section, key].value
    ]
    if fixed:
        raise ConfigError(f"these settings need a restart: {', '.join(fixed)}; nothing was changed")
