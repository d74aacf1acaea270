"""Copies that let load flow off overfull ranks where split weights alone cannot. Pure.

After `migration.solvers.split_weights` some ranks of a layer may still be above the cap. They cannot push
their load anywhere: all holders of their experts are as full as they are. The load above the cap, summed over
ranks, is the layer's *excess*. Weights alone cannot lower it (it is the deficiency of a flow from experts
through holders into ranks of that capacity). A copy can if it leads out: an expert of a crowded rank gets a
replica where there is room, in an empty slot or in place of a spare replica whose own load fits elsewhere.
All layers are processed at once, one copy each in a round, or several while the excess is large:

1. Expert: of the rank with most excess, including the excess of ranks that exchange load with it, the expert
through which most of it could leave.

2. Slot: those that promise most. The promise is the room of the rank, and of those it can push load to, less
the load of the replaced replica that finds no place. Or two copies at once, where they promise more or single
ones have failed: the emptiest rank's smallest expert goes where it does no harm, and the expert that takes
its place leads out of a crowded rank.

3. Proof: the copy is made in a trial, the weights flow for some rounds, and the excess must fall. The
shortfall of a slot against its promise is remembered. Where all trials have failed, more are made at a time,
with another expert, and the best is taken.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import BoolArray, FloatArray, IndexArray, SlotTable
from fleet.placement import EMPTY
from migration import kernels
from migration.model.constraints import Constraints
from migration.model.placement_changes import NONE, NOWHERE, ChangeKind, PlacementChanges, joined
from migration.solvers.overflow_state import (
    OverflowRanks,
    OverflowView,
    admit,
    over,
    overflow_ranks,
    overflow_view,
    total,
    widen,
)
from migration.solvers.split_weights import SplitResult, diffused

SETTLING, LONG = 5, 12
"""Rounds of flow after copies, and where copies have failed."""
ROUNDS, FURTHER, MAX_ROUNDS = 8, 4.0, 18
"""Rounds of copies: ROUNDS, plus FURTHER for each mean rank load of excess, averaged over layers; at most
MOST_ROUNDS."""
LANES = 10
"""Most copies of a layer in one attempt."""
LARGE, WIDE = 1.5, 0.5
"""Only layers with at least LARGE excess make several copies at once. Together these may move at most the
part WIDE of it."""
FULLEST = 4
"""Ranks of a layer to examine when several copies are made at once; otherwise only the fullest."""
TRIALS = (1, 3, 5)
"""Slots of a layer tried at a time, by the number of failed rounds since its last copy. After the last entry
the layer is given up."""
PROOF = 0.25
"""Part of the load that a copy should move by which the excess must fall; its square, cube after failures."""
LEAST = 1e-3
"""Least fall of the excess, in mean rank loads, for any copy."""
FORGETTING = 0.5
"""Part of the learnt harm of slots that is kept when a layer has changed."""
NEAR_CAP = 1e-4
"""Loads above the cap by less than this, in mean rank loads, count as at the cap."""
_TINY = 1e-9


def overflow_copies(
    table: SlotTable,
    load: FloatArray,
    parts: SplitResult,
    served: FloatArray,
    cap: FloatArray,
    open_layers: BoolArray,
    limits: Constraints,
    node: NDArray[np.intp] | None,
) -> PlacementChanges:
    """Return the copies that bring the `open_layers` [layers] to their `cap` [layers], or as near as could be
    found.

    load: [layers, experts] in mean rank loads; parts, served: the table's shared slots, and their loads after
    convergence of the weights.
    """
    found = [NONE]
    state = overflow_ranks(table, load, parts, served, cap, limits, node).taken(open_layers)
    excess = state.excess()
    # More rounds where the excess is larger; finished layers leave the arrays.
    rounds = ROUNDS + FURTHER * excess.mean() if len(excess) else 0
    while len(excess) and len(found) <= min(rounds, MAX_ROUNDS):
        found.append(_round(state, excess))
        excess = state.excess()
        open_ = (excess > NEAR_CAP) & (state.fails < len(TRIALS))
        state, excess = state.taken(open_), excess[open_]
    return joined(found)


def _round(state: OverflowRanks, before: FloatArray) -> PlacementChanges:
    """Make copies in each layer that has some with proof. before: [a], the excess."""
    # Room for experts that become shared in this round.
    widen(state, LANES + 1 if (before > LARGE).any() else 2)
    view = overflow_view(state)
    leads = _leads(state, view, before)
    attempt, exchange = _attempts(state, view, leads, before), _exchanges(state, view, leads, before)
    promised = np.full(len(before), -np.inf)
    np.maximum.at(promised, attempt.row, attempt.promised)
    # Double copies compete where they promise more, or where single ones have failed.
    attempt = attempt.joined(
        exchange.taken(
            np.flatnonzero((state.fails[exchange.row] > 0) | (exchange.promised > promised[exchange.row]))
        )
    )
    trial = _tried(state, view, attempt)
    fallen = before[attempt.row] - trial.excess
    # Blame a slot only where a single copy was tried.
    alone = attempt.promise[:, 1] == -np.inf
    state.harm[attempt.row[alone], attempt.element[alone, 0]] += np.maximum(
        attempt.promise[:, 0] - fallen, 0.0
    )[alone]
    # Proven copies first, then the largest fall; the first of each row is made.
    proven = fallen > np.maximum(PROOF ** (1 + state.fails[attempt.row]) * attempt.moved.sum(axis=1), LEAST)
    best = np.lexsort((-fallen, ~proven, attempt.row))
    best = best[np.diff(attempt.row[best], prepend=-1) > 0]
    best = best[proven[best]]
    state.fails += 1
    state.fails[attempt.row[best]] = 0
    state.harm[attempt.row[best]] *= FORGETTING
    return _make(state, attempt.taken(best), trial.served[best])


class _Leads(NamedTuple):
    """Experts of the fullest ranks for which further replicas would help: [a, c] each."""

    expert: IndexArray
    rank: IndexArray
    flow: FloatArray
    """Excess that could leave through a further replica; 0: no replica may be made, or the expert is in
    another column too."""


def _leads(state: OverflowRanks, view: OverflowView, before: FloatArray) -> _Leads:
    a, ranks = len(state.layer), len(state.dead) - 1
    rows = np.arange(a)[:, None]
    # Relieve the rank with most excess, counting that of ranks it exchanges load with. With a large excess,
    # and after every second failure, only the rank's own load counts.
    pressed = np.where(((state.fails % 2 == 0) & (before <= LARGE))[:, None], view.leaving, 0.0) + view.loads
    pressed[:, state.dead] = -np.inf
    live = max(1, ranks + 1 - int(state.dead.sum()))
    rank = _lowest(-pressed, min(FULLEST, live) if (before > LARGE).any() else 1)
    here = state.table.reshape(a, ranks, -1)[rows, rank].reshape(a, -1).astype(np.intp)
    rank = np.repeat(rank, here.shape[1] // rank.shape[1], axis=1)
    # Of a sole holder's expert up to the whole load can leave; of a shared one, what its crowded holders
    # serve.
    alone = state.replicas[rows, here] == 1
    flow = np.where(alone, np.minimum(state.load[rows, here], view.leaving[rows, rank]), view.out[rows, here])
    allowed = (here != EMPTY) & (state.replicas[rows, here] < state.most[rows, here]) & ~state.dead[rank]
    column = np.broadcast_to(np.arange(here.shape[1]), here.shape)
    # Keep one column per expert, though several of the fullest ranks may hold it.
    first = np.full(state.load.shape, here.shape[1])
    np.minimum.at(first, (rows, here), column)
    flow = np.where(allowed & (first[rows, here] == column), np.minimum(flow, before[:, None]), 0.0)
    # Of equal flows prefer the larger expert: its replica has more room for corrections.
    return _Leads(here, rank, flow + 1e-3 * np.where(flow > 0, state.load[rows, here], 0.0))


class _Attempt(NamedTuple):
    """t attempts, each of up to LANES copies in the present state of its layer."""

    row: IndexArray
    """[t], ascending."""
    element: IndexArray
    """[t, LANES]."""
    expert: IndexArray
    """[t, LANES]."""
    moved: FloatArray
    """[t, LANES]: load that the copy should take over; 0 where there is no copy."""
    promise: FloatArray
    """[t, LANES]: fall of the excess; -inf where there is no copy"""

    @classmethod
    def of(cls, row: IndexArray) -> "_Attempt":
        """Return attempts without copies."""
        shape = (len(row), LANES)
        return cls(
            row, np.zeros(shape, np.intp), np.zeros(shape, np.intp), np.zeros(shape), np.full(shape, -np.inf)
        )

    def taken(self, which: IndexArray) -> "_Attempt":
        return _Attempt(
            self.row[which], self.element[which], self.expert[which], self.moved[which], self.promise[which]
        )

    @property
    def promised(self) -> FloatArray:
        """[t]: by all copies of the attempt."""
        return np.asarray(np.where(self.promise > -np.inf, self.promise, 0.0).sum(axis=1))

    def joined(self, other: "_Attempt") -> "_Attempt":
        both = _Attempt(*(np.concatenate(parts) for parts in zip(self, other, strict=True)))
        return both.taken(np.argsort(both.row, kind="stable"))


@dataclass(slots=True)
class _Claims:
    """Claims of the copies of a round's attempts: copies of one attempt must not interfere."""

    shut: BoolArray
    """[a, ranks + 1]: dead ranks, and ranks that receive already."""
    parted: BoolArray
    """[a, experts + 1]: experts that got or lost a replica, and so lose no further one."""
    gained: NDArray[np.int64]
    """[a, experts + 1]: replicas after the copies so far."""
    spent: FloatArray
    """[a]: load that the copies so far move."""

    @classmethod
    def none(cls, state: OverflowRanks) -> "_Claims":
        a = len(state.layer)
        return cls(
            np.broadcast_to(state.dead, (a, len(state.dead))).copy(),
            np.zeros(state.load.shape, bool),
            state.replicas.copy(),
            np.zeros(a),
        )

    def add(
        self,
        state: OverflowRanks,
        leads: _Leads,
        row: IndexArray,
        element: IndexArray,
        pick: IndexArray,
        moved: FloatArray,
    ) -> None:
        """Claim the rank and the experts of a copy in each row, and lower the flows of the leads."""
        expert = leads.expert[row, pick]
        self.shut[row, state.rank[row, element]] = True
        self.parted[row, state.expert[row, element]] = True
        self.gained[row, expert] += 1
        # Load that this copy moves is no longer available to experts of the same rank, or to the same expert
        # elsewhere.
        same = leads.expert[row] == expert[:, None]
        touched = (leads.rank[row] == leads.rank[row, pick][:, None]) | same
        full = (self.gained[row, expert] >= state.most[row, expert])[:, None] & same
        leads.flow[row] = np.where(
            full, 0.0, leads.flow[row] - np.where(touched, np.minimum(moved[:, None], leads.flow[row]), 0.0)
        )


