"""KV memory of a rank: units in one mapping, and the pages that they make up.

A *unit* is the KV of one page of one *head group*, all layers, contiguous: [layers, 2 * heads of the group,
page tokens, head_dim], keys before values. A page of data-parallel attention has a unit of every group, a
page of tensor-parallel attention one unit on every rank (decision 0020). A *row* is the part of a unit for
one layer and one head, either keys or values: [page tokens, head_dim].
"""

import os
import weakref
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine_adapter.embedded.arena import map_or_allocate
from fleet.arrays import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class PageTable:
    """Units of every page, and where attention finds them."""

    units: NDArray[np.int32]
    """[pages, units of a page]. Read-only."""
    rows: IntArray
    """int64 [2 * heads of a page, pages]: rows of each page in the first layer, keys before values."""


class KvPool:
    """KV units of one rank, zeroed, with every byte allocated. The memory belongs to a file that other ranks
    can map."""

    def __init__(
        self,
        *,
        pages: int,
        groups: int,
        layers: int,
        kv_heads: int,
        head_dim: int,
        page_tokens: int,
        dtype: torch.dtype,
    ) -> None:
        """pages: of data-parallel attention. kv_heads: a multiple of groups. OSError when the system has too
        little memory."""
        self.groups = groups
        self.units = pages * groups
        self._heads = kv_heads // groups
        shape = (self.units, layers, 2 * self._heads, page_tokens, head_dim)
        self.nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self.unit_bytes = self.nbytes // self.units
        self.descriptor, self._memory = map_or_allocate("roost-kv", self.nbytes)
        # Readers of other ranks open the file by this descriptor's number, so it stays open with the pool.
        if self.descriptor >= 0:
            weakref.finalize(self, os.close, self.descriptor)
        self.values = torch.from_numpy(self._memory).view(dtype).view(shape)
        """[units, layers, 2 * heads of a group, page tokens, head_dim]."""
        rows = self.values.view(-1, page_tokens, head_dim)
        self._of_layer = [rows[layer * 2 * self._heads :] for layer in range(layers)]

    @property
    def page_bytes(self) -> int:
        """Memory of a page of data-parallel attention in bytes."""
        return self.groups * self.unit_bytes

    def unit(self, number: int) -> NDArray[np.uint8]:
        """Return a view of a unit's memory, uint8 [unit_bytes]. IndexError when there is no such unit."""
        if not 0 <= number < self.units:
            raise IndexError(f"kv pool: unit {number}; there are units 0 to {self.units - 1}")
        return self._memory[number * self.unit_bytes : (number + 1) * self.unit_bytes]

    def layer(self, number: int) -> torch.Tensor:
        """Return a view of the rows from a layer's first row on, [rows, page tokens, head_dim]. With it,
        `PageTable.rows` are those of this layer."""
        return self._of_layer[number]

    def first_units(self, units_of_page: int) -> NDArray[np.int32]:
        """Return int32 [pages, units_of_page] with all units in order. units_of_page: 1 or `groups`."""
        return np.arange(self.units, dtype=np.int32).reshape(-1, units_of_page)

    def page_table(self, units: NDArray[np.int32], units_of_page: int) -> PageTable:
        """Return the table of pages with these units, [pages, units_of_page], copied. ValueError when a unit
        does not exist or is part of two pages, and for another shape or type."""
        if units.ndim != 2 or units.shape[1] != units_of_page or units.dtype != np.int32 or not len(units):
            raise ValueError(
                f"kv pool: a page table is {units.dtype} {units.shape}; expected int32 [pages,"
                f" {units_of_page}]"
            )
        outside = units[(units < 0) | (units >= self.units)].tolist()
        if wrong := outside or np.flatnonzero(np.bincount(units.ravel()) > 1).tolist():
            raise ValueError(
                f"kv pool: unit {wrong[0]} in a page table; every page needs units of its own, from 0 to"
                f" {self.units - 1}"
            )
        rows_of_unit = self.values.shape[1] * self.values.shape[2]
        # [units of a page, heads of a group, pages]: the heads of a page are those of its units, in order.
        keys = units.T.astype(np.int64)[:, None] * rows_of_unit + np.arange(self._heads)[:, None]
        keys = keys.reshape(-1, len(units))
        units = units.copy()
        units.flags.writeable = False
        return PageTable(units, np.concatenate([keys, keys + self._heads]))
