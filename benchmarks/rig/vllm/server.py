"""A real vLLM of two data-parallel ranks on this machine's processor, with chosen plugins; it is ended,
engine cores included, with the context.

vLLM has an environment of its own (`python`). Plugins are modules on its path; vLLM finds them by an
`entry_points.txt`, which is written into a temporary folder.
"""

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil

from benchmarks.rig.processes import ROOT, free_port
from benchmarks.rig.report import Report, Target
from deploy.local.parent_death import wrapped
from deploy.sections import DEMO_CHECKPOINT

START_SECONDS = 300.0
END_SECONDS = 20.0
PYTHON = "ROOST_VLLM_PYTHON"
"""environment variable: Python of vLLM's environment"""
MODEL = "demo"
BLOCK = 32
"""tokens in a KV block: the least of this build"""
EPLB: dict[str, Any] = {
    "num_redundant_experts": 8,
    "window_size": 1000,
    "log_balancedness": True,
    "log_balancedness_interval": 1000,
    "communicator": "torch_nccl",
    "use_async": False,
}
"""Logging with an interval as long as the window makes vLLM count in every step; its own decisions use the
same last `window_size` steps either way."""
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


class Plugin(NamedTuple):
    """General plugin of vLLM: folder of the module, and `module:function`."""

    folder: Path
    entry: str


STAND_INS = Plugin(ROOT / "tests" / "vllm" / "cpu_stand_ins", "roost_cpu_stand_ins:register")
"""what only the processor build of vLLM lacks"""
ROOST = Plugin(ROOT / "engine_adapter" / "vllm" / "plugin", "roost_vllm:register")
RECORDER = Plugin(Path(__file__).parent / "recorder", "roost_recorder:register")


@dataclass(frozen=True)
class Server:
    """How one vLLM is started."""

    python: Path
    plugins: Sequence[Plugin]
    step_interval: int | None
    """of EPLB; None: one rank, without expert parallelism"""
    flags: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    eplb: Mapping[str, Any] = field(default_factory=dict)
    """keys of --eplb-config that differ"""
    checkpoint: Path = DEMO_CHECKPOINT

    def command(self, port: int) -> list[str]:
        """Return the command line."""
        flags = {
            "--model": str(self.checkpoint),
            "--served-model-name": MODEL,
            "--host": "127.0.0.1",
            "--port": str(port),
            "--dtype": "float32",
            "--block-size": str(BLOCK),
            "--max-model-len": "1024",
            "--max-num-seqs": "16",
        }
        if self.step_interval is not None:
            flags["--data-parallel-size"] = "2"
            flags["--eplb-config"] = json.dumps({**EPLB, "step_interval": self.step_interval, **self.eplb})
        experts = [] if self.step_interval is None else ["--enable-expert-parallel", "--enable-eplb"]
        module = "vllm.entrypoints.openai.api_server"  # `vllm serve` looks for a distribution named vllm
        pairs = [word for pair in flags.items() for word in pair]
        return [str(self.python), "-m", module, *pairs, "--enforce-eager", *experts, *self.flags]


def python_of_vllm(option: Path | None) -> Path:
    """Return the Python of vLLM's environment: the option, else `ROOST_VLLM_PYTHON`, else `.venv-vllm`.
    Raises ValueError if there is none."""
    found = option or Path(os.environ.get(PYTHON) or ROOT / ".venv-vllm" / "bin" / "python")
    if not found.is_file():
        raise ValueError(
            f"{found} does not exist: `make test-vllm` installs vLLM, --python or {PYTHON} names it"
        )
    return found


def with_vllm(
    report: Report, option: Path | None, measure: Callable[[Path], None], *, as_json: bool, check: bool
) -> None:
    """Measure with the Python of vLLM's environment and finish the report, which says so if there is none.
    option: as in `python_of_vllm`."""
    try:
        interpreter = python_of_vllm(option)
    except ValueError as error:
        report.notes.append(str(error))
        report.targets.append(Target("vLLM is installed", 0, 1, unit=""))
    else:
        measure(interpreter)
    report.finish(as_json=as_json, check=check)


class Running(NamedTuple):
    """A vLLM that answers."""

    url: str
    pid: int

    def family(self) -> list[psutil.Process]:
        """Return all of its processes."""
        return _family(self.pid)


@asynccontextmanager
async def serving(server: Server, log: Path) -> AsyncIterator[Running]:
    """Run the server; yield once it answers. log: file of its output.

    Raises RuntimeError with the end of its output if it ends before, TimeoutError if it does not answer."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="roost-vllm-") as folder, log.open("wb") as out:
        _write_entry_points(Path(folder), server.plugins)
        path = os.pathsep.join([folder, *(str(plugin.folder) for plugin in server.plugins)])
        process = await asyncio.create_subprocess_exec(
            *wrapped(server.command(port), os.getpid()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=folder,
            env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": path, **server.environment},
            process_group=0,
        )
        url = f"http://127.0.0.1:{port}"
        try:
            await _answers(url, process, log)
            yield Running(url, process.pid)
        finally:
            await _end(process)


def _write_entry_points(folder: Path, plugins: Sequence[Plugin]) -> None:
    about = folder / "roost_benchmark-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: roost-benchmark\nVersion: 0\n")
    lines = [f"{plugin.entry.split(':')[0]} = {plugin.entry}" for plugin in plugins]
    (about / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines]) + "\n")


async def _answers(url: str, process: asyncio.subprocess.Process, log: Path) -> None:
    async with aiohttp.ClientSession(url) as http, asyncio.timeout(START_SECONDS):
        while True:
            if process.returncode is not None:
                raise RuntimeError(f"vLLM ended with {process.returncode}; it said: {_tail(log)}")
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get("/health") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.2)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the server and everything that it started: its engine cores outlive a killed front end."""
    family = _family(process.pid)
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), END_SECONDS)
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, timeout=5)
    for one in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    if process.returncode is None:
        await process.wait()


def _family(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    return []
