"""Copies that let load out of where it is stuck. Pure.

After `migration.reweight` the ranks of a layer that are still above the cap cannot push their load anywhere: all holders of their experts are as full
as they are. What stands above the cap, summed over ranks, is the layer's *excess*, and weights alone will not lower it (it is the deficiency of a
flow from experts through holders into ranks of that capacity). A copy does if it leads out: an expert of a crowded rank gets a replica where there is
room, in an empty slot or in place of a spare replica whose own load fits elsewhere. Layers go on at once, a copy each at a time:

1. Which expert: of the fullest rank's, the one by which most excess could leave, its own rank's and that of ranks that can push load to it.
2. Where to: the slots that promise most: room of the rank and of those it can push load to, less what the replica that gives way leaves without a place.
3. Proof: the copy is made in a trial, the weights flow for some rounds, and the excess must have fallen. What does not prove itself is not tried again
   until something else has changed. The fewer layers are left, the more slots each tries at a time.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.placement import EMPTY
from migration.changes import NONE, NOWHERE, Changes, Kind, Table, joined
from migration.limits import Limits
from migration.reweight import Places, Shared, Values, diffused

SETTLING = 10
"""rounds of flow after a copy"""
ROWS = 64
"""copies tried at a time, all layers together: as many slots of a layer as that leaves for each"""
MOST_TRIALS = 6
"""slots of a layer tried at a time"""
PATIENCE = 3
"""times that a layer's best slots may all fail to prove themselves"""
PROOF = 0.25
"""of what a copy promised"""
HOMELESS = 0.2
"""what a unit of load costs, in units of excess, that must flow on from the ranks which a replica that gives way leaves it to"""
NEAR_CAP = 1e-4
"""above the cap by less than this, in mean rank loads, is at the cap"""
_ROOM_TO_GROW = 8
"""further elements that arrays have columns for"""
_TINY = 1e-9
Flags = NDArray[np.bool_]


def outlets(table: Table, load: Values, parts: Shared, served: Values, cap: Values, wanted: Flags, limits: Limits, node: NDArray[np.intp] | None) -> Changes:
    """The copies that bring the layers that are `wanted` [layers] to their `cap` [layers], or as near as could be found.

    load: [layers, experts] in mean rank loads; parts, served: the table's shared slots, and what they serve once weights have flowed.
    """
    found = [NONE]
    crowds = _crowds(table, load, parts, served, cap, limits, node).taken(wanted)
    while len(crowds.layer):
        found.append(_round(crowds))
        crowds = crowds.taken((crowds.excess() > NEAR_CAP) & (crowds.fails < PATIENCE))
    return joined(found)


@dataclass(slots=True)
class _Crowds:
    """The layers still worked on, a of them. An *element* is a slot whose expert has several replicas, or an empty one; up to m of a layer.

    Rank number `ranks` and expert number `experts` are nobody: unused elements belong to them, and empty slots to that expert.
    """

    dead: Flags
    """[ranks + 1]: of no layer; nobody is dead"""
    layer: Places
    table: Table
    """[a, slots]"""
    load: Values
    """[a, experts + 1], in mean rank loads"""
    cap: Values
    """[a]"""
    replicas: NDArray[np.int64]
    """[a, experts + 1]: live holders"""
    least: NDArray[np.int64]
    """[a, experts + 1]: an expert with no more live holders keeps them"""
    most: NDArray[np.int64]
    """[a, experts + 1]: and with so many gets no more"""
    alone: Values
    """[a, ranks + 1]: load of experts that are in no element"""
    slot: Places
    """[a, m]; NOWHERE: unused"""
    rank: Places
    """[a, m]"""
    expert: Places
    """[a, m]"""
    served: Values
    """[a, m]"""
    new: Flags
    """[a, m]: brought by this plan"""
    failed: Flags
    """[a, m]: tried in vain since the last copy"""
    fails: Places
    """[a]: rounds in vain since the last copy"""

    def taken(self, which: Flags) -> "_Crowds":
        """Some of the layers."""
        return self if which.all() else _Crowds(self.dead, *(getattr(self, part.name)[which] for part in fields(self)[1:]))

    def loads(self) -> Values:
        """[a, ranks + 1]"""
        return np.asarray(self.alone + _summed(self.served, self.rank, len(self.dead)))

    def excess(self) -> Values:
        """[a]: what stands above the cap."""
        return np.asarray(_over(self.loads(), self.cap, self.dead).sum(axis=1))


