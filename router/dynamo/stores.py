"""Dynamo's discovery, read as it lies in its file store."""

import asyncio
import time
from pathlib import Path

EXPIRED_SECONDS = 30.0
"""A file that its owner has not renewed for this long is left over: owners renew every few seconds, and other
processes of Dynamo delete files after ten.
"""
_BUCKETS = ("instances", "mdc", "event_channels", "event_sources")


class FileStore:
    """The shared folder of Dynamo's discovery backend "file". State: content of the files, by their times."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "v1"
        self._known: dict[str, tuple[float, bytes]] = {}

    async def read(self) -> dict[str, tuple[float, bytes]]:
        """Return the records by file, with the time of the last change. A missing folder is an empty one."""
        self._known = await asyncio.to_thread(self._read)
        return self._known

    def _read(self) -> dict[str, tuple[float, bytes]]:
        found: dict[str, tuple[float, bytes]] = {}
        oldest = time.time() - EXPIRED_SECONDS
        for bucket in _BUCKETS:
            folder = self._folder / bucket
            for path in folder.iterdir() if folder.is_dir() else ():
                try:
                    changed = path.stat().st_mtime
                    if changed < oldest or path.name.startswith("."):
                        continue
                    known = self._known.get(f"{bucket}/{path.name}")
                    content = path.read_bytes() if known is None or known[0] != changed else known[1]
                except FileNotFoundError:  # deleted since it was listed
                    continue
                found[f"{bucket}/{path.name}"] = changed, content
        return found