def _attempts(state: OverflowRanks, view: OverflowView, leads: _Leads, before: FloatArray) -> _Attempt:
    """Return the attempts of a round.

    After a success: one attempt of several copies, which together stay well below the excess. Else: several
    attempts of one copy.
    """
    many = before > LARGE
    # Without a large excess only the fullest rank's experts are candidates.
    leads.flow[~many[:, None] & (leads.rank != leads.rank[:, :1])] = 0.0
    _pass_over(leads.flow, state.fails)
    claims = _Claims.none(state)
    found, row, lead = None, np.arange(len(before)), np.full(len(before), -1)
    for lane in range(LANES):
        pick = leads.flow[row].argmax(axis=1)
        flow = leads.flow[row, pick]
        promise = _lane_promises(state, view, row, leads.expert[row, pick], flow, claims)
        # The first lane opens the attempts, several per row after failures; later lanes extend the best
        # attempt of a row.
        if found is None:
            nth, element = _best(promise, np.array(TRIALS)[state.fails])
            found, at = _Attempt.of(row[nth]), np.arange(len(nth))
            lead[row[nth][::-1]] = at[::-1]
        else:
            element = promise.argmax(axis=1)
            nth = np.flatnonzero(promise[np.arange(len(row)), element] > 0)
            element, at = element[nth], lead[row[nth]]
        worth = promise[nth, element]
        row, flow, pick = row[nth], flow[nth], pick[nth]
        moved = np.minimum(flow, view.space[row, element])
        found.element[at, lane], found.expert[at, lane] = element, leads.expert[row, pick]
        found.moved[at, lane], found.promise[at, lane] = moved, worth
        claims.spent[row] += moved
        # Further copies only where the excess is large and the last round succeeded.
        on = many[row] & (state.fails[row] == 0) & (claims.spent[row] < WIDE * before[row])
        row, element, moved, pick = row[on], element[on], moved[on], pick[on]
        if not len(row):
            break
        claims.add(state, leads, row, element, pick, moved)
    assert found is not None
    return found


