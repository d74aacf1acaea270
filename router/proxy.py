"""Speaks HTTP to ranks: one keep-alive client for all, every failure translated at this door."""

import asyncio
import math
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import aiohttp
import msgspec

from fleet.completions import ApiError
from router.config import RouterConfig
from router.course import Failure

_ERROR_BYTES = 64 * 1024
"""Read of an error's body at most."""
_DRAIN_SECONDS = 1.0
"""For the end of a stream whose answer is whole; afterwards the connection is closed instead of kept."""
_DATA = b"data:"


class UpstreamFailed(Exception):
    """A rank did not answer, or not to the end."""

    def __init__(self, how: Failure, detail: str) -> None:
        super().__init__(f"{how.value}: {detail}")
        self.how = how


class _ErrorBody(msgspec.Struct):
    message: str = ""
    code: str | int | None = None
    param: str | None = None


class _ErrorAnswer(msgspec.Struct):
    error: _ErrorBody | str | None = None
    detail: Any = None


class EventSplitter:
    """Server-sent events out of bytes as they arrive: the data of each, without its line ends. ValueError when one is too long."""

    def __init__(self, most_bytes: int) -> None:
        self._rest = b""
        self._most = most_bytes

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that is complete now; comments and other fields are left out."""
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *blocks, self._rest = data.split(b"\n\n")
        if len(self._rest) > self._most:
            raise ValueError(f"a server-sent event exceeds {self._most} bytes")
        return [_event_data(block) for block in blocks if _DATA in block]


def _event_data(block: bytes) -> bytes:
    if block.startswith(_DATA) and b"\n" not in block:
        return block[5:].lstrip()
    return b"\n".join(line[5:].lstrip() for line in block.split(b"\n") if line.startswith(_DATA))


class Call:
    """One request at a rank, from sending to the last byte; an async context manager that leaves no open connection behind.

    Entering raises UpstreamFailed, or ApiError when the rank blames the request (4xx but 429).
    """

    def __init__(self, session: aiohttp.ClientSession, config: RouterConfig, url: str, body: bytes, headers: Mapping[str, str]) -> None:
        self._session = session
        self._config = config
        self._url = url
        self._body = body
        self._headers = headers
        self._read_any = False
        self._clean = False
        self._response: aiohttp.ClientResponse
        self._loop = asyncio.get_running_loop()
        self._silent_at = 0.0
        """when the rank will have been silent for too long; inf while nobody waits for it"""
        self._alarm: asyncio.TimerHandle | None = None
        self._gave_up = False

    async def __aenter__(self) -> "Call":
        try:
            async with asyncio.timeout(self._config.first_token_seconds):
                self._response = await self._session.post(self._url, data=self._body, headers=self._headers)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL) as error:
            raise UpstreamFailed(Failure.CONNECT, f"{self._url}: {error}") from error
        except TimeoutError as error:
            raise UpstreamFailed(Failure.FIRST_TOKEN_TIMEOUT, f"{self._url}: no answer for {self._config.first_token_seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamFailed(Failure.DISCONNECTED, f"{self._url}: {error or type(error).__name__}") from error
        try:
            await self._check_status()
        except BaseException:
            self._response.close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        if kind is None and self._clean:
            await self._drain()
        self._response.close()  # after a whole answer the connection is back in the pool already, and this does nothing

    @property
    def status(self) -> int:
        return self._response.status

    @property
    def content_type(self) -> str:
        return self._response.headers.get("content-type", "application/json")

    async def read(self) -> bytes:
        """What has arrived; b"" at the end. UpstreamFailed when nothing comes in time or the stream breaks."""
        seconds = self._config.between_tokens_seconds if self._read_any else self._config.first_token_seconds
        self._silent_at = self._loop.time() + seconds
        if self._alarm is None:
            self._alarm = self._loop.call_at(self._silent_at, self._look)
        try:
            data = await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            if self._gave_up:
                how = Failure.STALLED if self._read_any else Failure.FIRST_TOKEN_TIMEOUT
                raise UpstreamFailed(how, f"{self._url}: silent for {seconds:g} s") from error
            raise UpstreamFailed(Failure.BROKEN, f"{self._url}: {error or type(error).__name__}") from error
        finally:
            self._silent_at = math.inf
        self._read_any = True
        return data

    def _look(self) -> None:
        """The alarm went off: give the rank up, or set the alarm again. One timer per call, not one per read: most reads are short."""
        now = self._loop.time()
        if now >= self._silent_at:
            self._gave_up = True
            self._response.close()  # the waiting read fails at once
            return
        waiting = self._silent_at - now if self._silent_at < math.inf else self._config.between_tokens_seconds
        self._alarm = self._loop.call_later(min(waiting, self._config.between_tokens_seconds), self._look)

    def whole(self) -> None:
        """The answer is complete: what is left is the end of the stream, and the connection may be used again."""
        self._clean = True

    async def _drain(self) -> None:
        content = self._response.content
        try:
            async with asyncio.timeout(_DRAIN_SECONDS):
                while await content.readany():
                    pass
        except (TimeoutError, aiohttp.ClientError, OSError):
            self._response.close()

    async def _check_status(self) -> None:
        status = self._response.status
        if status < 400:
            return
        try:
            async with asyncio.timeout(self._config.between_tokens_seconds):
                body = await self._response.content.read(_ERROR_BYTES)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise UpstreamFailed(Failure.BROKEN, f"{self._url}: HTTP {status}, then {error or type(error).__name__}") from error
        refused = api_error(status, body)
        if status == 429 or refused.code == "overloaded":
            raise UpstreamFailed(Failure.BUSY, f"{self._url}: {refused.message}")
        if status >= 500:
            raise UpstreamFailed(Failure.SERVER_ERROR, f"{self._url}: HTTP {status}: {refused.message}")
        if status in (401, 403):
            raise UpstreamFailed(Failure.SERVER_ERROR, f"{self._url}: HTTP {status}: the server refused the router's key; set backend_key_file")
        raise refused


def api_error(status: int, body: bytes) -> ApiError:
    """A rank's error in OpenAI's form, or as near to it as its body allows."""
    try:
        answer = msgspec.json.decode(body, type=_ErrorAnswer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ApiError(status, body[:500].decode(errors="replace") or f"HTTP {status}")
    error = answer.error
    if isinstance(error, _ErrorBody):
        return ApiError(status, error.message, code=None if error.code is None else str(error.code), param=error.param)
    return ApiError(status, str(error or answer.detail or f"HTTP {status}"))


class Upstream:
    """The client behind all calls. Open it once, on the loop that uses it; closing closes every connection."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Upstream":
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=self._config.keepalive_seconds)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, connect=self._config.connect_seconds),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("user-agent", "accept-encoding"),
            headers={"content-type": "application/json"},
        )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise ApiError(503, "the router is starting or stopping", code="not_ready", retry_after=1.0)
        return self._session

    def call(self, url: str, body: bytes, headers: Mapping[str, str]) -> Call:
        return Call(self.session, self._config, url, body, headers)

    async def get(self, url: str, headers: Mapping[str, str], *, seconds: float, most_bytes: int) -> bytes:
        """The body of a GET. OSError (also for other statuses than 200), TimeoutError, or ValueError when it is too long."""
        try:
            async with asyncio.timeout(seconds), self.session.get(url, headers=headers) as response:
                body = await response.content.read(most_bytes + 1)
                while not response.content.at_eof() and len(body) <= most_bytes:
                    body += await response.content.read(most_bytes + 1 - len(body))
                if response.status != 200:
                    raise OSError(f"HTTP {response.status}: {api_error(response.status, body).message}")
        except aiohttp.ClientError as error:
            raise OSError(str(error) or type(error).__name__) from error
        if len(body) > most_bytes:
            raise ValueError(f"{url} answered with more than {most_bytes} bytes")
        return body