def _over(loads: Values, cap: Values, dead: Flags) -> Values:
    """[a, ranks + 1]: load above the cap."""
    return np.asarray(np.where(dead, 0.0, np.maximum(loads - cap[:, None], 0.0)))


def _summed(values: Values, place: Places, places: int) -> Values:
    """[a, places]: values [a, m] added up by place [a, m]."""
    rows = len(values)
    return np.asarray(np.bincount((place + places * np.arange(rows)[:, None]).ravel(), values.ravel(), rows * places).reshape(rows, places), np.float64)


def _crowds(table: Table, load: Values, parts: Shared, served: Values, cap: Values, limits: Limits, node: NDArray[np.intp] | None) -> _Crowds:
    layers, slots = table.shape
    experts, ranks = load.shape[1], len(parts.alone) // layers
    rank = np.arange(slots) // (slots // ranks)
    dead = np.append(np.zeros(ranks, bool) if limits.live is None else ~limits.live, True)
    free = np.flatnonzero((table == EMPTY) & ~dead[rank])
    position = np.sort(np.concatenate([parts.slot, free]))
    layer, slot = np.divmod(position, slots)
    column = np.arange(len(position)) - np.searchsorted(layer, np.arange(layers))[layer]
    width = int(column.max(initial=-1)) + 1 + _ROOM_TO_GROW
    shape = (layers, width)
    flat = np.zeros(table.size)
    flat[parts.slot] = served
    slots_at, ranks_at, experts_at, served_at = np.full(shape, NOWHERE, np.intp), np.full(shape, ranks), np.full(shape, experts), np.zeros(shape)
    slots_at[layer, column] = slot
    ranks_at[layer, column] = rank[slot]
    experts_at[layer, column] = np.where(table[layer, slot] == EMPTY, experts, table[layer, slot])
    served_at[layer, column] = flat[position]
    held = (table != EMPTY) & ~dead[rank]
    replicas = np.bincount((np.arange(layers)[:, None] * (experts + 1) + table)[held], minlength=layers * (experts + 1)).reshape(layers, experts + 1)
    least, most = _bounds(replicas, ranks - int(dead[:-1].sum()), limits, node)
    padded = np.pad(load, ((0, 0), (0, 1)))
    alone = np.pad(parts.alone.reshape(layers, ranks), ((0, 0), (0, 1)))
    new, failed, fails = np.zeros(shape, bool), np.zeros(shape, bool), np.zeros(layers, np.intp)
    return _Crowds(
        dead, np.arange(layers), table.copy(), padded, cap, replicas, least, most, alone, slots_at, ranks_at, experts_at, served_at, new, failed, fails
    )


