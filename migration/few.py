"""Few copies: from a placement that demand has drifted away from, the changes that win back most balance for the fewest copies. Pure.

Of each layer the most loaded ranks are relieved, again and again, until none exceeds the cap at which the wanted part of a full re-placement's gain is
reached. Three changes carry load from a rank to another: swap two experts (two copies), replicate one over a spare replica or into an empty slot (one), move
one there (one). The fourth, giving up a spare replica, costs nothing, and what moves into the slot that it leaves costs one where a swap costs two. What
these changes themselves have brought to a rank and take away again need never be copied. `migration.relief` says which change is best.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.placement import EMPTY
from migration.changes import NONE, NOWHERE, Changes, Kind, Table, joined, taken, within
from migration.limits import UNLIMITED, Limits
from migration.noise import Noise, changed, deviation, expected_max, expected_most
from migration.relief import ENDLESS, Array, Choice, Flags, Index, State, best

REACH = 160
"""pairs of slots that are looked at for a swap, of a rank that is relieved and the least loaded ones"""
AT_ONCE = 16
"""of so many ranks, one is relieved per round"""
LEAST = 1e-7
"""a fall of the penalty below this is rounding"""
BEHIND = 0.015
"""most by which a layer's most loaded rank may stay above a full re-placement's, as a part of it, whatever part of the gain that is"""
CROWD = 0.85
"""done layers are dropped when no more than this part of them is left"""
FINE = 1e-4
"""by how much a cap is lowered at least where it proves too high"""


def few(
    table: Table, load: NDArray[Any], ranks: int, limits: Limits = UNLIMITED, *, goal: NDArray[Any], noise: Noise | None = None, node: Index | None = None
) -> Changes:
    """The changes, layers interleaved, each layer's in their order; `gain` is by how much the layer's most loaded rank falls, in mean rank loads.

    table: legal, [layers, slots]; load: [layers, experts], any unit; goal: [layers], balance of a full re-placement under this load.
    noise: None: the load is exact. With it, layers whose imbalance the sample explains are left alone, and the others are brought to the wanted part of
    the gain that is left of a full re-placement's on the next window. node: [ranks]; where there are several, experts that must keep more than one
    replica keep those where they are. ValueError names what does not fit together.
    """
    layers, slots = table.shape
    if ranks < 1 or slots % ranks:
        raise ValueError(f"few: {slots} slots do not divide into {ranks} ranks")
    if len(load) != layers or np.shape(goal) != (layers,):
        raise ValueError(f"few: load is {load.shape} and goal {np.shape(goal)}; expected [{layers}, experts] and [{layers}]")
    state = _state(table, load, ranks, limits, node)
    live = ranks - int(state.away.sum())
    if live < 2:
        return NONE
    aims, wanted = _aims(state, np.asarray(goal, np.float64), limits.target, noise)
    search = _Search(state.taken(wanted), aims)
    search.go(-(-REACH // state.per**2), max(1, live // AT_ONCE))
    found = search.changes
    return found if limits.most_copies is None else within(found, limits.most_copies)


def _state(table: Table, load: NDArray[Any], ranks: int, limits: Limits, node: Index | None) -> State:
    """The table as it is; caps are 0."""
    layers, slots = table.shape
    experts = load.shape[1]
    away = np.zeros(ranks, bool) if limits.live is None else ~np.asarray(limits.live, bool)
    expert = np.where((table == EMPTY) | np.repeat(away, slots // ranks), experts, table).astype(np.intp)
    held = np.zeros((layers, experts + 1, ranks), bool)
    held[np.arange(layers)[:, None], expert, np.arange(slots) // (slots // ranks)] = True
    replicas = held[:, :-1].sum(axis=2)
    wanted = np.where(replicas > 0, load, 0.0)
    mean = np.maximum(wanted.sum(axis=1, keepdims=True), 1e-300) / max(int((~away).sum()), 1)
    least = np.ones((layers, experts)) if limits.least_replicas is None else np.maximum(limits.least_replicas, 1)
    fixed = np.zeros((layers, experts), bool) if limits.frozen is None else np.asarray(limits.frozen, bool)
    if node is not None and len(np.unique(node)) > 1:
        fixed = fixed | (least > 1)
    count, relative = _wider(np.maximum(replicas, 1), ENDLESS), _wider(wanted / mean, 0.0)
    state = State(
        ranks,
        slots // ranks,
        ENDLESS if limits.most_replicas is None else limits.most_replicas,
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


def _wider(values: NDArray[Any], empty: float) -> Array:
    """[layers, experts + 1]: with the value of an empty slot."""
    return np.pad(values.astype(np.float64), ((0, 0), (0, 1)), constant_values=empty)


class _Aims:
    """What is wanted of the next window."""

    def __init__(self, most: Array, spread: Array) -> None:
        self.most = most
        """[layers]: most load of a rank that may be expected there"""
        self.spread = spread
        """[layers]: standard deviation of a rank's load between windows"""


