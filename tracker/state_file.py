"""The tracker's state on disk: one file, replaced atomically, and loaded only if its checksum matches.

Layout: MAGIC, which includes the format version; the sha256 of the body; the body, a msgpack `SavedState`.
Times in the body are those of the tracker's own clock (`SavedState.now`). `saved_at` is wall-clock time, from
which a reader computes the time since the file was written.
"""

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import msgspec

logger = logging.getLogger(__name__)

MAGIC = b"roost tracker 1\n"
_DIGEST = 32
MAX_BYTES = 4 << 30
"""Limit of the bytes read from a file."""


class SavedState(msgspec.Struct, frozen=True, kw_only=True):
    """Saved state of the tracker. Decoding raises ValueError for anything else."""

    saved_at: float
    """wall clock, seconds"""
    now: float
    """the tracker's clock at that moment, seconds"""
    meaning_from: int
    """lowest version of cluster models to which signatures may refer"""
    activity: tuple[tuple[str, Any], ...]
    learnt: dict[str, Any]
    """by model"""
    drifts: dict[str, Any]
    """by model"""


_DECODER: msgspec.msgpack.Decoder[SavedState] = msgspec.msgpack.Decoder(SavedState)


def write(path: Path, saved: SavedState) -> int:
    """Replace the file atomically and return its size. OSError if that fails; the old file then remains."""
    body = msgspec.msgpack.encode(saved)
    draft = path.with_name(path.name + ".new")
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(MAGIC)
        file.write(hashlib.sha256(body).digest())
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return len(MAGIC) + _DIGEST + len(body)


def read(path: Path) -> SavedState | None:
    """Load the saved state; None if there is none or it is unusable. An unusable file is renamed, and the log
    gives the reason.
    """
    try:
        with path.open("rb") as file:
            return _parsed(file.read(MAX_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("the tracker's state %s cannot be read (%s); starting afresh", path, error)
    except ValueError as error:
        _set_aside(path, error)
    return None


def _parsed(raw: bytes) -> SavedState:
    if not raw.startswith(MAGIC):
        raise ValueError("it was not written by this version of the tracker")
    body = memoryview(raw)[len(MAGIC) + _DIGEST :]
    if hashlib.sha256(body).digest() != raw[len(MAGIC) : len(MAGIC) + _DIGEST]:
        raise ValueError("it is damaged: its checksum does not fit")
    return _DECODER.decode(body)


def _set_aside(path: Path, why: ValueError) -> None:
    aside = path.with_name(path.name + ".unusable")
    try:
        path.replace(aside)
    except OSError as error:
        logger.warning(
            "the tracker's state %s cannot be used: %s; nor moved aside: %s; starting afresh",
            path,
            why,
            error,
        )
    else:
        logger.warning(
            "the tracker's state %s cannot be used: %s; it is now %s; starting afresh", path, why, aside
        )
