"""vLLM's own load balancer against Roost, on a real vLLM: two data-parallel ranks with expert parallelism, 8
redundant experts, fp32, the demo model. Two cores stand in for the accelerators, so nothing here is a speed.

All arms get the same requests in the same order: windows of held-out documents, whose domains change in the
middle. In vLLM's arms its EPLB rearranges every 3,000 and every 300 steps; in Roost's the plugin carries out
the plans of router, tracker and planner. A run is long enough for five rearrangements of the slower EPLB.

- balance: mean / highest load of a rank, by layer and step, as the mean over steps; from vLLM's own counters
  (`expert_load_pass`), from the first plan or rearrangement on. A recorder in vLLM's workers reads them the
  same way in all arms.
- received: experts that came to a rank that did not hold them, summed over layers; first placement included.
- texts: every answer of every arm is compared. vLLM adds a token's experts by rank, so another map rounds
  otherwise: a difference is excused where the two best tokens are a tie (`benchmarks.rig.vllm.ties`).

A start of vLLM takes a minute or more, and a run of the full size five to ten: `--keep FOLDER` keeps what
was measured, and a further call runs only what is missing. --quick starts vLLM twice (EPLB at 300 steps, and
Roost) for some two thousand steps, enough for a first plan, holds nothing but the texts to a target, and
still takes minutes.

    python -m benchmarks.real_vllm.loop --quick --python .venv-vllm/bin/python
"""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import typer

from benchmarks.rig.live.document_traffic import Request, texts
from benchmarks.rig.report import AsJson, Check, Quick, Report, Target
from benchmarks.rig.vllm.arms import Arm, EplbArm, RoostArm, Run, run_or_read
from benchmarks.rig.vllm.load import Plenty, halves, requests
from benchmarks.rig.vllm.records import Record, balance, read, received, remote
from benchmarks.rig.vllm.server import PYTHON, with_vllm
from benchmarks.rig.vllm.ties import Judge

FEWER, REARRANGEMENTS = 0.2, 5
"""largest share of EPLB's received experts; least rearrangements of each EPLB arm"""
FULL = Plenty(850, 8, 128, 128)
SHORT = Plenty(256, 8, 128, 64)
SLOW, FAST, ROOST, HOMES = EplbArm(3000), EplbArm(300), RoostArm(), RoostArm(homes=True)
Python = typer.Option(None, help=f"Python of vLLM's environment; default: ${PYTHON}, .venv-vllm")
Keep = typer.Option(None, help="folder for the evidence; what lies there is not run again")
_COLUMNS = [
    "arm",
    "seed",
    "steps",
    "balance",
    "balance, same steps",
    "received",
    "changes",
    "remote %",
    "tok/s",
]


class Measured(NamedTuple):
    """One arm under one seed."""

    arm: Arm
    asked: Sequence[Request]
    run: Run
    record: Record

    @property
    def first(self) -> int:
        """Step of the first plan or rearrangement; the last step if there was none."""
        changes = self.record.changes
        return changes[1].step if len(changes) > 1 else len(self.record.busy) - 1

    @property
    def balance(self) -> float:
        return balance(self.record, self.first)

    @property
    def received(self) -> int:
        return sum(received(self.record))


async def measure(
    python: Path, arms: Sequence[Arm], seeds: int, much: Plenty, folder: Path
) -> list[list[Measured]]:
    """Run every arm under every seed; return by seed and arm."""
    traffic, found = texts(None, much.prompt), []
    for seed in range(seeds):
        several = requests(traffic, much, seed)
        row = []
        for arm in arms:
            run, place = await run_or_read(arm, python, several, much, folder / f"seed-{seed}")
            record = read(place).between(run.began, run.began + run.seconds)
            row.append(Measured(arm, several, run, record))
        found.append(row)
    return found


