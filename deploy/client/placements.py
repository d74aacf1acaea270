"""Placements of each engine: the current one, and the first one of its current incarnation."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bus import Bus
from bus.protocol.subjects import Subjects
from deploy.client.fleet_status import members
from deploy.client.migrations import NoSuchEngine, engine_named
from fleet.dispatch import numbered
from fleet.facts.engines import EngineJoined
from fleet.facts.placements import PlacementCommitted
from fleet.placement import Placement


class Placements(NamedTuple):
    """Placements of one engine."""

    joined: EngineJoined
    first: Placement | None
    """placement in the engine's join; None: the join had none"""
    now: Placement

    @property
    def node(self) -> NDArray[np.intp]:
        """Return the machine index of each rank, [ranks], numbered from 0."""
        return np.array(numbered(self.joined.nodes or (self.joined.node,) * self.now.ranks), np.intp)


async def placements(bus: Bus, subjects: Subjects) -> dict[str, Placements]:
    """Return the placements of each member: the last recorded placement, or that of its join if none is
    newer."""
    joins = {engine.joined.engine: engine.joined for engine in await members(bus, subjects)}
    first = {
        name: Placement.from_record(joined.served)
        for name, joined in joins.items()
        if joined.served is not None
    }
    last = dict(first)
    async for received in bus.replay(subjects.placements(), latest=True, follow=False):
        message = received.message
        if (
            isinstance(message, PlacementCommitted)
            and message.engine in joins
            and joins[message.engine].worker_id == message.worker_id
        ):
            last[message.engine] = Placement.from_record(message.served)
    return {name: Placements(joins[name], first.get(name), now) for name, now in last.items()}


async def placements_of(bus: Bus, subjects: Subjects, engine: str | None) -> dict[str, Placements]:
    """Return the placements of one engine, by its full or short name, or (None) of all. Raises
    NoSuchEngine."""
    found = await placements(bus, subjects)
    if engine is None:
        return found
    name = (await engine_named(bus, subjects, engine)).engine
    if name not in found:
        raise NoSuchEngine(f"engine {name!r} has stated no placement")
    return {name: found[name]}
