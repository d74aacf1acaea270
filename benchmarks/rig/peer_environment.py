"""Routers that Roost is compared with, in a separate virtual environment, so that dependencies do not
conflict.

`ai-dynamo` cannot be installed with its dependencies where NVIDIA's index is unreachable (one of them is a
placeholder elsewhere). It is installed without them, and the imports of its frontend and mocker are installed
by name.
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
    """Paths of the peers; for absent ones, `missing` gives the reason."""

    smg: Path | None
    dynamo: Path | None
    """Python that has it installed"""
    missing: dict[str, str]


def install() -> dict[str, str]:
    """Create the environment and install every available peer; progress goes to standard error. Returns the
    failures by name."""
    failed: dict[str, str] = {}
    if not (FOLDER / "bin" / "python").exists():
        _say(f"making {FOLDER}")
        venv.create(FOLDER, with_pip=True)
    for at, (what, packages) in enumerate(_STEPS, 1):
        _say(f"[{at}/{len(_STEPS)}] installing {what}")
        try:
            done = subprocess.run(
                [
                    str(FOLDER / "bin" / "python"),
                    "-m",
                    "pip",
                    "install",
                    "-q",
                    "--disable-pip-version-check",
                    *packages,
                ],
                capture_output=True,
                text=True,
                timeout=_PIP_SECONDS,
                check=False,
            )
            output = (done.stderr or done.stdout).strip().splitlines()
        except subprocess.TimeoutExpired:
            failed[what] = f"pip took more than {_PIP_SECONDS} s"
        else:
            if done.returncode:
                failed[what] = next(
                    (line for line in reversed(output) if line.startswith("ERROR")),
                    output[-1] if output else "pip failed",
                )
        if what in failed:
            _say(f"    failed: {failed[what]}")
    return failed


def find(failed: dict[str, str]) -> Peers:
    """Return the peers that can be started. failed: the result of `install`."""
    python = FOLDER / "bin" / "python"
    missing: dict[str, str] = {}
    smg = FOLDER / "bin" / "smg"
    if not smg.exists():
        missing["smg"] = failed.get(SMG, f"{SMG} is not in {FOLDER.name}; run without --no-install")
    if not python.exists():
        missing["dynamo"] = f"{DYNAMO} is not in {FOLDER.name}; run without --no-install"
    else:
        tried = subprocess.run(
            [str(python), "-c", "import dynamo.frontend, dynamo.mocker"],
            capture_output=True,
            text=True,
            check=False,
        )
        if tried.returncode:
            why = "; ".join(f"{what}: {reason}" for what, reason in failed.items() if what != SMG)
            last = (tried.stderr.strip().splitlines() or ["no reason"])[-1]
            missing["dynamo"] = why or f"its frontend cannot be imported ({last}); run without --no-install"
    return Peers(None if "smg" in missing else smg, None if "dynamo" in missing else python, missing)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
