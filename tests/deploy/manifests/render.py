"""Render the chart, and write the plain manifests: python -m tests.deploy.manifests.render (or `make manifests`)"""

import re
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.manifests.install_helm import PROGRAM
from tests.deploy.manifests.started import ROOT

CHART = ROOT / "helm/roost"
EXAMPLES = ROOT / "helm/examples"
PLAIN = ROOT / "kubernetes"
WRITTEN: Mapping[str, str | None] = {"roost": None, "roost-with-vllm": "vllm"}
"""Plain manifests, each with the example whose values it was made with; None: the defaults."""
HEAD = "# Made from the chart by `make manifests`; do not edit. Namespace llm, release roost{}.\n"


class Refused(Exception):
    """Helm refused values or templates; the text is its message."""


@cache
def rendered(example: str | None, *settings: str) -> str:
    """The chart's manifests. example: name of a file of values; settings: of the form KEY=VALUE. Raises
    Refused."""
    values = [] if example is None else ["--values", str(EXAMPLES / f"{example}.yaml")]
    given = [word for setting in settings for word in ("--set", setting)]
    command = [
        str(PROGRAM),
        "template",
        "roost",
        str(CHART),
        "--namespace",
        "llm",
        "--kube-version",
        "1.37.0",
    ]
    done = subprocess.run(
        [*command, *values, *given], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        raise Refused(done.stderr)
    return done.stdout


@cache
def manifests(example: str | None, *settings: str) -> tuple[dict[str, Any], ...]:
    """The same as values, to be read only."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return tuple(one for one in yaml.load_all(rendered(example, *settings), loader) if one)


def page(name: str) -> str:
    """The text of one file of plain manifests."""
    example = WRITTEN[name]
    return HEAD.format("" if example is None else f", values helm/examples/{example}.yaml") + rendered(
        example
    )


def file_of(name: str) -> Path:
    return PLAIN / f"{name}.yaml"


def environment(container: dict[str, Any]) -> dict[str, str]:
    """Variables of a container of the pod e0."""
    found = {}
    for variable in container.get("env", ()):
        path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        found[variable["name"]] = (
            variable["value"] if path is None else {"status.podIP": "10.0.0.5"}.get(path, "e0")
        )
    return found


def command(container: dict[str, Any]) -> list[str]:
    """Arguments of a container, with the variables that they name."""
    given = environment(container)
    return [re.sub(r"\$\((\w+)\)", lambda found: given[found[1]], word) for word in container["args"]]


def main() -> None:
    """Write all files."""
    PLAIN.mkdir(exist_ok=True)
    for name in WRITTEN:
        file_of(name).write_text(page(name))


if __name__ == "__main__":
    main()