def _aims(state: State, goal: Array, target: float, noise: Noise | None) -> tuple[_Aims, Flags]:
    """Sets each layer's cap; what is wanted, and, [layers], of which layers anything is."""
    alive = state.over[:, ~state.away]
    most = np.maximum(alive.max(axis=1), 1e-9)
    least = 1.0 / np.clip(goal, 1e-9, 1.0)
    spread = np.zeros(len(goal)) if noise is None else deviation(state.load[:, :-1], state.replicas[:, :-1], alive.shape[1], noise.window)
    blur = expected_most(alive.shape[1]) * spread
    aim = np.minimum(1.0 / (target / (least + blur) + (1.0 - target) / most), least * (1.0 + BEHIND) + blur)
    state.cap = np.maximum(aim - blur + 0.5 * spread, least)
    state.measure()
    wanted = most > np.maximum(state.cap, least + blur)
    if noise is not None:
        wanted &= changed(alive, goal, spread)
    return _Aims(aim, spread), wanted


class _Search:
    """Change after change, until no layer has one left."""

    def __init__(self, state: State, aims: _Aims) -> None:
        self._state = state
        self._aims = aims
        self._parts = [NONE]

    @property
    def changes(self) -> Changes:
        return joined(self._parts)

    def go(self, reach: int, at_once: int) -> None:
        """With the `reach` least loaded ranks for each of `at_once` that are relieved at once; where they find nothing, with all for one."""
        stuck: list[State] = []
        going = np.ones(len(self._state.layer), bool)
        while going.any():
            if going.mean() < CROWD:
                self._state, going = self._state.taken(going), np.ones(int(going.sum()), bool)
            choice = best(self._state, going, reach, at_once)
            made = np.any([self._make(choice, turn, going) for turn in range(at_once)], axis=0)
            if (going & ~made).any():
                stuck.append(self._state.taken(going & ~made))
            going = made & ~self._reached(made)
        if stuck and (reach, at_once) != (self._state.ranks, 1):
            self._state = self._state.together(stuck)
            self.go(self._state.ranks, 1)

    def _reached(self, which: Flags) -> Flags:
        """[layers]: whose next window may be expected to show no more than wanted. Lowers the caps of those that keep theirs and miss that."""
        state = self._state
        rows = np.flatnonzero(which & (state.over.max(axis=1) <= 0.0))
        reached = np.zeros(len(which), bool)
        if len(rows):
            of = state.layer[rows]
            loads = state.over[rows][:, ~state.away] + state.cap[rows, None]
            missed = expected_max(loads, self._aims.spread[of]) - self._aims.most[of]
            done = (missed <= FINE) | (state.cap[rows] <= 1.0 + FINE)
            reached[rows[done]] = True
            again = rows[~done]
            state.lower(again, np.maximum(missed[~done], FINE - state.over[again].max(axis=1)))
        return reached

    def _make(self, choice: Choice, turn: int, going: Flags) -> Flags:
        """Makes one change of each layer that is going, where it is still legal and lowers the penalty; [layers]: where it is and does."""
        state = self._state
        kind, at_hot, at_cold = choice.kind[:, turn], choice.hot[:, turn], choice.cold[:, turn]
        layers = np.arange(len(going))
        hot, cold = state.expert[layers, at_hot], state.expert[layers, at_cold]
        replicate, swap, move, drop = (kind == one for one in Kind)
        lost = np.where(drop, hot, cold)
        spare = swap | (state.replicas[layers, lost] > state.least[layers, lost])
        few_enough = ~replicate | (state.replicas[layers, hot] < state.most_replicas)
        made: Flags = going & (choice.worth[:, turn] > LEAST) & spare & few_enough
        if not made.any():
            return made
        most, before = state.over.max(axis=1), state.penalty
        more = replicate * 1.0 - drop
        less = -1.0 * ((replicate | move) & (cold != state.empty))
        to_hot = np.where(swap, cold, np.where(replicate, hot, state.empty))
        self._write(made, drop, at_hot, at_cold, to_hot, hot)
        self._count(made, hot, cold, more, less)
        state.measure()
        back = made & (state.penalty > before - LEAST)
        if back.any():  # ranks that hold both experts were reckoned with each for itself, or two changes of a round touch one expert
            self._write(back, drop, at_hot, at_cold, hot, cold)
            self._count(back, hot, cold, -more, -less)
            state.measure()
            made &= ~back
        changes = Changes(
            kind.astype(np.uint8),
            state.layer.astype(np.int32),
            np.where(drop, at_hot, at_cold).astype(np.int32),
            np.where(drop, EMPTY, hot).astype(np.int16),
            np.where(swap | move, at_hot, NOWHERE).astype(np.int32),
            np.where(swap, cold, EMPTY).astype(np.int16),
            most - state.over.max(axis=1),
        )
        self._parts.append(taken(changes, made))
        return made

    def _write(self, which: Flags, drop: Flags, at_hot: Index, at_cold: Index, hot: Index, cold: Index) -> None:
        """Experts into two slots of each of these layers, into the first alone for a drop."""
        one, two = np.flatnonzero(which), np.flatnonzero(which & ~drop)
        self._state.put(np.concatenate([one, two]), np.concatenate([at_hot[one], at_cold[two]]), np.concatenate([hot[one], cold[two]]))

    def _count(self, which: Flags, hot: Index, cold: Index, more: Array, less: Array) -> None:
        """So many more replicas of two experts of each of these layers."""
        one, two = np.flatnonzero(which & (more != 0.0)), np.flatnonzero(which & (less != 0.0))
        self._state.count(np.concatenate([one, two]), np.concatenate([hot[one], cold[two]]), np.concatenate([more[one], less[two]]))
