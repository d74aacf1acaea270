"""Latency that Roost adds between a Dynamo frontend and its workers, over an empty router in Python at the
same place.

Three unmodified frontends of Dynamo, with the same four mockers behind them: one before an empty pass-through
router (`benchmarks.real_dynamo.passthrough`), one before `roost router --dynamo`, and one that routes itself
in its KV mode. They are measured in alternating rounds, one request at a time, with prompts of 200 words of
which half are shared by eight groups. All processes share this machine's cores; on a busy machine the
processor time of the routers tells more than the latency. The empty router passes on one item after another;
Roost reads a worker's items ahead of the frontend. Needs the environment of `make test-dynamo`.

Another checkout's router takes part in turns with `--against`, which may be repeated.

    python -m benchmarks.real_dynamo.router --quick
"""

import contextlib
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

import typer
import uvloop

from benchmarks.real_dynamo import handler
from benchmarks.rig.chat_bodies import bodies, common_words, sources, write_model
from benchmarks.rig.load_client import SETTINGS, call_all
from benchmarks.rig.processes import ROOST, ROOT, Started, free_port, process
from benchmarks.rig.report import AsJson, Check, Quick, Report, Target, percentile

PYTHON = Path(os.environ.get("ROOST_DYNAMO_PYTHON", ROOT / ".venv-dynamo/bin/python"))
MODEL, MOCKERS, WORDS = "tiny", 4, 200
PASSTHROUGH, ROOST_ROUTER, KV = (
    "empty router in Python",
    "roost router --dynamo",
    "the frontend's own KV mode",
)
MOST_ADDED_MS = 0.5
PATH = "/v1/chat/completions"
Against = typer.Option([], "--against", help="another checkout, whose router is measured too")
_WARMING = 200
"""requests to each frontend before the first round"""
_ALONE = 100
"""requests to the handlers alone"""


class Place(NamedTuple):
    """A frontend's port, and the process of the router behind it (None: the frontend itself routes)."""

    port: int
    router: Started | None

    def processor_seconds(self) -> float:
        """Return the processor time of the router so far."""
        return 0.0 if self.router is None else self.router.processor_seconds()


class _Router(NamedTuple):
    """A router at the place that is measured: its command, the checkout it comes from, and the namespace in
    which its frontend finds it.
    """

    command: list[str]
    tree: Path
    namespace: str

    @classmethod
    def of_roost(cls, tree: Path, namespace: str) -> "_Router":
        command = [*ROOST, "router", "--port", str(free_port()), "--dynamo", "workers"]
        return cls([*command, "--frontend-migration-limit", "0"], tree, namespace)


def _routers(model: Path, against: Sequence[Path]) -> dict[str, _Router]:
    """Return the routers by name."""
    empty = [sys.executable, "-m", "benchmarks.real_dynamo.passthrough", str(model)]
    found = {
        PASSTHROUGH: _Router(empty, ROOT, "passthrough"),
        ROOST_ROUTER: _Router.of_roost(ROOT, "roost"),
    }
    for number, tree in enumerate(against):
        found[f"{ROOST_ROUTER} of {tree}"] = _Router.of_roost(tree, f"roost{number}")
    return found


@contextlib.asynccontextmanager
async def frontends(folder: Path, against: Sequence[Path] = ()) -> AsyncIterator[dict[str, Place]]:
    """Start everything; yield the frontends and routers by name. against: further checkouts of Roost."""
    model = folder / "model"
    model.mkdir()
    (folder / "discovery").mkdir()
    write_model(model, sources())
    shared = {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(folder / "discovery"),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_EVENT_PLANE_HOST": "127.0.0.1",
        "DYN_SELF_HOST_METADATA": "0",
        "DYN_LOG": "error",
        "HF_HUB_OFFLINE": "1",
    }
    mocker = [str(PYTHON), "-m", "dynamo.mocker", "--model-path", str(model), "--model-name", MODEL]
    mocker += ["--endpoint", "dyn://workers.backend.generate", "--num-workers", str(MOCKERS)]
    mocker += ["--block-size", "16", "--num-gpu-blocks-override", "16384", "--speedup-ratio", "1000"]
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(process(mocker, None, environment=shared))
        namespaces, routers = {KV: "workers"}, dict[str, Started]()
        for name, router in _routers(model, against).items():
            own = {**shared, "ROOST_DYNAMO_ENDPOINT": f"{router.namespace}.router.generate"}
            started = process(router.command, None, environment=own, tree=router.tree)
            routers[name] = Started(0, await stack.enter_async_context(started))
            namespaces[name] = router.namespace
        places = {}
        for name, namespace in namespaces.items():
            port = free_port()
            places[name] = Place(port, routers.get(name))
            mode = "kv" if name == KV else "round-robin"
            command = [
                str(PYTHON),
                "-m",
                "dynamo.frontend",
                "--http-host",
                "127.0.0.1",
                "--http-port",
                str(port),
            ]
            command += ["--router-mode", mode, "--namespace", namespace, "--migration-limit", "0"]
            await stack.enter_async_context(
                process(
                    command,
                    f"http://127.0.0.1:{port}/v1/models",
                    environment=shared,
                    answers=lambda body: MODEL.encode() in body,
                )
            )
        yield places


