"""KV pages between engines on one machine: those of a prefill rank, read by a rank that decodes. Belongs to
the step thread.

Both map each other's memory, as the ranks of one engine do. On another machine, or where head groups, type
or weights differ, nothing is read, and the prompt is computed again.
"""

import logging
import os
from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from engine_adapter.batching.handed_kv import PromptKv, take_over
from engine_adapter.batching.kv_cache import Block, KvCache
from engine_adapter.embedded.model_runner import ModelRunner
from engine_adapter.transfer.port import TransferError
from engine_adapter.transfer.shared_memory import map_memory, this_host
from fleet.requests.handovers import MemoryAddress

log = logging.getLogger(__name__)

_MAX_MAPPED = 16
"""Engines whose memory stays mapped."""


class KvExchange:
    """KV of this rank for other engines, and theirs for this rank. State: mapped memory, by its file."""

    def __init__(self, runner: ModelRunner, weights: str) -> None:
        """weights: their digest."""
        self._runner = runner
        self._weights = weights
        self._mapped: dict[tuple[int, int, int], NDArray[np.uint8]] = {}

    def source(self, pages: Sequence[int]) -> PromptKv | None:
        """Return the place of these pages, which hold a prompt's full blocks. None: other engines cannot read
        them, as under tensor-parallel attention a rank has only parts."""
        pool = self._runner.kv_pool
        if self._runner.placement.attention != "dp" or pool.descriptor < 0 or not this_host():
            return None
        units = tuple(tuple(self._runner.kv_units[page].tolist()) for page in pages)
        address = MemoryAddress(
            cells=pool.units,
            cell_bytes=pool.unit_bytes,
            layout=self._layout,
            base=0,
            host=this_host(),
            pid=os.getpid(),
            descriptor=pool.descriptor,
            inode=os.fstat(pool.descriptor).st_ino,
        )
        return PromptKv(
            layout=self._layout,
            blocks=len(units),
            page_bytes=pool.page_bytes,
            address=address,
            units=units,
            checksums=tuple(self._checksum(one) for one in units),
        )

    def fetch(self, source: PromptKv, cache: KvCache, blocks: Sequence[Block]) -> int:
        """Copy blocks of a prompt into the cache, as far as they are there and unchanged. Return how many."""
        own = self._runner.kv_units
        try:
            theirs = self._memory(source)
        except (TransferError, ValueError) as error:
            log.warning("the KV of a prompt is computed again: %s", error)
            return 0

        def fill(block: int, page: int) -> bool:
            mine = own[page].tolist()
            for unit, other in zip(mine, source.units[block], strict=True):
                self._runner.kv_pool.unit(unit)[:] = theirs[other]
            return self._checksum(mine) == source.checksums[block]

        return take_over(cache, blocks[: source.blocks], fill)

    def _memory(self, source: PromptKv) -> NDArray[np.uint8]:
        """Return the other rank's units, uint8 [units, unit_bytes]. ValueError when they do not fit this
        rank's, TransferError when they cannot be mapped."""
        pool, address = self._runner.kv_pool, source.address
        if self._runner.placement.attention != "dp":
            raise ValueError("this engine's attention is tensor-parallel at present")
        if source.layout != self._layout or address is None or address.cell_bytes != pool.unit_bytes:
            raise ValueError(f"its pages are {source.layout}, and not {self._layout}")
        if address.host != this_host():
            raise ValueError("it is on another machine")
        if not len(source.units) == len(source.checksums) == source.blocks:
            raise ValueError("its pages are not all named")
        known = self._runner.kv_units.shape[1]
        if any(
            len(page) != known or not all(0 <= unit < address.cells for unit in page) for page in source.units
        ):
            raise ValueError("it names units that do not exist")
        key = address.pid, address.descriptor, address.inode
        if key not in self._mapped:
            if len(self._mapped) == _MAX_MAPPED:
                self._mapped.clear()
            self._mapped[key] = map_memory(address).reshape(address.cells, address.cell_bytes)
        return self._mapped[key]

    @property
    def _layout(self) -> str:
        """Form of the pages: the weights, and the shape and type of a page's units."""
        pool = self._runner.kv_pool
        shape = "x".join(str(size) for size in pool.values.shape[1:])
        return f"{self._weights} {pool.groups}x{shape} {str(pool.values.dtype).removeprefix('torch.')}"

    def _checksum(self, units: Sequence[int]) -> int:
        found = xxhash.xxh3_64()
        for unit in units:
            found.update(self._runner.kv_pool.unit(unit).data)
        return found.intdigest()
