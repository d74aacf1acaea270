"""The launcher that stages maps into SGLang's EPLB, with stand-ins for SGLang: it was never run with SGLang."""

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import roost_sglang
import torch
from roost_sglang import (
    BadMap,
    LauncherSettings,
    StagedMap,
    install,
    main,
    map_digest,
    needed_names,
    read_map,
    settings_of,
)

from deploy.views.map_files import encoded
from engine_adapter.vllm.wire import map_digest as roosts_digest
from fleet.placement import Placement

EXPERTS, RANKS = 3, 2
CURRENT = [[0, 1, 2, 0], [0, 1, 2, 0]]
NEXT = [[2, 1, 0, 1], [0, 1, 2, 2]]


class Metadata:
    """The part of ExpertLocationMetadata that the launcher reads."""

    num_logical_experts, ep_size = EXPERTS, RANKS

    def __init__(self, table: list[list[int]]) -> None:
        self.physical_to_logical_map = self.physical_to_logical_map_cpu = torch.tensor(table)

    @staticmethod
    def init_by_mapping(config: Any, table: Any) -> tuple[str, Any]:
        return config, table.tolist()


class Manager:
    """The part of EPLBManager that the launcher replaces."""

    _model_config = "config"

    def _check_rebalance_needed(self, utilization: float | None) -> bool:
        return utilization != 1.0

    def _compute_expert_location_metadata(self, count: Any, *, broadcast_over_world: bool) -> Any:
        return "own", broadcast_over_world


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """SGLang's modules, with one rank."""
    manager = type(
        "EPLBManager",
        (Manager,),
        {
            name: getattr(Manager, name)
            for name in ("_check_rebalance_needed", "_compute_expert_location_metadata")
        },
    )
    managers, locations = types.ModuleType("eplb_manager"), types.ModuleType("expert_location")
    managers.EPLBManager = manager  # type: ignore[attr-defined]
    locations.ExpertLocationMetadata = Metadata  # type: ignore[attr-defined]
    locations.get_global_expert_location_metadata = lambda: Metadata(CURRENT)  # type: ignore[attr-defined]
    eplb = types.ModuleType("sglang.srt.eplb")
    eplb.eplb_manager, eplb.expert_location = managers, locations  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.eplb", eplb)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    sent: list[Any] = []
    monkeypatch.setattr(
        torch.distributed, "broadcast", lambda tensor, src: sent.append((tensor.tolist(), src))
    )
    return types.SimpleNamespace(manager=manager, locations=locations, sent=sent)


def staged(folder: Path, table: Any = NEXT, **more: Any) -> Path:
    file = folder / "next.json"
    file.write_text(json.dumps({"physical_to_logical_map": table, **more}))
    return file


def rebalance(manager: Any) -> Any:
    """What EPLB does at a rebalancing."""
    one = manager()
    if not one._check_rebalance_needed(0.5):
        return None
    return one._compute_expert_location_metadata("counts", broadcast_over_world=False)


def test_a_staged_map_comes_into_force_once(sglang: Any, tmp_path: Path) -> None:
    file = staged(tmp_path, replaces=map_digest(CURRENT, EXPERTS))
    install(LauncherSettings(file, own_algorithm=False), needed_names())
    assert rebalance(sglang.manager) == ("config", NEXT)
    assert sglang.sent == [([1], 0), (NEXT, 0)]
    assert (tmp_path / "next.json.taken").exists()
    assert rebalance(sglang.manager) is None, "the map in force stays"


def test_other_ranks_take_what_the_first_one_sends(
    sglang: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def receive(tensor: Any, src: int) -> None:
        tensor.copy_(torch.tensor([1] if tensor.dim() == 1 else NEXT))

    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "broadcast", receive)
    install(LauncherSettings(tmp_path / "none.json", own_algorithm=False), needed_names())
    assert rebalance(sglang.manager) == ("config", NEXT)


def test_without_a_map_sglang_may_choose(sglang: Any, tmp_path: Path) -> None:
    install(LauncherSettings(tmp_path / "none.json", own_algorithm=True), needed_names())
    assert rebalance(sglang.manager) == ("own", False)
    assert sglang.manager()._check_rebalance_needed(1.0) is False
    assert sglang.sent == [([0], 0), ([0], 0)]


def test_after_a_scale_up_sglang_chooses(sglang: Any, tmp_path: Path) -> None:
    install(LauncherSettings(staged(tmp_path), own_algorithm=False), needed_names())
    one = sglang.manager()
    assert one._check_rebalance_needed(None)
    assert one._compute_expert_location_metadata("counts", broadcast_over_world=True) == ("own", True)


