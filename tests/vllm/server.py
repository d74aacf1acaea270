"""A real vLLM with expert parallelism over two ranks of this machine, with Roost's plugin and without.

The environment that holds vLLM is named by ROOST_VLLM_PYTHON, or is the one that `make test-vllm` makes.
Plugins are put on PYTHONPATH, never installed into it."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
import tomllib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import httpx
import psutil

from tests.conftest import free_port

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("ROOST_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
PLUGIN = ROOT / "engine_adapter" / "vllm" / "plugin"
STAND_INS = Path(__file__).parent / "cpu_stand_ins"
MODEL = str(ROOT / "deploy" / "demo_model" / "checkpoint")
SERVED = "demo"
BLOCK = 32
START_SECONDS = 300.0
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a vLLM. attention: the way two ranks share the attention, or one process without EPLB;
    port: of its HTTP server (0: a free one); kv_port: of its KV events, and those after it (0: none);
    redundant: physical experts beyond one of each; agent, secret: where its workers connect to (empty: the
    plugin is there, and does nothing); paths: further entries of PYTHONPATH; nice: niceness."""

    attention: Literal["tp", "dp", "alone"]
    port: int = 0
    kv_port: int = 0
    redundant: int = 8
    agent: str = ""
    secret: Path | None = None
    with_plugin: bool = True
    eplb: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    paths: tuple[Path, ...] = ()
    nice: int = 10


@dataclass
class Vllm:
    """A vLLM that serves. processes: all of its processes."""

    url: str
    options: Options
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def targets(self) -> int:
        """Number of data-parallel ranks."""
        return 2 if self.options.attention == "dp" else 1

    def processes(self) -> list[psutil.Process]:
        """Return the processes that live, the API server first."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]


def entry_points(folder: Path) -> Path:
    """Write what `pip install` would write of the plugin's entry points, and return the folder for
    PYTHONPATH."""
    about = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    info = folder / f"roost_vllm-{about['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n"
    )
    lines = [f"{name} = {value}" for name, value in about["entry-points"]["vllm.general_plugins"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines, ""]))
    return folder


def command(options: Options, port: int) -> list[str]:
    """Return the command line of a vLLM."""
    eplb = {
        "num_redundant_experts": options.redundant,
        "communicator": "torch_nccl",
        "use_async": False,
        "step_interval": 1_000_000_000,
        **options.eplb,
    }
    ways = {"tp": "--tensor-parallel-size", "dp": "--data-parallel-size"}
    words = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL, "--port", str(port)]
    words += [
        "--served-model-name",
        SERVED,
        "--dtype",
        "float32",
        "--enforce-eager",
        "--block-size",
        str(BLOCK),
    ]
    words += ["--max-model-len", "1024", "--max-num-seqs", "16"]
    if options.attention in ways:
        words += [ways[options.attention], "2", "--enable-expert-parallel", "--enable-eplb"]
        words += ["--eplb-config", json.dumps(eplb)]
    if options.kv_port:
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv"}
        ports = {"endpoint": options.kv_port, "replay_endpoint": options.kv_port + 10}
        events |= {name: f"tcp://127.0.0.1:{port}" for name, port in ports.items()}
        words += ["--kv-events-config", json.dumps(events)]
    return [*words, *options.arguments]


@contextlib.asynccontextmanager
async def vllm(options: Options, folder: Path) -> AsyncIterator[Vllm]:
    """A vLLM that answers; all of its processes are ended with the context. RuntimeError, with the end of its
    log, when it does not start. folder: for its log."""
    server = await asyncio.to_thread(_start, options, folder)
    try:
        await _until_ready(server)
        yield server
    finally:
        await asyncio.to_thread(end, server)


def _start(options: Options, folder: Path) -> Vllm:
    folder.mkdir(parents=True, exist_ok=True)
    port, log = options.port or free_port(), folder / "vllm.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command(options, port),
            cwd=ROOT,
            env={**os.environ, **_environment(options, folder)},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _give_way(process.pid, options.nice)
    return Vllm(f"http://127.0.0.1:{port}", options, process, log)


def _give_way(pid: int, nice: int) -> None:
    """Let others run first: an engine waits for its GPU, but these ranks spin and compute on the processors,
    and starve NATS and commands where there are only two. The kernel weighs sessions against each other, and
    niceness within one (sched(7), autogroups)."""
    group = Path(f"/proc/{pid}/autogroup")
    if group.exists():
        group.write_text(str(nice))
    os.setpriority(os.PRIO_PROCESS, pid, nice)


def _environment(options: Options, folder: Path) -> dict[str, str]:
    plugin = [PLUGIN, entry_points(folder / "plugin")] if options.with_plugin else []
    paths = [STAND_INS, *plugin, *options.paths]
    agent = {"ROOST_AGENT": options.agent, "ROOST_SECRET_FILE": str(options.secret)} if options.agent else {}
    joined = os.pathsep.join(str(path) for path in paths)
    return {**_ENVIRONMENT, "PYTHONPATH": joined, **agent, **options.environment}


async def _until_ready(server: Vllm) -> None:
    deadline = time.monotonic() + START_SECONDS
    async with httpx.AsyncClient(timeout=5) as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(f"{server.url}/health")).status_code == 200:
                    return
            if server.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"vLLM does not start: {_tail(server.log)}")
            await asyncio.sleep(0.5)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:]


def end(server: Vllm) -> None:
    """Kill all processes of a vLLM: an engine core outlives its API server, and keeps ports and memory. They
    share the session that the API server began."""
    session = server.process.pid
    for sent, seconds in ((signal.SIGTERM, 8.0), (signal.SIGKILL, 10.0)):
        members = [process for process in psutil.process_iter() if _session(process) == session]
        for process in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(sent)
        server.process.poll()
        psutil.wait_procs(members, timeout=seconds)
    server.process.wait(timeout=10)


def _session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except (ProcessLookupError, PermissionError):
        return -1
