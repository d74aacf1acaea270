"""Find the change that best relieves the most loaded ranks, for many layers at once. Pure.

A change is rated by the fall of the layer's penalty per copy. Where the number of an expert's replicas
changes, the loads of all its holders change. Several ranks of a layer are relieved in one round, each with
its own partners: with r of them, the n-th least loaded rank is a partner of the (n mod r)-th. Loads called
`level` are relative to the cap. Large intermediate arrays are float32.
"""

from typing import NamedTuple

import numpy as np

from fleet.arrays import BoolArray, Float32Array, FloatArray, IndexArray
from migration import kernels
from migration.model.placement_changes import ChangeKind
from migration.solvers.search_state import SearchState, penalty

INVITING = 0.02
"""Amount by which a rank with room that has received an expert already counts as less loaded: what it gives
away again costs less."""
FREE = 2.0
"""Factor on the worth of a change for each replica of this plan that it removes again, and on a drop: these
copy nothing."""
LOOKS = 160
"""Least number of pairs of slots examined for one rank."""
BARRED = 1e6
"""Penalty of forbidden changes."""


class RoundSize(NamedTuple):
    """Number of ranks of a layer that are relieved in a round. More ranks mean fewer partners for each."""

    most: int
    of: int
    """At most one in this number of the ranks above the cap: the last ones need the best fit."""


class SwapChoice(NamedTuple):
    """Changes [r], at most one for each relieved rank; within a layer the most loaded rank's comes first."""

    layer: IndexArray
    """Row of the state."""
    kind: IndexArray
    worth: Float32Array
    """Fall of the penalty per copy."""
    hot: IndexArray
    """Slot of the rank that is relieved."""
    cold: IndexArray
    """Slot of another rank; any for a drop."""
    level: Float32Array
    """Load of the rank."""