def test_names_that_are_missing_are_named(sglang: Any) -> None:
    del sglang.locations.get_global_expert_location_metadata
    with pytest.raises(RuntimeError, match="lacks get_global_expert_location_metadata; it was written for"):
        needed_names()


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (b"{", "no map can be read"),
        (b"[]", "no map can be read"),
        (b'{"logical_count": []}', "no map can be read"),
        ({"physical_to_logical_map": NEXT[:1]}, "no 2 layers"),
        ({"physical_to_logical_map": [[0, 1, 2], [0, 1, 2, 0]]}, "layer 0 has no 4 numbers"),
        ({"physical_to_logical_map": [[0, 1, 2, True], [0, 1, 2, 0]]}, "layer 0 has no 4 numbers"),
        ({"physical_to_logical_map": [[0, 1, 2, 0], [0, 1, 1, 0]]}, "layer 1 lacks expert 2, of 3"),
        ({"physical_to_logical_map": [[0, 1, 2, 3], [0, 1, 2, 0]]}, "layer 0 lacks expert 3, of 3"),
        ({"physical_to_logical_map": [[0, 1, 2, -1], [0, 1, 2, 0]]}, "layer 0 lacks"),
        ({"physical_to_logical_map": NEXT, "replaces": "another"}, "it replaces the map another"),
    ],
)
def test_a_map_that_is_none_for_this_engine_is_refused(tmp_path: Path, content: Any, wrong: str) -> None:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    with pytest.raises(BadMap, match=wrong):
        read_map(raw, CURRENT, EXPERTS, RANKS)
    file = tmp_path / "next.json"
    file.write_bytes(raw)
    assert StagedMap(file).take(CURRENT, EXPERTS, RANKS) is None
    assert (tmp_path / "next.json.refused").exists()


def test_slots_must_divide_by_the_ranks() -> None:
    with pytest.raises(BadMap, match="4 slots do not divide by 3 ranks"):
        read_map(json.dumps({"physical_to_logical_map": NEXT}).encode(), CURRENT, EXPERTS, 3)


def test_a_map_has_the_same_name_here_and_in_roost() -> None:
    assert map_digest(NEXT, EXPERTS) == roosts_digest(np.array(NEXT, np.int16), EXPERTS)


def test_a_map_that_roost_plan_writes_is_one_of_the_launcher() -> None:
    placement = Placement(np.array(NEXT, np.int16), experts=EXPERTS, ranks=RANKS, duplicates=True)
    content = encoded(placement, "sglang", dense_layers=1)
    assert read_map(content, [CURRENT[0]] * 3, EXPERTS, RANKS)[1:] == placement.expert_of_slot.tolist()


# Launching


def test_it_is_off_unless_a_file_is_named() -> None:
    assert settings_of({}) is None
    assert settings_of({"ROOST_SGLANG_MAP": "/a"}) == LauncherSettings(Path("/a"), own_algorithm=False)
    assert settings_of({"ROOST_SGLANG_MAP": "/a", "ROOST_SGLANG_ELSE": "eplb"}) == (Path("/a"), True)
    with pytest.raises(ValueError, match="must be keep or eplb"):
        settings_of({"ROOST_SGLANG_ELSE": "x"})


@pytest.fixture
def launched(sglang: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of SGLang's launchers and schedulers."""
    calls: list[Any] = []

    def module(name: str, **about: Callable[..., Any]) -> None:
        found = types.ModuleType(name)
        for key, value in about.items():
            setattr(found, key, value)
        monkeypatch.setitem(sys.modules, name, found)

    module(
        "sglang.srt.server_args",
        prepare_server_args=lambda given: types.SimpleNamespace(
            given=given, enable_eplb="--enable-eplb" in given
        ),
    )
    module("sglang.launch_server", run_server=lambda server: calls.append(("plain", server.given)))
    module(
        "sglang.srt.entrypoints.http_server",
        launch_server=lambda server, run_scheduler_process_func: calls.append(run_scheduler_process_func),
    )
    module("sglang.srt.entrypoints")
    module("sglang.srt.managers")
    module("sglang.srt.managers.scheduler", run_scheduler_process=lambda *given: calls.append(given))
    return calls


def test_without_a_file_sglang_is_launched_as_it_is(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROOST_SGLANG_MAP", raising=False)
    main(["--model-path", "m"])
    assert launched == [("plain", ["--model-path", "m"])]


def test_with_a_file_its_schedulers_are_ours(
    launched: list[Any], sglang: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ROOST_SGLANG_MAP", str(staged(tmp_path)))
    main(["--enable-eplb"])
    (scheduler,) = launched
    assert scheduler is roost_sglang.run_scheduler_process
    scheduler("server", "ports")
    assert launched[1] == ("server", "ports")
    assert rebalance(sglang.manager) == ("config", NEXT)


def test_a_file_without_eplb_is_refused(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOST_SGLANG_MAP", "/maps/next.json")
    with pytest.raises(SystemExit, match="needs --enable-eplb"):
        main([])
