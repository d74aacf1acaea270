"""Simplest loop over NIXL's API that reads cells in pieces, for comparison: one request after another, polled
50 us to 1 ms apart."""

import time
from typing import Any

import numpy as np

from engine_adapter.engine import ExpertMemory
from engine_adapter.transfer.nixl_loader import load_nixl
from fleet.requests.handovers import MemoryAddress

SHORTEST_PAUSE, LONGEST_PAUSE = 50e-6, 1e-3
Rows = list[tuple[int, int, int]]


class RawLoop:
    """Read the first `cells` cells of a peer into the same cells here, in requests of at most `piece` bytes
    (small cells together, as Roost does)."""

    def __init__(self, memory: ExpertMemory, address: MemoryAddress, cells: int, piece: int) -> None:
        nixl = load_nixl()
        self._agent: Any = nixl.agent("raw", nixl.config(enable_prog_thread=False, backends=[]))
        self._agent.create_backend("UCX", {})
        self._agent.register_memory([(memory.base, memory.cells * memory.cell_bytes, 0, "")], "DRAM")
        name = self._agent.add_remote_agent(address.metadata)
        self._peer: str = name.decode() if isinstance(name, bytes) else name
        total = cells * memory.cell_bytes
        each = min(piece, memory.cell_bytes)
        rows = [
            (offset, min(each, memory.cell_bytes - offset % memory.cell_bytes), 0)
            for offset in _offsets(cells, memory.cell_bytes, each)
        ]
        together = max(1, piece // each)
        self._groups = [rows[first : first + together] for first in range(0, len(rows), together)]
        assert sum(row[1] for row in rows) == total
        self._bases = memory.base, address.base
        here, there = (
            self._agent.prep_xfer_dlist(who, _based(rows, base), "DRAM")
            for who, base in zip(("", self._peer), self._bases, strict=True)
        )
        self._prepared = here, there

    def read(self) -> None:
        """Read with descriptors made for every request."""
        for rows in self._groups:
            here, there = (self._agent.get_xfer_descs(_based(rows, base), "DRAM") for base in self._bases)
            self._finish(self._agent.initialize_xfer("READ", here, there, self._peer))

    def read_prepared(self) -> None:
        """Read with prepared descriptors, named by index."""
        first = 0
        for rows in self._groups:
            at = np.arange(first, first + len(rows), dtype=np.int32)
            self._finish(self._agent.make_prepped_xfer("READ", self._prepared[0], at, self._prepared[1], at))
            first += len(rows)

    def _finish(self, request: Any) -> None:
        state, pause = self._agent.transfer(request), SHORTEST_PAUSE
        while state == "PROC" and (state := self._agent.check_xfer_state(request)) == "PROC":
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE)
        request.release()
        if state != "DONE":
            raise RuntimeError(f"the raw loop's request ended as {state}")


def _offsets(cells: int, cell_bytes: int, each: int) -> list[int]:
    return [cell * cell_bytes + offset for cell in range(cells) for offset in range(0, cell_bytes, each)]


def _based(rows: Rows, base: int) -> Any:
    return np.array([(base + offset, size, device) for offset, size, device in rows], np.uint64)
