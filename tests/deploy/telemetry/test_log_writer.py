"""Lines are written by a thread: in order, many at once, and when nobody reads they are dropped and
counted."""

import fcntl
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

import deploy.telemetry.log_writer
from deploy.telemetry.log_writer import (
    MAX_LINE_CHARACTERS,
    JsonFormatter,
    LogFile,
    LogWriter,
    PlainFormatter,
)

PIPE_BYTES = 4096


class Pipe:
    """One end is written to by a handler; the other is read when it is told to be."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        fcntl.fcntl(self.write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._read = b""

    def until(self, text: str) -> str:
        """Read until this text has come; all that was read so far."""
        while text.encode() not in self._read:
            self._read += os.read(self.read_end, 65536)
        return self._read.decode()

    def close(self) -> None:
        for end in (self.read_end, self.write_end):
            os.close(end)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


@pytest.fixture
def handler(pipe: Pipe) -> LogWriter:
    handler = LogWriter(pipe.write_end, lambda dropped: f"{dropped} dropped")
    handler.setFormatter(PlainFormatter())
    return handler


@pytest.fixture
def say(handler: LogWriter) -> logging.Logger:
    logger = logging.Logger("test of lines")
    logger.addHandler(handler)
    return logger


def test_lines_arrive_in_order(pipe: Pipe, say: logging.Logger) -> None:
    for at in range(300):
        say.info("line %d", at)
    assert pipe.until("line 299\n").splitlines() == [f"line {at}" for at in range(300)]


def test_a_flush_writes_at_once_what_is_held(
    pipe: Pipe, say: logging.Logger, handler: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploy.telemetry.log_writer, "GATHER_SECONDS", 600.0)
    say.info("last words")
    handler.flush()
    assert pipe.until("\n") == "last words\n"


def test_nobody_reading_holds_nobody_up_and_is_told_when_the_reader_is_back(
    pipe: Pipe, say: logging.Logger, handler: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploy.telemetry.log_writer, "MAX_HELD_CHARACTERS", 20_000)
    monkeypatch.setattr(deploy.telemetry.log_writer, "FLUSH_SECONDS", 0.05)
    for at in range(2000):
        say.info("%090d", at)  # 180 kB: the pipe takes 4, the handler 20
    dropped = handler.dropped
    assert 1000 < dropped < 2000
    before = time.monotonic()
    handler.flush()  # the end of a process does not wait for ever either
    assert time.monotonic() - before < 5
    lines = pipe.until(" dropped\n").splitlines()
    assert lines[-1] == f"{dropped} dropped"
    assert [int(line) for line in lines[:-1]] == list(range(2000 - dropped))
    say.info("after all")
    assert pipe.until("after all\n").splitlines()[-2:] == [f"{dropped} dropped", "after all"]


def test_a_reader_that_has_gone_is_counted_and_survived(
    pipe: Pipe, say: logging.Logger, handler: LogWriter
) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), pipe.write_end)  # writing there is an error
    say.info("to nobody")
    handler.flush()
    assert handler.dropped == 1


def test_a_descriptor_that_does_not_block_loses_nothing(
    pipe: Pipe, say: logging.Logger, handler: LogWriter
) -> None:
    os.set_blocking(pipe.write_end, False)
    for at in range(2000):
        say.info("%020d", at)
    assert len(pipe.until(f"{1999:020d}\n").splitlines()) == 2000
    assert handler.dropped == 0


def test_one_line_is_bounded_and_one_that_cannot_be_made_is_told(
    pipe: Pipe, say: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    say.info("%d", "no number")
    say.info("x" * 1_000_000)
    assert len(pipe.until("\n")) == MAX_LINE_CHARACTERS + 1
    assert "no number" in capsys.readouterr().err


def test_json_lines_have_time_level_logger_message_and_traceback_and_no_secrets() -> None:
    try:
        raise ValueError("nats://user:s3cret@h:1")  # noqa: TRY301
    except ValueError:
        record = logging.getLogger("a.b").makeRecord(
            "a.b", logging.WARNING, "", 0, "said %s", ("nats://u:s3cret@h",), sys.exc_info()
        )
    line = json.loads(JsonFormatter().format(record))
    assert (line["level"], line["logger"]) == ("WARNING", "a.b")
    assert datetime.fromisoformat(line["time"]).tzinfo is not None
    assert "Traceback" in line["traceback"]
    assert "s3cret" not in json.dumps(line)


def test_a_log_file_is_opened_anew_once_it_was_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    file = LogFile(path, str)
    file.setFormatter(PlainFormatter())
    logger = logging.Logger("test of a file")
    logger.addHandler(file)
    logger.info("before")
    file.flush()
    path.rename(tmp_path / "access.log.1")
    logger.info("after")
    file.flush()
    assert ((tmp_path / "access.log.1").read_text(), path.read_text()) == ("before\n", "after\n")
