"""Notes of a pre-copy: what the ranks of an engine tell each other at the beginning of a step, as plain
data."""

from typing import Literal

import msgspec

Outcome = Literal["copied", "declined", "failed", "ended"]
"""copied: all units are read. declined: no unit is read. failed: a read is overdue. ended: the overdue reads
have ended, after "failed"."""


class AnnouncedRead(msgspec.Struct, frozen=True):
    """One unit to read. unit: the reader's own unit to fill. None: the reader takes one."""

    reader: int
    source_rank: int
    source: int
    unit: int | None


class Announcement(msgspec.Struct, frozen=True):
    """A page to read ahead."""

    key: int
    """Of the rank that announces it. Never used again."""
    block_hash: int
    held: bool
    """True if a request holds the page, False if it is only kept."""
    reads: tuple[AnnouncedRead, ...]


class SettledReads(msgspec.Struct, frozen=True):
    """The reads that a reader was to do for one announcement."""

    owner: int
    key: int
    outcome: Outcome


class PreCopyNote(msgspec.Struct):
    """Note of one rank in one step."""

    announced: list[Announcement] = []
    withdrawn: list[int] = []
    """Keys of pages whose content is gone."""
    settled: list[SettledReads] = []
