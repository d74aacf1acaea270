"""Few copies under the even split: from a placement that no longer fits the demand, win back most balance
with few copies. Pure.

The even split gives every replica of an expert the same share of its load. vLLM and its expert-parallel load
balancer (EPLB) can do nothing else. The policy that plans for such engines is `uniform`; its candidates are
reported as "even shares".

In each layer the most loaded ranks are relieved repeatedly, until none exceeds the cap. The cap is set so
that the target part of a full re-placement's gain is reached. Three changes carry load from one rank to
another: swap two experts (two copies), replicate one into an empty slot or over a spare replica (one copy),
move one there (one copy). The fourth change, dropping a spare replica, costs nothing. The move into the slot
that it leaves then costs one copy where a swap costs two. A replica that these changes bring to a rank and
take away again is never copied (`migration.solvers.table_diff.shortened` removes it).
`migration.solvers.swap_search` finds the best change, and `migration.solvers.search_state` defines what best
means.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import BoolArray, FloatArray, IndexArray, SlotTable
from fleet.placement import EMPTY
from migration.model.constraints import UNLIMITED, Constraints
from migration.model.placement_changes import NONE, NOWHERE, ChangeKind, PlacementChanges, taken, within
from migration.model.sampling_noise import (
    LoadNoise,
    changed,
    deviations,
    expected_max,
    expected_most,
    freedom,
)
from migration.solvers.search_state import ENDLESS, SearchState
from migration.solvers.swap_search import RoundSize, SwapChoice, best

PAIRS = 24_000
"""Pairs of slots examined in a round, for all layers together."""
PATIENCE = 2
"""Rounds without a change after which a layer is given up."""
BRISKLY, CAREFULLY = RoundSize(4, 2), RoundSize(2, 12)
"""Round sizes where ranks are few, and where they are many."""
OF = 4
"""At most one in this number of live ranks is relieved in a round."""
MANY, FAR = 32, 2.0
"""Largest number of ranks that counts as few; load of the most loaded rank, mean over layers, from which even
with many ranks as many are relieved in a round as with few."""
LEAST = 1e-7
"""A fall of the penalty below this is rounding."""
MARGIN = 0.15
"""Standard deviations between windows by which the aim exceeds the target: a plan fits the noise of its own
sample."""
BEHIND = 0.013
"""Most by which a layer's most loaded rank may stay above that of a full re-placement, relative to it,
whatever part of the gain that is."""
REPLICATE, SWAP, MOVE, DROP = (int(kind) for kind in ChangeKind)
CROWD = 0.85
"""Finished layers are removed from the state when at most this part is still active."""
HOPE = 0.8
"""Standard deviations between windows by which a cap may at first exceed what a flat placement could afford:
not every rank ends at the cap."""
IDLE = 0.25
"""Standard deviations between windows above the mean load, below which reducing loads further is
pointless."""
LONG, LAST = 8, 0.03
"""After this many rounds the search stops when at most this part of the layers is active: a round costs the
same for few layers as for many."""
ROUNDS = 200
"""Upper limit of rounds."""
FELT = 0.002
"""Part of a step's expected longest rank below which an improvement does not count."""
FINE = 1e-4
"""Least amount by which a cap is lowered where it proves too high."""


