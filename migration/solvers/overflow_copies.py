"""Copies that let load out of where it is stuck. Pure.

After `migration.solvers.split_weights` the ranks of a layer that are still above the cap cannot push their load anywhere: all holders of their experts are as
full
as they are. What stands above the cap, summed over ranks, is the layer's *excess*, and weights alone will not lower it (it is the deficiency of a
flow from experts through holders into ranks of that capacity). A copy does if it leads out: an expert of a crowded rank gets a replica where there is
room, in an empty slot or in place of a spare replica whose own load fits elsewhere. All layers go on at once, one copy each in a round, or several
while much is in excess:

1. Which expert: of the rank with most excess, its own and that of ranks that load flows to and fro with, the one by which most of it could leave.
2. Where to: the slots that promise most: room of the rank and of those it can push load to, less what the replica that gives way leaves without a place.
   Or two copies at once, where they promise more, or single ones have failed: the emptiest rank's smallest expert goes where it does no
   harm, and what comes in its place leads out of a crowded rank.
3. Proof: the copy is made in a trial, the weights flow for some rounds, and the excess must have fallen. By how much a slot has fallen short of its
   promise is remembered. Where all have failed, more are tried at a time, with another expert, and the best of them is taken.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.placement import EMPTY
from migration.model.constraints import Constraints
from migration.model.placement_changes import NONE, NOWHERE, ChangeKind, PlacementChanges, Table, joined
from migration.solvers.overflow_state import Flags, OverflowRanks, OverflowView, admit, crowds_of, over, sight_of, widen
from migration.solvers.split_weights import Places, SplitResult, Values, diffused

SETTLING, LONG = 5, 12
"""rounds of flow after copies, and where copies have failed"""
ROUNDS, FURTHER, MOST_ROUNDS = 8, 4.0, 18
"""rounds of copies: so many, and for every mean rank load that a layer has above its cap, on average, so many more; never more than the last"""
LANES = 10
"""copies of a layer in one attempt, at most"""
LARGE, WIDE = 1.5, 0.5
"""only layers with so large an excess make several copies at once, and these together are to move no more than this part of it"""
FULLEST = 4
"""ranks of a layer that are looked at when several copies are made at once; else only the fullest"""
TRIALS = (1, 3, 5)
"""slots of a layer tried at a time, by how often before all have failed since its last copy; after the last it is left as it is"""
PROOF = 0.25
"""of what a copy should move, so much must come off the excess; its square, cube after failures"""
LEAST = 1e-3
"""and so much, in mean rank loads, whatever it should move"""
FORGETTING = 0.5
"""what is kept of the harm learnt about slots when a layer has changed"""
NEAR_CAP = 1e-4
"""above the cap by less than this, in mean rank loads, is at the cap"""
_TINY = 1e-9


def outlets(
    table: Table, load: Values, parts: SplitResult, served: Values, cap: Values, wanted: Flags, limits: Constraints, node: NDArray[np.intp] | None
) -> PlacementChanges:
    """The copies that bring the layers that are `wanted` [layers] to their `cap` [layers], or as near as could be found.

    load: [layers, experts] in mean rank loads; parts, served: the table's shared slots, and what they serve once weights have flowed.
    """
    found = [NONE]
    crowds = crowds_of(table, load, parts, served, cap, limits, node).taken(wanted)
    excess = crowds.excess()
    rounds = ROUNDS + FURTHER * excess.mean() if len(excess) else 0
    while len(excess) and len(found) <= min(rounds, MOST_ROUNDS):
        found.append(_round(crowds, excess))
        excess = crowds.excess()
        open_ = (excess > NEAR_CAP) & (crowds.fails < len(TRIALS))
        crowds, excess = crowds.taken(open_), excess[open_]
    return joined(found)


def _round(crowds: OverflowRanks, before: Values) -> PlacementChanges:
    """Copies in each layer that has some that prove themselves. before: [a], the excess."""
    widen(crowds, LANES + 1 if (before > LARGE).any() else 2)
    sight = sight_of(crowds)
    leads = _leads(crowds, sight, before)
    attempt, exchange = _attempts(crowds, sight, leads, before), _exchanges(crowds, sight, leads, before)
    promised = np.full(len(before), -np.inf)
    np.maximum.at(promised, attempt.row, attempt.promised)
    attempt = attempt.joined(exchange.taken(np.flatnonzero((crowds.fails[exchange.row] > 0) | (exchange.promised > promised[exchange.row]))))
    trial = _tried(crowds, sight, attempt)
    fallen = before[attempt.row] - trial.excess
    alone = attempt.promise[:, 1] == -np.inf
    crowds.harm[attempt.row[alone], attempt.element[alone, 0]] += np.maximum(attempt.promise[:, 0] - fallen, 0.0)[alone]
    proven = fallen > np.maximum(PROOF ** (1 + crowds.fails[attempt.row]) * attempt.moved.sum(axis=1), LEAST)
    best = np.lexsort((-fallen, ~proven, attempt.row))
    best = best[np.diff(attempt.row[best], prepend=-1) > 0]
    best = best[proven[best]]
    crowds.fails += 1
    crowds.fails[attempt.row[best]] = 0
    crowds.harm[attempt.row[best]] *= FORGETTING
    return _make(crowds, attempt.taken(best), trial.served[best])


class _Leads(NamedTuple):
    """Experts of the fullest ranks that further replicas would help: [a, c] each."""

    expert: Places
    rank: Places
    flow: Values
    """excess that could leave through a further replica; 0: none must be made, or the expert stands in another column too"""


def _leads(crowds: OverflowRanks, sight: OverflowView, before: Values) -> _Leads:
    a, ranks = len(crowds.layer), len(crowds.dead) - 1
    rows = np.arange(a)[:, None]
    pressed = np.where(((crowds.fails % 2 == 0) & (before <= LARGE))[:, None], sight.leaving, 0.0) + sight.loads
    pressed[:, crowds.dead] = -np.inf
    fullest = min(FULLEST, ranks) if (before > LARGE).any() else 1
    rank = pressed.argmax(axis=1)[:, None] if fullest == 1 else np.argsort(-pressed, axis=1, kind="stable")[:, :fullest]
    here = crowds.table.reshape(a, ranks, -1)[rows, rank].reshape(a, -1).astype(np.intp)
    rank = np.repeat(rank, here.shape[1] // rank.shape[1], axis=1)
    alone = crowds.replicas[rows, here] == 1
    flow = np.where(alone, np.minimum(crowds.load[rows, here], sight.leaving[rows, rank]), sight.out[rows, here])
    allowed = (here != EMPTY) & (crowds.replicas[rows, here] < crowds.most[rows, here]) & ~crowds.dead[rank]
    column = np.broadcast_to(np.arange(here.shape[1]), here.shape)
    first = np.full(crowds.load.shape, here.shape[1])
    np.minimum.at(first, (rows, here), column)
    flow = np.where(allowed & (first[rows, here] == column), np.minimum(flow, before[:, None]), 0.0)
    return _Leads(here, rank, flow + 1e-3 * np.where(flow > 0, crowds.load[rows, here], 0.0))


class _Attempt(NamedTuple):
    """t attempts, each of up to LANES copies in its layer as it stands."""

    row: Places
    """[t], ascending"""
    element: Places
    """[t, LANES]"""
    expert: Places
    """[t, LANES]"""
    moved: Values
    """[t, LANES]: load that the copy should take over; 0 where there is no copy"""
    promise: Values
    """[t, LANES]: fall of the excess; -inf where there is no copy"""

    @classmethod
    def of(cls, row: Places) -> "_Attempt":
        """Attempts of no copies yet."""
        shape = (len(row), LANES)
        return cls(row, np.zeros(shape, np.intp), np.zeros(shape, np.intp), np.zeros(shape), np.full(shape, -np.inf))

    def taken(self, which: Places) -> "_Attempt":
        return _Attempt(self.row[which], self.element[which], self.expert[which], self.moved[which], self.promise[which])

    @property
    def promised(self) -> Values:
        """[t]: by all copies of the attempt."""
        return np.asarray(np.where(self.promise > -np.inf, self.promise, 0.0).sum(axis=1))

    def joined(self, other: "_Attempt") -> "_Attempt":
        both = _Attempt(*(np.concatenate(parts) for parts in zip(self, other, strict=True)))
        return both.taken(np.argsort(both.row, kind="stable"))


def _attempts(crowds: OverflowRanks, sight: OverflowView, leads: _Leads, before: Values) -> _Attempt:
    """What is to be tried: where all went well, one attempt of several copies, which together stay well below the excess; else several of one."""
    a = len(crowds.layer)
    rows = np.arange(a)
    many = before > LARGE
    leads.flow[~many[:, None] & (leads.rank != leads.rank[:, :1])] = 0.0
    _pass_over(leads.flow, crowds.fails)
    shut = np.broadcast_to(crowds.dead, (a, len(crowds.dead))).copy()
    parted = np.zeros(crowds.load.shape, bool)
    found, row, lead = None, rows, np.full(a, -1)
    spent, gained = np.zeros(a), crowds.replicas.copy()
    for lane in range(LANES):
        pick = leads.flow[row].argmax(axis=1)
        expert, flow = leads.expert[row, pick], leads.flow[row, pick]
        admit(crowds, row, expert)
        parted[row, expert] = True
        worth = np.minimum(flow[:, None], sight.space[row]) - sight.stranded[row] - crowds.harm[row]
        worth[(sight.space[row] <= LEAST) | (flow <= 0)[:, None]] = -np.inf
        promise = _promises(crowds, row, expert, worth, shut, parted)
        if found is None:
            nth, element = _best(promise, np.array(TRIALS)[crowds.fails])
            found = _Attempt.of(row[nth])
            lead[row[nth][::-1]] = np.arange(len(nth))[::-1]
            at = np.arange(len(nth))
        else:
            element = promise.argmax(axis=1)
            nth = np.flatnonzero(promise[np.arange(len(row)), element] > 0)
            element, at = element[nth], lead[row[nth]]
        worth = promise[nth, element]
        row, expert, flow, pick = row[nth], expert[nth], flow[nth], pick[nth]
        moved = np.minimum(flow, sight.space[row, element])
        found.element[at, lane], found.expert[at, lane], found.moved[at, lane], found.promise[at, lane] = element, expert, moved, worth
        spent[row] += moved
        on = many[row] & (crowds.fails[row] == 0) & (spent[row] < WIDE * before[row])
        row, element, expert, moved, pick = row[on], element[on], expert[on], moved[on], pick[on]
        if not len(row):
            break
        shut[row, crowds.rank[row, element]] = True
        parted[row, crowds.expert[row, element]] = True
        touched = (leads.rank[row] == leads.rank[row, pick][:, None]) | (leads.expert[row] == expert[:, None])
        gained[row, expert] += 1
        full = (gained[row, expert] >= crowds.most[row, expert])[:, None] & (leads.expert[row] == expert[:, None])
        leads.flow[row] = np.where(full, 0.0, leads.flow[row] - np.where(touched, np.minimum(moved[:, None], leads.flow[row]), 0.0))
    assert found is not None
    return found


def _exchanges(crowds: OverflowRanks, sight: OverflowView, leads: _Leads, before: Values) -> _Attempt:
    """One attempt of two copies in each layer where not very much is in excess.

    The emptiest rank may hold nothing that another holds as well, so that nothing there can give way. Its smallest expert comes into a slot of a
    crowded rank through which least flows, and gives way to an expert of a crowded rank.
    """
    rows = np.arange(len(crowds.layer))
    rank = _nth_emptiest(crowds, sight, crowds.fails)
    own, origin = (table.reshape(len(rows), len(crowds.dead) - 1, -1)[rows, rank].astype(np.intp) for table in (crowds.table, crowds.origin))
    small, weight = _smallest(crowds, own)
    row = rows[np.isfinite(weight) & (before <= LARGE)]
    admit(crowds, row, small[row])
    high = sight.loads > crowds.cap[:, None]
    into = np.full(len(rows), NOWHERE)
    promise = _promises(crowds, row, small[row], np.where(high[row[:, None], crowds.rank[row]], -crowds.served[row], -np.inf))
    found = promise.max(axis=1, initial=-np.inf) > -np.inf
    row = row[found]
    into[row] = promise[found].argmax(axis=1)
    there = (np.concatenate([own, origin, crowds.expert[rows, into][:, None]], axis=1)[:, :, None] == leads.expert[:, None, :]).any(axis=1)
    flow = np.where(there, 0.0, leads.flow)
    lead = flow.argmax(axis=1)
    moved = np.minimum(flow[rows, lead], crowds.cap - sight.loads[rows, rank] + weight)
    row = row[moved[row] > weight[row] + LEAST]
    row = row[~(crowds.new[row] & (crowds.expert[row] == small[row][:, None])).any(axis=1)]
    expert = leads.expert[row, lead[row]]
    admit(crowds, row, expert)
    attempt = _Attempt.of(row)
    out = (crowds.expert[row] == small[row][:, None]).argmax(axis=1)
    attempt.element[:, 0], attempt.expert[:, 0], attempt.promise[:, 0] = into[row], small[row], 0.0
    attempt.element[:, 1], attempt.expert[:, 1], attempt.moved[:, 1], attempt.promise[:, 1] = out, expert, moved[row], moved[row] - weight[row]
    return attempt


def _nth_emptiest(crowds: OverflowRanks, sight: OverflowView, nth: Places) -> Places:
    """[a]: the live rank that so many [a] are emptier than."""
    order = np.argsort(np.where(crowds.dead, np.inf, sight.loads), axis=1, kind="stable")
    live = len(crowds.dead) - int(crowds.dead.sum())
    return np.asarray(order[np.arange(len(order)), np.minimum(nth, live - 1)])


def _smallest(crowds: OverflowRanks, experts: Places) -> tuple[Places, Values]:
    """([a] of the experts [a, k] that with one holder that may move, the smallest, [a] its load; inf: there is none)."""
    rows = np.arange(len(experts))
    at = rows[:, None], experts
    free = (experts != EMPTY) & (crowds.replicas[at] == 1) & (crowds.least[at] == 1) & (crowds.most[at] > 1)
    weight = np.where(free, crowds.load[at], np.inf)
    pick = weight.argmin(axis=1)
    return experts[rows, pick], weight[rows, pick]


def _pass_over(flow: Values, fails: Places) -> None:
    """Where copies have failed, not always the same expert: the best are left out, as many as failures, while others are half as good."""
    for n in range(1, int(fails.max()) + 1):
        row = np.flatnonzero(fails >= n)
        best = flow[row].argmax(axis=1)
        most = flow[row, best].copy()
        flow[row, best] = 0.0
        keep = flow[row].max(axis=1) < 0.5 * most
        flow[row[keep], best[keep]] = most[keep]


def _promises(crowds: OverflowRanks, row: Places, expert: Places, worth: Values, shut: Flags | None = None, parted: Flags | None = None) -> Values:
    """[t, m]: worth [t, m] where an element may give way to the layer's expert [t]; -inf where it must not.

    shut: [a, ranks + 1], ranks where nothing may come; parted: [a, experts + 1], experts that lose no replica; None: none.
    """
    held, ranks = crowds.expert[row], len(crowds.dead) - 1
    holds = np.broadcast_to(crowds.dead, (len(row), ranks + 1)).copy() if shut is None else shut[row]
    here = (crowds.table[row] == expert[:, None]) | (crowds.origin[row] == expert[:, None])
    holds[:, :ranks] |= here.reshape(len(row), ranks, crowds.table.shape[1] // ranks).any(axis=2)
    spare = crowds.replicas[row] > crowds.least[row]
    if parted is not None:
        spare &= ~parted[row]
    spare[:, -1] = True
    nth = np.arange(len(row))[:, None]
    return np.where(spare[nth, held] & ~crowds.new[row] & ~holds[nth, crowds.rank[row]], worth, -np.inf)


def _best(promise: Values, most: Places) -> tuple[Places, Places]:
    """(row, element) of the best promises of each row, at most `most` [a] of it."""
    width = min(int(most.max()), promise.shape[1])
    top = np.argpartition(-promise, width - 1, axis=1)[:, :width] if width > 1 else promise.argmax(axis=1)[:, None]
    worth = np.take_along_axis(promise, top, 1)
    order = np.argsort(-worth, axis=1, kind="stable")
    top, worth = np.take_along_axis(top, order, 1), np.take_along_axis(worth, order, 1)
    row, nth = np.nonzero((worth > -np.inf) & (np.arange(width) < most[:, None]))
    return row, top[row, nth]


class _Trial(NamedTuple):
    """What became of attempts, once weights have flowed."""

    served: Values
    """[t, m]"""
    excess: Values
    """[t]"""


def _tried(crowds: OverflowRanks, sight: OverflowView, attempt: _Attempt) -> _Trial:
    """What weights make of the copies, from a start that is guessed."""
    row, t = attempt.row, len(attempt.row)
    nth, each = np.arange(t), np.arange(t)[:, None]
    held, rank, served, whole = crowds.expert[row], crowds.rank[row], crowds.served[row], crowds.load[row]
    room = np.maximum(crowds.cap[:, None] - sight.loads, 0.0)[row][each, rank] + 1e-3
    for lane in range(LANES):
        n = nth[attempt.promise[:, lane] > -np.inf]
        if not len(n):
            break
        element, expert, moved = attempt.element[n, lane], attempt.expert[n, lane], attempt.moved[n, lane]
        gone, left = held[n, element].copy(), served[n, element].copy()
        held[n, element] = -1
        near = np.where(held[n] == gone[:, None], room[n], 0.0)
        served[n] += near * (left / np.maximum(near.sum(axis=1), _TINY))[:, None]
        served[n, element] = 0.0
        served[n] += _handed_back(crowds, sight, row[n], element, held[n], served[n], left)
        served[n] *= np.where(held[n] == expert[:, None], (1.0 - moved / np.maximum(whole[n, expert], _TINY))[:, None], 1.0)
        held[n, element], served[n, element] = expert, moved
    excess = np.empty(t)
    for which, rounds in ((crowds.fails[row] == 0, SETTLING), (crowds.fails[row] > 0, LONG)):
        if which.any():
            served[which], loads = _flowed(held[which], rank[which], served[which], crowds.alone[row[which]], whole.shape[1], rounds)
            excess[which] = over(loads, crowds.cap[row[which]], crowds.dead).sum(axis=1)
    return _Trial(served, excess)


def _flowed(held: Places, rank: Places, served: Values, alone: Values, experts: int, rounds: int) -> tuple[Values, Values]:
    """([t, m] what elements serve, [t, ranks + 1] loads) after so many rounds. held, rank, served: [t, m]; alone: [t, ranks + 1]."""
    t, ranks = alone.shape
    each = np.arange(t)[:, None]
    group, groups = _numbered((held + experts * each).ravel(), t * experts)
    none = np.empty(0, np.intp)
    parts = SplitResult(none, none, group, (rank + ranks * each).ravel(), np.empty(0), alone.ravel(), groups, none)
    after = diffused(parts, served.ravel(), rounds)
    return after.reshape(held.shape), parts.of_rank(after).reshape(-1, ranks)


def _handed_back(crowds: OverflowRanks, sight: OverflowView, row: Places, element: Places, held: Places, served: Values, left: Values) -> Values:
    """[t, m]: what flows at once when an element gives up the load `left` [t]: its expert's other holder hands as much back to its rank as it can,
    through the other experts that both hold."""
    nth, other, rank = np.arange(len(row)), sight.other[row], crowds.rank[row]
    here, there, parallel = rank[nth, element], rank[nth, other[nth, element]], sight.parallel[row, element]
    part = np.where(parallel > 0, np.minimum(left / np.maximum(parallel, _TINY), 1.0), 0.0)
    both = (rank == there[:, None]) & (rank[nth[:, None], other] == here[:, None]) & (held == held[nth[:, None], other])
    handed = np.where(both, served * part[:, None], 0.0)
    handed[nth, other[nth, element]] = 0.0
    return np.asarray(handed[nth[:, None], other] - handed)


def _numbered(keys: Places, most: int) -> tuple[Places, int]:
    """Keys below `most`, numbered without gaps in their order, and how many they are."""
    there = np.zeros(most, bool)
    there[keys] = True
    found = np.flatnonzero(there)
    number = np.empty(most, np.intp)
    number[found] = np.arange(len(found))
    return number[keys], len(found)


def _make(crowds: OverflowRanks, attempt: _Attempt, served: Values) -> PlacementChanges:
    """Makes the copies of one attempt in each of its layers; each gains its part of what all gain."""
    before = np.where(crowds.dead, 0.0, crowds.loads()[attempt.row]).max(axis=1)
    nth, lane = np.nonzero(attempt.promise > -np.inf)
    row, element, expert = attempt.row[nth], attempt.element[nth, lane], attempt.expert[nth, lane]
    slot, gone = crowds.slot[row, element], crowds.expert[row, element]
    np.add.at(crowds.replicas, (row, gone), np.where(gone == crowds.load.shape[1] - 1, 0, -1))
    np.add.at(crowds.replicas, (row, expert), 1)
    crowds.table[row, slot] = expert
    crowds.expert[row, element], crowds.new[row, element], crowds.served[attempt.row] = expert, True, served
    after = np.where(crowds.dead, 0.0, crowds.loads()[attempt.row]).max(axis=1)
    n = len(row)
    return PlacementChanges(
        np.full(n, ChangeKind.REPLICATE, np.uint8),
        crowds.layer[row].astype(np.int32),
        slot.astype(np.int32),
        expert.astype(np.int16),
        np.full(n, NOWHERE, np.int32),
        np.full(n, EMPTY, np.int16),
        ((before - after) / np.maximum((attempt.promise > -np.inf).sum(axis=1), 1))[nth],
    )