def _bounds(replicas: NDArray[np.int64], ranks: int, limits: Limits, node: NDArray[np.intp] | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(least, most) live holders [layers, experts + 1]; for nobody 0 and 0: an empty slot gives way at once, and nothing is copied into it as such.

    Where there are several nodes, replicas of experts that must keep more than one stay where they are: they may be spread on purpose.
    """
    least, most = np.ones_like(replicas), np.full_like(replicas, ranks if limits.most_replicas is None else min(ranks, limits.most_replicas))
    if limits.least_replicas is not None:
        spread = node is not None and int(node.max()) > 0
        least[:, :-1] = np.where(spread & (limits.least_replicas > 1), replicas[:, :-1], np.maximum(limits.least_replicas, 1))
    if limits.frozen is not None:
        least[:, :-1] = np.where(limits.frozen, replicas[:, :-1], least[:, :-1])
        most[:, :-1] = np.where(limits.frozen, 0, most[:, :-1])
    least[:, -1], most[:, -1] = -1, 0
    return least, most


class _Sight(NamedTuple):
    """What the layers look like: [a, m] of elements, [a, ranks + 1] of ranks, in mean rank loads."""

    loads: Values
    leaving: Values
    """[a, ranks + 1]: excess of a rank, and of those that can push load to it"""
    out: Values
    """[a, experts + 1]: excess that could leave through a further replica"""
    space: Values
    """[a, m]: room of the element's rank without it, and of ranks that this can push load to"""
    homeless: Values
    """[a, m]: what it serves and the other holders have no room for"""
    lost: Values
    """[a, m]: nor the ranks that these can push load to"""


def _sight(crowds: _Crowds) -> _Sight:
    ranks, experts = len(crowds.dead), crowds.load.shape[1]
    rows = np.arange(len(crowds.layer))[:, None]
    loads, y = crowds.loads(), crowds.served
    over = _over(loads, crowds.cap, crowds.dead)
    signed = np.where(crowds.dead, 0.0, crowds.cap[:, None] - loads)
    room = np.maximum(signed, 0.0)[rows, crowds.rank]
    pressed = np.minimum(y, over[rows, crowds.rank])
    leaving = over + _summed(_summed(pressed, crowds.expert, experts)[rows, crowds.expert] - pressed, crowds.rank, ranks)
    out = np.minimum(crowds.load, _summed(np.minimum(y, leaving[rows, crowds.rank]), crowds.expert, experts))
    elsewhere = _summed(room, crowds.expert, experts)[rows, crowds.expert] - room
    passing = np.where(crowds.expert < experts - 1, np.minimum(y, elsewhere), 0.0)
    onward = _summed(passing, crowds.rank, ranks)[rows, crowds.rank]
    beyond = _summed(room + onward, crowds.expert, experts)[rows, crowds.expert] - room - onward
    space = np.maximum(signed[rows, crowds.rank] + y + onward - passing, 0.0)
    return _Sight(loads, leaving, out, space, np.maximum(y - elsewhere, 0.0), np.maximum(y - beyond, 0.0))


def _round(crowds: _Crowds) -> Changes:
    """One copy in each layer that has one that proves itself."""
    sight = _sight(crowds)
    expert, flow = _chosen(crowds, sight)
    promise = _promises(crowds, sight, expert, flow)
    row, element = _best(promise, int(np.clip(ROWS // len(crowds.layer), 1, MOST_TRIALS)))
    _admit(crowds, expert)
    trial = _tried(crowds, sight, row, element, expert[row], np.minimum(flow[row], sight.space[row, element]))
    before = _over(sight.loads, crowds.cap, crowds.dead).sum(axis=1)
    left = np.full(promise.shape, np.inf)
    left[row, element] = trial.excess
    best = left.argmin(axis=1)
    promised = np.minimum(flow, sight.space[np.arange(len(best)), best])
    proven = before - left[np.arange(len(left)), best] > PROOF ** (1 + crowds.fails) * promised
    crowds.failed[row, element] = True
    crowds.failed[proven] = False
    crowds.fails = np.where(proven, 0, crowds.fails + 1)
    made = proven[row] & (best[row] == element)
    return _make(crowds, row[made], element[made], expert[row[made]], trial.served[made])


def _chosen(crowds: _Crowds, sight: _Sight) -> tuple[Places, Values]:
    """([a] expert of the fullest rank by which most excess could leave, [a] how much; 0: none)."""
    a = len(crowds.layer)
    rows = np.arange(a)
    rank = np.where(crowds.dead, -np.inf, sight.loads).argmax(axis=1)
    here = crowds.table.reshape(a, len(crowds.dead) - 1, -1)[rows, rank].astype(np.intp)
    each = rows[:, None]
    flow = np.where(crowds.replicas[each, here] > 1, sight.out[each, here], np.minimum(crowds.load[each, here], sight.leaving[rows, rank][:, None]))
    flow = np.where((here != EMPTY) & (crowds.replicas[each, here] < crowds.most[each, here]), flow, 0.0)
    order = np.argsort(-flow - 1e-3 * np.where(flow > 0, crowds.load[each, here], 0.0), axis=1, kind="stable")
    pick = order[rows, np.minimum(crowds.fails, order.shape[1] - 1)]
    return here[rows, pick], flow[rows, pick]


def _promises(crowds: _Crowds, sight: _Sight, expert: Places, flow: Values) -> Values:
    """[a, m]: by how much the excess should fall when the element gives way to the layer's expert; -inf where it must not."""
    a = len(expert)
    rows = np.arange(a)[:, None]
    holds = np.ones((a, len(crowds.dead)), bool)
    holds[:, :-1] = (crowds.table == expert[:, None]).reshape(a, len(crowds.dead) - 1, -1).any(axis=2) | crowds.dead[:-1]
    spare = crowds.replicas[rows, crowds.expert] > crowds.least[rows, crowds.expert]
    free = spare & ~crowds.new & ~crowds.failed & ~holds[rows, crowds.rank] & (flow > 0)[:, None]
    return np.where(free, np.minimum(flow[:, None], sight.space) - sight.lost - HOMELESS * sight.homeless, -np.inf)


def _best(promise: Values, most: int) -> tuple[Places, Places]:
    """(row, element) of the best promises of each row, at most so many of it."""
    top = promise.argmax(axis=1)[:, None] if most == 1 else np.argpartition(-promise, most, axis=1)[:, :most]
    row, nth = np.nonzero(np.take_along_axis(promise, top, 1) > -np.inf)
    return row, top[row, nth]


def _admit(crowds: _Crowds, expert: Places) -> None:
    """Makes elements of the slots of experts that have had one holder until now."""
    row = np.flatnonzero((crowds.replicas[np.arange(len(expert)), expert] == 1) & ~(crowds.expert == expert[:, None]).any(axis=1))
    if not len(row):
        return
    column = (crowds.slot != NOWHERE).sum(axis=1)[row]
    if int(column.max()) >= crowds.slot.shape[1]:
        _widen(crowds)
    slot = (crowds.table[row] == expert[row, None]).argmax(axis=1)
    rank = slot // (crowds.table.shape[1] // (len(crowds.dead) - 1))
    load = crowds.load[row, expert[row]]
    crowds.slot[row, column], crowds.rank[row, column], crowds.expert[row, column], crowds.served[row, column] = slot, rank, expert[row], load
    crowds.alone[row, rank] -= load


def _widen(crowds: _Crowds) -> None:
    """More columns for elements."""
    nobody = {"slot": NOWHERE, "rank": len(crowds.dead) - 1, "expert": crowds.load.shape[1] - 1, "served": 0.0, "new": False, "failed": False}
    for name, value in nobody.items():
        setattr(crowds, name, np.pad(getattr(crowds, name), ((0, 0), (0, _ROOM_TO_GROW)), constant_values=value))


class _Trial(NamedTuple):
    """t copies, each in its own layer as it stands."""

    served: Values
    """[t, m]"""
    excess: Values
    """[t]"""


def _tried(crowds: _Crowds, sight: _Sight, row: Places, element: Places, expert: Places, moved: Values) -> _Trial:
    """What weights make of it when `element` of the layer `row` holds `expert` [t], from a start where it serves `moved` [t]."""
    nth = np.arange(len(row))
    held, rank, served, whole = crowds.expert[row], crowds.rank[row], crowds.served[row], crowds.load[row]
    gone, left = held[nth, element].copy(), served[nth, element].copy()
    held[nth, element] = -1
    room = np.where(held == gone[:, None], np.maximum(crowds.cap[:, None] - sight.loads, 0.0)[row[:, None], rank] + 1e-3, 0.0)
    served += room * (left / np.maximum(room.sum(axis=1), _TINY))[:, None]
    served *= np.where(held == expert[:, None], (1.0 - moved / np.maximum(whole[nth, expert], _TINY))[:, None], 1.0)
    held[nth, element], served[nth, element] = expert, moved
    ranks, experts, each = len(crowds.dead), whole.shape[1], nth[:, None]
    alone = crowds.alone[row]
    none = np.empty(0, np.intp)
    parts = Shared(none, none, (held + experts * each).ravel(), (rank + ranks * each).ravel(), np.empty(0), alone.ravel(), len(row) * experts, none)
    served = diffused(parts, served.ravel(), SETTLING)
    loads = parts.of_rank(served).reshape(-1, ranks)
    return _Trial(served.reshape(held.shape), _over(loads, crowds.cap[row], crowds.dead).sum(axis=1))


def _make(crowds: _Crowds, row: Places, element: Places, expert: Places, served: Values) -> Changes:
    """Makes one copy in each layer of `row`."""
    before = np.where(crowds.dead, 0.0, crowds.loads()[row]).max(axis=1)
    slot, gone = crowds.slot[row, element], crowds.expert[row, element]
    crowds.replicas[row, gone] -= gone != crowds.load.shape[1] - 1
    crowds.replicas[row, expert] += 1
    crowds.table[row, slot] = expert
    crowds.expert[row, element], crowds.new[row, element], crowds.served[row] = expert, True, served
    after = np.where(crowds.dead, 0.0, crowds.loads()[row]).max(axis=1)
    n = len(row)
    return Changes(
        np.full(n, Kind.REPLICATE, np.uint8),
        crowds.layer[row].astype(np.int32),
        slot.astype(np.int32),
        expert.astype(np.int16),
        np.full(n, NOWHERE, np.int32),
        np.full(n, EMPTY, np.int16),
        before - after,
    )
