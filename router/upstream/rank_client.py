"""Client for ranks: one HTTP client for all calls. Translates every failure, and detects silence."""

import asyncio
import errno
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import msgspec

from fleet.completions import MAX_DETAIL, UNREADABLE, ApiError, shortened
from fleet.completions.token_frames import HEADER, TokenPiece
from router.config import RouterConfig
from router.health.attempt_failures import AttemptFailure
from router.http.asgi_response import not_ready
from router.upstream.http_client import HttpClient, Origin, request_bytes
from router.upstream.server_connection import ChunkRelay, Connection, ConnectionLost
from router.upstream.token_frames import PieceRelay, RankFrames

_ERROR_BYTES = 64 * 1024
"""Most bytes read from the body of an error."""
_ResultT = TypeVar("_ResultT")
_FRAMES = 64
"""Longest token frame, as a multiple of the longest event of one stream."""
_FRAMES_KEPT_SECONDS = 300.0
"""Time for which a rank's token frames stay open without answers. An answer that begins before they are open
comes as events to its end, at twice the cost.
"""
FRAMES_HEADER = HEADER.encode()
_DRAIN_SECONDS = 1.0
"""Time limit for the end of a stream whose answer is complete. Afterwards the connection is closed instead of
kept.
"""


class UpstreamRefusal(NamedTuple):
    """A server's own error answer, unchanged."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class UpstreamFailed(Exception):
    """A rank gave no answer, or an incomplete one. `refused`: its own error answer, if there is one."""

    def __init__(self, how: AttemptFailure, detail: str, refused: UpstreamRefusal | None = None) -> None:
        super().__init__(f"{how.value}: {shortened(detail, MAX_DETAIL)}")
        self.how = how
        self.refused = refused

    def refusal(self, attempts: int) -> ApiError:
        """Return the client's error when no other rank is tried: 429 if ranks were busy, else 503."""
        if self.how is AttemptFailure.BUSY:
            return ApiError(
                429, f"{attempts} ranks are saturated; try again later", code="saturated", retry_after=2.0
            )
        return ApiError(
            503,
            f"{attempts} ranks failed this request, the last with {self.how.value}",
            code="upstream_failed",
            retry_after=2.0,
        )


class _ErrorBody(msgspec.Struct):
    message: str = ""
    code: str | int | None = None
    param: str | None = None


class _ErrorAnswer(msgspec.Struct):
    error: _ErrorBody | str | None = None
    detail: Any = None


class UpstreamRequest(msgspec.Struct, frozen=True):
    """A request to a server: its base URL, the path below it, and the content."""

    method: str
    url: str
    path: str
    headers: Mapping[str, str] | Sequence[tuple[bytes, bytes]]
    body: bytes


_FORGOTTEN = UpstreamRequest("", "", "", (), b"")


class Patience(msgspec.Struct, frozen=True):
    """Time limits of a call in seconds; inf: no limit."""

    first: float
    """until the first byte of the answer's body"""
    between: float
    """between two pieces of the body"""
    total: float = math.inf


