"""Images run commands that exist, as a user without rights, and hold torch only where it is needed."""

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from engine_adapter.vllm.config import VllmConfig
from fleet.settings import FilePath
from migration.config import MigrationConfig
from router.config import RouterConfig
from tests.deploy.manifests.started import ROOT, Started, mounted, provide, start
from tracker.config import TrackerConfig

FILE = ROOT / "containers/Containerfile"
REPOSITORY = ROOT.parents[1]


@dataclass
class Image:
    """One stage of the file, with what it takes over from its base."""

    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def last(self, instruction: str) -> str:
        return next(text for name, text in reversed(self.steps) if name == instruction)

    def variables(self) -> dict[str, str]:
        return {
            name: value
            for instruction, text in self.steps
            if instruction == "ENV"
            for name, _, value in (pair.partition("=") for pair in text.split())
        }


def instructions() -> Iterator[tuple[str, str]]:
    lines = [line for line in FILE.read_text().splitlines() if not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, text = line.strip().partition(" ")
            yield name, text


def images() -> dict[str, Image]:
    found: dict[str, Image] = {}
    for name, text in instructions():
        if name == "FROM":
            base, _, stage = text.partition(" AS ")
            found[stage] = Image(base, [*(found[base].steps if base in found else [])])
        elif found:
            list(found.values())[-1].steps.append((name, text))
    return found


IMAGES = images()
PARTS = ("router", "planner", "tracker")


@pytest.mark.parametrize("name", [*PARTS, "engine"])
def test_the_command_of_an_image_starts_its_part(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: None
) -> None:
    image = IMAGES[name]
    provide(tmp_path)
    assert json.loads(image.last("ENTRYPOINT")) == ["roost"]
    command = [mounted(word, tmp_path) for word in json.loads(image.last("CMD"))]
    variables = {variable: mounted(value, tmp_path) for variable, value in image.variables().items()}
    variables |= {"ROOST_WORKER_HOST": "10.0.0.5"} if name == "engine" else {}
    assert start(monkeypatch, command, variables).part == name


def address(started: Started) -> str | None:
    """HOST:PORT of a part's HTTP server."""
    if started.part == "router":
        config = started.settings.part(RouterConfig)
        return f"{config.host}:{config.port}"
    kind = TrackerConfig if started.part == "tracker" else MigrationConfig
    return started.settings.part(kind).metrics_address


@pytest.mark.parametrize("name", PARTS)
def test_a_health_check_asks_where_the_part_listens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: None
) -> None:
    provide(tmp_path)
    image = IMAGES[name]
    command = [mounted(word, tmp_path) for word in json.loads(image.last("CMD"))]
    variables = {key: mounted(value, tmp_path) for key, value in image.variables().items()}
    started = start(monkeypatch, command, variables)
    check = image.last("HEALTHCHECK")
    asked = re.search(r"(https?)://127\.0\.0\.1:(\d+)/health", check)
    assert asked is not None
    assert address(started) == f"0.0.0.0:{asked[2]}"
    assert image.last("EXPOSE") == asked[2]
    assert (asked[1] == "https") == ("--tls-cert" in command)
    program = json.loads(check.partition(" CMD ")[2])
    assert program[:2] == ["python", "-c"]
    compile(program[2], name, "exec")


@pytest.mark.parametrize("name", ["parts", *PARTS, "engine", "vllm"])
def test_no_image_runs_as_root(name: str) -> None:
    assert IMAGES[name].last("USER") == "10001:10001"


def closure(*extras: str) -> set[str]:
    """Every package that an installation with these extras brings, by the metadata of what is installed."""
    found: set[tuple[str, str]] = set()
    wanted = [("roost", extra) for extra in ("", *extras)]
    while wanted:
        name, extra = wanted.pop()
        if (name, extra) in found:
            continue
        found.add((name, extra))
        for line in requires(name) or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                wanted += [(canonicalize_name(needed.name), each) for each in ("", *needed.extras)]
    return {name for name, _ in found}


def installed(name: str) -> str:
    return next(text for instruction, text in IMAGES[name].steps if instruction == "RUN" and ".whl)[" in text)


def test_routers_planners_trackers_and_agents_bring_no_torch() -> None:
    (extras,) = re.findall(r"\.whl\)\[([a-z,]+)\]", installed("parts"))
    brought = closure(*extras.split(","))
    assert {"uvloop", "scipy", "tokenizers", "pyzmq"} <= brought
    assert not {"torch", "safetensors", "nixl-cu12", "transformers", "ai-dynamo-runtime"} & brought
    assert "torch" in closure("engine")


def test_everything_in_an_image_has_an_exact_pin() -> None:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}
    assert not closure("vllm", "sglang") - pinned - {"roost"}
    for name in ("parts", "engine"):
        assert "-c /wheels/constraints.txt" in installed(name)
        assert "pip check" in installed(name)


def test_the_image_of_a_vllm_finds_its_agent_at_the_default_address() -> None:
    variables = IMAGES["vllm"].variables()
    assert variables["ROOST_AGENT"] == VllmConfig().listen
    assert FilePath(variables["ROOST_SECRET_FILE"])


def test_what_the_images_copy_is_let_through_to_the_build() -> None:
    ignored = (FILE.parent / "Containerfile.dockerignore").read_text().splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    packages = set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    assert kept == packages | {"pyproject.toml", "hatch_build.py", "constraints.txt", "README.md", "LICENSE"}