def best(state: SearchState, going: BoolArray, pace: RoundSize, pairs: int, turn: int) -> SwapChoice:
    """Return the change worth most for each of the most loaded ranks above the cap, as many as `pace` allows,
    in each active layer.

    pairs: approximate number of pairs of slots to examine (one of the relieved rank, one of another), for
    swaps and for other changes; at least LOOKS for each rank. Where that does not cover all pairs, swaps
    consider the least loaded ranks only. Where a rank has many slots, some are considered, other ones with
    each `turn`.
    """
    rows = _rows(state, going, pace)
    # Divide the budget of pairs evenly: a round costs the same for few ranks as for many.
    looks = max(LOOKS, pairs // max(len(rows.layer), 1))
    hot = _hot(state, rows, int(looks**0.5), turn)
    many = _replicated(state)
    replicate, move = _one_copy(
        state, rows, hot, _spare(state, rows, many, max(LOOKS, looks) // hot.slot.shape[1], turn), many
    )
    options = (
        replicate,
        _swap(state, rows, hot, looks, turn),
        move,
        _drop(state, rows, hot, many),
    )  # by Kind
    worth, hot_slot, cold_slot = (np.array(parts) for parts in zip(*options, strict=True))
    if state.full:
        worth[[ChangeKind.MOVE, ChangeKind.DROP]] = -BARRED
    # A replica above the cap cannot be moved away whole: where replicating it helps, nothing else is
    # considered.
    worth[0] += _bar(hot.has_giant & (worth[0] > 0.0))
    kind, at = worth.argmax(axis=0), np.arange(len(rows.layer))
    return SwapChoice(
        rows.layer, kind, worth[kind, at], hot_slot[kind, at], cold_slot[kind, at], hot.level[:, 0]
    )


class _Rows(NamedTuple):
    """The r ranks to be relieved, and their partners."""

    layer: IndexArray
    """[r]"""
    rank: IndexArray
    """[r]"""
    turn: IndexArray
    """[r]: position among the relieved ranks of its layer."""
    width: IndexArray
    """[r]: number of relieved ranks in its layer."""
    cold: IndexArray
    """[layers, others]: the other ranks, least loaded first."""
    dealing: IndexArray
    """[layers, ranks]: index of the relieved rank that it is a partner of; -1: none (dead, or relieved
    itself)."""


def _rows(state: SearchState, going: BoolArray, pace: RoundSize) -> _Rows:
    away = int(state.away.sum())
    # Prefer partners that received an expert of this plan already: it can be given away again without a copy.
    key = state.over - INVITING * (state.inviting & (state.over < 0.0))
    if away:
        key[:, state.away] = -np.inf
    order = key.argsort(axis=1)
    hot, cold = order[:, ::-1][:, : pace.most], order[:, away : state.ranks - pace.most]
    layers = np.arange(len(going))[:, None]
    allowed = -(-(state.over > 0.0).sum(axis=1) // pace.of) * going
    above = (state.over[layers, hot] > 0.0) & (np.arange(hot.shape[1]) < allowed[:, None])
    layer, turn = (kernels.plain(part) for part in above.nonzero())
    width = above.sum(axis=1)
    begin = width.cumsum() - width
    dealing = np.full(state.over.shape, -1, np.intp)
    # Deal partners out in turns, so that every relieved rank gets some of the emptiest.
    dealing[layers, cold] = begin[:, None] + np.arange(cold.shape[1]) % np.maximum(width, 1)[:, None]
    dealing[width == 0] = -1
    return _Rows(layer, hot[layer, turn], turn, width[layer], cold, dealing)


class _Hot(NamedTuple):
    """Slots of the ranks to be relieved: arrays [r, h] unless stated otherwise."""

    slot: IndexArray
    expert: IndexArray
    """Index into a flat [layers, experts + 1]."""
    each: Float32Array
    """Load that a slot serves."""
    replicas: Float32Array
    weight: Float32Array
    """Factor on the worth of a change that removes the replica."""
    barred: Float32Array
    """BARRED where the slot must not change."""
    level: Float32Array
    """[r, 1]: load of the rank."""
    pays: Float32Array
    """[r, 1]: its penalty."""
    lighter: Float32Array
    """Load that leaves a slot when its expert gets one more replica."""
    without: Float32Array
    """Penalty of the rank without the replica."""
    shared: Float32Array
    """Penalty of the rank with one more replica of the expert elsewhere."""
    giant: BoolArray
    """The replica alone exceeds the cap: its expert must get another replica sooner or later."""

    @property
    def has_giant(self) -> BoolArray:
        """[r]"""
        return np.asarray(self.giant.any(axis=1))


def _hot(state: SearchState, rows: _Rows, most: int, turn: int) -> _Hot:
    slot = (rows.rank * state.per)[:, None] + _some(state.per, most, turn)
    at = slot + (rows.layer * state.expert.shape[1])[:, None]
    first = (rows.layer * state.load.shape[1])[:, None]
    expert = state.expert.take(at) + first
    each = state.each.take(expert).astype(np.float32)
    rank = (rows.layer * state.ranks + rows.rank)[:, None]
    level, pays = state.over.take(rank).astype(np.float32), state.pays.take(rank).astype(np.float32)
    barred = _bar(state.fixed.take(expert) | (expert == first + state.empty))
    replicas, weight, giant = (
        state.replicas.take(expert).astype(np.float32),
        _weight(state.fresh.take(at)),
        each > state.cap[rows.layer, None],
    )
    lighter = each / (replicas + 1.0)
    without, shared = penalty(level - np.array((each, lighter)))
    return _Hot(slot, expert, each, replicas, weight, barred, level, pays, lighter, without, shared, giant)


def _some(count: int, most: int, turn: int) -> IndexArray:
    """Return about `most` of the numbers below count, different ones each turn."""
    step = -(-count // most)
    return np.arange(turn % step, count, step)


def _weight(fresh: BoolArray) -> Float32Array:
    return np.asarray(fresh * np.float32(FREE - 1.0) + np.float32(1.0))


def _bar(which: BoolArray) -> Float32Array:
    return np.asarray(which * np.float32(BARRED))


class _Replicated(NamedTuple):
    """Every slot whose expert has other replicas, and every empty one: arrays [n] in the order of layers and
    slots."""

    slot: IndexArray
    """IndexArray into a flat [layers, slots]."""
    rank: IndexArray
    """IndexArray into a flat [layers, ranks]."""
    expert: IndexArray
    """Index into a flat [layers, experts + 1]."""
    each: FloatArray
    replicas: FloatArray
    rise: FloatArray
    """Rise of its rank's penalty when another replica of the expert is removed."""
    rising: FloatArray
    """Flat [layers, experts + 1]: `rise`, summed over an expert's holders."""
    falling: FloatArray
    """Flat [layers, experts + 1]: total fall of the holders' penalties when the expert gets one more
    replica."""


def _replicated(state: SearchState) -> _Replicated:
    library = kernels.compiled()
    if library is None:
        return _replicated_in_numpy(state)
    found = [np.empty(state.expert.size, kind) for kind in (np.intp, np.intp, np.intp, float, float, float)]
    rising, falling, count = np.empty(state.load.size), np.empty(state.load.size), np.empty(1, np.intp)
    library.swap_replicated(
        state.expert,
        state.replicas,
        state.each,
        state.over,
        state.pays,
        state.per,
        state.ranks,
        *found,
        rising,
        falling,
        count,
    )
    slot, rank, expert, each, replicas, rise = (part[: count[0]] for part in found)
    return _Replicated(slot, rank, expert, each, replicas, rise, rising, falling)


def _replicated_in_numpy(state: SearchState) -> _Replicated:
    """Implement `_replicated`."""
    place = (state.expert + np.arange(0, state.load.size, state.empty + 1)[:, None]).ravel()
    slot = (state.replicas > 1.0).take(place).nonzero()[0]
    expert, rank = place[slot], slot // state.per
    level, now = state.over.take(rank), state.pays.take(rank)
    each, replicas = state.each.take(expert), state.replicas.take(expert)
    more, less = penalty(np.array((level + each / (replicas - 1.0), level - each / (replicas + 1.0))))
    rise, fall = more - now, now - less
    rising, falling = (
        np.asarray(np.bincount(expert, values, state.load.size), np.float64) for values in (rise, fall)
    )
    return _Replicated(slot, rank, expert, each, replicas, rise, rising, falling)


class _Spare(NamedTuple):
    """Replaceable slots of ranks with room: m columns; shorter rows are padded with BARRED ones."""

    slot: IndexArray
    """[r, m]"""
    without: Float32Array
    """[r, m]: load of the slot's rank without it."""
    cost: Float32Array
    """[r, m]: rise of the other holders' penalties when the replica is replaced, less the penalty of the
    slot's rank."""
    weight: Float32Array
    """[r, m]"""
    shared: tuple[IndexArray, IndexArray, Float32Array]
    """(row, column, load) of those that hold an expert of the relieved rank too, and the load that then comes
    to that rank when they are replaced."""


def _spare(state: SearchState, rows: _Rows, many: _Replicated, most: int, turn: int) -> _Spare:
    chosen, row, column, columns = _spare_slots(state, rows, many, most, turn)
    slot, rank, expert, each = many.slot[chosen], many.rank[chosen], many.expert[chosen], many.each[chosen]
    shape = (len(rows.layer), columns)
    at = row * shape[1] + column
    of_layer = np.zeros(shape, np.intp)
    of_layer.ravel()[at] = slot - rows.layer[row] * state.expert.shape[1]
    without, cost, weight = (
        np.zeros(shape, np.float32),
        np.full(shape, BARRED, np.float32),
        np.ones(shape, np.float32),
    )
    without.ravel()[at] = state.over.take(rank) - each
    cost.ravel()[at] = many.rising.take(expert) - many.rise[chosen] - state.pays.take(rank)
    weight.ravel()[at] += state.fresh.take(slot) * np.float32(FREE - 1.0)
    # Removing a replica of an expert that the relieved rank also holds adds load there: recorded here and
    # corrected later.
    shared = (state.held.take(expert * state.ranks + rows.rank[row]) & (each > 0.0)).nonzero()[0]
    comes = each[shared] / (many.replicas[chosen[shared]] - 1.0)
    return _Spare(of_layer, without, cost, weight, (row[shared], column[shared], comes.astype(np.float32)))


def _spare_slots(
    state: SearchState, rows: _Rows, many: _Replicated, most: int, turn: int
) -> tuple[IndexArray, IndexArray, IndexArray, int]:
    """Return (slots, as indices of `many`; their row and column; number of columns).

    These are slots of partners with room, whose expert may lose a replica, grouped by relieved rank into rows
    of a rectangle.
    """
    library = kernels.compiled()
    if library is None or not len(rows.layer):
        return _spare_slots_in_numpy(state, rows, many, most, turn)
    chosen, row, column = (np.empty(len(many.rank), np.intp) for _ in range(3))
    size = np.empty(2, np.intp)
    library.swap_spare(
        rows.dealing,
        state.over,
        state.replicas,
        state.least,
        state.fixed,
        many.rank,
        many.expert,
        len(rows.layer),
        most,
        turn,
        chosen,
        row,
        column,
        size,
    )
    count, columns = size.tolist()
    return chosen[:count], row[:count], column[:count], columns


def _spare_slots_in_numpy(
    state: SearchState, rows: _Rows, many: _Replicated, most: int, turn: int
) -> tuple[IndexArray, IndexArray, IndexArray, int]:
    """Implement `_spare_slots`."""
    chosen = ((rows.dealing >= 0) & (state.over < 0.0)).take(many.rank).nonzero()[0]
    chosen = chosen[((state.replicas > state.least) & ~state.fixed).take(many.expert[chosen])]
    row = rows.dealing.take(many.rank[chosen])
    order = row.astype(np.int16).argsort(kind="stable")
    chosen, row = chosen[order], row[order]
    number = np.bincount(row, minlength=len(rows.layer))
    column = np.arange(len(chosen)) - (number.cumsum() - number).repeat(number)
    # Too many: every step-th, shifted with each turn so that all are seen in time.
    step = -(-int(number.max(initial=1)) // most)
    if step > 1:
        some = (column % step == turn % step).nonzero()[0]
        chosen, row, column = chosen[some], row[some], column[some] // step
    return chosen, row, column, int(column.max(initial=0)) + 1


class _Option(NamedTuple):
    """The best change of one kind: arrays [r]."""

    worth: Float32Array
    hot: IndexArray
    cold: IndexArray


def _option(worth: Float32Array, hot: IndexArray, cold: IndexArray) -> _Option:
    """Return the best of worth [r, h, c], of hot [r, h] and cold [r, c]."""
    at, flat = np.arange(len(worth)), worth.reshape(len(worth), -1)
    top = flat.argmax(axis=1)
    return _option_at(flat[at, top], top, hot, cold)


def _option_at(worth: Float32Array, top: IndexArray, hot: IndexArray, cold: IndexArray) -> _Option:
    """Return the change of hot [r, h] and cold [r, c] at an index [r] of the flat [h, c]."""
    row, (first, second) = np.arange(len(top)), np.divmod(top, cold.shape[1])
    return _Option(worth, hot[row, first], cold[row, second])


def _one_copy(
    state: SearchState, rows: _Rows, hot: _Hot, spare: _Spare, many: _Replicated
) -> tuple[_Option, _Option]:
    """Return the best replication and the best move into a spare slot."""
    own = hot.pays - hot.shared
    others = many.falling.take(hot.expert) - own
    relief = (
        own
        + others * (hot.replicas > 1.0)
        - hot.barred
        - _bar(hot.replicas >= state.max_replicas)
        - _bar(hot.has_giant[:, None] & ~hot.giant)
    ).astype(np.float32)
    relief_of_move = hot.pays - hot.without - hot.barred
    library = kernels.compiled()
    if library is None or not len(rows.layer):
        return _one_copy_in_numpy(state, hot, spare, relief, relief_of_move)
    worth, at = np.empty((2, len(relief)), np.float32), np.empty((2, len(relief)), np.intp)
    library.swap_copy(
        state.per,
        state.ranks,
        state.held,
        hot.expert,
        hot.each,
        hot.lighter,
        _held_elsewhere(hot),
        hot.level,
        hot.pays,
        relief_of_move,
        relief,
        hot.weight,
        spare.slot,
        spare.without,
        spare.cost,
        spare.weight,
        *spare.shared,
        worth,
        at,
    )
    replicate, move = (_option_at(*found, hot.slot, spare.slot) for found in zip(worth, at, strict=True))
    return replicate, move


def _held_elsewhere(hot: _Hot) -> BoolArray:
    """[r, h]: slots whose expert may change and has other holders."""
    return np.asarray((hot.replicas > 1.0) & (hot.barred == 0.0))


def _one_copy_in_numpy(
    state: SearchState, hot: _Hot, spare: _Spare, relief: Float32Array, relief_of_move: Float32Array
) -> tuple[_Option, _Option]:
    """Implement `_one_copy`. relief [r, h]: by a replication, and by a move."""
    level = spare.without[:, None, :] + hot.each[:, :, None]
    _bar_holders(state, hot, level, spare.slot)
    move = penalty(level)
    level -= hot.lighter[:, :, None]
    replicate = penalty(level)
    _correct(move, replicate, hot, spare)
    _to_worth(move, relief_of_move, spare.cost, spare.weight)
    move *= hot.weight[:, :, None]
    _to_worth(replicate, relief, spare.cost, spare.weight)
    return _option(replicate, hot.slot, spare.slot), _option(move, hot.slot, spare.slot)


def _to_worth(cost: Float32Array, relief: Float32Array, rise: Float32Array, weight: Float32Array) -> None:
    """Turn cost [r, h, c] into worth in place: relief [r, h] less cost less rise [r, c], times weight [r,
    c]."""
    np.subtract(relief[:, :, None], cost, out=cost)
    cost -= rise[:, None, :]
    cost *= weight[:, None, :]


def _bar_holders(state: SearchState, hot: _Hot, level: Float32Array, slot: IndexArray) -> None:
    """Bar, in level [r, h, c], an expert from slots [r, c] of ranks that hold it already."""
    row, column = _held_elsewhere(hot).nonzero()
    if len(row):
        there = state.held.take((hot.expert[row, column] * state.ranks)[:, None] + (slot // state.per)[row])
        level[row, column] += _bar(there)


def _correct(move: Float32Array, replicate: Float32Array, hot: _Hot, spare: _Spare) -> None:
    """Correct the costs [r, h, m] of pairs whose spare expert is also on the relieved rank: its load comes
    back there."""
    row, column, comes = spare.shared
    if len(row):
        left = hot.level[row] - np.array((hot.each[row], hot.lighter[row]))  # [2, n, h]
        alone = penalty(hot.level[row] + comes[:, None]) - hot.pays[row]
        more = penalty(left + comes[:, None]) - penalty(left) - alone
        move[row, :, column] += more[0]
        replicate[row, :, column] += more[1]


def _swap(state: SearchState, rows: _Rows, hot: _Hot, looks: int, turn: int) -> _Option:
    """Return the best exchange with one of the least loaded ranks."""
    # Spend the looks on few slots of several partners, the least loaded ones first.
    few = hot.slot.shape[1]
    reach = max(1, min(-(-looks // few**2), rows.cold.shape[1] // int(rows.width.max(initial=1))))
    rank = rows.cold[rows.layer[:, None], rows.turn[:, None] + rows.width[:, None] * np.arange(reach)]
    within = _some(state.per, few, turn // -(-state.per // few))
    relief = hot.pays - hot.barred
    library = kernels.compiled()
    if library is None or not len(rows.layer):
        return _swap_in_numpy(state, rows, hot, relief, rank, within)
    worth, hot_at, cold = np.empty(len(relief), np.float32), *np.empty((2, len(relief)), np.intp)
    library.swap_exchange(
        rows.layer,
        rows.rank,
        kernels.plain(rank),
        within,
        state.per,
        state.ranks,
        state.expert,
        state.each,
        state.over,
        state.pays,
        state.held,
        state.fixed,
        state.fresh,
        hot.expert,
        hot.each,
        _held_elsewhere(hot),
        hot.level - hot.each,
        relief,
        np.float32(0.5) * hot.weight,
        worth,
        hot_at,
        cold,
    )
    return _Option(worth, hot.slot[np.arange(len(hot_at)), hot_at], cold)


def _swap_in_numpy(
    state: SearchState, rows: _Rows, hot: _Hot, relief: Float32Array, rank: IndexArray, within: IndexArray
) -> _Option:
    """Implement `_swap`. relief: [r, h]; rank: [r, n], partners; within: slots of a partner to examine."""
    slot = ((rank * state.per)[:, :, None] + within).reshape(len(rank), -1)
    of_rank = (rank + (rows.layer * state.ranks)[:, None]).repeat(len(within), axis=1)
    at = slot + (rows.layer * state.expert.shape[1])[:, None]
    first = (rows.layer * state.load.shape[1])[:, None]
    expert = state.expert.take(at) + first
    level, each = state.over.take(of_rank), state.each.take(expert)
    # The partner's expert must be movable and new to the relieved rank.
    stays = (
        state.held.take(expert * state.ranks + rows.rank[:, None])
        | (expert == first + state.empty)
        | state.fixed.take(expert)
    )
    # Penalties of both ranks after the exchange; the same buffer is reused, as it is the largest array of a
    # round.
    after = (level - each).astype(np.float32)[:, None, :] + hot.each[:, :, None]
    _bar_holders(state, hot, after, slot)
    cost = penalty(after)
    np.add((hot.level - hot.each)[:, :, None], each.astype(np.float32)[:, None, :], out=after)
    cost += penalty(after)
    _to_worth(
        cost,
        relief,
        (_bar(stays) - state.pays.take(of_rank)).astype(np.float32),
        _weight(state.fresh.take(at)),
    )
    # A swap copies two experts: worth is per copy.
    cost *= (np.float32(0.5) * hot.weight)[:, :, None]
    return _option(cost, hot.slot, slot)


def _drop(state: SearchState, rows: _Rows, hot: _Hot, many: _Replicated) -> _Option:
    """Return the best replica for the rank to drop."""
    own = penalty(hot.level + hot.each / np.maximum(hot.replicas - 1.0, 1.0)) - hot.pays
    cost = (
        hot.without
        + (many.rising.take(hot.expert) - own)
        + hot.barred
        + _bar(hot.replicas <= state.least.take(hot.expert))
    )
    worth = (FREE * (hot.pays - cost)).astype(np.float32)
    return _option(worth[:, :, None], hot.slot, hot.slot[:, :1])
