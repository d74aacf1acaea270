"""Starting and stopping leave nothing behind, whenever it happens."""

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.system.fleets import MODEL, Fleet, Home, Running, until


def gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def state(home: Home) -> list[Path]:
    return [path for path in (home.state / "roost").rglob("*") if path.name != "lock"]


@pytest.fixture
def small(home: Home) -> Iterator[Running]:
    """A fleet of one engine of one rank that has just started."""
    shared = set(os.listdir("/dev/shm"))
    up = home.start("up", "--ranks", "1", "--port", "0")
    yield up
    if up.process.poll() is None:
        up.stop(signal.SIGKILL)
    assert set(os.listdir("/dev/shm")) <= shared


def test_ctrl_c_stops_everything_and_leaves_nothing(home: Home, small: Running) -> None:
    small.says("Ctrl-C stops everything")
    router = re.search(r"router +http://127\.0\.0\.1:(\d+)", small.output)
    assert router is not None
    children = small.children()
    assert len(children) == 5
    before = time.monotonic()
    assert small.stop(signal.SIGINT) == 0
    assert time.monotonic() - before < 10
    assert gone(children)
    assert state(home) == []
    assert "stopped; nothing is left behind" in small.output
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(router[1])))


@pytest.mark.parametrize("moment", ["nats is ready", pytest.param("router is ready", marks=pytest.mark.slow)])
def test_a_stop_while_starting_is_clean(home: Home, small: Running, moment: str) -> None:
    small.says(moment)
    children = small.children()
    assert small.stop(signal.SIGTERM) == 0
    assert gone(children)
    assert state(home) == []


@pytest.mark.slow
def test_children_end_with_up_when_it_is_killed_with_minus_nine(home: Home, small: Running) -> None:
    small.says("Ctrl-C stops everything")
    children = small.children()
    children[-1].send_signal(signal.SIGSTOP)
    small.stop(signal.SIGKILL)
    until(lambda: gone(children), "the end of every child", 5)
    done = home.run("status")
    assert done.returncode == 1
    assert "is `roost up` running?" in done.stderr


@pytest.mark.slow
def test_a_frozen_rank_does_not_hold_up_a_stop(home: Home, small: Running) -> None:
    small.says("Ctrl-C stops everything")
    children = small.children()
    rank = next(child for child in children if '"part":"rank"' in " ".join(child.cmdline()))
    rank.send_signal(signal.SIGSTOP)
    assert small.stop(signal.SIGINT) == 0
    assert gone(children)
    assert state(home) == []


@pytest.mark.slow
def test_a_checkpoint_that_is_broken_is_told_with_the_tensor(home: Home, tmp_path: Path) -> None:
    checkpoint = Path(__file__).parents[2] / "deploy" / "demo_model" / "checkpoint"
    for file in checkpoint.iterdir():
        content = file.read_bytes()
        (tmp_path / file.name).write_bytes(
            content[: len(content) // 2] if file.suffix == ".safetensors" else content
        )
    done = home.run("up", "--ranks", "1", "--port", "0", "--model", str(tmp_path))
    assert done.returncode == 1
    assert "model.safetensors" in done.stderr
    assert "Traceback" not in done.stderr.split("roost:")[0]
    assert [path.suffix for path in state(home) if path.is_file()] == [".log"] * 5


@pytest.mark.slow
def test_a_worker_joins_a_fleet_and_leaves_it(fleet: Fleet, home: Home) -> None:
    home.environment["ROOST_BUS_CREDENTIALS_FILE"] = str(
        fleet.run_directory / "bus" / "engine.json"
    )  # it is another user's home
    worker = home.start("worker", "--name", "guest", "--ranks", "1", "--nats", fleet.nats)
    worker.says("guest is ready")
    until(lambda: fleet.serving(1, 3), "three ranks in all", 10)
    children = worker.children()
    assert worker.stop(signal.SIGTERM) == 0
    assert gone(children)
    assert "guest" not in fleet.status()
    until(lambda: fleet.serving(1, 2), "two ranks", 10)
    left = [
        json.loads(line)
        for line in fleet.home.output(
            "events", "--since", "1h", "--no-follow", "--json", "--kind", "EngineLeft"
        ).splitlines()
    ]
    assert [
        (event["message"]["engine"], event["message"]["reason"])
        for event in left
        if event["message"]["engine"] == "guest"
    ] == [("guest", "stopped")]
    assert state(home) == []


@pytest.mark.slow
def test_a_plain_server_joins_a_fleet_by_url(fleet: Fleet, home: Home) -> None:
    """The plain server is the fleet's own router; the fleet it joins has no other engine."""
    plain = home.start("up", "--engines", "0", "--port", "0")
    plain.says("Ctrl-C stops everything")
    router = re.search(r"router +(http://\S+)", plain.output)
    assert router is not None
    worker = home.start(
        "worker", "--engine", "openai", "--url", fleet.router, "--name", "plain", "--nats", nats_of(plain)
    )
    with httpx.Client(base_url=router[1], timeout=30, trust_env=False) as client:
        until(lambda: client.get("/ready").status_code == 200, "the plain engine to join", 20)
        assert (
            client.post("/v1/chat/completions", json=fleet.body()).json()["choices"]
            == fleet.chat().json()["choices"]
        )
        worker.stop(signal.SIGTERM)
        until(lambda: client.get("/ready").status_code == 503, "the plain engine to leave", 10)
    plain.stop()


def nats_of(up: Running) -> str:
    found = re.search(r"NATS +(nats://\S+)", up.output)
    assert found is not None
    return found[1]


def test_a_router_stands_before_plain_servers_without_nats(fleet: Fleet, home: Home) -> None:
    router = home.start("router", "--backend", fleet.router, "--port", "0")
    router.says("listens on http://")
    found = re.search(r"listens on (http://\S+)", router.output)
    assert found is not None
    with httpx.Client(base_url=found[1], timeout=30, trust_env=False) as client:
        until(lambda: client.get("/ready").status_code == 200, "the backend to be probed", 20)
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == [MODEL]
        assert (
            client.post("/v1/chat/completions", json=fleet.body()).json()["choices"]
            == fleet.chat().json()["choices"]
        )
    text = home.output("explain", "hello", "--router", found[1])
    assert "chosen" in text
    assert router.stop(signal.SIGTERM) == 0


@pytest.mark.slow
def test_a_router_that_is_stopped_alone_finishes_its_streams_and_another_takes_its_place(home: Home) -> None:
    (home.state / "roost.toml").write_text(f'[simulated]\nstep = 0.05\nmodel = "{MODEL}"\n')
    small = Fleet(home, "--engine", "simulated", "--ranks", "1")
    try:
        with small.stream(
            "A long story.", max_tokens=600
        ) as stream:  # 30 s, twice as long as health probes take to give a process up
            pieces = stream.pieces()
            next(pieces)
            router = small.processes()["router"]
            router.terminate()
            assert len(list(pieces)) > 400
        router.wait(10)
        until(
            lambda: small.processes().get("router") is not None and small.serving(1, 1), "another router", 20
        )
        assert "no answer to" not in small.up.output
    finally:
        small.stop()
