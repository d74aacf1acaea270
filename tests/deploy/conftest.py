"""Trivial children for the supervisor: Python one-liners that need nothing of Roost."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.supervise import Command


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Command]:
    """A command that runs a piece of Python; its log is <name>.log."""

    def command(code: str, name: str = "child", keep: tuple[int, ...] = ()) -> Command:
        arguments = [sys.executable, "-S", "-u", "-c", code]
        return Command(name=name, arguments=arguments, log=tmp_path / f"{name}.log", environment=dict(os.environ), keep=keep)

    return command