def judge(report: Report, by_seed: list[list[Measured]], *, quick: bool) -> None:
    """Add rows and targets; the deciding ratio last. quick: hold only the texts to a target."""
    for seed, row in enumerate(by_seed):
        same = max(one.first for one in row)
        for one in row:
            report.add(
                one.arm.name,
                seed,
                int(one.record.busy.sum()),
                one.balance,
                balance(one.record, same),
                one.received,
                len(one.record.changes) - 1,
                100 * remote(one.record),
                one.run.tokens / one.run.seconds,
            )
    unlike, ties = different(by_seed)
    answers = sum(len(one.run.texts) for row in by_seed for one in row[1:])
    report.notes.append(
        f"{unlike + ties} of {answers} answers differ from the first arm's, {ties} of them by a tie"
    )
    report.targets.append(Target("answers that differ, ties aside", unlike, 0, at_least=False, unit=""))
    if quick:
        return
    eplb = {arm: _of(by_seed, arm) for arm in (SLOW, FAST)}
    least = min(len(one.record.changes) - 1 for several in eplb.values() for one in several)
    report.targets.append(Target("rearrangements of each EPLB arm", least, REARRANGEMENTS, unit=""))
    best = max(eplb, key=lambda arm: _balance(eplb[arm]))
    mine = _of(by_seed, ROOST)
    report.notes.append(f"the better EPLB: {best.name}")
    report.targets += [
        Target("Roost's balance over the better EPLB's", _balance(mine) / _balance(eplb[best]), 1.0),
        Target("experts received, over that EPLB's", _received(mine) / _received(eplb[best]), FEWER, False),
    ]


def different(by_seed: list[list[Measured]]) -> tuple[int, int]:
    """Count the answers that are not those of the same seed's first arm: real differences, and ties."""
    found = [
        (request, text, other)
        for row in by_seed
        for one in row[1:]
        for request, text, other in zip(one.asked, one.run.texts, row[0].run.texts, strict=True)
        if text != other
    ]
    if not found:
        return 0, 0
    judge = Judge()
    ties = sum(judge.is_tie(request.prompt, text, other) for request, text, other in found)
    return len(found) - ties, ties


def _of(by_seed: list[list[Measured]], arm: Arm) -> list[Measured]:
    return [one for row in by_seed for one in row if one.arm == arm]


def _balance(several: list[Measured]) -> float:
    return float(np.mean([one.balance for one in several]))


def _received(several: list[Measured]) -> float:
    return float(np.mean([one.received for one in several]))


def setting(much: Plenty) -> list[str]:
    """Return the conditions of all arms."""
    first, second = halves(texts(None, much.prompt))
    return [
        (
            f"{much.count} requests of {much.prompt} + {much.output} tokens, {much.concurrency} at once;"
            f" held-out documents: {', '.join(first)}; then {', '.join(second)}"
        ),
        "processor only, 2 ranks on shared cores: tokens/s are no measure of either side",
    ]


def main(
    quick: bool = Quick,
    as_json: bool = AsJson,
    check: bool = Check,
    python: Path = Python,
    seeds: int = typer.Option(3, min=1, help="orders of requests (1 with --quick)"),
    homes: bool = typer.Option(
        False, help="one more arm: Roost with homes used at any confidence, for the remote pairs"
    ),
    keep: Path = Keep,
) -> None:
    """Compare vLLM's EPLB with Roost on a real vLLM."""
    report = Report("vLLM's EPLB and Roost on a real vLLM", _COLUMNS)

    def run(interpreter: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="roost-vllm-loop-") as folder:
            place = Path(folder) if keep is None else keep.absolute()
            judge(
                report,
                asyncio.run(measure(interpreter, arms, 1 if quick else seeds, much, place)),
                quick=quick,
            )

    much = SHORT if quick else FULL
    arms: list[Arm] = [FAST, ROOST] if quick else [SLOW, FAST, ROOST, *([HOMES] if homes else [])]
    report.notes += setting(much)
    if quick:
        report.notes.append(f"left out by --quick: {SLOW.name}; all seeds but one; the figures' targets")
    with_vllm(report, python, run, as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
