"""Run directories: private, locked while their owner lives, cleared of what the dead left."""

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.run_directory import KEPT, LONGEST_SOCKET_FOLDER, Running, home, live_runs, run_directory

HOLDER = """
import sys
from pathlib import Path
from deploy.run_directory import Running, run_directory
with run_directory(Path(sys.argv[1])) as run:
    run.write_record(Running(pid=1, namespace="n", nats="nats://127.0.0.1:1"))
    run.log("engine-0/1").write_text("words")
    (run.folder("nats") / "data").write_text("x")
    print("up", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path / "roost"


def holder(base: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(base)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def test_it_is_readable_by_its_user_alone_and_gone_after_a_clean_end(base: Path) -> None:
    with run_directory(base) as run:
        assert run.path.stat().st_mode & 0o077 == 0
        assert run.folder("meet").stat().st_mode & 0o077 == 0
    assert list(base.iterdir()) == []


def test_a_stop_by_cancellation_is_a_clean_end(base: Path) -> None:
    with pytest.raises(asyncio.CancelledError), run_directory(base):
        raise asyncio.CancelledError
    assert list(base.iterdir()) == []


def test_after_a_failure_the_logs_stay_and_nothing_else(base: Path) -> None:
    def fail() -> None:
        with run_directory(base) as run:
            run.log("engine-0/1").write_text("last words")
            (run.folder("nats") / "data").write_text("x")
            run.write_record(Running(pid=1, namespace="n"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert sorted(path.name for path in base.glob("run-*/*")) == ["engine-0-1.log", "lock"]


def test_live_runs_are_found_and_dead_ones_are_not(base: Path) -> None:
    with holder(base) as process:
        assert live_runs(base) == [Running(pid=1, namespace="n", nats="nats://127.0.0.1:1")]
        process.kill()
    assert live_runs(base) == []


def test_a_new_run_removes_what_a_killed_one_left_but_its_logs(base: Path) -> None:
    with holder(base) as process:
        process.kill()
    left = next(base.iterdir())
    with run_directory(base):
        assert [path.name for path in left.glob("*.log")] == ["engine-0-1.log"]
        assert not (left / "nats").exists()


def test_a_live_run_is_left_alone(base: Path) -> None:
    with holder(base) as process:
        left = next(base.iterdir())
        with run_directory(base):
            assert (left / "nats" / "data").exists()
        process.kill()


def test_of_the_dead_only_the_newest_few_are_kept(base: Path) -> None:
    for number in range(KEPT + 3):
        dead = base / f"run-{10_000_000 + number}"
        dead.mkdir(parents=True)
        (dead / "lock").touch()
        os.utime(dead / "lock", (number, number))
    with run_directory(base) as run:
        kept = sorted(path.name for path in base.iterdir() if path != run.path)
    assert kept == [f"run-{10_000_000 + number}" for number in range(3, KEPT + 3)]


def test_meeting_folders_have_paths_short_enough_for_sockets_and_are_removed_with_the_run(
    tmp_path: Path,
) -> None:
    with run_directory(tmp_path / ("long" * 20)) as run:
        folders = [run.meeting_folder(name) for name in ("a", "b")]
        assert all(
            len(str(folder)) <= LONGEST_SOCKET_FOLDER and folder.stat().st_mode & 0o077 == 0
            for folder in folders
        )
        run.drop("a")
        assert [folder.exists() for folder in folders] == [False, True]
    assert not folders[1].exists()


def test_a_new_run_removes_meeting_folders_that_a_killed_one_had_elsewhere(tmp_path: Path) -> None:
    dead = tmp_path / "run-10000000"
    dead.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "rank0.wake").touch()
    (dead / "meet").symlink_to(elsewhere)
    with run_directory(tmp_path):
        assert not elsewhere.exists()


def test_a_log_that_grew_too_long_is_moved_aside(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.run_directory.LOG_BYTES", 10)
    with run_directory(base) as run, run.log("router").open("a") as log:
        log.write("0123456789 and more\n")
        log.flush()
        run.shorten_logs()
        log.write("new\n")
        log.flush()
        assert run.log("router").read_text() == "new\n"
        assert run.log("router").with_suffix(".log.old").read_text() == "0123456789 and more\n"


def test_lines_that_come_while_a_long_log_is_moved_aside_are_not_lost(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.run_directory.LOG_BYTES", 10)
    with run_directory(base) as run, run.log("router").open("a") as log:
        log.write("0123456789 and more\n")
        log.flush()
        for name in ("copyfileobj", "copyfile"):
            copy = getattr(shutil, name)

            def busy(*arguments: Any, copy: Any = copy) -> None:
                copy(*arguments)
                log.write("meanwhile\n")
                log.flush()

            monkeypatch.setattr(shutil, name, busy)
        run.shorten_logs()
        log.write("new\n")
        log.flush()
        assert (
            run.log("router").with_suffix(".log.old").read_text() + run.log("router").read_text()
            == "0123456789 and more\nmeanwhile\nnew\n"
        )


def test_the_place_follows_the_state_variable_when_it_is_absolute() -> None:
    assert home({"XDG_STATE_HOME": "/state"}) == Path("/state/roost")
    assert home({"XDG_STATE_HOME": "relative"}) == home({}) == Path.home() / ".local" / "state" / "roost"