class Round(NamedTuple):
    """Seconds of every request of one round, and processor seconds of the router per request."""

    whole: list[float]
    processor: float


async def measured(places: dict[str, Place], *, rounds: int, requests: int) -> dict[str, list[Round]]:
    """Return the rounds by frontend; the order of frontends alternates."""
    words = common_words(sources())
    for place in places.values():
        warming = bodies(MODEL, words, _WARMING, count=WORDS, stream=False, seed=place.port)
        await call_all(place.port, PATH, warming, connections=1)
    found: dict[str, list[Round]] = defaultdict(list)
    names = list(places)
    for number in range(rounds):
        asks = bodies(MODEL, words, requests, count=WORDS, stream=False, seed=f"round {number}")
        for name in names[number % len(names) :] + names[: number % len(names)]:
            before = places[name].processor_seconds()
            samples, _ = await call_all(places[name].port, PATH, asks, connections=1)
            spent = places[name].processor_seconds() - before
            found[name].append(Round([sample.whole for sample in samples], spent / requests))
    return found


def main(
    quick: bool = Quick,
    as_json: bool = AsJson,
    check: bool = Check,
    against: list[Path] = Against,
) -> None:
    """Measure Roost between Dynamo's frontend and workers."""
    if not PYTHON.exists():
        raise typer.BadParameter(f"{PYTHON} does not exist; make test-dynamo makes it")
    rounds, requests = (6, 100) if quick else (20, 200)
    trees = [tree.resolve() for tree in against]
    alone = uvloop.run(handler.measured(_ALONE))
    found = uvloop.run(_run(trees, rounds=rounds, requests=requests))
    report = Report(
        f"between a Dynamo frontend and {MOCKERS} mockers, one request at a time, {WORDS} words",
        ["router", "p50 ms", "p99 ms", "p50 over the empty router ms", "router's processor ms"],
        notes=[SETTINGS, *_about(alone)],
    )
    added = {name: _added(found[name], found[PASSTHROUGH]) for name in found}
    for name in found:
        whole = [1e3 * one for some in found[name] for one in some.whole]
        processor = 1e3 * statistics.median(some.processor for some in found[name])
        report.add(name, statistics.median(whole), percentile(whole, 0.99), added[name], processor)
    report.targets.append(
        Target("p50 that Roost adds to an empty router", added[ROOST_ROUTER], MOST_ADDED_MS, False, " ms")
    )
    report.finish(as_json=as_json, check=check)


def _about(alone: dict[str, handler.Times]) -> list[str]:
    """Say what the handlers themselves cost, without Dynamo (`benchmarks.real_dynamo.handler`)."""
    return [
        f"handler alone, {name}: {warm.whole / 1e3:.2f} ms of processor time with warm caches,"
        f" {cold.whole / 1e3:.2f} with cold ones; until its worker is called {warm.called / 1e3:.2f} and"
        f" {cold.called / 1e3:.2f}"
        for name, (warm, cold) in alone.items()
    ]


async def _run(against: Sequence[Path], *, rounds: int, requests: int) -> dict[str, list[Round]]:
    with tempfile.TemporaryDirectory() as folder:
        async with frontends(Path(folder), against) as places:
            return await measured(places, rounds=rounds, requests=requests)


def _added(one: list[Round], other: list[Round]) -> float:
    """Return the median over rounds of the difference of medians, in milliseconds."""
    pairs = zip(one, other, strict=True)
    return 1e3 * statistics.median(
        statistics.median(ours.whole) - statistics.median(theirs.whole) for ours, theirs in pairs
    )


if __name__ == "__main__":
    typer.run(main)
