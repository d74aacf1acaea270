"""Commands of images, units and manifests, carried through the real command line up to the point of serving."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import deploy
from deploy.cli import parts
from deploy.configuration_loader import Configuration
from tests.certificates import certificate
from tests.deploy.commands import roost

ROOT = Path(deploy.__file__).parent / "manifests"
MOUNTS = re.compile(r"/(etc|var/lib|run)/roost[a-z-]*")
"""Folders that an image or a unit is given from outside."""


@dataclass(frozen=True)
class Started:
    """The part that a command would run, and its settings."""

    part: str
    settings: Configuration


def mounted(text: str, folder: Path) -> str:
    """The text with each folder that is given from outside below `folder`."""
    return MOUNTS.sub(lambda found: f"{folder}{found[0]}", text)


def provide(folder: Path) -> None:
    """Keys, secrets, certificates and logins where the images, units and manifests look for them."""
    etc = folder / "etc/roost"
    for name in ("bus", "keys", "tls", "fleet", "metrics", "config"):
        (etc / name).mkdir(parents=True, exist_ok=True)
    made = certificate(etc / "tls", "localhost", "127.0.0.1")
    for cert, key in (("tls/tls.crt", "tls/tls.key"), ("router.crt", "router.key")):
        (etc / cert).write_bytes(made.cert.read_bytes())
        (etc / key).write_bytes(made.key.read_bytes())
    for name in ("fleet.secret", "fleet/fleet.secret", "metrics.key", "metrics/metrics.key"):
        (etc / name).write_text("a-secret-of-at-least-thirty-two-characters\n")
    for name in ("client-keys", "keys/client-keys"):
        done = roost("key", "new", "someone", "--rights", "all", "--file", str(etc / name))
        assert done.exit_code == 0, done.output
        (etc / "client.key").write_text(done.stdout.split()[-1])
    for name in ("roost.toml", "config/roost.toml"):
        (etc / name).write_text("")
    for role in ("router", "planner", "tracker", "engine", "engine-e0"):
        (etc / f"bus/{role}.json").write_text(json.dumps({"user": role, "password": "secret"}))


def start(
    monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str], environment: Mapping[str, str]
) -> Started:
    """Run `roost ARGUMENTS` until it would serve. Fails the test if the command refuses an option, a variable,
    a file or their combination."""
    seen: list[Started] = []

    def run_part(name: str, settings: Configuration, *_: Any) -> int:
        seen.append(Started(name, settings))
        return 0

    def own_engine(settings: Configuration, *_: Any, **__: Any) -> None:
        seen.append(Started("engine", settings))

    monkeypatch.setattr(parts, "run_part", run_part)
    monkeypatch.setattr(parts, "_ranks", own_engine)
    monkeypatch.setattr(parts, "supervise", lambda _: 0)
    monkeypatch.setattr(parts, "set_up_logging_of", lambda _: None)
    monkeypatch.setattr(parts, "listen", lambda *_: None)
    with monkeypatch.context() as context:
        for name, value in environment.items():
            context.setenv(name, value)
        done = roost(*arguments)
    assert done.exit_code == 0, done.output
    (started,) = seen
    return started
