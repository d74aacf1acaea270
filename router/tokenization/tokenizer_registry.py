"""Tokenizers of the served models: fetched by digest when an engine names one. Long work (unpacking,
encoding) runs off the event loop.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from bus import Bus, BusError
from bus.keyed_queue import KeyedQueue
from router.tokenization.segment_cache import SegmentCache
from router.tokenization.tokenizer import BadTokenizer, ModelTokenizer

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 2.0
_MAX_TOKENIZERS = 256
"""Most tokenizers that are known or requested at once."""

Changed = Callable[[str, str | None], None]
"""Called with a digest, and the reason why its tokenizer cannot be used (None: it can)."""


class TokenizerRegistry:
    """State: tokenizers by digest. `threads`: executor for long work. `seen_bytes`: budget for token ids of
    known texts, of all models together.
    """

    def __init__(self, threads: ThreadPoolExecutor, changed: Changed, seen_bytes: int = 0) -> None:
        self._threads = threads
        self._changed = changed
        self.seen = SegmentCache(seen_bytes) if seen_bytes else None
        self._known: dict[str, ModelTokenizer] = {}
        self._archives: dict[str, bytes] = {}
        self._due: KeyedQueue[str] = KeyedQueue(_MAX_TOKENIZERS)

    def get(self, digest: str | None) -> ModelTokenizer | None:
        return None if digest is None else self._known.get(digest)

    def archive(self, digest: str) -> bytes | None:
        """Return the archive of a known tokenizer, for other processes."""
        return self._archives.get(digest)

    @property
    def digests(self) -> tuple[str, ...]:
        """Return the digests of the usable tokenizers."""
        return tuple(self._known)

    def request(self, digest: str) -> str | None:
        """Request a tokenizer unless it is known. Return the reason why it cannot be used now; None if it
        can.
        """
        if digest in self._known:
            return None
        self._due.ask(digest)
        return "its tokenizer is being fetched"

    async def add(self, digest: str, archive: bytes) -> None:
        """Add a tokenizer that no engine publishes on the bus. BadTokenizer when it cannot be used."""
        self._known[digest] = await asyncio.get_running_loop().run_in_executor(
            self._threads, ModelTokenizer.from_archive, archive, self.seen
        )
        self._archives[digest] = archive

    def keep_only(self, digests: set[str]) -> None:
        """Forget tokenizers that no engine names."""
        for digest in self._known.keys() - digests:
            self._known.pop(digest).forget_segments()
            self._archives.pop(digest, None)

    async def run(self, bus: Bus) -> None:
        """Fetch until cancelled."""
        while True:
            digest = await self._due.next()
            if digest not in self._known:
                await self._fetch(bus, digest)

    async def _fetch(self, bus: Bus, digest: str) -> None:
        try:
            archive = await bus.get_blob(digest)
            self._known[digest] = await asyncio.get_running_loop().run_in_executor(
                self._threads, ModelTokenizer.from_archive, archive, self.seen
            )
        except BusError as error:
            log.warning("tokenizer %s cannot be fetched yet: %s", digest, error)
            self._changed(digest, f"its tokenizer cannot be fetched: {error}")
            self._due.ask_later(digest, _PAUSE_SECONDS)
        except BadTokenizer as error:
            log.error("tokenizer %s cannot be used: %s", digest, error)  # noqa: TRY400 the message is complete
            self._changed(digest, f"its tokenizer cannot be used: {error}")
        else:
            self._archives[digest] = archive
            self._changed(digest, None)
