"""Both copies of the messages between agent and plugin say the same."""

import ast
import typing
from pathlib import Path

import msgspec
import numpy as np
import pytest
import roost_vllm
from roost_vllm import wire as worker_side

from engine_adapter.vllm import wire as agent_side

PLUGIN = Path(roost_vllm.__file__).parent


def messages(union: object) -> dict[str, type[msgspec.Struct]]:
    return {kind.__struct_config__.tag: kind for kind in typing.get_args(union)}


@pytest.mark.parametrize("direction", ["FromWorker", "FromAgent"])
def test_both_sides_have_the_same_messages_with_the_same_keys_and_types(direction: str) -> None:
    ours, theirs = (messages(getattr(side, direction)) for side in (agent_side, worker_side))
    assert ours.keys() == theirs.keys()
    for name, kind in ours.items():
        copy = theirs[name]
        assert copy.__name__ == kind.__name__
        assert {field.name: (field.type, field.default) for field in msgspec.structs.fields(copy)} == {
            field.name: (field.type, field.default) for field in msgspec.structs.fields(kind)
        }, name


def test_both_sides_have_the_same_version_and_bounds() -> None:
    assert worker_side.PROTOCOL == agent_side.PROTOCOL
    assert worker_side.MAX_FRAME_BYTES == agent_side.MAX_FRAME_BYTES
    assert worker_side.WorkerState == agent_side.WorkerState


def test_both_sides_compute_the_same_digests_and_proofs() -> None:
    table = np.arange(24, dtype=np.int16).reshape(2, 12)
    assert worker_side.map_digest(table, 12) == agent_side.map_digest(table, 12)
    for role in typing.get_args(typing.get_type_hints(agent_side.proof)["role"]):
        assert worker_side.proof(b"key", role, b"nonce") == agent_side.proof(b"key", role, b"nonce")


def test_the_plugin_imports_nothing_of_roost() -> None:
    roost = {"fleet", "bus", "tracker", "router", "migration", "engine_adapter", "deploy"}
    for path in PLUGIN.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                named = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                named = {node.module or ""}
            else:
                continue
            assert not {name.partition(".")[0] for name in named} & roost, path
