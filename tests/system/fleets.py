"""Whole fleets in processes of their own, as a user starts them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from bus.config import BusConfig
from deploy.local.parent_death import wrapped

ROOT = Path(__file__).resolve().parents[2]
MODEL = "roost-demo"
START_SECONDS = 90.0


def until(condition: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
    """Look until something is true, and return it; other processes have no event to wait for."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)
    return found


@dataclass
class Home:
    """A user's machine: state, settings, and the command."""

    state: Path
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-c", "from deploy.cli import main; main()", *arguments]

    @property
    def environ(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ROOST_", "OTEL_"))}
        # Engines of tests start together, several on two cores.
        ours = {"XDG_STATE_HOME": str(self.state), "ROOST_ENGINE_CALIBRATION_SECONDS": "0"}
        return {**kept, "PYTHONPATH": str(ROOT), **ours, **self.environment}

    def run(self, *arguments: str, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
        """A command that ends by itself."""
        return subprocess.run(
            self.command(*arguments),
            env=self.environ,
            cwd=self.state,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def output(self, *arguments: str) -> str:
        """What a command prints that works."""
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, *arguments: str) -> "Running":
        """A command that goes on; it ends with the tests, whatever happens to them."""
        log = self.state / f"{arguments[0]}-{time.monotonic_ns()}.out"
        with log.open("wb") as out:
            command = wrapped(self.command(*arguments), os.getpid())
            process = subprocess.Popen(
                command,
                env=self.environ,
                cwd=self.state,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        return Running(process, log)


@dataclass
class Running:
    """A command that goes on."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text()

    def says(self, text: str, seconds: float = START_SECONDS) -> None:
        """Wait until it has printed something."""
        until(
            lambda: text in self.output or self.process.poll() is not None,
            f"{text!r}; it says:\n{self.output}",
            seconds,
        )
        assert text in self.output, self.output

    def children(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def stop(self, number: signal.Signals = signal.SIGINT, seconds: float = 30.0) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=seconds)


class Fleet:
    """A running `roost up`."""

    def __init__(self, home: Home, *arguments: str) -> None:
        self.home = home
        self.spans = home.state / "spans.jsonl"
        self.up = home.start("up", "--port", "0", "--spans", str(self.spans), *arguments)
        self.up.says("Ctrl-C stops everything")
        running = json.loads(next((home.state / "roost").glob("run-*/running.json")).read_text())
        self.nats: str = running["nats"]
        self.router: str = running["router"]
        self.routers: list[str] = running["routers"] or [self.router]
        self.run_directory = self.log_of("nats").parent
        self.http = httpx.Client(base_url=self.router, timeout=60, trust_env=False)

    def bus_config(self, user: str = "operator", **settings: Any) -> BusConfig:
        """How a user of its NATS server connects."""
        return BusConfig(
            urls=(self.nats,), credentials_file=self.run_directory / "bus" / f"{user}.json", **settings
        )

    def log_of(self, name: str) -> Path:
        return next((self.home.state / "roost").glob(f"run-*/{name}.log"))

    @property
    def to_ranks(self) -> dict[str, str]:
        """Headers of a request that comes from the fleet."""
        return {"authorization": f"Bearer {(self.run_directory / 'fleet.secret').read_text().strip()}"}

    def processes(self) -> dict[str, psutil.Process]:
        """By name: nats, router, tracker, planner, engine-0/1 ... (simulated: engine-0 ...)"""
        found: dict[str, psutil.Process] = {}
        for process in self.up.children():
            try:
                command = process.cmdline()
            except psutil.NoSuchProcess:
                continue
            order = json.loads(command[-1]) if command and command[-1].startswith('{"part"') else None
            if order is None:
                found["nats"] = process
            elif order["part"] == "rank":
                found[f"{order['rank']['engine']}/{order['rank']['rank']}"] = process
            elif order["part"] == "simulated":
                found[order["rank"]["engine"]] = process
            else:
                found[
                    order["part"] if order.get("number") is None else f"{order['part']}-{order['number']}"
                ] = process
        return found

    def body(self, content: str = "Tell me about Debian.", **more: Any) -> dict[str, Any]:
        return {
            "model": MODEL,
            "temperature": 0,
            "max_tokens": 24,
            "messages": [{"role": "user", "content": content}],
            **more,
        }

    def chat(self, content: str = "Tell me about Debian.", **more: Any) -> httpx.Response:
        """An answer that must be good."""
        answer = self.http.post("/v1/chat/completions", json=self.body(content, **more))
        assert answer.status_code == 200, answer.text
        return answer

    def text(self, content: str = "Tell me about Debian.", **more: Any) -> str:
        return str(self.chat(content, **more).json()["choices"][0]["message"]["content"])

    @contextmanager
    def stream(self, content: str, **more: Any) -> Iterator["Stream"]:
        with self.http.stream(
            "POST", "/v1/chat/completions", json=self.body(content, stream=True, **more)
        ) as answer:
            assert answer.status_code == 200, answer.read()
            yield Stream(answer)

    def decision(self, decision_id: str) -> dict[str, Any]:
        answer = self.http.get(f"/v1/decisions/{decision_id}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def status(self) -> dict[str, Any]:
        """By engine name, as `roost status` tells it."""
        return {
            engine["engine"]: engine for engine in json.loads(self.home.output("status", "--json"))["engines"]
        }

    def serving(self, engines: int, ranks: int) -> bool:
        """Whether the router would use so many ranks now."""
        answer = self.http.post("/v1/route", json=self.body())
        if answer.status_code != 200:
            return False
        candidates = answer.json()["candidates"]
        return len(candidates) == engines * ranks

    def stop(self) -> None:
        self.http.close()
        self.up.stop()


class Stream:
    """The chunks of one streamed answer."""

    def __init__(self, answer: httpx.Response) -> None:
        self.decision_id = answer.headers["x-roost-decision-id"]
        self.ids: set[str] = set()
        self.roles = 0
        self.finish: str | None = None
        self._lines = answer.iter_lines()

    def pieces(self) -> Iterator[str]:
        """The texts, up to [DONE]; an error event fails the test."""
        for line in self._lines:
            if line == "data: [DONE]":
                return
            if not line:
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            self.ids.add(chunk["id"])
            for choice in chunk["choices"]:
                self.roles += "role" in choice["delta"]
                self.finish = choice["finish_reason"] or self.finish
                yield choice["delta"].get("content") or ""
        raise AssertionError("the stream ended without [DONE]")


def new_home(**environment: str) -> Home:
    return Home(Path(tempfile.mkdtemp(prefix="roost-test-")), environment)


def leave_nothing(fleet: Fleet) -> None:
    """Stop a fleet as Ctrl-C does; whatever it leaves fails."""
    processes = fleet.up.children()
    assert fleet.up.process.poll() is None, fleet.up.output
    fleet.stop()
    _, alive = psutil.wait_procs(processes, timeout=5)
    left = list((fleet.home.state / "roost").glob("*"))
    shutil.rmtree(fleet.home.state)
    assert not alive
    assert not left
