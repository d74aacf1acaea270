"""The routers that Roost is measured beside, in a virtual environment of their own, so that neither side's dependencies bend the other's.

`ai-dynamo` cannot be installed with its dependencies where NVIDIA's index is out of reach (one of them is a placeholder elsewhere), so it
comes without, and what its frontend and mocker import comes by name.
"""

import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rig.processes import ROOT

FOLDER = ROOT / ".venv-peers"
SMG = "sglang-router==0.3.2"
DYNAMO = "ai-dynamo==1.6.1"
_STEPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (SMG, (SMG,)),
    ("ai-dynamo-runtime", ("ai-dynamo-runtime==1.6.1",)),
    (
        "what Dynamo's frontend and mocker import",
        (
            "aiohttp",
            "msgspec",
            "prometheus-client",
            "pyzmq",
            "transformers",
            "tokenizers",
            "zstandard",
            "kubernetes<33",
            "redis",
            "tqdm",
            "certifi",
            "uvloop",
        ),
    ),
    (f"{DYNAMO} without its dependencies", ("--no-deps", DYNAMO)),
)
_PIP_SECONDS = 600


@dataclass(frozen=True)
class Peers:
    """Where the peers are; for those that are not there, `missing` says why."""

    smg: Path | None
    dynamo: Path | None
    """the Python that has it"""
    missing: dict[str, str]


def install() -> dict[str, str]:
    """Make the environment and put every peer in that can be had; progress goes to standard error. Returns what failed, by what it was."""
    failed: dict[str, str] = {}
    if not (FOLDER / "bin" / "python").exists():
        _say(f"making {FOLDER}")
        venv.create(FOLDER, with_pip=True)
    for at, (what, packages) in enumerate(_STEPS, 1):
        _say(f"[{at}/{len(_STEPS)}] installing {what}")
        try:
            done = subprocess.run(
                [str(FOLDER / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages],
                capture_output=True,
                text=True,
                timeout=_PIP_SECONDS,
                check=False,
            )
            said = (done.stderr or done.stdout).strip().splitlines()
        except subprocess.TimeoutExpired:
            failed[what] = f"pip took more than {_PIP_SECONDS} s"
        else:
            if done.returncode:
                failed[what] = next((line for line in reversed(said) if line.startswith("ERROR")), said[-1] if said else "pip failed")
        if what in failed:
            _say(f"    failed: {failed[what]}")
    return failed


def find(failed: dict[str, str]) -> Peers:
    """What can be started. failed: what `install` said."""
    python = FOLDER / "bin" / "python"
    missing: dict[str, str] = {}
    smg = FOLDER / "bin" / "smg"
    if not smg.exists():
        missing["smg"] = failed.get(SMG, f"{SMG} is not in {FOLDER.name}; run with --install")
    if not python.exists():
        missing["dynamo"] = f"{DYNAMO} is not in {FOLDER.name}; run with --install"
    else:
        tried = subprocess.run([str(python), "-c", "import dynamo.frontend, dynamo.mocker"], capture_output=True, text=True, check=False)
        if tried.returncode:
            why = "; ".join(f"{what}: {reason}" for what, reason in failed.items() if what != SMG)
            missing["dynamo"] = why or f"its frontend cannot be imported ({(tried.stderr.strip().splitlines() or ['no reason'])[-1]}); run with --install"
    return Peers(None if "smg" in missing else smg, None if "dynamo" in missing else python, missing)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