class Call:
    """One request to a server, from sending to the last byte. An async context manager that leaves no open
    connection behind.

    Entering raises UpstreamFailed if no answer begins, and ApiError 504 if the total limit expires first. The
    answer may have any status.
    """

    def __init__(
        self, client: HttpClient, sent: UpstreamRequest, connect_seconds: float, patience: Patience
    ) -> None:
        self.loop = client.loop
        self._client = client
        self._sent = sent
        self._url = sent.url
        self._connect_seconds = connect_seconds
        self._patience = patience
        self._deadline = math.inf
        self._origin: Origin
        self._connection: Connection
        self._connected = False
        self._clean = False

    async def __aenter__(self) -> "Call":
        try:
            self._origin = self._client.origin(self._url)
            self._connection = await self._client.connect(self._origin, self._connect_seconds)
        except TimeoutError as error:
            raise UpstreamFailed(
                AttemptFailure.CONNECT, f"{self._url}: no connection within {self._connect_seconds:g} s"
            ) from error
        except (OSError, ValueError) as error:
            # The router is out of file descriptors, which is not the rank's fault.
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                message = "the router has no file descriptor left for a connection; try again later"
                raise ApiError(503, message, code="out_of_descriptors", retry_after=1.0) from error
            raise UpstreamFailed(
                AttemptFailure.CONNECT, f"{self._url}: {error or type(error).__name__}"
            ) from error
        self._connected = True
        try:
            sent = self._sent
            self._deadline = self.loop.time() + self._patience.total
            self._connection.send(
                request_bytes(sent.method, self._origin, sent.path, sent.headers, sent.body)
            )
            self._sent = _FORGOTTEN  # a long answer need not keep its prompt
            while not self._connection.status:
                await self._more(AttemptFailure.DISCONNECTED)
            if self._connection.status >= 400:
                await self._check_status()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._clean and not self._connection.complete:
            await self._drain()
        self._client.give_back(self._origin, self._connection)

    async def _check_status(self) -> None:
        """Handle an answer that is an error."""

    @property
    def status(self) -> int:
        return self._connection.status

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of the answer, unchanged."""
        return self._connection.raw_headers

    @property
    def content_type(self) -> str:
        return self._connection.headers.get(b"content-type", b"application/json").decode("latin-1")

    def cut(self, why: str) -> None:
        """Close the connection, if there is one. The call fails as if the server had closed it."""
        if self._connected:
            self._connection.cut(why)

    async def read(self) -> bytes:
        """Return the bytes that have arrived; b"" at the end. UpstreamFailed if nothing comes in time or the
        stream breaks, ApiError 504 at the total limit.
        """
        connection = self._connection
        while (data := connection.take()) is None:
            await self._more(AttemptFailure.BROKEN)
        return data

    async def through(self, take: Callable[[bytes], _ResultT | None]) -> _ResultT:
        """Give the bytes that arrive to `take`, b"" at the end, until it returns a result. Errors as of
        `read`, and those of `take`.

        While this waits, `take` runs in the event loop's callback, so that a token costs no task switch.
        """
        connection = self._connection
        while True:
            while (data := connection.take()) is not None:
                if (result := take(data)) is not None:
                    return result
            if (result := await self._more(AttemptFailure.BROKEN, take)) is not None:
                return result

    def relay(self, relay: ChunkRelay | None) -> None:
        """Let a relay pass chunks on while `through` waits; None: no longer. Of use only in its `take`."""
        self._connection.relay = relay
        if relay is not None:
            self._connection.heard = relay

    def whole(self) -> None:
        """Mark the answer as complete. Only the end of the stream remains, and the connection may be
        reused."""
        self._clean = True

    async def _more(
        self,
        how: AttemptFailure,
        take: Callable[[bytes], _ResultT | None] | None = None,
        receive: Callable[[Any], _ResultT | None] | None = None,
    ) -> _ResultT | None:
        """Wait for the server, within the current time limit. take, receive: as of `Connection.more`."""
        patience, connection = self._patience, self._connection
        seconds = patience.between if connection.read_any else patience.first
        if self._deadline < math.inf:
            seconds = min(seconds, self._deadline - self.loop.time())
        try:
            result: _ResultT | None = await connection.more(
                seconds, take, receive, between=patience.between, deadline=self._deadline
            )
        except ConnectionLost as error:
            raise UpstreamFailed(how, f"{self._url}: {error}") from error
        if connection.fell_silent:
            if self.loop.time() >= self._deadline:
                message = (
                    f"no complete answer within {patience.total:g} s ([router] answer_seconds); stream it, or"
                    " request fewer tokens"
                )
                raise ApiError(504, message, code="answer_timeout")
            raise UpstreamFailed(
                AttemptFailure.STALLED if connection.read_any else AttemptFailure.FIRST_TOKEN_TIMEOUT,
                f"{self._url}: silent for too long",
            )
        return result

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(_DRAIN_SECONDS):
                while await self._connection.read():
                    pass
        except (TimeoutError, ConnectionLost):
            self._connection.cut("the answer was complete, but its end did not come")

    async def error_body(self) -> bytes:
        """Return the first bytes of an error's body, enough to identify the error."""
        body = b""
        while len(body) <= _ERROR_BYTES and (data := await self.read()):
            body += data
        return body