def _lane_promises(
    state: OverflowRanks,
    view: OverflowView,
    row: IndexArray,
    expert: IndexArray,
    flow: FloatArray,
    claims: _Claims,
) -> FloatArray:
    """[t, m]: promise of each element for one more copy of the layer's expert [t], through which `flow` [t]
    could leave."""
    admit(state, row, expert)
    claims.parted[row, expert] = True
    library = kernels.compiled()
    if library is not None and len(row):
        return _compiled_promises(library, state, view, row, expert, None, flow, claims.shut, claims.parted)
    # Promise of a slot: load it takes, less the load it displaces, less its learnt shortfall.
    worth = np.minimum(flow[:, None], view.space[row]) - view.stranded[row] - state.harm[row]
    worth[(view.space[row] <= LEAST) | (flow <= 0)[:, None]] = -np.inf
    return _promises(state, row, expert, worth, claims.shut, claims.parted)


def _exchanges(state: OverflowRanks, view: OverflowView, leads: _Leads, before: FloatArray) -> _Attempt:
    """Return one attempt of two copies for each layer without a large excess.

    The emptiest rank may hold only experts without other replicas, so that nothing there can give way. Its
    smallest expert then goes into a slot of a crowded rank through which least flows, and its own slot gets
    an expert of a crowded rank.
    """
    rows = np.arange(len(state.layer))
    # Another rank after each failure.
    rank = _nth_emptiest(state, view, state.fails)
    own, origin = (
        table.reshape(len(rows), len(state.dead) - 1, -1)[rows, rank].astype(np.intp)
        for table in (state.table, state.origin)
    )
    small, weight = _smallest(state, own)
    row = rows[np.isfinite(weight) & (before <= LARGE)]
    admit(state, row, small[row])
    # First half: the slot on a crowded rank that serves least.
    high = view.loads > state.cap[:, None]
    into = np.full(len(rows), NOWHERE)
    worth = np.where(high[row[:, None], state.rank[row]], -state.served[row], -np.inf)
    library = kernels.compiled()
    promise = (
        _promises(state, row, small[row], worth)
        if library is None or not len(row)
        else _compiled_promises(library, state, view, row, small[row], worth)
    )
    found = promise.max(axis=1, initial=-np.inf) > -np.inf
    row = row[found]
    into[row] = promise[found].argmax(axis=1)
    # Second half: an expert of a crowded rank that the emptiest rank has never held, and that did not just
    # give way.
    there = (
        np.concatenate([own, origin, state.expert[rows, into][:, None]], axis=1)[:, :, None]
        == leads.expert[:, None, :]
    ).any(axis=1)
    flow = np.where(there, 0.0, leads.flow)
    lead = flow.argmax(axis=1)
    moved = np.minimum(flow[rows, lead], state.cap - view.loads[rows, rank] + weight)
    # The exchange must move more load out than the small expert brings in.
    row = row[moved[row] > weight[row] + LEAST]
    row = row[~(state.new[row] & (state.expert[row] == small[row][:, None])).any(axis=1)]
    expert = leads.expert[row, lead[row]]
    admit(state, row, expert)
    attempt = _Attempt.of(row)
    out = (state.expert[row] == small[row][:, None]).argmax(axis=1)
    attempt.element[:, 0], attempt.expert[:, 0], attempt.promise[:, 0] = into[row], small[row], 0.0
    attempt.element[:, 1], attempt.expert[:, 1], attempt.moved[:, 1], attempt.promise[:, 1] = (
        out,
        expert,
        moved[row],
        moved[row] - weight[row],
    )
    return attempt


