"""Settings of the plugin, from the environment of vLLM's processes."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

PATIENCE_SECONDS = 600.0
"""Time without an agent after which `ROOST_FALLBACK=vllm` takes effect."""


class Settings(NamedTuple):
    """Settings of the plugin."""

    host: str
    port: int
    secret: bytes
    fallback: bool = False
    """after `patience` seconds without an agent vLLM's own policy takes over"""
    asynchronous: bool = False
    """maps are taken under asynchronous EPLB, which no test has run"""
    patience: float = PATIENCE_SECONDS
    fault: str = ""
    """why there are no settings: this worker takes part in nothing, and tells the other ranks so"""


def from_environment(environment: Mapping[str, str]) -> Settings | None:
    """Return the settings; None without `ROOST_AGENT`: then the plugin does nothing. ValueError for a value
    that is wrong, and for a secret that is missing."""
    agent = environment.get("ROOST_AGENT", "")
    if not agent:
        return None
    host, _, port = agent.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"ROOST_AGENT is {agent!r}; give it as HOST:PORT, for example 127.0.0.1:7200")
    return Settings(
        host=host.strip("[]"),
        port=int(port),
        secret=_secret(environment.get("ROOST_SECRET_FILE", "")),
        fallback=_option(environment, "ROOST_FALLBACK", "vllm"),
        asynchronous=_option(environment, "ROOST_ASYNC", "experimental"),
        patience=_seconds(environment, "ROOST_PATIENCE_SECONDS", PATIENCE_SECONDS),
    )


def _secret(name: str) -> bytes:
    if not name:
        raise ValueError(
            "ROOST_AGENT is set, ROOST_SECRET_FILE is not; name the file that holds the agent's secret"
        )
    try:
        secret = Path(name).read_bytes().strip()
    except OSError as error:
        raise ValueError(f"ROOST_SECRET_FILE {name!r} cannot be read: {error.strerror}") from None
    if not secret:
        raise ValueError(f"ROOST_SECRET_FILE {name!r} is empty; put the agent's secret into it")
    return secret


def _seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    value = environment.get(name, "")
    if not value:
        return default
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{name} is {value!r}; give a number of seconds, for example {default:.0f}")
    return seconds


def _option(environment: Mapping[str, str], name: str, word: str) -> bool:
    value = environment.get(name, "")
    if value not in ("", word):
        raise ValueError(f"{name} is {value!r}; it may be {word!r} or unset")
    return value == word