class RankCall(Call):
    """A call to a rank of the fleet's own engines. Entering also raises UpstreamFailed for the rank's errors,
    and ApiError if the rank blames the request (4xx except 429).
    """

    def __init__(
        self,
        client: HttpClient,
        sent: UpstreamRequest,
        connect_seconds: float,
        patience: Patience,
        frames: RankFrames | None,
        frames_headers: Sequence[tuple[bytes, bytes]],
    ) -> None:
        """frames: None if the rank sends none. frames_headers: of the request that opens them."""
        super().__init__(client, sent, connect_seconds, patience)
        self._frames = frames
        self._frames_headers = frames_headers
        self._number = 0
        self._pieces: deque[TokenPiece] | None = None
        """pieces that arrived while the task was busy; exists once there were any"""
        self._frames_lost = ""

    async def __aenter__(self) -> "RankCall":
        joined = None if self._frames is None else self._frames.join(self, self._frames_headers)
        if joined is not None:
            self._number, value = joined
            sent = self._sent
            self._sent = UpstreamRequest(
                sent.method, sent.url, sent.path, [*sent.headers, (FRAMES_HEADER, value)], sent.body
            )
        try:
            await super().__aenter__()
        except BaseException:
            self._leave()
            raise
        if FRAMES_HEADER not in self._connection.headers:
            self._leave()
        self._connection.forget_head()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()
        await super().__aexit__(kind, error, trace)

    @property
    def framed(self) -> bool:
        """True if the answer arrives in token frames: use `pieces`."""
        return self._number != 0

    async def pieces(self, take: Callable[[TokenPiece], _ResultT | None]) -> _ResultT:
        """Give the answer's pieces to `take` until it returns a result. Errors as of `read`, and those of
        `take`, which runs as in `through`. It gets those that the answer's relay does not take.
        """
        while True:
            while self._pieces:
                self._connection.read_any = True
                if (result := take(self._pieces.popleft())) is not None:
                    return result
            if self._connection.take():
                raise UpstreamFailed(AttemptFailure.BROKEN, "the rank sent events beside its token frames")
            if self._frames_lost:
                raise UpstreamFailed(AttemptFailure.BROKEN, self._frames_lost)
            if (result := await self._more(AttemptFailure.BROKEN, receive=take)) is not None:
                return result

    def piece(self, piece: TokenPiece) -> None:
        """Receive a piece. What the client is too slow for is kept, at most the rest of the answer."""
        if self._pieces or not self._connected or not self._connection.give(piece):
            if self._pieces is None:
                self._pieces = deque()
            self._pieces.append(piece)
            self.relay_pieces(None)  # the next ones come after this one

    def relay_pieces(self, relay: PieceRelay | None) -> None:
        """Give the pieces to a relay first, as long as it takes them; None: no longer."""
        if self._frames is not None and self._number:
            self._frames.relay(self._number, relay)
            if relay is not None:
                self._connection.heard = relay

    def frames_lost(self, why: str) -> None:
        self._frames_lost = why
        if self._connected:
            self._connection.wake()

    def _leave(self) -> None:
        if self._frames is not None and self._number:
            self._frames.leave(self._number)
            self._number = 0

    async def _check_status(self) -> None:
        status = self.status
        refused = api_error(status, await self.error_body())
        if status == 429 or refused.code == "overloaded":
            raise UpstreamFailed(AttemptFailure.BUSY, f"{self._url}: {refused.message}")
        if status >= 500:
            raise UpstreamFailed(
                AttemptFailure.SERVER_ERROR, f"{self._url}: HTTP {status}: {refused.message}"
            )
        if status in (401, 403):
            raise UpstreamFailed(
                AttemptFailure.SERVER_ERROR,
                f"{self._url}: HTTP {status}: the rank refused the router's key; set fleet_secret_file",
            )
        raise refused


def api_error(status: int, body: bytes) -> ApiError:
    """Convert a rank's error to OpenAI's form, as far as its body allows."""
    try:
        answer = msgspec.json.decode(body, type=_ErrorAnswer)
    except UNREADABLE:
        return ApiError(status, body[:500].decode(errors="replace") or f"HTTP {status}")
    error = answer.error
    if isinstance(error, _ErrorBody):
        return ApiError(
            status, error.message, code=None if error.code is None else str(error.code), param=error.param
        )
    return ApiError(status, str(error or answer.detail or f"HTTP {status}"))


