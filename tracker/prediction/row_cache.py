"""Rows by key within a hard byte budget: frequently used rows stay, rows used once are evicted. Pure.

A set-associative table: a key's set follows from its bits, and its row may be in any of the WAYS of the set.
Every way counts its uses. A new row takes an empty way, or replaces the least used; among equals the one
longest unused, and among those the one with the most tokens of evidence, so that the end of a prefix is
evicted before its beginning. If every way of a set was used repeatedly, their counts fall together until one
counts as used once (the ageing of GCLOCK: Smith 1978, Sequentiality and Prefetching in Database Systems). So
a new row always enters, and a flood of keys used once takes one way of a set, never all.

Rows of a prefix link to that of its parent: touching one touches its ancestors too.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import AnyArray, KeyArray
from fleet.keyed import KeyedTable, KeySets
from fleet.prediction import ROW
from fleet.signatures import PACKED

WAYS = 8
MAX_USES = 15
"""Limit of the use count."""
TICKS = 256
"""Resolution of a row's age, in steps per lifetime."""
LONGEST_CHAIN = 8192
"""Limit of ancestors that are touched with a row."""
OVERHEAD = 4096
RESERVE = 64
"""Memory besides the rows: OVERHEAD bytes, and 1 / RESERVE of the budget for temporary data."""
_WRAP = 1 << 15
_CHUNK = 1 << 15
_BATCH = 1 << 10


def cell(extra: int) -> np.dtype[Any]:
    """Return the dtype of a stored row: `fleet.prediction.row` and `extra` bytes for the owner."""
    return np.dtype([("packed", "u1", (PACKED,)), ("tokens", "<u4"), ("extra", "u1", (extra,))])


