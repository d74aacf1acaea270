"""The connection to NATS: made once, remade for ever."""

import asyncio
import logging
import random
import re
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nats import errors
from nats.aio.client import Client, Server
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.js import errors as js_errors

from bus import BusError, StoreFull
from bus.config import BusConfig
from bus.nats.login import read_login, tls_context
from bus.protocol.codec import LARGE
from bus.protocol.roles import Login
from fleet.redaction import without_secrets

logger = logging.getLogger(__name__)
T = TypeVar("T")

SMALLEST_MAX_PAYLOAD = LARGE + 64 * 1024
"""Bytes a server must accept in one message: the largest payload that travels in an envelope, and the envelope."""
RETRY_SECONDS = 0.1
CLOSE_SECONDS = 2.0
DRAIN_SECONDS = 2.0
"""An answer waits for earlier ones to be written for at most this time; then it is dropped, and requested again."""
DRAIN_LOOK_SECONDS = 0.005
UNANSWERED_PINGS = 2
FULL = 10077
"""JetStream's error code for "maximum bytes exceeded" (sent as service unavailable, but waiting does not help)."""

GONE = (errors.NoRespondersError, js_errors.NoStreamResponseError, js_errors.ServiceUnavailableError, js_errors.NotFoundError)
"""What a server says that has no JetStream, or lost its store."""
TRANSIENT = (TimeoutError, OSError, errors.ConnectionClosedError, errors.OutboundBufferLimitError, errors.StaleConnectionError, *GONE)
"""After these, the same may succeed a moment later."""


REFUSED = re.compile(r"permissions violation for (publish|subscription) to \"([^\"]*)\"", re.IGNORECASE)
"""In a server's words: what the user may not do, and where."""

VAGUE = (TimeoutError, OSError, errors.UnexpectedEOF)
"""These say nothing of the cause: a server that refuses a client says so and hangs up, and often only the hanging up is heard."""


def is_full(error: BaseException | None) -> bool:
    return isinstance(error, js_errors.APIError) and error.err_code == FULL


def because(error: BaseException | None) -> str:
    """An error of nats-py and what to do about it."""
    if error is None:
        return "no connection; is the NATS server running?"
    if is_full(error):
        return f"{error}; it is full: raise its max_bytes on the server (the bus.*_bytes settings hold for new ones)"
    remedy = "start the NATS server with JetStream (-js)" if isinstance(error, GONE) else "is the NATS server well?"
    return f"{without_secrets(str(error)) or type(error).__name__}; {remedy}"


class _Client(Client):
    """nats-py's, which would send its password in clear to whoever says that it knows no TLS."""

    def _connect_command(self) -> bytes:
        if "tls" in self.options and not self._server_info.get("tls_required"):
            raise errors.Error("the server does not ask for TLS, and the settings do (bus.tls_*, or tls:// in the URL); nothing was sent to it")
        return bytes(super()._connect_command())


async def whole(exchange: Awaitable[T]) -> T:
    """The answer of an exchange of nats-py's, unless this task was cancelled meanwhile.

    nats-py waits with `asyncio.wait_for`, which before Python 3.12 forgets a cancellation that arrives together with the answer: the
    task would run on for ever.
    """
    task = asyncio.current_task()
    assert task is not None, "nats-py is awaited outside a task"
    before = task.cancelling()
    try:
        return await exchange
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError


@dataclass(eq=False)
class _Feed:
    """One subscription, so that it can be made again on a new connection."""

    subject: str
    hear: Callable[[Msg], Awaitable[None]]
    queue: str = ""
    subscription: NatsSubscription | None = None

    async def attach(self, client: Client) -> None:
        self.subscription = await client.subscribe(self.subject, queue=self.queue, cb=self.hear)


