"""Copies that one rank makes when all layers of an engine turn over at once, in cells of known numbers. Pure.

A rank's first `layers * slots` cells hold the whole layers, slot by slot; as many more hold the sharded ones,
group by group. So both forms lie in memory together, and each is turned into the other any number of times.
"""

from typing import NamedTuple

import numpy as np

from engine_adapter.handover.inbound_copies import CellRead
from fleet.placement import Placement, linear, with_rows
from fleet.sharding import group_of, turn


class Forms(NamedTuple):
    """Both forms of an engine's layers."""

    whole: Placement
    sharded: Placement

    def turn(self, *, to_sharded: bool) -> tuple[Placement, Placement]:
        """Return the placements before and after."""
        return (self.whole, self.sharded) if to_sharded else (self.sharded, self.whole)


class PartRead(NamedTuple):
    """A part of an expert that one rank copies."""

    layer: int
    expert: int
    part: int
    source: int
    """Rank."""
    read: CellRead


def forms(*, layers: int, experts: int, ranks: int) -> Forms:
    """Return the forms of an engine whose experts lie in order, as many slots as needed."""
    whole = linear(layers=layers, experts=experts, ranks=ranks)
    return Forms(whole, with_rows(whole, dict.fromkeys(range(layers)), epoch=1))


def part_reads(engine: Forms, rank: int, *, to_sharded: bool) -> list[PartRead]:
    """Return what a rank copies to turn all layers over, in the order in which an engine does."""
    before, after = engine.turn(to_sharded=to_sharded)
    found = []
    for layer, expert, part, source, _ in zip(*turn(before, after).to(rank), strict=True):
        group, position = group_of(int(expert), before.ranks)
        slots = before.slots_per_rank
        sharded = (before.layers + int(layer)) * slots + group
        holder = int(source) if to_sharded else rank
        slot = int(np.flatnonzero(engine.whole.on_rank(holder)[layer] == expert)[0])
        whole = int(layer) * slots + slot
        read = (
            CellRead(whole, int(part), sharded, position, True)
            if to_sharded
            else CellRead(sharded, position, whole, int(part), False)
        )
        found.append(PartRead(int(layer), int(expert), int(part), int(source), read))
    return found