def _nth_emptiest(state: OverflowRanks, view: OverflowView, nth: IndexArray) -> IndexArray:
    """[a]: the live rank that `nth` [a] ranks are emptier than."""
    live = len(state.dead) - int(state.dead.sum())
    nth = np.minimum(nth, live - 1)
    order = _lowest(np.where(state.dead, np.inf, view.loads), int(nth.max(initial=0)) + 1)
    return np.asarray(order[np.arange(len(order)), nth])


def _lowest(values: FloatArray, count: int) -> IndexArray:
    """[a, count]: places of the lowest values of each row [a, m], in rising order; of equal ones the first.

    At least that many are finite.
    """
    if count > len(TRIALS) + 1:
        return np.argsort(values, axis=1, kind="stable")[:, :count]
    # Few of many: no order of all is needed.
    values, rows, found = values.copy(), np.arange(len(values)), np.empty((len(values), count), np.intp)
    for nth in range(count):
        found[:, nth] = values.argmin(axis=1)
        values[rows, found[:, nth]] = np.inf
    return found


def _smallest(state: OverflowRanks, experts: IndexArray) -> tuple[IndexArray, FloatArray]:
    """Return ([a] the smallest of the experts [a, k] that have one holder and may move, [a] its load; inf:
    there is none)."""
    rows = np.arange(len(experts))
    at = rows[:, None], experts
    free = (experts != EMPTY) & (state.replicas[at] == 1) & (state.least[at] == 1) & (state.most[at] > 1)
    weight = np.where(free, state.load[at], np.inf)
    pick = weight.argmin(axis=1)
    return experts[rows, pick], weight[rows, pick]


