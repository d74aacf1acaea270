"""A placement made for locality, brought under a cap of rank load: the fullest rank exchanges or shares out what costs least locality. Pure.

New weights come first (`migration.reweight`, nothing moves for them). Where they do not suffice, the fullest rank of a layer either exchanges an
expert with another rank, or another rank takes a replica of one of its experts in place of a spare one; of all such exchanges the one that
loses least worth per load it takes from the fullest rank, again and again until the cap is kept or nothing helps.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.placement import EMPTY, Split
from migration.reweight import ROUNDS, Shared, Wants, diffused, shared, split_of
from migration.worth import Held, Worth

Table = NDArray[np.int16]
Values = NDArray[np.float64]
_STEPS = 8
"""exchanges of a layer between two looks at the weights"""
_LOOKS = 40
_PATIENCE = 6
"""looks that found no fullest rank less full before a layer is given up"""
_TINY = 1e-9
_PACE = 0.6
"""share of a rank's excess that flows off in a round, of each pool"""
_LITTLE = 0.3
"""of the most that any exchange could take off the fullest rank"""


def table_of(held: Held, slots: int) -> Table:
    """int16 [layers, ranks * slots]: experts of each rank in ascending order, then empty slots."""
    layers, ranks, experts = held.shape
    order = np.argsort(~held, axis=2, kind="stable")[:, :, : min(slots, experts)]
    table = np.full((layers, ranks, slots), EMPTY, np.int16)
    table[:, :, : order.shape[2]] = np.where(np.take_along_axis(held, order, 2), order, EMPTY)
    return table.reshape(layers, ranks * slots)