class Upstream:
    """HTTP client of all calls. Usable between entering and leaving, on one loop. Leaving closes idle
    connections.
    """

    def __init__(self, config: RouterConfig) -> None:
        self._client: HttpClient | None = None
        self._frames: dict[str, RankFrames] = {}
        self._use(config)

    async def __aenter__(self) -> "Upstream":
        self._client = HttpClient(self._config.keepalive_seconds, self._config.upstream_ca)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for frames in self._frames.values():
            frames.close()
        self._frames.clear()
        if self._client is not None:
            self._client.close()
            self._client = None

    def reconfigure(self, config: RouterConfig) -> None:
        """Apply new time limits and the current authorities of `upstream_ca` to calls that begin from now on.
        OSError if the file cannot be used; nothing changes then.
        """
        if config.upstream_ca is not None and self._client is not None:
            self._client.trust(config.upstream_ca)
        self._use(config)

    def _use(self, config: RouterConfig) -> None:
        self._config = config
        self._streamed = Patience(config.first_token_seconds, config.between_tokens_seconds)
        self._whole = Patience(math.inf, config.between_tokens_seconds, config.answer_seconds or math.inf)

    def call(
        self,
        url: str,
        path: str,
        body: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        frames_headers: Sequence[tuple[bytes, bytes]] | None = None,
    ) -> RankCall:
        """POST JSON to a rank of the fleet's own engines. frames_headers: the answer may arrive in token
        frames, which a request with these headers opens; None: as events.
        """
        sent = UpstreamRequest("POST", url, path, [(b"content-type", b"application/json"), *headers], body)
        frames = None if frames_headers is None else self._frames_of(url)
        config = self._config
        return RankCall(
            self._opened, sent, config.connect_seconds, self._streamed, frames, frames_headers or ()
        )

    def _frames_of(self, url: str) -> RankFrames:
        frames = self._frames.get(url)
        if frames is None:
            config = self._config
            frames = RankFrames(self._opened, url, config.connect_seconds, _FRAMES * config.max_event_bytes)
            self._frames[url] = frames
        return frames

    def forward(self, sent: UpstreamRequest, *, stream: bool, patience: Patience | None = None) -> Call:
        """Forward a request unchanged to a server that answers in text. stream: the answer begins with the
        first token; otherwise it comes at once, with only a total limit. patience: replaces the limits of the
        settings.
        """
        return Call(
            self._opened,
            sent,
            self._config.connect_seconds,
            patience or (self._streamed if stream else self._whole),
        )

    async def get(
        self, url: str, path: str, headers: Mapping[str, str], *, seconds: float, max_bytes: int
    ) -> bytes:
        """Return the body of a GET. OSError (also for statuses other than 200), TimeoutError, or ValueError
        if the body is too long.
        """
        client = self._opened
        origin = client.origin(url)
        connection = await client.connect(origin, seconds)
        try:
            async with asyncio.timeout(seconds):
                connection.send(request_bytes("GET", origin, path, headers, b""))
                await connection.head()
                body = b""
                while data := await connection.read():
                    body += data
                    if len(body) > max_bytes:
                        raise ValueError(f"{url}{path} answered with more than {max_bytes} bytes")
        except ConnectionLost as error:
            raise OSError(str(error)) from error
        finally:
            client.give_back(origin, connection)
        if connection.status != 200:
            raise OSError(f"HTTP {connection.status}: {api_error(connection.status, body).message}")
        return body

    def prune(self) -> None:
        """Close connections that have been idle for too long. Call regularly."""
        client = self._opened
        client.prune()
        kept_since = client.loop.time() - _FRAMES_KEPT_SECONDS
        for url, frames in list(self._frames.items()):
            if not frames.busy and frames.used_at < kept_since:
                frames.close()
                del self._frames[url]

    @property
    def _opened(self) -> HttpClient:
        if self._client is None:
            raise not_ready("the router is starting or stopping")
        return self._client
