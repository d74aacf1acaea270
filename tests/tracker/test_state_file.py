"""State file: written atomically, loaded only undamaged."""

import hashlib
import logging
import os
from pathlib import Path

import pytest

from tracker.state_file import MAGIC, SavedState, read, write

SAVED = SavedState(
    saved_at=1e9,
    now=12.5,
    meaning_from=7,
    activity=(("departed", [1, 2]), ("model", ["m", {"counts": b"\x00\xff"}])),
    learnt={"m": {"a": 1.5}},
    drifts={},
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kept" / "tracker.state"


def test_what_was_written_is_read(path: Path) -> None:
    assert write(path, SAVED) == path.stat().st_size
    found = read(path)
    assert found is not None
    assert (found.saved_at, found.now, found.meaning_from, found.learnt) == (1e9, 12.5, 7, {"m": {"a": 1.5}})
    assert [(kind, piece) for kind, piece in found.activity] == [
        ("departed", [1, 2]),
        ("model", ["m", {"counts": b"\x00\xff"}]),
    ]
    assert [entry.name for entry in path.parent.iterdir()] == ["tracker.state"]
    assert path.stat().st_mode & 0o077 == 0, "for its owner alone"


def test_without_a_file_nothing_is_known(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read(path) is None
    assert caplog.records == []


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda raw: b"", "not written by this version"),
        (lambda raw: raw[:10], "not written by this version"),
        (lambda raw: raw[:-1], "damaged"),
        (lambda raw: raw[:-1] + b"\x00", "damaged"),
        (lambda raw: raw[: len(MAGIC)] + bytes(32) + raw[len(MAGIC) + 32 :], "damaged"),
        (lambda raw: raw.replace(b"tracker 1", b"tracker 2"), "not written by this version"),
        (lambda raw: b"something else altogether", "not written by this version"),
    ],
)
def test_a_damaged_or_foreign_file_is_set_aside_and_the_log_says_so(
    damage: object, says: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(path, SAVED)
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with caplog.at_level(logging.WARNING):
        assert read(path) is None
    assert says in caplog.text
    assert not path.exists()
    assert path.with_name("tracker.state.unusable").exists()
    write(path, SAVED)
    assert read(path) is not None


def test_bytes_that_are_whole_but_say_something_else_are_set_aside(path: Path) -> None:
    body = b"\x81\xa1a\x01"
    path.parent.mkdir()
    path.write_bytes(MAGIC + hashlib.sha256(body).digest() + body)
    assert read(path) is None
    assert path.with_name("tracker.state.unusable").exists()


def test_a_file_that_cannot_be_read_leaves_the_tracker_to_start_afresh(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.mkdir(parents=True)
    assert read(path) is None
    assert "cannot be read" in caplog.text


def test_a_writer_that_dies_half_way_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, SAVED)

    def broken(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="no space"):
        write(path, SavedState(saved_at=2e9, now=1.0, meaning_from=1, activity=(), learnt={}, drifts={}))
    found = read(path)
    assert found is not None
    assert found.saved_at == 1e9
