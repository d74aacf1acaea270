"""An update of a fleet part by part under load: every part of an earlier version is replaced by this one."""

import json
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import cycle
from pathlib import Path

import httpx
import pytest

from fleet.event import PROTOCOL
from tests.conftest import NatsServer, free_port
from tests.system.fleets import ROOT, START_SECONDS, Home, Running, new_home, until

pytestmark = pytest.mark.slow

EARLIER = "5218e068d81b8ba12eefc8626375585f142e0bb1"
"""The version that is updated, as long as there is no release: the last commit of an earlier day."""
TOKENS = 24
USERS = 3
PRE_STOP_SECONDS = 2.0
PATIENCE_SECONDS = 60.0


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """The tree of the last release, or of the stated commit."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is no clone of the repository, so that an earlier version is not at hand")
    tags = _git("tag", "--list", "v*", "--merged", "HEAD", "--sort=-version:refname").decode().split()
    commit = tags[0] if tags else EARLIER
    try:
        packed = _git("archive", commit)
    except subprocess.CalledProcessError:
        pytest.skip(f"a shallow clone does not have {commit}, the earlier version")
    tree = tmp_path / "earlier"
    tree.mkdir()
    # By tar: the filters of Python's tarfile begin with 3.11.4, and warn where none is stated.
    subprocess.run(["tar", "-x", "-C", tree], input=packed, check=True)
    return tree


@dataclass
class Fleet:
    """Parts of either version on one NATS server."""

    nats: str
    homes: dict[Path, Home]
    parts: dict[str, Running] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    def start(self, name: str, tree: Path) -> None:
        """Start a part of a version, and wait until it serves."""
        home = self.homes[tree]
        if name.startswith("router"):
            port = self.ports.setdefault(name, free_port())
            self.parts[name] = home.start("router", "--nats", self.nats, "--port", str(port))
            return
        if name.startswith("engine"):
            named = ("--engine", "simulated", "--ranks", "2", "--name", name)
            self.parts[name] = home.start("worker", *named, "--nats", self.nats)
            return
        self.parts[name] = home.start(name, "--nats", self.nats)

    def replace(self, name: str, tree: Path) -> None:
        """Stop a part as a service manager does, and start it in the other version."""
        running = self.parts[name]
        running.process.terminate()
        assert running.process.wait(timeout=START_SECONDS) == 0, running.output
        self.start(name, tree)

    def end(self, name: str) -> None:
        """Kill a part."""
        self.parts[name].process.kill()
        self.parts[name].process.wait(timeout=START_SECONDS)

    def ready(self, name: str) -> bool:
        """True while a router takes requests."""
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.url(name)}/ready", trust_env=False).status_code == 200
        return False

    def engines(self, name: str) -> set[str]:
        """Live engines as a router sees them."""
        with suppress(httpx.TransportError, KeyError):
            status = httpx.get(f"{self.url(name)}/v1/status", trust_env=False).json()
            return {engine["engine"] for engine in status["engines"] if engine["state"] == "live"}
        return set()

    def url(self, router: str) -> str:
        return f"http://127.0.0.1:{self.ports[router]}"

    @cached_property
    def model(self) -> str:
        """The name under which its engines serve."""
        name: str = httpx.get(f"{self.url(self.routers[0])}/v1/models", trust_env=False).json()["data"][0][
            "id"
        ]
        return name

    @property
    def routers(self) -> list[str]:
        return sorted(self.ports)


class Users:
    """Clients that ask one request after another, at routers that say they are ready."""

    def __init__(self, fleet: Fleet) -> None:
        self.ended: Counter[str] = Counter()
        self._fleet = fleet
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(USERS)]

    def __enter__(self) -> "Users":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)

    def some_more(self, count: int = 2 * USERS) -> None:
        """Wait for further complete answers."""
        wanted = self.ended["complete"] + count
        until(lambda: self.ended["complete"] >= wanted, f"{count} answers", PATIENCE_SECONDS)

    def _ask(self, number: int) -> None:
        routers = cycle(self._fleet.routers[number % 2 :] + self._fleet.routers[: number % 2])
        for asked in range(10**9):
            if self._over.is_set():
                return
            router = next(routers)
            if self._fleet.ready(router):
                self.ended[self._one(router, f"user {number} asks {asked}")] += 1

    def _one(self, router: str, text: str) -> str:
        body = {
            "model": self._fleet.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": TOKENS,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        address = f"{self._fleet.url(router)}/v1/chat/completions"
        try:
            with httpx.stream(
                "POST", address, json=body, timeout=PATIENCE_SECONDS, trust_env=False
            ) as answer:
                text = answer.read().decode()
        except httpx.TransportError as error:
            return f"broken: {error!r}"
        events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
        if answer.status_code != 200 or not events or events[-1] != "[DONE]":
            return f"{answer.status_code}: {text[-200:]}"
        usage = json.loads(events[-2]).get("usage") or {}
        counted = usage.get("completion_tokens")
        return "complete" if counted == TOKENS else f"{counted} tokens instead of {TOKENS}"


@pytest.fixture
def fleet(earlier: Path, nats_server: NatsServer) -> Iterator[Fleet]:
    """The parts of the earlier version."""
    with ExitStack() as stack:
        homes = {}
        for tree in (earlier, ROOT):
            homes[tree] = new_home(PYTHONPATH=str(tree), ROOST_ROUTER_PRE_STOP_SECONDS=str(PRE_STOP_SECONDS))
            stack.callback(shutil.rmtree, homes[tree].state)
        fleet = Fleet(nats_server.url, homes)
        for name in ("router-0", "router-1", "tracker", "planner", "engine-0", "engine-1"):
            fleet.start(name, earlier)
            stack.callback(fleet.end, name)
        for router in fleet.routers:
            until(
                lambda router=router: fleet.engines(router) == {"engine-0", "engine-1"},
                "engines",
                START_SECONDS,
            )
        yield fleet


def test_a_fleet_is_updated_part_by_part_under_load_and_loses_nothing(fleet: Fleet) -> None:
    with Users(fleet) as users:
        users.some_more()
        for name in (*fleet.routers, "tracker", "planner", "engine-0", "engine-1"):
            fleet.replace(name, ROOT)
            for router in fleet.routers:
                until(lambda router=router: fleet.ready(router), f"{router} after {name}", START_SECONDS)
                until(
                    lambda router=router: fleet.engines(router) == {"engine-0", "engine-1"},
                    f"the engines at {router} after {name}",
                    START_SECONDS,
                )
            users.some_more()
    assert set(users.ended) == {"complete"}, users.ended
    routers = [word for router in fleet.routers for word in ("--router", fleet.url(router))]
    said = fleet.homes[ROOT].run("doctor", "--nats", fleet.nats, *routers, "--json")
    found = json.loads(said.stdout)["findings"]
    assert not [one for one in found if one["level"] == "problem"], found


@pytest.mark.parametrize(("apart", "serves"), [(1, True), (2, False)])
def test_an_engine_of_a_protocol_one_apart_serves_and_of_one_two_apart_is_refused(
    earlier: Path, nats_server: NatsServer, apart: int, serves: bool
) -> None:
    event = earlier / "fleet/event.py"
    event.write_text(event.read_text().replace(f"PROTOCOL = {PROTOCOL}", f"PROTOCOL = {PROTOCOL + apart}", 1))
    with ExitStack() as stack:
        homes = {tree: new_home(PYTHONPATH=str(tree)) for tree in (earlier, ROOT)}
        fleet = Fleet(nats_server.url, homes)
        for name, tree in (("router-0", ROOT), ("engine-0", earlier)):
            fleet.start(name, tree)
            stack.callback(fleet.end, name)
        words = f"engine engine-0 speaks protocol {PROTOCOL + apart} and this part {PROTOCOL}"
        if serves:
            until(lambda: fleet.ready("router-0"), "the router is ready", START_SECONDS)
            with Users(fleet) as users:
                users.some_more()
            assert set(users.ended) == {"complete"}, users.ended
            assert words not in fleet.parts["router-0"].output
        else:
            fleet.parts["router-0"].says(words)
            assert "update this part" in fleet.parts["router-0"].output
            assert not fleet.ready("router-0")
    for home in homes.values():
        shutil.rmtree(home.state)
