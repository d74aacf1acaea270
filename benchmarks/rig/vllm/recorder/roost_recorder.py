"""Recorder of vLLM's own expert counters, step by step, for benchmarks. It runs in vLLM's worker processes
and imports nothing of Roost.

A vLLM general plugin. `ROOST_RECORDER` names a folder; without it nothing happens. Each expert rank writes
`rank-R.json` (sizes) and `rank-R.bin`: records of `time` (float64, monotonic), `kind` (int32) and `table`
(int32 [layers, physical experts]).

- `STEP`, `DUMMY`: a step with or without tokens of this rank; the table counts (token, k) pairs by physical
  expert, as vLLM's `expert_load_pass` does. Under data parallelism each rank counts its own tokens. All ranks
  write as many step records, since vLLM steps them together.
- `MAP`: the table names the logical expert of each slot from the next record on.
"""

import functools
import json
import os
import struct
import time
from pathlib import Path
from typing import Any, BinaryIO

STEP, DUMMY, MAP = 0, 1, 2
FOLDER = "ROOST_RECORDER"
_FLUSH_SECONDS = 1.0
_registered = False


class Recorder:
    """File of one expert rank."""

    def __init__(self, folder: Path, rank: int, ranks: int, layers: int, slots: int, experts: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        sizes = {"rank": rank, "ranks": ranks, "layers": layers, "slots": slots, "experts": experts}
        (folder / f"rank-{rank}.json").write_text(json.dumps({**sizes, "pid": os.getpid()}))
        self._file: BinaryIO = (folder / f"rank-{rank}.bin").open("wb")
        self._flushed = time.monotonic()
        self._map: Any = None

    def step(self, dummy: bool, table: Any, expert_of_slot: Any) -> None:
        """Record one step, after the map in force if that is a new one. Both tables are CPU tensors."""
        if self._map is None or not bool((self._map == expert_of_slot).all()):
            self._map = expert_of_slot.clone()
            self._write(MAP, self._map)
        self._write(DUMMY if dummy else STEP, table)
        if (now := time.monotonic()) > self._flushed + _FLUSH_SECONDS:
            self._file.flush()
            self._flushed = now

    def close(self) -> None:
        self._file.close()

    def _write(self, kind: int, table: Any) -> None:
        numbers = table.contiguous().to("cpu").numpy().astype("<i4")
        self._file.write(struct.pack("<di", time.monotonic(), kind) + numbers.tobytes())


def register() -> None:
    """Wrap vLLM's `EplbState.step`, once per process."""
    global _registered
    if _registered or not os.environ.get(FOLDER):
        return
    _registered = True
    from vllm.distributed.eplb.eplb_state import EplbState

    inner, recorders = EplbState.step, {}

    @functools.wraps(inner)
    def step(self: Any, is_dummy: bool = False, is_profile: bool = False, log_stats: bool = False) -> None:
        if not is_profile and self.model_states:
            state = next(iter(self.model_states.values()))
            if id(self) not in recorders:
                recorders[id(self)] = _recorder(state)
            recorders[id(self)].step(is_dummy, state.expert_load_pass, state.physical_to_logical_map)
        inner(self, is_dummy, is_profile, log_stats)

    EplbState.step = step


def _recorder(state: Any) -> Recorder:
    from vllm.distributed import get_ep_group

    group, (layers, slots) = get_ep_group(), state.physical_to_logical_map.shape
    return Recorder(
        Path(os.environ[FOLDER]),
        group.rank_in_group,
        group.world_size,
        layers,
        slots,
        state.model.num_logical_experts,
    )
