"""`roost worker --dynamo` as a process, found by a client of Dynamo's runtime through files."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.local.parent_death import wrapped
from deploy.parts.dynamo import idle_together, planes
from deploy.run_directory import live_runs

pytest.importorskip("dynamo._core", reason="needs the extra dynamo")
ROOT = Path(__file__).parents[3]
REQUEST = {
    "token_ids": list(range(1, 41)),
    "stop_conditions": {"max_tokens": 8, "ignore_eos": True},
    "sampling_options": {"temperature": 0.0},
}
START_SECONDS = 60


def test_the_planes_are_those_of_dynamos_variables() -> None:
    assert tuple(vars_of(planes({}))) == ("etcd", "tcp", "zmq")
    chosen = {"DYN_DISCOVERY_BACKEND": "file", "DYN_REQUEST_PLANE": "nats", "DYN_EVENT_PLANE": "nats"}
    assert tuple(vars_of(planes(chosen))) == ("file", "nats", "nats")


def vars_of(chosen: Any) -> list[str]:
    return [chosen.discovery, chosen.requests, chosen.events]


async def test_ranks_of_several_processes_become_idle_together(tmp_path: Path) -> None:
    first = asyncio.create_task(idle_together(tmp_path, 0, 2), name="the first rank")
    await asyncio.sleep(0.05)
    assert not first.done()
    async with asyncio.timeout(5):
        await idle_together(tmp_path, 1, 2)
        await first


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a deployment, which the variables name for client and worker."""
    found = {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(tmp_path / "discovery"),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_EVENT_PLANE_HOST": "127.0.0.1",
        "DYN_SELF_HOST_METADATA": "0",
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "PYTHONPATH": str(ROOT),
    }
    (tmp_path / "discovery").mkdir()
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.mark.slow
async def test_a_worker_needs_no_nats_serves_by_ids_and_leaves_discovery_at_its_end(
    files: Path,
) -> None:
    from dynamo.runtime import DistributedRuntime

    command = [sys.executable, "-c", "from deploy.cli import main; main()", "worker", "--engine", "simulated"]
    command += ["--ranks", "2", "--dynamo", "processtest.moe", "--name", "sim"]
    process = await asyncio.create_subprocess_exec(
        *wrapped(command, os.getpid()), cwd=files, stdout=asyncio.subprocess.DEVNULL
    )
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    client = await runtime.endpoint("processtest.moe.generate").client()
    async with asyncio.timeout(START_SECONDS):
        (instance,) = await client.wait_for_instances()
    for rank in (0, 1):
        stream = await client.direct({**REQUEST, "routing": {"dp_rank": rank}}, instance, annotated=False)
        chunks = [chunk async for chunk in stream]
        assert sum(len(chunk["token_ids"]) for chunk in chunks) == 8
    process.terminate()
    async with asyncio.timeout(START_SECONDS):
        assert await process.wait() == 0
        while client.instance_ids():  # noqa: ASYNC110 another process ends it
            await asyncio.sleep(0.02)
    assert not live_runs(files / "state" / "roost")
    runtime.shutdown()
