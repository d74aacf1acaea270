"""Launcher of SGLang whose EPLB takes expert maps from a file. Written from the source of SGLang 0.5.23,
never run.

    ROOST_SGLANG_MAP=/maps/next.json python roost_sglang.py --model-path MODEL --enable-eplb ...

Without ROOST_SGLANG_MAP it launches SGLang as `python -m sglang.launch_server` does. The module runs in
SGLang's environment, and needs nothing of Roost.

The file has the form of `--init-expert-location`: {"physical_to_logical_map": [layers][slots]}, and may say
which map it is for ("replaces": `map_digest`). EPLB looks at it each time that it would rebalance
(`--eplb-rebalance-num-iterations`), at the same forward pass on all ranks. The first rank reads and checks
it, and broadcasts the result in the group in which EPLB has just added up its counts. So all ranks take the
map, or none does, and no rank enters a collective because of a file that it alone has seen. SGLang moves the
weights itself. A map that is taken is renamed to *.taken, one that is refused to *.refused. Without a new map
the one in force stays, or (ROOST_SGLANG_ELSE=eplb) SGLang's own algorithm chooses.

Elastic expert parallelism is left to SGLang: after a scale-up it chooses the map. Models with draft workers
that have experts were not looked at.
"""

import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

MAP_VARIABLE = "ROOST_SGLANG_MAP"
ELSE_VARIABLE = "ROOST_SGLANG_ELSE"
_MAX_BYTES = 64 << 20
_NOTHING, _TAKEN = 0, 1
log = logging.getLogger("roost_sglang")
Table = list[list[int]]


class BadMap(ValueError):
    """A map that must not come into force. The text says why."""


class LauncherSettings(NamedTuple):
    """Settings of the launcher, from the environment."""

    file: Path
    own_algorithm: bool
    """SGLang's own algorithm chooses while no map is staged."""


def settings_of(environment: "os._Environ[str] | dict[str, str]") -> LauncherSettings | None:
    """Return the settings; None: the launcher changes nothing. ValueError for a wrong value."""
    file, otherwise = environment.get(MAP_VARIABLE, ""), environment.get(ELSE_VARIABLE, "keep")
    if otherwise not in ("keep", "eplb"):
        raise ValueError(f"{ELSE_VARIABLE}={otherwise!r} must be keep or eplb")
    return LauncherSettings(Path(file), otherwise == "eplb") if file else None


def map_digest(table: Sequence[Sequence[int]], experts: int) -> str:
    """Return the digest of a map: 16 hexadecimal digits, as Roost names maps (`engine_adapter.vllm.wire`)."""
    about = f"{len(table)},{len(table[0])},{experts};".encode()
    content = b"".join(expert.to_bytes(2, "little", signed=True) for row in table for expert in row)
    return hashlib.blake2b(about + content, digest_size=8).hexdigest()


def read_map(content: bytes, current: Sequence[Sequence[int]], experts: int, ranks: int) -> Table:
    """Return the map in a file. BadMap if it is none, or none for this engine.

    current: map in force, [layers][slots]. experts: logical ones of a layer. ranks: that hold experts."""
    if len(content) > _MAX_BYTES:
        raise BadMap(f"it is longer than {_MAX_BYTES} bytes")
    try:
        found = json.loads(content)
        table = found["physical_to_logical_map"]
        replaces = found.get("replaces")
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError) as error:
        raise BadMap(f"no map can be read from it: {error}") from error
    _check_shape(table, current)
    for layer, row in enumerate(table):
        missing = set(range(experts)) - set(row)
        if missing or not 0 <= min(row) <= max(row) < experts:
            raise BadMap(f"layer {layer} lacks expert {min(missing, default=max(row))}, of {experts}")
    if len(table[0]) % ranks:
        raise BadMap(f"{len(table[0])} slots do not divide by {ranks} ranks")
    if replaces is not None and replaces != map_digest(current, experts):
        raise BadMap(f"it replaces the map {replaces}, in force is {map_digest(current, experts)}")
    return [list(row) for row in table]


def _check_shape(table: Any, current: Sequence[Sequence[int]]) -> None:
    if not isinstance(table, list) or len(table) != len(current):
        raise BadMap(f"it has no {len(current)} layers")
    for layer, row in enumerate(table):
        if not isinstance(row, list) or len(row) != len(current[0]) or {type(one) for one in row} != {int}:
            raise BadMap(f"layer {layer} has no {len(current[0])} numbers")


