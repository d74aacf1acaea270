"""Trivial children for the supervisor, and a place where commands find nothing they were not given."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.local.supervise import Command


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Command]:
    """A command that runs a piece of Python; its log is <name>.log."""

    def command(code: str, name: str = "child", keep: tuple[int, ...] = ()) -> Command:
        arguments = [sys.executable, "-S", "-u", "-c", code]
        return Command(
            name=name,
            arguments=arguments,
            log=tmp_path / f"{name}.log",
            environment=dict(os.environ),
            keep=keep,
        )

    return command


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No roost.toml, no running fleet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
