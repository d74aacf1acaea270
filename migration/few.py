"""Few copies: from a placement that demand has drifted away from, the changes that win back most balance for the fewest copies. Pure.

Replicas share an expert's load evenly. Of each layer the most loaded rank is relieved, again and again, until none exceeds the cap at which the wanted
part of a full re-placement's gain is reached. Three changes carry load from it to one of the least loaded ranks: swap two experts (two copies), replicate
one over a spare replica or into an empty slot (one), move one there (one); the fourth, giving up a spare replica of its own, costs nothing.

What a change is worth is the fall of a penalty summed over ranks, per copy. The penalty of a load is its excess over the cap, and below the cap a small
square of what is missing to it: excess must go, and room should lie where the next excess fits in. All layers go one change at a time, at once.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from fleet.placement import EMPTY
from migration.changes import NONE, NOWHERE, Changes, Kind, Table, joined, taken, within
from migration.limits import UNLIMITED, Limits
from migration.noise import Noise, changed, deviation, expected_most

Array = NDArray[np.float64]
Index = NDArray[np.intp]
ROOM = 10.0
"""weight of the square of a rank's room below the cap, against excess over it"""
REACH = 640
"""pairs of slots, one of the most loaded rank's and one of the least loaded ranks', that a layer looks at in one round"""
LEAST = 1e-7
"""a fall of the penalty below this is rounding"""
FREE = 0.5
"""copies that a drop counts as when changes are compared: what it gives up is missed later"""
ENDLESS = 1 << 20
"""replicas of what may be replaced at will: an empty slot"""


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
    search = _search(table, load, ranks, limits, node)
    open_layers = _capped(search, np.asarray(goal, np.float64), limits.target, noise)
    found = _found(search.taken(open_layers), max(1, REACH // search.per**2))
    return found if limits.most_copies is None else within(found, limits.most_copies)


@dataclass(slots=True)
class _Search:
    """Layers that are worked on. Experts are numbered as in the table, with one more, the last, that stands for an empty slot."""

    ranks: int
    per: int
    """slots of a rank"""
    most_replicas: int
    away: NDArray[np.bool_]
    """bool [ranks]: dead"""
    layer: Index
    expert: Index
    """[layers, slots]; slots of dead ranks as if empty"""
    load: Array
    """[layers, experts + 1], in mean rank loads"""
    replicas: NDArray[np.int64]
    """[layers, experts + 1]"""
    spare: NDArray[np.int64]
    """[layers, experts + 1]: an expert that has more replicas than this may lose one"""
    fixed: NDArray[np.bool_]
    """[layers, experts + 1]: stays where it is"""
    cap: Array
    """[layers]: most load of a rank that is good enough"""
    share: Array
    """[layers, ranks, slots of a rank]: load of each slot"""
    ranked: Array
    """[layers, ranks]: load of each rank"""

    def measure(self) -> None:
        """Brings `share` and `ranked` up to date with `expert` and `replicas`."""
        self.share = _at(self.load / self.replicas, self.expert).reshape(len(self.layer), self.ranks, self.per)
        self.ranked = self.share @ np.ones(self.per)

    def taken(self, which: NDArray[np.bool_]) -> "_Search":
        """Some of the layers."""
        return self if which.all() else _with(self, {name: getattr(self, name)[which] for name in _PER_LAYER})

    def penalty(self) -> Array:
        """[layers]: what is to fall."""
        return np.asarray(_penalty(self.ranked - self.cap[:, None]).sum(axis=1))


_PER_LAYER = tuple(field.name for field in fields(_Search) if field.name not in ("ranks", "per", "most_replicas", "away"))


def _with(search: _Search, arrays: dict[str, NDArray[Any]]) -> _Search:
    """With other layers: arrays by name, of `_PER_LAYER`."""
    return replace(search, **cast("dict[str, Any]", arrays))


def _search(table: Table, load: NDArray[Any], ranks: int, limits: Limits, node: Index | None) -> _Search:
    """The table as it is, no caps set."""
    layers, slots = table.shape
    experts = load.shape[1]
    away = np.zeros(ranks, bool) if limits.live is None else ~np.asarray(limits.live, bool)
    expert = np.where((table == EMPTY) | np.repeat(away, slots // ranks), experts, table).astype(np.intp)
    rows = np.arange(layers)[:, None] * (experts + 1)
    replicas = np.bincount((expert + rows).ravel(), minlength=layers * (experts + 1)).reshape(layers, -1)
    held = np.where(replicas[:, :-1] > 0, load, 0.0)
    mean = np.maximum(held.sum(axis=1, keepdims=True), 1e-300) / max(int((~away).sum()), 1)
    replicas = np.maximum(replicas, 1)
    replicas[:, -1] = ENDLESS
    least = np.ones((layers, experts), np.int64) if limits.least_replicas is None else np.maximum(limits.least_replicas, 1).astype(np.int64)
    fixed = np.zeros((layers, experts), bool) if limits.frozen is None else np.asarray(limits.frozen, bool)
    if node is not None and len(np.unique(node)) > 1:
        fixed = fixed | (least > 1)
    search = _Search(
        ranks, slots // ranks, ENDLESS if limits.most_replicas is None else limits.most_replicas, away, np.arange(layers), expert,
        _wider(held / mean, 0.0), replicas, _wider(least, 0), _wider(fixed, False), np.empty(layers), np.empty(0), np.empty(0),
    )  # fmt: skip
    search.measure()
    return search


def _wider(values: NDArray[Any], empty: Any) -> NDArray[Any]:
    """[layers, experts + 1]: with the value of an empty slot."""
    return np.pad(values, ((0, 0), (0, 1)), constant_values=empty)


def _at(values: NDArray[Any], expert: Index) -> NDArray[Any]:
    """values [layers, experts + 1] of expert [layers, ...]."""
    rows = np.arange(0, values.size, values.shape[1]).reshape(-1, *[1] * (expert.ndim - 1))
    return np.take(values, expert + rows)


def _capped(search: _Search, goal: Array, target: float, noise: Noise | None) -> NDArray[np.bool_]:
    """Sets each layer's cap; [layers]: which are to be worked on."""
    alive = search.ranked[:, ~search.away]
    most = np.maximum(alive.max(axis=1, initial=0.0), 1e-9)
    least = 1.0 / np.clip(goal, 1e-9, 1.0)
    if noise is None:
        search.cap = 1.0 / (target / least + (1.0 - target) / most)
        return np.asarray(most > np.maximum(search.cap, least))
    spread = deviation(search.load[:, :-1], search.replicas[:, :-1], alive.shape[1], noise.window)
    blur = expected_most(alive.shape[1]) * spread
    search.cap = np.maximum(1.0 / (target / (least + blur) + (1.0 - target) / most) - blur, least)
    return np.asarray(changed(alive, goal, spread) & (most > least + blur))


def _penalty(over: Array) -> Array:
    """Of loads by how much they exceed the cap (below 0: their room)."""
    room = np.minimum(over, 0.0)
    return np.asarray(over + room * (ROOM * room - 1.0))


class _Choice(NamedTuple):
    """One change for each layer: arrays [layers]."""

    kind: Index
    worth: Array
    """fall of the penalty per copy"""
    hot: Index
    """slot of the most loaded rank that is relieved"""
    cold: Index
    """slot of another rank; any for a drop"""


def _found(search: _Search, reach: int) -> Changes:
    """Change after change, until no layer has one left: of the most loaded rank with the `reach` least loaded ones, or, where nothing is, with all."""
    parts, stuck = [NONE], [search.taken(np.zeros(len(search.layer), bool))]
    while len(search.layer):
        part, made = _make(search, _best(search, min(reach, search.ranks)))
        parts.append(part)
        if not made.all():
            stuck.append(search.taken(~made))
        search = search.taken(made & (search.ranked.max(axis=1) > search.cap))
    if reach < search.ranks and len(stuck) > 1:
        together = _with(search, {name: np.concatenate([getattr(part, name) for part in stuck]) for name in _PER_LAYER})
        parts.append(_found(together, search.ranks))
    return joined(parts)


def _best(search: _Search, reach: int) -> _Choice:
    """The change worth most for each layer's most loaded rank."""
    layers, per, empty = len(search.layer), search.per, search.load.shape[1] - 1
    rows = np.arange(layers)
    over = search.ranked - search.cap[:, None]
    most = over.argmax(axis=1)
    ready = np.where(search.away, np.inf, over)
    ready[rows, most] = np.inf
    least = np.argpartition(ready, reach - 1, axis=1)[:, :reach]  # [layers, reach]
    closed = np.isinf(ready[rows[:, None], least])[:, :, None]
    hot_slot = most[:, None] * per + np.arange(per)  # [layers, slots]
    cold_slot = (least[:, :, None] * per + np.arange(per)).reshape(layers, -1)  # [layers, reach * slots]
    hot, cold = search.expert[rows[:, None], hot_slot], search.expert[rows[:, None], cold_slot]
    hot_count, cold_count = _at(search.replicas, hot), _at(search.replicas, cold)
    hot_share, cold_share = search.share[rows, most], search.share[rows[:, None], least].reshape(layers, -1)

    same = hot[:, :, None, None] == cold.reshape(layers, 1, reach, per)  # [layers, slots, reach, slots]
    there = np.repeat(same.any(axis=3), per, axis=2)  # expert of the hot slot is on the cold rank
    here = same.any(axis=1).reshape(layers, -1)  # expert of the cold slot is on the hot rank
    rising, falling = _others(search, over)
    top = over[rows, most][:, None]
    floor = np.repeat(over[rows[:, None], least], per, axis=1)

    loses = np.where(here, cold_share / np.maximum(cold_count - 1, 1), 0.0)  # what comes to the hot rank when the cold slot's expert goes
    rise = _at(rising, cold) - _rise(floor, cold_share, cold_count) - np.where(here, _penalty(top + loses) - _penalty(top), 0.0)
    fall = np.where(hot_count > 1, _at(falling, hot) - _fall(top, hot_share, hot_count), 0.0)
    fixed_hot = _at(search.fixed, hot) | (hot == empty)
    fixed_cold = _at(search.fixed, cold) | np.repeat(closed, per, axis=1)[:, :, 0]
    before = (_penalty(top) + _penalty(floor))[:, None, :]
    replaced = np.where(fixed_cold | (cold_count <= _at(search.spare, cold)), -np.inf, -rise)[:, None, :] + before
    replaced = np.where(there | fixed_hot[:, :, None], -np.inf, replaced)

    difference = hot_share[:, :, None] - cold_share[:, None, :]
    after_cold = _penalty(floor[:, None, :] + difference)
    swap = before - after_cold - _penalty(top[:, :, None] - difference)
    swap = np.where(there | (here | fixed_cold | (cold == empty))[:, None, :] | fixed_hot[:, :, None], -np.inf, 0.5 * swap)
    eased = (top + 0.0)[:, :, None] + loses[:, None, :]
    move = replaced - after_cold - _penalty(eased - hot_share[:, :, None])
    lighter = (hot_share / (hot_count + 1))[:, :, None]
    replicate = replaced + fall[:, :, None] - _penalty(floor[:, None, :] + difference - lighter) - _penalty(eased - lighter)
    replicate = np.where((hot_count >= search.most_replicas)[:, :, None], -np.inf, replicate)
    drop = _penalty(top) - _penalty(top - hot_share) - (_at(rising, hot) - _rise(top, hot_share, hot_count))
    drop = np.where(fixed_hot | (hot_count <= _at(search.spare, hot)), -np.inf, drop / FREE)
    return _most_worth(rows, hot_slot, cold_slot, replicate, swap, move, drop)


def _most_worth(rows: Index, hot_slot: Index, cold_slot: Index, replicate: Array, swap: Array, move: Array, drop: Array) -> _Choice:
    """The best of the best, in the order of Kind."""
    worths = [replicate.reshape(len(rows), -1), swap.reshape(len(rows), -1), move.reshape(len(rows), -1), drop]
    best = np.stack([worth.argmax(axis=1) for worth in worths])
    worth = np.stack([worth[rows, at] for worth, at in zip(worths, best, strict=True)])
    kind = worth.argmax(axis=0)
    at = best[kind, rows]
    wide = cold_slot.shape[1]
    dropped = kind == Kind.DROP
    hot = np.where(dropped, at, at // wide)
    return _Choice(kind, worth[kind, rows], hot_slot[rows, hot], cold_slot[rows, np.where(dropped, 0, at % wide)])


def _rise(over: Array, share: Array, count: NDArray[np.int64]) -> Array:
    """By how much a holder's penalty rises when another replica of the expert goes."""
    return np.asarray(_penalty(over + share / np.maximum(count - 1, 1)) - _penalty(over))


def _fall(over: Array, share: Array, count: NDArray[np.int64]) -> Array:
    """By how much a holder's penalty falls when the expert gets another replica."""
    return np.asarray(_penalty(over) - _penalty(over - share / (count + 1)))


def _others(search: _Search, over: Array) -> tuple[Array, Array]:
    """[layers, experts + 1] each: `_rise` and `_fall` summed over an expert's holders; 0 for experts with one replica."""
    place = (search.expert + np.arange(0, search.load.size, search.load.shape[1])[:, None]).ravel()
    replicas = search.replicas.ravel()[place]
    at = np.flatnonzero((replicas > 1) & (replicas < ENDLESS))
    key, share, count, level = place[at], search.share.ravel()[at], replicas[at], over.ravel()[at // search.per]
    return _added(search, key, _rise(level, share, count)), _added(search, key, _fall(level, share, count))


def _added(search: _Search, key: Index, values: Array) -> Array:
    """float64 [layers, experts + 1]: values added up by place in that."""
    return np.asarray(np.bincount(key, values, search.load.size), np.float64).reshape(search.load.shape)


def _make(search: _Search, choice: _Choice) -> tuple[Changes, NDArray[np.bool_]]:
    """Makes the changes that lower the penalty: they, and, [layers], where there was one."""
    rows, empty = np.arange(len(search.layer)), search.load.shape[1] - 1
    hot, cold = search.expert[rows, choice.hot], search.expert[rows, choice.cold]
    most, penalty, expert, replicas = search.ranked.max(axis=1), search.penalty(), search.expert.copy(), search.replicas.copy()
    replicate, swap, move, drop = (choice.kind == kind for kind in Kind)
    search.expert[rows, choice.hot] = np.where(swap, cold, np.where(replicate, hot, empty))
    search.expert[rows, choice.cold] = np.where(drop, cold, hot)
    search.replicas[rows, hot] += replicate * 1 - drop
    search.replicas[rows, cold] -= (replicate | move) & (cold != empty)
    search.measure()
    made = (choice.worth > LEAST) & (search.penalty() < penalty - LEAST)
    if not made.all():  # holders that lose one expert and gain another by a change: worth added both up as if each were alone
        search.expert[~made], search.replicas[~made] = expert[~made], replicas[~made]
        search.measure()
    changes = Changes(
        choice.kind.astype(np.uint8),
        search.layer.astype(np.int32),
        np.where(drop, choice.hot, choice.cold).astype(np.int32),
        np.where(drop, EMPTY, hot).astype(np.int16),
        np.where(swap | move, choice.hot, NOWHERE).astype(np.int32),
        np.where(swap, cold, EMPTY).astype(np.int16),
        most - search.ranked.max(axis=1),
    )
    return taken(changes, made), made
