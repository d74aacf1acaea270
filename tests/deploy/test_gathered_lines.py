"""Many short log lines in few writes, none of them lost."""

import asyncio
import io
import logging

import pytest

from deploy.gathered_lines import GATHER_SECONDS, MOST_HELD, GatheredLines


class Stream(io.StringIO):
    """Counts writes."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0

    def write(self, text: str) -> int:
        self.writes += 1
        return super().write(text)


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
def say(stream: Stream) -> logging.Logger:
    logger = logging.Logger("test of lines")
    logger.addHandler(GatheredLines(stream))
    return logger


@pytest.mark.looptime
async def test_lines_of_one_moment_are_written_together(stream: Stream, say: logging.Logger) -> None:
    for moment in range(2):
        say.info("first %d", moment)
        say.info("second")
        assert stream.writes == moment
        await asyncio.sleep(GATHER_SECONDS)
    assert (stream.writes, stream.getvalue()) == (2, "first 0\nsecond\nfirst 1\nsecond\n")


def test_without_an_event_loop_each_line_is_written_at_once(stream: Stream, say: logging.Logger) -> None:
    say.info("one")
    assert stream.getvalue() == "one\n"


@pytest.mark.looptime
async def test_too_many_lines_do_not_wait(stream: Stream, say: logging.Logger) -> None:
    for at in range(MOST_HELD):
        say.info(str(at))
    assert stream.getvalue().count("\n") == MOST_HELD


@pytest.mark.looptime
async def test_what_is_held_is_written_when_logging_ends(stream: Stream, say: logging.Logger) -> None:
    say.info("last words")
    for handler in say.handlers:
        handler.flush()
    assert stream.getvalue() == "last words\n"


def test_a_stream_that_nobody_reads_is_said_and_survived(stream: Stream, say: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    stream.close()
    say.info("to nobody")
    assert "1 lines could not be written" in capsys.readouterr().err