def _pass_over(flow: FloatArray, fails: IndexArray) -> None:
    """Zero the flow of the best experts where copies have failed, one per failure, while another is at least
    half as good.

    So repeated attempts do not always choose the same expert.
    """
    for n in range(1, int(fails.max()) + 1):
        row = np.flatnonzero(fails >= n)
        best = flow[row].argmax(axis=1)
        most = flow[row, best].copy()
        flow[row, best] = 0.0
        keep = flow[row].max(axis=1) < 0.5 * most
        flow[row[keep], best[keep]] = most[keep]


def _promises(
    state: OverflowRanks,
    row: IndexArray,
    expert: IndexArray,
    worth: FloatArray,
    shut: BoolArray | None = None,
    parted: BoolArray | None = None,
) -> FloatArray:
    """[t, m]: worth [t, m] where an element may give way to the layer's expert [t]; -inf where it must not.

    shut: [a, ranks + 1], ranks that must not receive; parted: [a, experts + 1], experts that must not lose a
    replica; None: none.
    """
    held, ranks = state.expert[row], len(state.dead) - 1
    holds = np.broadcast_to(state.dead, (len(row), ranks + 1)).copy() if shut is None else shut[row]
    here = (state.table[row] == expert[:, None]) | (state.origin[row] == expert[:, None])
    holds[:, :ranks] |= here.reshape(len(row), ranks, state.table.shape[1] // ranks).any(axis=2)
    spare = state.replicas[row] > state.least[row]
    if parted is not None:
        spare &= ~parted[row]
    spare[:, -1] = True
    nth = np.arange(len(row))[:, None]
    return np.where(spare[nth, held] & ~state.new[row] & ~holds[nth, state.rank[row]], worth, -np.inf)


def _compiled_promises(
    library: kernels.Kernels,
    state: OverflowRanks,
    view: OverflowView,
    row: IndexArray,
    expert: IndexArray,
    worth: FloatArray | None,
    flow: FloatArray | None = None,
    shut: BoolArray | None = None,
    parted: BoolArray | None = None,
) -> FloatArray:
    """Return `_promises`. worth: None: that of one more copy, as in `_lane_promises`."""
    found = np.empty((len(row), state.expert.shape[1]))
    library.overflow_promises(
        row,
        expert,
        worth,
        flow,
        view.space,
        state.table,
        state.origin,
        state.expert,
        state.rank,
        state.replicas,
        state.least,
        state.new,
        shut,
        parted,
        view.stranded,
        state.dead,
        found,
        state.harm,
    )
    return found


def _best(promise: FloatArray, most: IndexArray) -> tuple[IndexArray, IndexArray]:
    """Return (row, element) of the best promises of each row, at most `most` [a] of them."""
    width = min(int(most.max()), promise.shape[1])
    top = (
        np.argpartition(-promise, width - 1, axis=1)[:, :width]
        if width > 1
        else promise.argmax(axis=1)[:, None]
    )
    worth = np.take_along_axis(promise, top, 1)
    order = np.argsort(-worth, axis=1, kind="stable")
    top, worth = np.take_along_axis(top, order, 1), np.take_along_axis(worth, order, 1)
    row, nth = np.nonzero((worth > -np.inf) & (np.arange(width) < most[:, None]))
    return row, top[row, nth]


class _Trial(NamedTuple):
    """Result of attempts after the flow of weights."""

    served: FloatArray
    """[t, m]"""
    excess: FloatArray
    """[t]"""


def _tried(state: OverflowRanks, view: OverflowView, attempt: _Attempt) -> _Trial:
    """Simulate the flow of weights after the copies, from an estimated start."""
    library = kernels.compiled()
    if library is None or not len(attempt.row):
        return _tried_in_numpy(state, view, attempt)
    trial = _Trial(np.empty((len(attempt.row), state.served.shape[1])), np.empty(len(attempt.row)))
    library.overflow_tried(
        attempt.row,
        attempt.element,
        attempt.expert,
        attempt.moved,
        attempt.promise,
        state.expert,
        state.rank,
        state.served,
        state.load,
        state.dead,
        state.cap,
        state.alone,
        view.loads,
        view.other,
        view.parallel,
        SETTLING,
        LONG,
        state.fails,
        *trial,
    )
    return trial


def _tried_in_numpy(state: OverflowRanks, view: OverflowView, attempt: _Attempt) -> _Trial:
    """Implement `_tried` in numpy."""
    row, t = attempt.row, len(attempt.row)
    nth, each = np.arange(t), np.arange(t)[:, None]
    held, rank, served, whole = state.expert[row], state.rank[row], state.served[row], state.load[row]
    room = np.maximum(state.cap[:, None] - view.loads, 0.0)[row][each, rank] + 1e-3
    for lane in range(LANES):
        n = nth[attempt.promise[:, lane] > -np.inf]
        if not len(n):
            break
        element, expert, moved = attempt.element[n, lane], attempt.expert[n, lane], attempt.moved[n, lane]
        gone, left = held[n, element].copy(), served[n, element].copy()
        held[n, element] = -1
        # The replaced replica's load goes to its other holders, in proportion to their room.
        near = np.where(held[n] == gone[:, None], room[n], 0.0)
        served[n] += near * (left / np.maximum(total(near), _TINY))[:, None]
        served[n, element] = 0.0
        served[n] += _handed_back(state, view, row[n], element, held[n], served[n], left)
        # The expert's other holders hand over the moved part evenly.
        served[n] *= np.where(
            held[n] == expert[:, None], (1.0 - moved / np.maximum(whole[n, expert], _TINY))[:, None], 1.0
        )
        held[n, element], served[n, element] = expert, moved
    excess = np.empty(t)
    # Longer flow where copies have failed: the estimate of the start was worse there.
    for which, rounds in ((state.fails[row] == 0, SETTLING), (state.fails[row] > 0, LONG)):
        if which.any():
            served[which], loads = _flowed(
                held[which], rank[which], served[which], state.alone[row[which]], whole.shape[1], rounds
            )
            excess[which] = total(over(loads, state.cap[row[which]], state.dead))
    return _Trial(served, excess)


def _flowed(
    held: IndexArray, rank: IndexArray, served: FloatArray, alone: FloatArray, experts: int, rounds: int
) -> tuple[FloatArray, FloatArray]:
    """Return ([t, m] loads of elements, [t, ranks + 1] rank loads) after this many rounds of flow.

    held, rank, served: [t, m]; alone: [t, ranks + 1].
    """
    t, ranks = alone.shape
    each = np.arange(t)[:, None]
    # The trials form one large sparse problem: a group is an expert in a trial.
    group, groups = _numbered((held + experts * each).ravel(), t * experts)
    none = np.empty(0, np.intp)
    parts = SplitResult(
        none, none, group, (rank + ranks * each).ravel(), np.empty(0), alone.ravel(), groups, none
    )
    after = diffused(parts, served.ravel(), rounds)
    return after.reshape(held.shape), parts.of_rank(after).reshape(-1, ranks)


def _handed_back(
    state: OverflowRanks,
    view: OverflowView,
    row: IndexArray,
    element: IndexArray,
    held: IndexArray,
    served: FloatArray,
    left: FloatArray,
) -> FloatArray:
    """[t, m]: immediate change of loads when an element gives up its load `left` [t].

    Its expert's other holder hands back as much as it can to the element's rank, through other experts that
    both hold.
    """
    nth, other, rank = np.arange(len(row)), view.other[row], state.rank[row]
    here, there, parallel = rank[nth, element], rank[nth, other[nth, element]], view.parallel[row, element]
    part = np.where(parallel > 0, np.minimum(left / np.maximum(parallel, _TINY), 1.0), 0.0)
    both = (
        (rank == there[:, None])
        & (rank[nth[:, None], other] == here[:, None])
        & (held == held[nth[:, None], other])
    )
    handed = np.where(both, served * part[:, None], 0.0)
    handed[nth, other[nth, element]] = 0.0
    return np.asarray(handed[nth[:, None], other] - handed)


def _numbered(keys: IndexArray, most: int) -> tuple[IndexArray, int]:
    """Number keys below `most` without gaps, in their order; return the numbers and their count."""
    there = np.zeros(most, bool)
    there[keys] = True
    found = np.flatnonzero(there)
    number = np.empty(most, np.intp)
    number[found] = np.arange(len(found))
    return number[keys], len(found)


def _make(state: OverflowRanks, attempt: _Attempt, served: FloatArray) -> PlacementChanges:
    """Make the copies of one attempt in each of its layers; the layer's gain is divided evenly among them."""
    before = np.where(state.dead, 0.0, state.loads()[attempt.row]).max(axis=1)
    nth, lane = np.nonzero(attempt.promise > -np.inf)
    row, element, expert = attempt.row[nth], attempt.element[nth, lane], attempt.expert[nth, lane]
    slot, gone = state.slot[row, element], state.expert[row, element]
    np.add.at(state.replicas, (row, gone), np.where(gone == state.load.shape[1] - 1, 0, -1))
    np.add.at(state.replicas, (row, expert), 1)
    state.table[row, slot] = expert
    state.expert[row, element], state.new[row, element], state.served[attempt.row] = expert, True, served
    after = np.where(state.dead, 0.0, state.loads()[attempt.row]).max(axis=1)
    n = len(row)
    return PlacementChanges(
        np.full(n, ChangeKind.REPLICATE, np.uint8),
        state.layer[row].astype(np.int32),
        slot.astype(np.int32),
        expert.astype(np.int16),
        np.full(n, NOWHERE, np.int32),
        np.full(n, EMPTY, np.int16),
        ((before - after) / np.maximum((attempt.promise > -np.inf).sum(axis=1), 1))[nth],
    )
