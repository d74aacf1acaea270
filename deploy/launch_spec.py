"""What a supervisor tells a child process, and how the child answers: by making a file once it is ready."""

from pathlib import Path
from typing import Literal

import msgspec

PartName = Literal["router", "tracker", "planner", "rank", "simulated"]


class RankLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """Which rank of which incarnation of an engine a process is; a simulated engine's is all of them, and called 0."""

    engine: str
    rank: int
    worker_id: int
    urls: tuple[str, ...]
    meet: str
    """folder of this incarnation, where the ranks meet"""
    replaces: int | None = None
    """worker_id of the incarnation before, which is dead"""


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What `python -m deploy` gets as its one argument, as JSON."""

    part: PartName
    config: str
    """roost.toml with everything that is set"""
    ready: str
    """file to make once the part serves; of rank 0: once the engine's join is recorded"""
    number: int | None = None
    """which of several processes of the part this is"""
    descriptor: int | None = None
    """listening socket of a part with an HTTP face"""
    descriptors: tuple[int, ...] = ()
    """those of a simulated engine's ranks"""
    private: int | None = None
    """listening socket of this process alone, where several share a port"""
    bus: bool = True
    """False: a router before plain servers only, without NATS"""
    rank: RankLaunch | None = None
    credentials: str | None = None
    """file with the login of this process on NATS; None: as the configuration says"""


def tell(ready: Path | None) -> None:
    """Make the file a supervisor waits for, if there is one."""
    if ready is not None:
        ready.touch()


def take_back(ready: Path | None) -> None:
    """Remove that file: this process finishes what it has, and answers no health probes any more."""
    if ready is not None:
        ready.unlink(missing_ok=True)