class StagedMap:
    """File with the next map, as the first rank sees it."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def take(self, current: Sequence[Sequence[int]], experts: int, ranks: int) -> Table | None:
        """Return the staged map, and rename its file. None: there is none, or it is refused."""
        try:
            with self._file.open("rb") as source:
                content = source.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("%s cannot be read: %s", self._file, error)
            return None
        try:
            table = read_map(content, current, experts, ranks)
        except BadMap as error:
            log.warning("%s is refused: %s", self._file, error)
            self._rename("refused")
            return None
        self._rename("taken")
        log.info("%s is taken: map %s", self._file, map_digest(table, experts))
        return table

    def _rename(self, end: str) -> None:
        try:
            self._file.replace(f"{self._file}.{end}")
        except OSError as error:
            # it would be taken again at the next rebalancing, which changes nothing
            log.warning("%s cannot be renamed: %s", self._file, error)


class _Names(NamedTuple):
    """Names of SGLang that the launcher needs."""

    manager: Any
    metadata: Any
    in_force: Callable[[], Any]


def needed_names() -> _Names:
    """Return the names that the launcher needs. RuntimeError names those that this SGLang lacks."""
    from sglang.srt.eplb import eplb_manager, expert_location

    wanted = {
        "EPLBManager._check_rebalance_needed": getattr(
            getattr(eplb_manager, "EPLBManager", None), "_check_rebalance_needed", None
        ),
        "EPLBManager._compute_expert_location_metadata": getattr(
            getattr(eplb_manager, "EPLBManager", None), "_compute_expert_location_metadata", None
        ),
        "ExpertLocationMetadata.init_by_mapping": getattr(
            getattr(expert_location, "ExpertLocationMetadata", None), "init_by_mapping", None
        ),
        "get_global_expert_location_metadata": getattr(
            expert_location, "get_global_expert_location_metadata", None
        ),
    }
    missing = [name for name, found in wanted.items() if found is None]
    if missing:
        raise RuntimeError(f"roost_sglang: this SGLang lacks {', '.join(missing)}; it was written for 0.5.23")
    return _Names(
        eplb_manager.EPLBManager,
        expert_location.ExpertLocationMetadata,
        expert_location.get_global_expert_location_metadata,
    )


def install(settings: LauncherSettings, names: _Names) -> None:
    """Have EPLB take its maps from the file, in this process."""
    manager, staged = names.manager, StagedMap(settings.file)
    own_check, own_choice = manager._check_rebalance_needed, manager._compute_expert_location_metadata
    agreed: dict[int, Any] = {}
    """by the id of a manager, the map that all ranks have agreed on, until it is used"""

    def check(self: Any, utilization: float | None) -> bool:
        """Agree on a map. Called on all ranks at the same forward pass, after the counts were added up."""
        table = _agree(names.in_force(), staged)
        if table is not None:
            agreed[id(self)] = table
            return True
        return settings.own_algorithm and bool(own_check(self, utilization))

    def choose(self: Any, logical_count: Any, *, broadcast_over_world: bool) -> Any:
        table = agreed.pop(id(self), None)
        if table is None or broadcast_over_world:
            return own_choice(self, logical_count, broadcast_over_world=broadcast_over_world)
        return names.metadata.init_by_mapping(self._model_config, table)

    manager._check_rebalance_needed = check
    manager._compute_expert_location_metadata = choose
    log.info("expert maps are taken from %s", settings.file)


def _agree(metadata: Any, staged: StagedMap) -> Any:
    """Return the staged map on all ranks, a tensor [layers, slots] like the one in force; None on all
    ranks."""
    import torch
    import torch.distributed as dist

    current = metadata.physical_to_logical_map
    head = torch.zeros(1, dtype=torch.int64, device=current.device)
    table = current.detach().clone().contiguous()
    if dist.get_rank() == 0:
        rows = metadata.physical_to_logical_map_cpu.tolist()
        found = staged.take(rows, metadata.num_logical_experts, metadata.ep_size)
        if found is not None:
            head[0] = _TAKEN
            table.copy_(torch.tensor(found, dtype=table.dtype))
    dist.broadcast(head, src=0)
    if int(head.item()) == _NOTHING:
        return None
    dist.broadcast(table, src=0)
    return table


def run_scheduler_process(*arguments: Any, **named: Any) -> None:
    """Run one scheduler of SGLang, with the launcher's changes. It is the target of SGLang's new
    processes."""
    settings = settings_of(os.environ)
    if settings is not None:
        install(settings, needed_names())
    from sglang.srt.managers.scheduler import run_scheduler_process as own

    own(*arguments, **named)


def main(arguments: Sequence[str]) -> None:
    """Launch SGLang with its own arguments."""
    from sglang.srt.server_args import prepare_server_args

    if settings_of(os.environ) is None:
        from sglang.launch_server import run_server

        run_server(prepare_server_args(list(arguments)))
        return
    needed_names()
    from sglang.srt.entrypoints.http_server import launch_server

    server = prepare_server_args(list(arguments))
    if not getattr(server, "enable_eplb", False):
        raise SystemExit(f"{MAP_VARIABLE} needs --enable-eplb: EPLB moves the experts")
    launch_server(server, run_scheduler_process_func=run_scheduler_process)


if __name__ == "__main__":
    main(sys.argv[1:])