def even_split_copies(
    table: SlotTable,
    load: NDArray[Any],
    ranks: int,
    limits: Constraints = UNLIMITED,
    *,
    goal: NDArray[Any],
    noise: LoadNoise | None = None,
    node: IndexArray | None = None,
    full: bool = False,
) -> PlacementChanges:
    """Return the changes, layers interleaved, each layer's in order. gain: fall of the layer's most loaded
    rank, in mean rank loads.

    table: legal, [layers, slots]; load: [layers, experts], any unit; goal: [layers], balance of a full
    re-placement under this load. noise: None: the load is exact. With it, layers whose imbalance is explained
    by sampling are skipped, and the others are brought to the target part of the gain that remains of a full
    re-placement's on the next window. With the pairs of a step, layers whose imbalance is below the noise of
    single steps are skipped too. node: [ranks]; where there are several nodes, experts that must keep more
    than one replica keep those where they are. full: no slot may become empty, so that there are swaps and
    replications over spare replicas only; the table has no empty slot then. ValueError names the shapes that
    do not fit together.
    """
    layers, slots = table.shape
    if ranks < 1 or slots % ranks:
        raise ValueError(f"few: {slots} slots do not divide into {ranks} ranks")
    if len(load) != layers or np.shape(goal) != (layers,):
        raise ValueError(
            f"few: load is {load.shape} and goal {np.shape(goal)}; expected [{layers}, experts] and"
            f" [{layers}]"
        )
    # Relative loads make one set of thresholds valid for all layers.
    state = replace(_state(table, load, ranks, limits, node), full=full)
    live = ranks - int(state.away.sum())
    if live < 2:
        return NONE
    # Layers that are good enough, or whose imbalance is noise, leave the search here.
    aims, open_layers = _aims(state, np.asarray(goal, np.float64), limits.target, noise)
    search = _Search(state.taken(open_layers), aims)
    search.go(_pace(live, search.most_loaded))
    found = search.changes()
    return found if limits.max_copies is None else within(found, limits.max_copies)


