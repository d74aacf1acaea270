"""Messages between supervisor and child: the launch spec, and a file that the child creates once it is
ready."""

from pathlib import Path
from typing import Literal

import msgspec

PartName = Literal["router", "tracker", "planner", "rank", "simulated"]


class RankLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """Rank and engine incarnation that a process runs. The one process of a simulated engine runs all ranks,
    as rank 0."""

    engine: str
    rank: int
    worker_id: int
    urls: tuple[str, ...]
    meet: str
    """folder in which the ranks of this incarnation meet"""
    replaces: int | None = None
    """worker_id of the previous incarnation, which is dead"""


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """JSON argument of `python -m deploy`."""

    part: PartName
    config: str
    """roost.toml with the complete settings"""
    ready: str
    """file to create once the part serves; by rank 0: once the engine's join is stored"""
    number: int | None = None
    """index among several processes of the part"""
    descriptor: int | None = None
    """listening socket of a part with an HTTP server"""
    descriptors: tuple[int, ...] = ()
    """listening sockets of a simulated engine's ranks"""
    private: int | None = None
    """listening socket of this process alone, if several share a port"""
    bus: bool = True
    """False: without NATS, a router with static backends only, or an engine in Dynamo only"""
    rank: RankLaunch | None = None
    credentials: str | None = None
    """file with this process's NATS login; None: as configured"""


def mark_ready(ready: Path | None) -> None:
    """Create the ready file, if any, for which a supervisor waits."""
    if ready is not None:
        ready.touch()


def clear_ready(ready: Path | None) -> None:
    """Remove the ready file: this process finishes its open requests and no longer answers health probes."""
    if ready is not None:
        ready.unlink(missing_ok=True)