def held_of(table: Table, ranks: int, experts: int) -> Held:
    """bool [layers, ranks, experts]."""
    layers, slots = table.shape
    held = np.zeros((layers, ranks, experts), bool)
    layer, slot = np.nonzero(table != EMPTY)
    held[layer, slot // (slots // ranks), table[layer, slot]] = True
    return held


class Level(NamedTuple):
    """What replicas serve once weights have levelled ranks as far as they can while every node serves what it can of its own. Flat, as in `Shared`."""

    wants: Wants
    parts: Shared
    home: Values
    """[n]: of what a slot serves, the part that is its own rank's or node's"""
    each: Values
    """[n]"""

    @property
    def load(self) -> Values:
        """[layers, ranks], in units of the layer's mean."""
        return self.parts.of_rank(self.each).reshape(-1, self.wants.ranks)

    def slots(self, table: Table) -> Values:
        """[layers, slots]: what each slot serves, replicas or not."""
        each = np.where(table == EMPTY, 0.0, np.take_along_axis(self.wants.load, np.where(table == EMPTY, 0, table).astype(np.intp), 1)).reshape(-1)
        each[self.parts.slot] = self.each
        return each.reshape(table.shape)


def level(table: Table, demand: NDArray[Any], ranks: int, node: NDArray[np.intp]) -> Level:
    """By diffusion, as in `migration.reweight`, in two pools: a node's own flow among its replicas, what is left among all.

    demand: [ranks, layers, experts].
    """
    wants = Wants(demand, ranks, node, None)
    parts = shared(table, wants.load, ranks)
    own = wants.own(parts)
    near, cell, cells = np.zeros_like(own), parts.group, parts.groups
    if wants.node is not None:
        nodes = int(node.max()) + 1
        cell, cells = wants.node[parts.rank % ranks] * parts.groups + parts.group, nodes * parts.groups
        wanted = wants.of_nodes(parts).reshape(-1)
        near = (np.maximum(wanted - np.bincount(cell, own, cells), 0.0) / np.maximum(np.bincount(cell, minlength=cells), 1))[cell]
    far = np.maximum(parts.whole - parts.of_group(own + near), 0.0) / parts.replicas
    width = _PACE / np.maximum(np.bincount(parts.rank, minlength=len(parts.alone)), 1)[parts.rank]
    for _ in range(ROUNDS):
        height = parts.of_rank(own + near + far)[parts.rank]
        far = _flowed(far, height, width, parts.group, parts.groups)
        if wants.node is not None:
            near = _flowed(near, height, width, cell, cells)
    return Level(wants, parts, own + near, own + near + far)


def _flowed(pool: Values, height: Values, width: Values, group: NDArray[np.intp], groups: int) -> Values:
    """From where it stands higher than its group's mean to where it stands lower; each group keeps its sum."""
    total = np.bincount(group, pool, groups)
    mean = np.bincount(group, pool * height, groups) / np.maximum(total, _TINY)
    flowed = np.maximum(pool + width * (mean[group] - height), 0.0)
    return np.asarray(flowed * (total / np.maximum(np.bincount(group, flowed, groups), _TINY))[group])


def split_under(table: Table, demand: NDArray[Any], ranks: int, node: NDArray[np.intp], cap: float) -> Split:
    """The split that levels ranks at home first; ranks that stay above `cap` times the mean give away what they could serve at home."""
    found = level(table, demand, ranks, node)
    each = diffused(found.parts, found.each, own=np.minimum(found.home, found.each), enough=cap)
    return split_of(table, found.parts, each, found.wants)


class _Layers(NamedTuple):
    """Layers that are worked on, all arrays by them first; changed in place."""

    table: Table
    held: Held
    near: NDArray[np.int64]
    """[layers, nodes, experts] replicas on each node"""
    each: Values
    load: Values
    demand: Values
    """[layers, ranks, experts] in units of the mean rank load"""


def levelled(table: Table, demand: NDArray[Any], worth: Worth, cap: float, most: int, home: Held | None = None) -> Table:
    """The table after exchanges that bring every layer's fullest rank to at most `cap` times the mean where they can; the argument is left as it was.

    demand: [ranks, layers, experts]. most: replicas of an expert. home: bool [layers, ranks, experts] where one replica must stay; None: anywhere.
    """
    table, ranks = table.copy(), len(worth.node)
    busy, least = np.arange(len(table)), np.full(len(table), np.inf)
    failed = np.zeros(len(table), int)
    best = table.copy()
    for _ in range(_LOOKS):
        found = level(table[busy], demand[:, busy], ranks, worth.node)
        each, load = found.slots(table[busy]), found.load
        fullest = load.max(axis=1)
        better = fullest < least[busy] - _TINY
        best[busy[better]], least[busy[better]] = table[busy[better]], fullest[better]
        failed[busy] = np.where(better, 0, failed[busy] + 1)
        going = (fullest > cap) & (failed[busy] < _PATIENCE)
        busy, each, load = busy[going], each[going], load[going]
        if not len(busy):
            break
        allowed = np.where(failed[busy] % 2 == 1, 1, most)  # what further replicas take over is a guess: where it was wrong, they are not what helps
        table[busy] = _exchanged(table[busy], each, load, demand[:, busy], worth.at(busy), cap, allowed, None if home is None else home[busy])
    return best


def _exchanged(table: Table, each: Values, load: Values, demand: NDArray[Any], worth: Worth, cap: float, most: NDArray[np.intp], home: Held | None) -> Table:
    """After a few exchanges in each of these layers; loads are carried along as if weights stayed as they are."""
    wanted = demand.transpose(1, 0, 2) / np.maximum(demand.sum(axis=(0, 2)) / len(demand), _TINY)[:, None, None]
    held = held_of(table, len(worth.node), wanted.shape[2])
    state = _Layers(table.copy(), held, worth.near(held), each.copy(), load.copy(), wanted)
    for _ in range(_STEPS):
        rows = np.flatnonzero(state.load.max(axis=1) > cap)
        if not len(rows):
            break
        _step(state, rows, worth, cap, most, home)
    return state.table


def _step(state: _Layers, rows: NDArray[np.intp], worth: Worth, cap: float, most: NDArray[np.intp], home: Held | None) -> None:
    """The best exchange of each of these layers is made."""
    full = state.load[rows].argmax(axis=1)
    ranks = len(worth.node)
    per = state.table.shape[1] // ranks
    here = full[:, None] * per + np.arange(per)
    at = rows[:, None]
    mine, theirs = state.table[at, here].astype(np.intp)[:, :, None], state.table[rows].astype(np.intp)[:, None, :]
    there = (np.arange(ranks).repeat(per))[None, None, :]
    row, source = rows[:, None, None], full[:, None, None]
    # what is served by the two slots, where they are and where they would be: of a replica, another part is of its own rank
    sent, back = state.each[at, here][:, :, None], state.each[rows][:, None, :]
    pull = (state.demand[row, there, mine] - state.demand[row, source, mine]) * (state.held[row, :, mine].sum(axis=-1) > 1)
    drag = (state.demand[row, source, theirs] - state.demand[row, there, theirs]) * (state.held[row, :, theirs].sum(axis=-1) > 1)
    loads = state.load[rows]
    top, other = np.take_along_axis(loads, full[:, None], 1)[:, :, None], loads[:, there[0, 0]][:, None, :]
    apart = (there != source) & (mine != EMPTY) & ~state.held[row, there, mine]
    free = theirs == EMPTY
    # an exchange
    fair = apart & (free | ~state.held[row, source, theirs])
    if home is not None:
        fair &= ~home[row, source, mine] | home[row, there, mine]
        fair &= free | ~home[row, there, theirs] | home[row, source, theirs]
    sent_after, back_after = np.maximum(sent + 0.5 * pull, 0.0), np.where(free, 0.0, np.maximum(back + 0.5 * drag, 0.0))
    relief = top - np.maximum(top - sent + back_after, other - back + sent_after)
    stay, gone = _gain(state, worth, row, there, source, mine), np.where(free, 0.0, _gain(state, worth, row, source, there, theirs))
    cost = _cost(-(stay + gone), relief, top - cap, fair)
    # or a replica in place of a spare one
    count = state.held[rows].sum(axis=1)
    layer = np.arange(len(rows))[:, None, None]
    spare = free | (count[layer, theirs] > 1)
    if home is not None:
        spare &= free | ~home[row, there, theirs] | ((state.held & home)[row, :, theirs].sum(axis=-1) > 1)
    may = apart & spare & (count[layer, mine] < most[rows][:, None, None])
    shared_out = np.clip(0.5 * (top - (other - back)), 0.0, sent)
    relief = top - np.maximum(top - shared_out, other - back + shared_out)
    lost = np.where(free, 0.0, _loss(state, worth, row, there, theirs)) - _fresh(state, worth, row, there, mine)
    other_cost = _cost(lost, relief, top - cap, may)
    _make(state, rows, full, here, worth.node, cost, other_cost)


def _cost(lost: Values, relief: Values, wanted: Values, may: NDArray[np.bool_]) -> Values:
    """Worth lost per load taken off the fullest rank, as far as it is wanted; infinite where it takes little of it off, or may not be.

    Little: else equal ranks hand each other crumbs for nothing, and what must leave them all never does.
    """
    useful = np.where(may, np.minimum(relief, wanted), 0.0)
    enough = np.maximum(_LITTLE * useful.max(axis=(1, 2), keepdims=True), _TINY)
    return np.where(useful >= enough, (np.maximum(lost, 0.0) + _TINY) / np.maximum(useful, _TINY), np.inf)


def _gain(state: _Layers, worth: Worth, row: Any, to: Any, origin: Any, expert: Any) -> Values:
    """Worth won when an expert's replica moves from a rank to another."""
    here, there = worth.node[origin], worth.node[to]
    own = worth.own[row, to, expert] - worth.own[row, origin, expert]
    if not worth.shared.any():
        return np.asarray(own)
    last, first = state.near[row, here, expert] == 1, state.near[row, there, expert] == 0
    return np.asarray(own + np.where(here == there, 0.0, worth.shared[row, there, expert] * first - worth.shared[row, here, expert] * last))


def _fresh(state: _Layers, worth: Worth, row: Any, to: Any, expert: Any) -> Values:
    """Worth of one more replica."""
    return np.asarray(worth.own[row, to, expert] + worth.shared[row, worth.node[to], expert] * (state.near[row, worth.node[to], expert] == 0))


def _loss(state: _Layers, worth: Worth, row: Any, origin: Any, expert: Any) -> Values:
    """Worth of a replica that is given up."""
    return np.asarray(worth.own[row, origin, expert] + worth.shared[row, worth.node[origin], expert] * (state.near[row, worth.node[origin], expert] == 1))


def _make(state: _Layers, rows: NDArray[np.intp], full: NDArray[np.intp], here: NDArray[np.intp], node: NDArray[np.intp], swap: Values, copy: Values) -> None:
    """The cheaper of the best exchange and the best replica, per layer."""
    per = here.shape[1]
    slots = state.table.shape[1]
    for at, row in enumerate(rows.tolist()):
        swapped, copied = int(swap[at].argmin()), int(copy[at].argmin())
        exchange = swap[at].flat[swapped] <= copy[at].flat[copied]
        which = swapped if exchange else copied
        if not np.isfinite((swap if exchange else copy)[at].flat[which]):
            state.load[row] = 0.0  # nothing helps here before weights are looked at again
            continue
        mine, theirs = int(here[at, which // slots]), which % slots
        rank, other = int(full[at]), theirs // per
        expert, back = int(state.table[row, mine]), int(state.table[row, theirs])
        sent, returned = state.each[row, mine], state.each[row, theirs]
        state.table[row, theirs] = expert
        state.held[row, other, expert] = True
        state.near[row, node[other], expert] += 1
        if back != EMPTY:
            state.held[row, other, back] = False
            state.near[row, node[other], back] -= 1
        if exchange:
            state.table[row, mine] = back
            state.held[row, rank, expert] = False
            state.near[row, node[rank], expert] -= 1
            if back != EMPTY:
                state.held[row, rank, back] = True
                state.near[row, node[rank], back] += 1
            state.each[row, mine], state.each[row, theirs] = returned, sent
            moved = sent - returned
        else:
            moved = min(max(0.5 * (state.load[row, rank] - state.load[row, other] + returned), 0.0), sent)
            state.each[row, mine], state.each[row, theirs] = sent - moved, moved
            state.load[row, other] -= returned
        state.load[row, rank] -= moved
        state.load[row, other] += moved