class RowCache(KeyedTable):
    """A table of at most `budget` bytes, all allocated at construction. As a mapping it returns rows of ROW
    bytes (`fleet.prediction`).

    extra: internal bytes of a row, not returned. life: seconds after which an unused row expires, to 1 part
    in TICKS. max_changes: limit of keys remembered as changed. Key 0 is invalid. ValueError if the budget is
    less than one set.
    """

    def __init__(self, budget: int, life: float, max_changes: int, extra: int = 0) -> None:
        self._cell = cell(extra)
        self._log = min(max_changes, budget // 128)
        one_set = WAYS * (8 + self._cell.itemsize + 4 + 2 + 1)
        self._sets = (budget - budget // RESERVE - OVERHEAD - 8 * self._log) // one_set
        if self._sets < 1:
            raise ValueError(
                f"a budget of {budget} bytes holds no rows; allow at least {2 * (OVERHEAD + one_set)}"
            )
        slots = self._sets * WAYS
        cells = bytearray(self._cell.itemsize * slots)
        super().__init__(KeySets(self._sets, WAYS), memoryview(cells), self._cell.itemsize, ROW)
        self._cells: AnyArray = np.frombuffer(cells, self._cell)
        self._parents = np.zeros(slots, np.uint32)
        self._touched = np.zeros(slots, np.uint16)
        self._uses = np.zeros(slots, np.uint8)
        self._changes: KeyArray = np.zeros(self._log, np.uint64)
        self._changed = 0
        self._tick = 0
        self._tick_seconds = life / TICKS
        self._origin: float | None = None

    # Reading

    @property
    def nbytes(self) -> int:
        """Bytes allocated, used or not."""
        arrays = (self._keys, self._cells, self._parents, self._touched, self._uses, self._changes)
        return sum(int(array.nbytes) for array in arrays)

    @property
    def filled_bytes(self) -> int:
        """Bytes of the rows in use."""
        return self._filled * (self.nbytes - int(self._changes.nbytes)) // len(self._keys)

    @property
    def capacity(self) -> int:
        return len(self._keys)

    def cell(self, key: int) -> Any | None:
        """Return a copy of the complete row of a key (a scalar of `cell`); None if absent."""
        slot = self._index.slot(key)
        return None if slot < 0 else self._cells[slot].copy()

    def find(self, keys: KeyArray) -> NDArray[np.int64]:
        """Return the slots of keys [n]: int64 [n]; -1 if absent."""
        places = self._index.places(keys)
        hits = self._keys[places] == keys[:, None]
        hits[keys == 0] = False
        return np.where(hits.any(axis=1), places[np.arange(len(keys)), hits.argmax(axis=1)], -1)

    # Writing

    def put(self, keys: KeyArray, cells: AnyArray, now: float, parent: int | None = None) -> None:
        """Replace or add rows [n] of different keys [n], none 0.

        parent: the keys are a chain that continues this one (0: a chain from the start); None: not a chain.
        """
        self.advance(now)
        before = self._index.slot(parent) if parent else -1
        for start in range(0, len(keys), _BATCH):
            part = slice(start, start + _BATCH)
            slots = self._put(keys[part], cells[part])
            if parent is not None:
                self._parents[slots[0]] = before + 1
                self._parents[slots[1:]] = slots[:-1] + 1
                before = int(slots[-1])

    def _put(self, keys: KeyArray, cells: AnyArray) -> NDArray[np.int64]:
        """Store different keys and return their slots: int64 [n]. Keys of one set are stored one after
        another.
        """
        ways = self._index.places(keys)
        if len({*ways[:, 0].tolist()}) == len(keys):
            return self._place(keys, ways, cells)
        slots = np.full(len(keys), -1, np.int64)
        pending = np.arange(len(keys))
        while len(pending):
            ways = self._index.places(keys[pending])
            _, first = np.unique(ways[:, 0], return_index=True)
            slots[pending[first]] = self._place(keys[pending[first]], ways[first], cells[pending[first]])
            pending = np.delete(pending, first)
        return slots

    def put_one(self, key: int, cells: AnyArray, now: float) -> None:
        """Do `put` for a single row [1], considerably faster. ValueError for key 0."""
        if not 0 < key < 1 << 64:
            raise ValueError(f"rows: {key} is no key")
        self.advance(now)
        slot = self._index.slot(key)
        same = False
        if slot < 0:
            slot = self._room_for(key)
            self._uses[slot] = 1
        else:
            self._uses[slot] = min(int(self._uses[slot]) + 1, MAX_USES)
            same = self._cells[slot].tobytes() == cells.tobytes()
        self._touched[slot], self._keys[slot], self._cells[slot] = self._tick, key, cells[0]
        if not same:
            self._note(np.array([key], np.uint64))

    def _room_for(self, key: int) -> int:
        """Return the slot for a new key, emptied."""
        ways = self._index.places(np.array([key], np.uint64))
        weakest = int(self._weakest(ways, self._keys[ways])[0])
        self._make_room(ways, ways[:, weakest])
        return int(ways[0, weakest])

    def _place(self, keys: KeyArray, ways: NDArray[np.int64], cells: AnyArray) -> NDArray[np.int64]:
        """Store keys of different sets and return their slots: int64 [n]."""
        held = self._keys[ways]
        hits = held == keys[:, None]
        known = hits.any(axis=1)
        chosen = hits.argmax(axis=1)
        new = np.flatnonzero(~known)
        if len(new):
            chosen[new] = self._weakest(ways[new], held[new])
        slots = ways[np.arange(len(keys)), chosen]
        if len(new):
            self._make_room(ways[new], slots[new])
        same = known & (_bytes(self._cells[slots]) == _bytes(cells)).all(axis=1)
        self._uses[slots] = np.where(known, np.minimum(self._uses[slots] + 1, MAX_USES), 1)
        self._touched[slots] = self._tick
        self._keys[slots] = keys
        self._cells[slots] = cells
        self._note(keys[~same])
        return np.asarray(slots)

    def _weakest(self, ways: NDArray[np.int64], held: KeyArray) -> NDArray[np.intp]:
        """Return the way of each set that a new row takes: [n]."""
        worth = self._uses[ways].astype(np.int64) << 16
        worth |= self._touched[ways]
        worth <<= 32
        worth -= self._cells["tokens"][ways]
        worth[held == 0] = -(1 << 40)
        return np.asarray(worth.argmin(axis=1), np.intp)

    def _make_room(self, ways: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Evict slots [n], each the weakest of its ways [n, WAYS]. Uses fall until it counts as used once."""
        gone = self._keys[slots]
        gone = gone[gone != 0]
        self._filled += len(slots) - len(gone)
        self._parents[slots] = 0
        if not len(gone):
            return
        self._note(gone)
        fall = np.where(self._keys[slots] != 0, self._uses[slots], 1) - np.uint8(1)
        if fall.any():
            crowded, by = ways[fall > 0], fall[fall > 0, None]
            self._uses[crowded] = np.maximum(self._uses[crowded], by + np.uint8(1)) - by

    def touch(self, key: int, now: float) -> bool:
        """Count a use of a row and of its ancestors. False if it is unknown."""
        self.advance(now)
        slot = self._index.slot(key)
        if slot < 0:
            return False
        arrays: tuple[Any, ...] = (self._cells["tokens"], self._uses, self._touched, self._parents)
        # several times faster per item than the array
        tokens, uses, touched, parents = (memoryview(array) for array in arrays)
        tick = self._tick
        for _ in range(LONGEST_CHAIN):
            protected = uses[slot] >= MAX_USES and touched[slot] == tick
            touched[slot] = tick
            if protected:
                break
            uses[slot] = min(uses[slot] + 1, MAX_USES)
            above = parents[slot] - 1
            if above < 0 or tokens[above] >= tokens[slot] or not uses[above]:
                break
            slot = above
        return True

    def advance(self, now: float) -> None:
        """Advance the time, and expire rows unused for a lifetime."""
        if self._origin is None:
            self._origin = now
        tick = int(max(0.0, now - self._origin) / self._tick_seconds)
        if tick > self._tick:
            self._tick = tick
            self._expire()
        if self._tick >= _WRAP:
            self._rebase()

    def _rebase(self) -> None:
        """Start the ticks later, so that they fit into their type. No row is older than a lifetime."""
        by = self._tick - TICKS - 1
        floor = np.uint16(min(by, 0xFFFF))
        np.maximum(self._touched, floor, out=self._touched)
        self._touched -= floor
        self._tick -= by
        self._origin = (self._origin or 0.0) + by * self._tick_seconds

    def _expire(self) -> None:
        if self._tick <= TICKS or not self._filled:
            return
        for start in range(0, len(self._keys), _CHUNK):
            slots = start + np.flatnonzero(self._touched[start : start + _CHUNK] < self._tick - TICKS)
            slots = slots[self._keys[slots] != 0]
            self._note(self._keys[slots])
            self._keys[slots] = 0
            self._uses[slots] = 0
            self._parents[slots] = 0
            self._filled -= len(slots)

    def rewrite(self, renewed: Callable[[AnyArray], AnyArray]) -> None:
        """Replace all rows by renewed(rows [n]), in chunks."""
        for start in range(0, len(self._keys), _CHUNK):
            slots = start + np.flatnonzero(self._keys[start : start + _CHUNK])
            before = self._cells[slots]
            after = renewed(before)
            other = (_bytes(before) != _bytes(after)).any(axis=1)
            self._cells[slots[other]] = after[other]
            self._note(self._keys[slots[other]])

    # Publishing

    def _note(self, keys: KeyArray) -> None:
        room = self._log - self._changed
        if len(keys) > room:
            self._changed = self._log + 1
        elif len(keys):
            self._changes[self._changed : self._changed + len(keys)] = keys
            self._changed += len(keys)

    @property
    def overflown(self) -> bool:
        """True if more keys changed than are remembered: only a snapshot is complete."""
        return self._changed > self._log

    def take(self) -> tuple[KeyArray, NDArray[np.uint8]]:
        """Return the keys [n] changed since the last take and their rows [n, ROW]; zeros for deleted rows."""
        keys = np.unique(self._changes[: min(self._changed, self._log)])
        self._changed = 0
        slots = self.find(keys)
        rows = self._given(slots)
        rows[slots < 0] = 0
        return keys, rows

    def all(self) -> tuple[KeyArray, NDArray[np.uint8]]:
        """Return all keys [n] and rows [n, ROW]."""
        slots = np.flatnonzero(self._keys)
        return self._keys[slots], self._given(slots)

    def _given(self, slots: NDArray[np.int64]) -> NDArray[np.uint8]:
        return np.ascontiguousarray(_bytes(self._cells)[slots, :ROW])

    # Saving and restoring

    def state(self) -> dict[str, Any]:
        """Return the complete state, for msgpack."""
        slots = np.flatnonzero(self._keys)
        return {
            "sets": self._sets,
            "width": self._cell.itemsize,
            "origin": self._origin,
            "tick": self._tick,
            "slots": slots.astype("<u4").tobytes(),
            "keys": self._keys[slots].tobytes(),
            "cells": self._cells[slots].tobytes(),
            "parents": self._parents[slots].astype("<u4").tobytes(),
            "touched": self._touched[slots].astype("<u2").tobytes(),
            "uses": self._uses[slots].tobytes(),
            "changes": self._changes[: min(self._changed, self._log)].tobytes(),
            "changed": self._changed,
        }

    def take_over(self, state: dict[str, Any], later: float = 0.0) -> None:
        """Restore a state on a clock that is ahead by `later` seconds. ValueError if it does not fit, without
        any change.
        """
        if (state["sets"], state["width"]) != (self._sets, self._cell.itemsize):
            raise ValueError(
                f"rows: a table of {state['sets']} sets of {state['width']} bytes; this one has {self._sets}"
                f" of {self._cell.itemsize}"
            )
        slots = np.frombuffer(state["slots"], "<u4").astype(np.int64)
        keys, cells = np.frombuffer(state["keys"], "<u8"), np.frombuffer(state["cells"], self._cell)
        parents, touched, uses = (
            np.frombuffer(state[name], kind)
            for name, kind in (("parents", "<u4"), ("touched", "<u2"), ("uses", "u1"))
        )
        if (
            any(len(part) != len(slots) for part in (keys, cells, parents, touched, uses))
            or not (keys != 0).all()
        ):
            raise ValueError(
                f"rows: {len(slots)} places do not go with {len(keys)} keys and {len(cells)} rows"
            )
        if len(slots) and (
            slots.max() >= self.capacity
            or parents.max() > self.capacity
            or (self._index.places(keys)[:, 0] != slots // WAYS * WAYS).any()
        ):
            raise ValueError("rows: keys lie where they cannot")
        changes, changed = np.frombuffer(state["changes"], "<u8"), int(state["changed"])
        if len(changes) > self._log or len(changes) != min(changed, self._log):
            raise ValueError(f"rows: {len(changes)} changes of {changed}; at most {self._log} are remembered")
        for target, values in (
            (self._keys, keys),
            (self._cells, cells),
            (self._parents, parents),
            (self._touched, touched),
            (self._uses, uses),
        ):
            target[:] = np.zeros((), target.dtype)
            target[slots] = values
        self._changes[: len(changes)] = changes
        self._changed, self._filled, self._tick = changed, len(slots), int(state["tick"])
        self._origin = None if state["origin"] is None else state["origin"] + later


def _bytes(cells: AnyArray) -> NDArray[np.uint8]:
    """View rows as bytes: uint8 [n, width], the same memory."""
    return cells.view(np.uint8).reshape(len(cells), cells.dtype.itemsize)
