"""One process: its signals, its errors, its exit status."""

import asyncio
import os
import pty
import signal
import sys
from pathlib import Path

import pytest

from deploy.process import FAILURE, FINAL, alongside, first_failure, first_of, run, until_ready

PROGRAM = """
import asyncio, sys
from deploy.process import run
async def part():
    try:
        print("up", flush=True)
        await asyncio.sleep(600)
    finally:
        print("cleaning", flush=True)
        if sys.argv[1] == "stuck":
            await asyncio.sleep(600)
        print("clean", flush=True)
sys.exit(run(part(), expected=()))
"""


async def answer(how: str, *signals: signal.Signals) -> tuple[int, str]:
    """Exit status and output of a part that gets these signals."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, how, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    output = b""
    for number in signals:
        output += await process.stdout.readline()
        process.send_signal(number)
    output += await process.stdout.read()
    return await process.wait(), output.decode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_stops_a_part_cleanly(number: signal.Signals) -> None:
    assert await answer("", number) == (0, "up\ncleaning\nclean\n")


async def test_a_second_signal_ends_it_at_once() -> None:
    assert await answer("stuck", signal.SIGINT, signal.SIGTERM) == (-signal.SIGTERM, "up\ncleaning\n")


RELOADING = """
import asyncio, sys
from deploy.process import on_hangup, run
async def part():
    with on_hangup(lambda: print("again", flush=True)):
        print("up", flush=True)
        try:
            await asyncio.sleep(600)
        finally:
            open(sys.argv[1], "w").write("clean")
sys.exit(run(part(), expected=()))
"""


async def test_a_part_that_can_takes_a_hangup_for_a_wish_to_read_its_settings_again(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RELOADING, tmp_path / "end", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"up\n"
    for _ in range(2):
        process.send_signal(signal.SIGHUP)
        assert await process.stdout.readline() == b"again\n"
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0
    assert (tmp_path / "end").read_text() == "clean"


async def test_a_hangup_because_the_terminal_was_closed_stops_it_all_the_same(tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", RELOADING, str(tmp_path / "end")])
    said = b""
    while not said.endswith(b"\n"):
        said += os.read(terminal, 100)
    os.close(terminal)
    _, status = await asyncio.to_thread(os.waitpid, pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert (tmp_path / "end").read_text() == "clean"


class Refusal(Exception):
    pass


async def raising(error: Exception) -> None:
    raise error


def test_expected_errors_are_told_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(raising(OSError("no such server")), expected=(OSError,), hint="start one") == FAILURE
    assert capsys.readouterr().err == "roost: no such server; start one\n"


def test_errors_that_would_come_again_have_a_status_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    group = ExceptionGroup(
        "tasks", [ValueError("other"), ExceptionGroup("inner", [Refusal("the name is taken")])]
    )
    assert run(raising(group), expected=(OSError,), final=(Refusal,)) == FINAL
    assert capsys.readouterr().err == "roost: the name is taken\n"


def test_a_bug_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        run(raising(ZeroDivisionError()), expected=(OSError,))


def test_the_first_error_of_a_kind_is_found_in_groups() -> None:
    assert first_of(ExceptionGroup("", [ValueError("a"), OSError("b")]), (OSError,)) is not None
    assert first_of(ValueError("a"), (OSError,)) is None


async def test_waiting_for_readiness_notices_a_failure() -> None:
    ready = asyncio.Event()
    async with alongside(raising(Refusal("no")), "fails") as task:
        with pytest.raises(Refusal):
            await until_ready(ready, task)
    async with alongside(asyncio.sleep(600), "works") as task:
        ready.set()
        await until_ready(ready, task)
    assert task.cancelled()


async def test_a_task_that_ends_by_itself_is_a_failure_with_its_name() -> None:
    async with alongside(asyncio.sleep(0), "heartbeat of a") as task:
        with pytest.raises(RuntimeError, match="heartbeat of a ended unexpectedly"):
            await first_failure([task])
