"""Idle cost of `roost up` and its time to the first token: one engine of two ranks on the demo model.

Times the second start (the first one fills the file cache), requests one token, waits until the fleet is
idle, then reads the processor time and resident memory of every process. Memory is the sum of resident sets:
pages shared between processes count in each.

    python -m benchmarks.footprint --quick
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import typer

from benchmarks.rig.report import AsJson, Check, Quick, Report, Target

ROOST = str(Path(sys.executable).parent / "roost")
ROOT = Path(__file__).resolve().parents[1]
START_LIMIT, CPU_LIMIT, MEMORY_LIMIT = 20.0, 15.0, 2.0
"""seconds to the first token, percent of one core, GB"""


@contextlib.contextmanager
def fleet() -> Iterator[tuple[str, psutil.Process, float]]:
    """Run `roost up`; yield the router's URL, the process, and its start time (monotonic seconds)."""
    began = time.monotonic()
    child = subprocess.Popen(
        [ROOST, "up", "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT, text=True
    )
    try:
        yield _router_url(child), psutil.Process(child.pid), began
    finally:
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=30)


def _router_url(child: "subprocess.Popen[str]") -> str:
    assert child.stdout is not None
    seen = []
    for line in child.stdout:
        seen.append(line)
        words = line.split()
        if words[:1] == ["router"] and words[-1].startswith("http://"):
            return words[-1]
    raise RuntimeError("roost up ended before it was up:\n" + "".join(seen))


def first_token(url: str) -> None:
    """Request one streamed token and read it."""
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    body = json.dumps({"model": model, "prompt": "NAME\n", "max_tokens": 1, "stream": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        if not answer.readline().startswith(b"data:"):
            raise RuntimeError("the first line of the stream is no event")


def processor_seconds(processes: list[psutil.Process]) -> float:
    return sum(float(times.user + times.system) for times in (process.cpu_times() for process in processes))


def at_rest(top: psutil.Process, seconds: float) -> tuple[float, float, list[tuple[str, float, float]]]:
    """Return percent of one core and GB resident of all processes over `seconds`, and the same (and MB) of
    each by name."""
    processes = [top, *top.children(recursive=True)]
    before = {process.pid: processor_seconds([process]) for process in processes}
    began = time.monotonic()
    time.sleep(seconds)
    taken = time.monotonic() - began
    each = [
        (
            _name(process),
            100 * (processor_seconds([process]) - before[process.pid]) / taken,
            process.memory_info().rss / 1e6,
        )
        for process in processes
    ]
    return sum(cpu for _, cpu, _ in each), sum(memory for _, _, memory in each) / 1e3, each


def _name(process: psutil.Process) -> str:
    """Return the part that a process runs."""
    line = process.cmdline()
    for word in line:
        if word.startswith("{"):
            order = json.loads(word)
            return f"rank {order['rank']['rank']}" if order["part"] == "rank" else str(order["part"])
    return "nats-server" if "nats-server" in line[0] else "roost up"


def main(quick: bool = Quick, as_json: bool = AsJson, check: bool = Check) -> None:
    """Measure idle processor and memory use of `roost up`, and its time to the first token."""
    starts, rest = (2, 15.0) if quick else (4, 60.0)
    report = Report(f"roost up at rest, 2 ranks, over {rest:g} s", ["process", "% of a core", "MB resident"])
    seconds: list[float] = []
    for last in [False] * starts + [True]:
        with fleet() as (url, top, began):
            first_token(url)
            seconds.append(time.monotonic() - began)
            if last:
                time.sleep(2)  # lets the request's follow-up work finish
                cpu, memory, each = at_rest(top, rest)
    for name, share, size in each:
        report.add(name, share, size)
    report.notes.append(
        f"starts to the first token: {', '.join(f'{taken:.1f}' for taken in seconds)} s; load average"
        f" {os.getloadavg()[0]:.1f}"
    )
    report.targets += [
        Target(
            "second and later starts to the first token",
            statistics.median(seconds[1:]),
            START_LIMIT,
            at_least=False,
            unit=" s",
        ),
        Target("idle processor use of all processes", cpu, CPU_LIMIT, at_least=False, unit=" % of a core"),
        Target("resident memory of all processes", memory, MEMORY_LIMIT, at_least=False, unit=" GB"),
    ]
    report.finish(as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