def _pace(live: int, most: float) -> RoundSize:
    """Return the round size. most: load of the most loaded rank, mean over layers."""
    if live <= MANY:
        return BRISKLY._replace(most=max(1, min(BRISKLY.most, live // OF)))
    return CAREFULLY if most < FAR else CAREFULLY._replace(most=BRISKLY.most)


def _state(
    table: SlotTable, load: NDArray[Any], ranks: int, limits: Constraints, node: IndexArray | None
) -> SearchState:
    """Return the search state of the table; caps are 0."""
    layers, slots = table.shape
    experts = load.shape[1]
    # Slots of dead ranks count as empty; `away` keeps the search from filling them.
    away = np.zeros(ranks, bool) if limits.live is None else ~np.asarray(limits.live, bool)
    expert = np.where((table == EMPTY) | np.repeat(away, slots // ranks), experts, table).astype(np.intp)
    # Holders per expert and replica counts, for constant-time checks of legality.
    held = np.zeros((layers, experts + 1, ranks), bool)
    held[np.arange(layers)[:, None], expert, np.arange(slots) // (slots // ranks)] = True
    replicas = np.bincount(
        (expert + np.arange(layers)[:, None] * (experts + 1)).ravel(), minlength=layers * (experts + 1)
    ).reshape(layers, -1)[:, :-1]
    # Lost experts (no live holder) carry no load here: `planning.rank_loss` brings them back.
    live_load = np.where(replicas > 0, load, 0.0)
    mean = np.maximum(live_load.sum(axis=1, keepdims=True), 1e-300) / max(int((~away).sum()), 1)
    least = np.ones((layers, experts)) if limits.min_replicas is None else np.maximum(limits.min_replicas, 1)
    fixed = np.zeros((layers, experts), bool) if limits.frozen is None else np.asarray(limits.frozen, bool)
    # Replicas of critical experts may be spread over nodes on purpose, so they stay.
    if node is not None and len(np.unique(node)) > 1:
        fixed = fixed | (least > 1)
    # Column `experts` is the empty slot: no load, and always replaceable.
    count, relative = _wider(np.maximum(replicas, 1), ENDLESS), _wider(live_load / mean, 0.0)
    state = SearchState(
        ranks,
        slots // ranks,
        ENDLESS if limits.max_replicas is None else limits.max_replicas,
        away,
        layer=np.arange(layers),
        expert=expert,
        load=relative,
        replicas=count,
        least=_wider(least, 0.0),
        fixed=_wider(fixed, 0.0) > 0.0,
        cap=np.zeros(layers),
        first=expert.copy(),
        fresh=np.zeros((layers, slots), bool),
        inviting=np.zeros((layers, ranks), bool),
        held=held,
        each=relative / count,
        over=np.empty((layers, ranks)),
        pays=np.empty((layers, ranks)),
    )
    state.measure()
    return state


def _wider(values: NDArray[Any], empty: float) -> FloatArray:
    """[layers, experts + 1]: with the value of an empty slot."""
    return np.pad(values.astype(np.float64), ((0, 0), (0, 1)), constant_values=empty)


class _Aims:
    """Targets for the next window."""

    def __init__(self, most: FloatArray, spread: FloatArray) -> None:
        self.most = most
        """[layers]: highest expected load of a rank there."""
        self.spread = spread
        """[layers]: standard deviation of a rank's load between windows."""


def _aims(
    state: SearchState, goal: FloatArray, target: float, noise: LoadNoise | None
) -> tuple[_Aims, BoolArray]:
    """Set each layer's cap; return the targets, and [layers] the layers to improve."""
    alive = state.over[:, ~state.away]
    most = np.maximum(alive.max(axis=1), 1e-9)
    least = 1.0 / np.clip(goal, 1e-9, 1.0)
    open_layers, spread = most > least, np.zeros(len(goal))
    if noise is not None:
        each = _deviations(state, noise.window)
        free = freedom(state.load[:, :-1], state.replicas[:, :-1], alive.shape[1])
        open_layers, spread = changed(alive, goal, each, free), np.sqrt((each**2).mean(axis=1))
    # Expected maximum over ranks of the sampling noise, which a re-placement does not remove either.
    blur = expected_most(alive.shape[1]) * spread
    # Target part of the gain in throughput (1 / load), but never far behind a full re-placement.
    aim = (
        np.minimum(1.0 / (target / (least + blur) + (1.0 - target) / most), least * (1.0 + BEHIND) + blur)
        - MARGIN * spread
    )
    state.cap = np.maximum(aim - blur + HOPE * spread, np.maximum(least, 1.0 + IDLE * spread))
    if noise is not None and noise.step is not None:
        open_layers &= _felt(state, alive, least, noise.step)
    state.measure()
    open_layers &= most > np.maximum(state.cap, least + blur)
    return _Aims(aim, spread), open_layers


def _felt(state: SearchState, loads: FloatArray, least: FloatArray, step: float | NDArray[Any]) -> BoolArray:
    """[layers]: layers in which a re-placement would shorten single steps, despite their own noise.

    least: load of the most loaded rank after a re-placement.
    """
    # Variance of one step, not of the difference between two.
    blur = np.sqrt((_deviations(state, step) ** 2).mean(axis=1) / 2.0)
    flat = least + expected_most(loads.shape[1]) * blur
    return np.asarray(expected_max(loads, blur) > flat * (1.0 + FELT))


def _deviations(state: SearchState, pairs: float | NDArray[Any]) -> FloatArray:
    """[layers, live ranks]: standard deviations between two counts of this many pairs."""
    at = np.arange(len(state.layer))[:, None]
    shape = (len(at), state.ranks, state.per)
    shares, replicas = (
        values[at, state.expert].reshape(shape)[:, ~state.away] for values in (state.each, state.replicas)
    )
    return deviations(shares, replicas, pairs)


class _Search:
    """Local search over all layers at once, until no layer improves."""

    def __init__(self, state: SearchState, aims: _Aims) -> None:
        self._state = state
        self._aims = aims
        self._made: list[_Change] = []
        self._gains: list[FloatArray] = []
        self._layers: list[IndexArray] = []

    @property
    def most_loaded(self) -> float:
        """Load of the most loaded rank, mean over layers; 0 where there are none."""
        loads = self._state.over.max(axis=1) + self._state.cap
        return float(loads.mean()) if len(loads) else 0.0

    def go(self, pace: RoundSize) -> None:
        """Run until every layer has reached its target, or has found nothing in PATIENCE rounds.

        More than one such round is needed because each examines other slots.
        """
        layers = len(self._state.layer)
        going, idle, turn, few_left = np.ones(layers, bool), np.zeros(layers, np.intp), 0, LAST * layers
        while going.any() and turn < ROUNDS and (turn < LONG or going.sum() > few_left):
            # Compact the arrays, but not every round: copying them costs as much as a round.
            if going.mean() < CROWD:
                self._state, idle, going = (
                    self._state.taken(going),
                    idle[going],
                    np.ones(int(going.sum()), bool),
                )
            made = self._make(best(self._state, going, pace, PAIRS, turn))
            idle = np.where(made, 0, idle + 1)
            going &= (idle < PATIENCE) & ~self._reached(made)
            turn += 1

    def _reached(self, which: BoolArray) -> BoolArray:
        """[layers]: layers whose expected maximum in the next window is within the target. Lowers the caps of
        those that keep their cap and miss the target."""
        state = self._state
        rows = np.flatnonzero(which & (state.over.max(axis=1) <= 0.0))
        reached = np.zeros(len(which), bool)
        if len(rows):
            of = state.layer[rows]
            loads = state.over[rows][:, ~state.away] + state.cap[rows, None]
            missed = expected_max(loads, self._aims.spread[of]) - self._aims.most[of]
            floor = 1.0 + np.maximum(FINE, IDLE * self._aims.spread[of])
            done = (missed <= FINE) | (state.cap[rows] <= floor)
            reached[rows[done]] = True
            again = rows[~done]
            state.lower(again, np.maximum(missed[~done], FINE - state.over[again].max(axis=1)))
        return reached

    def _make(self, choice: SwapChoice) -> BoolArray:
        """Make the changes of a round that lower a layer's penalty; return [layers]: layers with a change."""
        state = self._state
        before, most = state.penalty, state.over.max(axis=1)
        change = _Change.of(state, choice)
        change.make(state)
        state.measure()
        # Revert what does harm, first all but the first change of a layer, then the first: several changes
        # can do harm together, and one can to ranks that hold both its experts.
        for first in (False, True):
            worse = (state.penalty > before - LEAST)[change.layer]
            back = worse & (change.first == first) if worse.any() else worse
            if back.any():
                change.taken(back).undo(state)
                state.measure()
                change = change.taken(~back)
        self._made.append(change)
        self._gains.append(change.gains(most, state.over.max(axis=1)))
        self._layers.append(state.layer[change.layer])
        made = np.zeros(len(state.layer), bool)
        made[change.layer] = True
        return made

    def changes(self) -> PlacementChanges:
        """Return the changes of each layer up to the one that reaches its lowest maximum load.

        Later changes relieve other ranks without lowering that maximum.
        """
        kind, hot, cold, at_hot, at_cold = (
            np.concatenate([np.empty(0, np.intp), *(getattr(change, name) for change in self._made)])
            for name in ("kind", "hot", "cold", "at_hot", "at_cold")
        )
        drop, swap = kind == ChangeKind.DROP, kind == ChangeKind.SWAP
        gone = np.where(swap, cold, self._state.empty)
        written, other = (
            np.where(expert == self._state.empty, EMPTY, expert).astype(np.int16)
            for expert in (np.where(drop, self._state.empty, hot), gone)
        )
        layer = np.concatenate([np.empty(0, np.int32), *self._layers]).astype(np.int32)
        gain = np.concatenate([np.empty(0), *self._gains])
        everything = PlacementChanges(
            kind.astype(np.uint8),
            layer,
            np.where(drop, at_hot, at_cold).astype(np.int32),
            written,
            np.where(swap | (kind == ChangeKind.MOVE), at_hot, NOWHERE).astype(np.int32),
            other,
            gain,
        )
        turn = np.arange(len(self._made)).repeat([len(change.layer) for change in self._made])
        return taken(everything, _paying(layer, turn, gain))


def _paying(layer: NDArray[np.int32], turn: IndexArray, gain: FloatArray) -> BoolArray:
    """[n]: changes up to the round (turn) after which their layer's accumulated gain is largest."""
    if not len(layer):
        return np.zeros(0, bool)
    order = layer.argsort(kind="stable")
    layer, turn, total = layer[order], turn[order], gain[order].cumsum()
    first = np.flatnonzero(np.diff(layer, prepend=-1))
    which = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(layer))))
    total -= (total[first] - gain[order][first])[which]
    ends = (np.diff(layer, append=-1) != 0) | (np.diff(turn, append=-1) != 0)
    total = np.where(ends, total, -np.inf)
    best = np.maximum.reduceat(total, first)
    until = np.minimum.reduceat(np.where(total >= best[which] - LEAST, turn, ENDLESS), first)
    kept = np.empty(len(order), bool)
    kept[order] = (turn <= until[which]) & (best[which] > LEAST)
    return kept


class _Change(NamedTuple):
    """Changes of a round, arrays [n]; those of a layer are consecutive and touch different ranks and
    experts."""

    layer: IndexArray
    """Row of the state."""
    kind: IndexArray
    at_hot: IndexArray
    """Slot."""
    at_cold: IndexArray
    hot: IndexArray
    """Expert in that slot."""
    cold: IndexArray
    level: NDArray[np.float32]
    """Load of the rank that is relieved."""

    @classmethod
    def of(cls, state: SearchState, choice: SwapChoice) -> "_Change":
        """Return the changes worth making; of those of a layer that touch the same expert only the first."""
        some = (choice.worth > LEAST).nonzero()[0]
        layer, kind, at_hot, at_cold = (
            choice.layer[some],
            choice.kind[some],
            choice.hot[some],
            choice.cold[some],
        )
        hot = state.expert[layer, at_hot]
        cold = np.where(kind == DROP, hot, state.expert[layer, at_cold])
        change = cls(layer, kind, at_hot, at_cold, hot, cold, choice.level[some])
        if change.first.all():
            return change
        touched = np.stack([hot, cold], axis=1) + (layer * (state.empty + 1))[:, None]
        by = np.zeros(state.load.size, np.intp)
        # Written in reverse order, so that the first change of an expert wins.
        by[touched[::-1]] = np.arange(len(some))[::-1, None]
        free = (
            (by[touched] == np.arange(len(some))[:, None]) | (touched % (state.empty + 1) == state.empty)
        ).all(axis=1)
        return change if free.all() else change.taken(free)

    def taken(self, which: BoolArray) -> "_Change":
        """Return some of the changes."""
        return _Change._make(part[which] for part in self)

    @property
    def first(self) -> BoolArray:
        """[n]: True for the first of its layer."""
        first = np.ones(len(self.layer), bool)
        np.not_equal(self.layer[1:], self.layer[:-1], out=first[1:])
        return first

    def make(self, state: SearchState) -> None:
        """Apply the changes. The caller then calls `measure`."""
        to_hot = np.where(
            self.kind == SWAP, self.cold, np.where(self.kind == REPLICATE, self.hot, state.empty)
        )
        self._write(state, to_hot, self.hot, 1.0)

    def undo(self, state: SearchState) -> None:
        """Revert the changes. The caller then calls `measure`."""
        self._write(state, self.hot, self.cold, -1.0)

    def _write(self, state: SearchState, to_hot: IndexArray, to_cold: IndexArray, sign: float) -> None:
        two = (self.kind != DROP).nonzero()[0]
        state.put(
            _joined(self.layer, self.layer[two]),
            _joined(self.at_hot, self.at_cold[two]),
            _joined(to_hot, to_cold[two]),
        )
        one = ((self.kind == REPLICATE) | (self.kind == DROP)).nonzero()[0]
        two = (((self.kind == REPLICATE) | (self.kind == MOVE)) & (self.cold != state.empty)).nonzero()[0]
        more = np.where(self.kind[one] == DROP, -sign, sign)
        state.count(
            _joined(self.layer[one], self.layer[two]),
            _joined(self.hot[one], self.cold[two]),
            _joined(more, np.full(len(two), -sign)),
        )

    def gains(self, before: FloatArray, after: FloatArray) -> FloatArray:
        """[n]: fall of the most loaded rank's load. before, after: [layers], of a round in which each change
        in turn relieves the most loaded rank."""
        starts, first = np.maximum(self.level, after[self.layer]), self.first
        starts[first] = before[self.layer[first]]
        ends = np.empty(len(starts))
        ends[:-1] = starts[1:]
        last = _before_each(first)
        ends[last] = after[self.layer[last]]
        return np.asarray(starts - ends)


def _joined(one: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([one, other])


def _before_each(first: BoolArray) -> IndexArray:
    """Return the ends of runs, given flags at their beginnings."""
    begins = first.nonzero()[0]
    return np.concatenate([begins[1:] - 1, [len(first) - 1]]) if len(begins) else begins
