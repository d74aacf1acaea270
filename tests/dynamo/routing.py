"""Roost between frontends and workers: its processes, and what they record."""

import json
from pathlib import Path
from typing import Any

import httpx

from benchmarks.rig.processes import ROOST
from deploy.sections import DEMO_CHECKPOINT
from tests.conftest import free_port
from tests.dynamo.deployment import NAMESPACE, DynamoDeployment, DynamoFrontend, DynamoProcess, until
from tests.dynamo.environment import PYTHON, ROOT

WORKERS = "workers"
"""Namespace of the workers."""


async def mocker(dynamo: DynamoDeployment, number: int) -> DynamoProcess:
    """Start one of Dynamo's own mockers. An answer of 120 tokens takes about a second."""
    command = [
        str(PYTHON),
        "-m",
        "dynamo.mocker",
        "--model-path",
        str(DEMO_CHECKPOINT),
        "--model-name",
        "tiny",
    ]
    command += ["--endpoint", f"dyn://{WORKERS}.backend.generate", "--num-workers", "1", "--block-size", "16"]
    command += ["--num-gpu-blocks-override", "4096", "--speedup-ratio", "1", "--max-num-seqs", "64"]
    return await dynamo.start(f"mocker-{number}", command)


async def roost(dynamo: DynamoDeployment, *options: str, **variables: str) -> str:
    """Start `roost router --dynamo`, whose own endpoint is in the frontends' namespace, and return its URL."""
    return (await roost_process(dynamo, *options, **variables))[0]


async def roost_process(
    dynamo: DynamoDeployment, *options: str, **variables: str
) -> tuple[str, DynamoProcess]:
    """Start it, and return its process as well."""
    port = free_port()
    command = [
        *ROOST,
        "router",
        "--dynamo",
        WORKERS,
        "--frontend-migration-limit",
        "0",
        "--port",
        str(port),
    ]
    process = await dynamo.start(
        "roost",
        [*command, *options],
        PYTHONPATH=str(ROOT),
        ROOST_DYNAMO_ENDPOINT=f"{NAMESPACE}.router.generate",
        **variables,
    )

    async def offers() -> bool:
        assert process.process.returncode is None, process.log.read_text()
        return f"at {NAMESPACE}.router.generate" in process.log.read_text()

    await until(offers, f"roost offers the model; see {process.log}")
    return f"http://127.0.0.1:{port}", process


async def frontend(dynamo: DynamoDeployment, *options: str, workers: int = 1) -> DynamoFrontend:
    """Start a frontend in round robin. workers: discovery files to wait for."""
    return await dynamo.frontend("round-robin", "--migration-limit", "0", *options, workers=workers)


async def metric(url: str, name: str, label: str = "") -> float:
    """Return the sum of a metric of a process over the series with this text in their labels."""
    async with httpx.AsyncClient() as client:
        lines = (await client.get(f"{url}/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name) and label in line)


def spans_of(file: Path, trace: str, name: str) -> list[Any]:
    """Return the spans of a trace in a file, by their name."""
    lines = file.read_text().splitlines() if file.exists() else []
    found = [json.loads(line) for line in lines if trace in line]
    return [span for span in found if name in span["name"]]
