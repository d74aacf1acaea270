"""Dynamo's discovery, as its file store and etcd hold it."""

import asyncio
import os
import time
from base64 import b64decode, b64encode
from pathlib import Path

import aiohttp
import msgspec

EXPIRED_SECONDS = 30.0
"""A file that its owner has not renewed for this long is left over: owners renew every few seconds, and other
processes of Dynamo delete files after ten.
"""
_BUCKETS = ("instances", "mdc", "event_channels", "event_sources")


_LEASE_SECONDS = 5.0


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
            try:
                entries = list(os.scandir(self._folder / bucket))
            except FileNotFoundError:
                continue
            for entry in entries:
                try:
                    changed = entry.stat().st_mtime
                    if changed < oldest or entry.name.startswith("."):
                        continue
                    key = f"{bucket}/{entry.name}"
                    known = self._known.get(key)
                    content = (
                        Path(entry.path).read_bytes() if known is None or known[0] != changed else known[1]
                    )
                except FileNotFoundError:  # deleted since it was listed
                    continue
                found[key] = changed, content
        return found


class EtcdStore:
    """Dynamo's discovery backend "etcd", read over etcd's JSON gateway. State: content of the last reading.

    Leases renew no record visibly. A record counts as renewed every few seconds as long as it is there.
    """

    def __init__(self, url: str, seconds: float = 5.0) -> None:
        """seconds: limit of one reading."""
        self._url = url.rstrip("/") + "/v3/kv/range"
        self._timeout = aiohttp.ClientTimeout(total=seconds)

    async def read(self) -> dict[str, tuple[float, bytes]]:
        """Return the records by key. OSError when etcd does not answer, or with nonsense."""
        now = time.time() // _LEASE_SECONDS * _LEASE_SECONDS
        ends = {"key": b64encode(b"v1/").decode(), "range_end": b64encode(b"v10").decode()}
        try:
            async with (
                aiohttp.ClientSession(timeout=self._timeout) as session,
                session.post(self._url, json=ends) as answer,
            ):
                answer.raise_for_status()
                found = _RANGE.decode(await answer.read())
                return {
                    b64decode(one.key).decode("utf-8", "replace"): (now, b64decode(one.value))
                    for one in found.kvs
                }
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise OSError(f"etcd at {self._url}: {error or type(error).__name__}") from error


class _Pair(msgspec.Struct, frozen=True):
    key: str
    value: str = ""


class _Range(msgspec.Struct, frozen=True):
    kvs: tuple[_Pair, ...] = ()


_RANGE: msgspec.json.Decoder[_Range] = msgspec.json.Decoder(_Range)