class Link:
    """The connection: made once, remade for ever, its subscriptions with it."""

    def __init__(self, config: BusConfig, name: str) -> None:
        """BusError when a file of credentials or certificates cannot be used."""
        self.config = config
        self.where = config.where
        """the servers, without secrets"""
        self.client: Client = _Client()
        self.closing = False
        self.runs: set[asyncio.Queue[Msg | None]] = set()
        """queues of running replays; None tells them that the connection was remade"""
        self._name = name
        self._feeds: set[_Feed] = set()
        self._up = asyncio.Event()
        self._trouble: Exception | None = None
        self._reopener: asyncio.Task[None] | None = None
        self._tls = tls_context(config)
        self._login = None if config.credentials_file is None else read_login(Path(config.credentials_file))
        self._denials: deque[tuple[str, str]] = deque(maxlen=64)
        """(publish or subscription, subject in small letters, as nats-py has it) that the server refused lately"""
        self.denied = 0
        """how often the server refused us a right so far"""

    def _current_login(self) -> Login:
        """As the file is now: a secret may have been changed since the last connection. A file that cannot be read changes nothing."""
        assert self._login is not None
        if self.config.credentials_file is not None:
            try:
                self._login = read_login(Path(self.config.credentials_file))
            except BusError as error:
                logger.warning("%s; the login of before is used", error)
        return self._login

    def _identity(self) -> dict[str, Any]:
        """Options of nats-py that say who we are, and how we know the server."""
        found: dict[str, Any] = {}
        if self._tls is not None:
            found["tls"] = self._tls
            found["tls_hostname"] = self.config.tls_hostname
        if self._login is not None:
            found["user"] = lambda: self._current_login().user
            found["password"] = lambda: self._current_login().password
            found["inbox_prefix"] = self._login.inbox_prefix
        return found

    def _options(self, client: Client) -> dict[str, Any]:
        async def closed() -> None:
            if client is self.client and not self.closing and self._reopener is None:
                logger.error("NATS closed the connection for good (%s); opening a new one", client.last_error)
                self._reopener = asyncio.create_task(self._reopen(), name="opens a new connection to NATS")

        return {
            "name": self._name,
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": self.config.reconnect_first_seconds,
            "reconnect_to_server_handler": self._next_server,
            "connect_timeout": self.config.connect_seconds,
            "ping_interval": self.config.ping_seconds,
            "max_outstanding_pings": UNANSWERED_PINGS,
            "pending_size": 2 * self.config.unsent_bytes,
            "error_cb": self._on_error,
            "disconnected_cb": self._on_disconnect,
            "reconnected_cb": self._on_reconnect,
            "closed_cb": closed,
            **self._identity(),
        }

    def _next_server(self, servers: list[Server], _: dict[str, Any]) -> tuple[Server, float]:
        """The server tried least often, after a pause that doubles with its failures (with jitter: parts come back one by one)."""
        server = min(servers, key=lambda candidate: candidate.reconnects)
        pause = min(self.config.reconnect_most_seconds, self.config.reconnect_first_seconds * 2.0 ** min(server.reconnects, 30))
        return server, pause * random.uniform(0.5, 1.0)

    async def _on_error(self, error: Exception) -> None:
        if self._trouble is None or not isinstance(error, VAGUE):
            self._trouble = error
        if refused := REFUSED.search(str(error)):
            return self._refused(refused[1].lower(), refused[2].lower())
        level = logging.WARNING if isinstance(error, errors.SlowConsumerError) else logging.DEBUG
        logger.log(level, "NATS: %s", without_secrets(str(error)) or type(error).__name__)

    def _refused(self, what: str, subject: str) -> None:
        """The server's word that this user has no right to something; said once for each subject of the last few."""
        self.denied += 1
        if (what, subject) not in self._denials:
            self._denials.append((what, subject))
            logger.warning("%s", self.denial((what, subject)))

    def denial(self, last: tuple[str, str] | None = None) -> str:
        """What was refused last, and what to do."""
        what, subject = last or self._denials[-1]
        may = "publish on" if what == "publish" else "listen to"
        user = "this user" if self._login is None else f"user {self._login.user!r}"
        return f"NATS at {self.where}: {user} may not {may} {subject}; give it the rights of its role (roost bus permissions)"

    async def _on_disconnect(self) -> None:
        self._up.clear()
        if not self.closing:
            logger.warning("lost the connection to NATS at %s; trying again until it stands", self.where)

    async def _on_reconnect(self) -> None:
        logger.info("connected to NATS at %s again", self.where)
        self._stands()

    def _stands(self) -> None:
        self._up.set()
        for queue in self.runs:
            queue.put_nowait(None)

    async def open(self) -> None:
        """The first connection. BusError when it does not stand in time."""
        try:
            await self._connected_in_time()
        except TimeoutError as error:
            await self.close()
            trouble = without_secrets(str(self._trouble or "")) or "no answer"
            if "authorization" in trouble.lower():
                raise BusError(
                    f"NATS at {self.where} refuses this user ({trouble}); correct bus.credentials_file ({self.config.credentials_file or 'it is not set'})"
                ) from error
            waited = f"within {self.config.connect_seconds} s ({trouble})"
            raise BusError(f"no NATS server at {self.where} {waited}; start one or correct bus.url") from error
        except errors.Error as error:
            trouble = without_secrets(str(error))
            raise BusError(f"{self.where!r} is no address of a NATS server ({trouble}); correct bus.url, e.g. nats://127.0.0.1:4222") from error
        if self.client.max_payload < SMALLEST_MAX_PAYLOAD:
            most = self.client.max_payload
            await self.close()
            raise BusError(f"the NATS server at {self.where} takes messages of {most} bytes; set its max_payload to {SMALLEST_MAX_PAYLOAD} or more")
        self._up.set()

    async def _connected_in_time(self) -> None:
        """TimeoutError when it takes too long. nats-py tries for ever, and may forget that it was cancelled (see `whole`): it is told again."""
        connecting = asyncio.create_task(self.client.connect(list(self.config.servers), **self._options(self.client)), name="connects to NATS")
        try:
            await asyncio.wait([connecting], timeout=self.config.connect_seconds)
        finally:
            while not connecting.done():
                connecting.cancel()
                await asyncio.wait([connecting], timeout=RETRY_SECONDS)
        if connecting.cancelled():
            raise TimeoutError
        connecting.result()

    async def _reopen(self) -> None:
        """nats-py gives up after some errors the server sends (revoked rights, say). We do not."""
        while True:
            self.client = client = _Client()
            await client.connect(list(self.config.servers), **self._options(client) | {"reconnect_time_wait": self.config.reconnect_most_seconds})
            with suppress(errors.Error):  # broken again before everything was in place: begin anew
                for feed in list(self._feeds):
                    await feed.attach(client)
                await self._round_trips()
                break
            await client.close()
            await asyncio.sleep(self.config.reconnect_most_seconds)
        self._reopener = None
        logger.info("a new connection to NATS at %s stands", self.where)
        self._stands()

    @property
    def connected(self) -> bool:
        """Whether the connection stands, with all its subscriptions."""
        return self._up.is_set() and bool(self.client.is_connected)

    async def standing(self) -> None:
        """Wait for the connection; BusError when it is closed on purpose."""
        while not self.connected:
            if self.closing:
                raise BusError("this bus is closed")
            self._up.clear()
            await self._up.wait()

    async def until_done(self, what: str, seconds: float, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat an exchange that may be repeated until it succeeds. StoreFull at once; BusError when that takes longer, or cannot succeed."""
        trouble: BaseException | None = None
        denied = self.denied
        try:
            async with asyncio.timeout(seconds):
                while True:
                    await self.standing()
                    try:
                        return await whole(attempt())
                    except TRANSIENT as error:
                        if is_full(error):
                            raise StoreFull(f"{what}: {because(error)}") from error
                        trouble = error
                    if self.denied > denied:  # by a server that answers nothing to who has no right: waiting does not help
                        raise BusError(f"{what}: {self.denial()}") from trouble
                    await asyncio.sleep(RETRY_SECONDS)
        except TimeoutError as error:
            raise BusError(f"{what}: not done within {seconds} s: {because(trouble)}") from error
        except errors.Error as error:
            raise BusError(f"{what}: {because(error)}") from error

    async def send(self, subject: str, raw: bytes) -> None:
        """Hand bytes to the connection; dropped when it is broken or far behind."""
        client = self.client
        if not client.is_connected or client.pending_data_size + len(raw) > self.config.unsent_bytes:
            return
        try:
            await client.publish(subject, raw)
        except errors.Error as error:
            logger.debug("dropped a message on %s: %s", subject, error)

    async def answer(self, subject: str, raw: bytes) -> None:
        """Hand an answer to the connection once what waits there has been written, so that many large ones do not drop one another."""
        until = asyncio.get_running_loop().time() + DRAIN_SECONDS
        while self.client.pending_data_size + len(raw) > self.config.unsent_bytes and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110 nats-py has no event for it
            await asyncio.sleep(DRAIN_LOOK_SECONDS)
        await self.send(subject, raw)

    @asynccontextmanager
    async def feed(self, subject: str, hear: Callable[[Msg], Awaitable[None]], queue: str = "") -> AsyncIterator[None]:
        """A subscription that survives reconnects."""
        feed = _Feed(subject, hear, queue)
        await self.standing()
        with suppress(ValueError):  # what was refused before may be allowed by now
            self._denials.remove(("subscription", subject.lower()))
        await feed.attach(self.client)
        self._feeds.add(feed)
        try:
            yield
        finally:
            self._feeds.discard(feed)
            if feed.subscription is not None:
                with suppress(errors.Error):  # a closed connection has ended it already
                    await feed.subscription.unsubscribe()

    async def listen(self, stack: AsyncExitStack, subject: str, hear: Callable[[Msg], Awaitable[None]], queue: str = "") -> None:
        """Enter a feed, within a bounded wait for the connection."""

        async def enter() -> None:
            await stack.enter_async_context(self.feed(subject, hear, queue))

        await self.until_done(f"listening on {subject}", self.config.request_seconds, enter)

    async def settled(self) -> None:
        """Return when the server has heard everything sent so far, subscriptions included. BusError when it refused one of them."""
        await self.until_done("subscribing", self.config.record_seconds, self._round_trips)
        for feed in self._feeds:
            refused = ("subscription", feed.subject.lower())
            if refused in self._denials:
                raise BusError(self.denial(refused))

    async def _round_trips(self) -> None:
        """Two: nats-py writes a ping at once, ahead of commands that still wait for its flusher; the second is behind them."""
        for _ in range(2):
            await self.client.flush(timeout=max(1, round(self.config.request_seconds)))

    async def close(self) -> None:
        self.closing = True
        self._stands()
        if self._reopener is not None:
            self._reopener.cancel()
            await asyncio.wait([self._reopener])
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.client.close()
        except TimeoutError:
            logger.warning("NATS at %s did not take the last messages in %s s; they are dropped", self.where, CLOSE_SECONDS)
            # nats-py has no way to give up what it could not send: without this the socket would stay open.
            writer: asyncio.StreamWriter | None = getattr(self.client._transport, "_io_writer", None)
            if writer is not None:
                writer.transport.abort()
