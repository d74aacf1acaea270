"""Arms of the comparison: the same requests to a vLLM under its own load balancer, or under Roost.

Each run leaves its raw evidence in a folder: the recorder's counters by step, the answers, the times. A folder
that is complete is not run again, so a comparison can be made in parts.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.rig.live.document_traffic import Request
from benchmarks.rig.vllm.load import Plenty, send
from benchmarks.rig.vllm.recorder.roost_recorder import FOLDER
from benchmarks.rig.vllm.server import MODEL, RECORDER, STAND_INS, Server, serving

_DONE = "run.json"


class Run(msgspec.Struct, frozen=True):
    """Answers of one run, in the order of the requests. The counters lie beside it."""

    texts: list[str]
    seconds: float
    tokens: int
    much: Plenty


class EplbArm(NamedTuple):
    """vLLM's own load balancer."""

    interval: int
    """steps between rearrangements"""

    @property
    def name(self) -> str:
        return f"vLLM's EPLB, every {self.interval:,} steps"

    @property
    def folder(self) -> str:
        return f"eplb-{self.interval}"

    async def run(self, python: Path, several: Sequence[Request], much: Plenty, folder: Path) -> Run:
        """Start a vLLM, send the requests, end it; leave the evidence in the folder."""
        environment = {FOLDER: str(folder)}
        server = Server(python, (STAND_INS, RECORDER), self.interval, environment=environment)
        async with serving(server, folder / "vllm.log") as url:
            return await sent(url, several, much)


async def sent(url: str, several: Sequence[Request], much: Plenty) -> Run:
    """Send the requests and keep what came back."""
    began = time.monotonic()
    answers = await send(url, MODEL, several, much)
    tokens = sum(answer.completion_tokens for answer in answers)
    return Run([answer.text for answer in answers], time.monotonic() - began, tokens, much)


def kept(folder: Path, much: Plenty) -> Run | None:
    """Return the run whose evidence lies in the folder; None if there is none of this load."""
    file = folder / _DONE
    if not file.is_file():
        return None
    run = msgspec.json.decode(file.read_bytes(), type=Run)
    return run if run.much == much else None


def keep(folder: Path, run: Run) -> None:
    (folder / _DONE).write_bytes(msgspec.json.encode(run))
