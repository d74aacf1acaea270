"""The connection to NATS, with reconnects without limit."""

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
from bus.config import RECONNECT_FIRST_SECONDS, BusConfig
from bus.nats.login import read_login, tls_context
from bus.protocol.codec import LARGE
from bus.protocol.roles import Login
from fleet.redaction import without_secrets

logger = logging.getLogger(__name__)
T = TypeVar("T")

SMALLEST_MAX_PAYLOAD = LARGE + 64 * 1024
"""Bytes that a server must accept in one message: the largest payload of an envelope, plus the envelope."""
RETRY_SECONDS = 0.1
CLOSE_SECONDS = 2.0
DRAIN_SECONDS = 2.0
"""Longest wait of an answer for earlier ones to be written. After it the answer is dropped, and requested
again.
"""
DRAIN_LOOK_SECONDS = 0.005
UNANSWERED_PINGS = 2
FULL = 10077
"""JetStream's error code for "maximum bytes exceeded" (sent as service unavailable, but waiting does not
help).
"""

GONE = (
    errors.NoRespondersError,
    js_errors.NoStreamResponseError,
    js_errors.ServiceUnavailableError,
    js_errors.NotFoundError,
)
"""Errors of a server without JetStream, or one that lost its store."""
TRANSIENT = (
    TimeoutError,
    OSError,
    errors.ConnectionClosedError,
    errors.OutboundBufferLimitError,
    errors.StaleConnectionError,
    *GONE,
)
"""Errors after which a retry may succeed."""


REFUSED = re.compile(r"permissions violation for (publish|subscription) to \"([^\"]*)\"", re.IGNORECASE)
"""A server's error message for a missing permission: the action and the subject."""

VAGUE = (TimeoutError, OSError, errors.UnexpectedEOF)
"""Errors that do not reveal the cause. A server that rejects a client sends a reason and hangs up; often only
the hang-up arrives.
"""


def is_full(error: BaseException | None) -> bool:
    return isinstance(error, js_errors.APIError) and error.err_code == FULL


def because(error: BaseException | None) -> str:
    """Describe an error of nats-py with its remedy."""
    if error is None:
        return "no connection; is the NATS server running?"
    if is_full(error):
        return (
            f"{error}; it is full: raise its max_bytes on the server (the bus.*_bytes settings hold for new"
            " ones)"
        )
    remedy = (
        "start the NATS server with JetStream (-js)"
        if isinstance(error, GONE)
        else "is the NATS server well?"
    )
    return f"{without_secrets(str(error)) or type(error).__name__}; {remedy}"


class _Client(Client):
    """nats-py's client, which otherwise sends its password in clear text to a server that claims to have no
    TLS.
    """

    def _connect_command(self) -> bytes:
        if "tls" in self.options and not self._server_info.get("tls_required"):
            raise errors.Error(
                "the server does not ask for TLS, and the settings do (bus.tls_*, or tls:// in the URL);"
                " nothing was sent to it"
            )
        return bytes(super()._connect_command())


async def await_cancellably(exchange: Awaitable[T]) -> T:
    """Await an exchange of nats-py, and raise CancelledError if this task was cancelled meanwhile.

    nats-py waits with `asyncio.wait_for`. Before Python 3.12 that loses a cancellation which arrives together
    with the answer, and the task would never end.
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
class _Renewed:
    """One subscription, in a form that can be renewed on a new connection."""

    subject: str
    receive: Callable[[Msg], Awaitable[None]]
    queue: str = ""
    subscription: NatsSubscription | None = None

    async def attach(self, client: Client) -> None:
        self.subscription = await client.subscribe(self.subject, queue=self.queue, cb=self.receive)


class Link:
    """The connection. It reconnects without limit and renews its subscriptions."""

    def __init__(self, config: BusConfig, name: str) -> None:
        """Raise BusError if a credentials or certificate file cannot be used."""
        self.config = config
        self.where = config.where
        """the servers, without credentials"""
        self.client: Client = _Client()
        self.closing = False
        self.runs: set[asyncio.Queue[Msg | None]] = set()
        """queues of running replays; None in a queue signals a reconnect"""
        self._name = name
        self.subscriptions: set[_Renewed] = set()
        """renewed on every new connection"""
        self._up = asyncio.Event()
        self._trouble: Exception | None = None
        self._reopener: asyncio.Task[None] | None = None
        self._tls = tls_context(config)
        self._login = None if config.credentials_file is None else read_login(Path(config.credentials_file))
        self._denials: deque[tuple[str, str]] = deque(maxlen=64)
        """recently denied rights: (publish or subscription, subject in lower case, as nats-py reports it)"""
        self.denied = 0
        """number of rights denied by the server so far"""

    def _current_login(self) -> Login:
        """Return the login from the credentials file, which may have changed since the last connection.

        If the file cannot be read, the previous login is used.
        """
        assert self._login is not None
        if self.config.credentials_file is not None:
            try:
                self._login = read_login(Path(self.config.credentials_file))
            except BusError as error:
                logger.warning("%s; using the previous login", error)
        return self._login

    def _identity(self) -> dict[str, Any]:
        """Return nats-py options for our login and for verifying the server."""
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
            "reconnect_time_wait": RECONNECT_FIRST_SECONDS,
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
        """Return the server with the fewest attempts, and a pause that doubles with its failures.

        Jitter spreads the reconnects of parts over time.
        """
        server = min(servers, key=lambda candidate: candidate.reconnects)
        pause = min(
            self.config.reconnect_max_seconds,
            RECONNECT_FIRST_SECONDS * 2.0 ** min(server.reconnects, 30),
        )
        return server, pause * random.uniform(0.5, 1.0)

    async def _on_error(self, error: Exception) -> None:
        if self._trouble is None or not isinstance(error, VAGUE):
            self._trouble = error
        if refused := REFUSED.search(str(error)):
            return self._refused(refused[1].lower(), refused[2].lower())
        level = logging.WARNING if isinstance(error, errors.SlowConsumerError) else logging.DEBUG
        logger.log(level, "NATS: %s", without_secrets(str(error)) or type(error).__name__)

    def _refused(self, what: str, subject: str) -> None:
        """Record a denied right. It is logged once for each of the most recent subjects."""
        self.denied += 1
        if (what, subject) not in self._denials:
            self._denials.append((what, subject))
            logger.warning("%s", self.denial((what, subject)))

    def denial(self, last: tuple[str, str] | None = None) -> str:
        """Describe the last denial, with its remedy."""
        what, subject = last or self._denials[-1]
        may = "publish on" if what == "publish" else "listen to"
        user = "this user" if self._login is None else f"user {self._login.user!r}"
        return (
            f"NATS at {self.where}: {user} may not {may} {subject}; give it the rights of its role (roost bus"
            " permissions)"
        )

    async def _on_disconnect(self) -> None:
        self._up.clear()
        if not self.closing:
            logger.warning("lost the connection to NATS at %s; reconnecting", self.where)

    async def _on_reconnect(self) -> None:
        logger.info("connected to NATS at %s again", self.where)
        self._announce_connected()

    def _announce_connected(self) -> None:
        self._up.set()
        for queue in self.runs:
            queue.put_nowait(None)

    async def open(self) -> None:
        """Open the first connection. BusError if it is not established in time."""
        try:
            await self._connected_in_time()
        except TimeoutError as error:
            await self.close()
            trouble = without_secrets(str(self._trouble or "")) or "no answer"
            if "authorization" in trouble.lower():
                raise BusError(
                    f"NATS at {self.where} refuses this user ({trouble}); correct bus.credentials_file"
                    f" ({self.config.credentials_file or 'it is not set'})"
                ) from error
            waited = f"within {self.config.connect_seconds} s ({trouble})"
            raise BusError(
                f"no NATS server at {self.where} {waited}; start one or correct bus.url"
            ) from error
        except errors.Error as error:
            trouble = without_secrets(str(error))
            raise BusError(
                f"{self.where!r} is no address of a NATS server ({trouble}); correct bus.url, e.g."
                " nats://127.0.0.1:4222"
            ) from error
        if self.client.max_payload < SMALLEST_MAX_PAYLOAD:
            most = self.client.max_payload
            await self.close()
            raise BusError(
                f"the NATS server at {self.where} takes messages of {most} bytes; set its max_payload to"
                f" {SMALLEST_MAX_PAYLOAD} or more"
            )
        self._up.set()

    async def _connected_in_time(self) -> None:
        """Connect within the configured time, or raise TimeoutError.

        nats-py retries without limit and may lose a cancellation (see `await_cancellably`), so the
        cancellation is repeated.
        """
        connecting = asyncio.create_task(
            self.client.connect(list(self.config.servers), **self._options(self.client)),
            name="connects to NATS",
        )
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
        """Open a new connection after nats-py has given up, as it does after some server errors (e.g. revoked
        rights).
        """
        while True:
            self.client = client = _Client()
            await client.connect(
                list(self.config.servers),
                **self._options(client) | {"reconnect_time_wait": self.config.reconnect_max_seconds},
            )
            with suppress(errors.Error):  # broken again before everything was in place: start over
                for subscribed in list(self.subscriptions):
                    await subscribed.attach(client)
                await self._round_trips()
                break
            await client.close()
            await asyncio.sleep(self.config.reconnect_max_seconds)
        self._reopener = None
        logger.info("a new connection to NATS at %s stands", self.where)
        self._announce_connected()

    @property
    def connected(self) -> bool:
        """True if the connection is up with all its subscriptions."""
        return self._up.is_set() and bool(self.client.is_connected)

    async def wait_connected(self) -> None:
        """Wait for the connection. BusError if it was closed on purpose."""
        while not self.connected:
            if self.closing:
                raise BusError("this bus is closed")
            self._up.clear()
            await self._up.wait()

    async def until_done(self, what: str, seconds: float, attempt: Callable[[], Awaitable[T]]) -> T:
        """Retry an idempotent exchange until it succeeds.

        StoreFull immediately. BusError if the exchange takes longer than `seconds` or cannot succeed.
        """
        trouble: BaseException | None = None
        denied = self.denied
        try:
            async with asyncio.timeout(seconds):
                while True:
                    await self.wait_connected()
                    try:
                        return await await_cancellably(attempt())
                    except TRANSIENT as error:
                        if is_full(error):
                            raise StoreFull(f"{what}: {because(error)}") from error
                        trouble = error
                    # the server does not answer clients without permission: waiting does not help
                    if self.denied > denied:
                        raise BusError(f"{what}: {self.denial()}") from trouble
                    await asyncio.sleep(RETRY_SECONDS)
        except TimeoutError as error:
            raise BusError(f"{what}: not done within {seconds} s: {because(trouble)}") from error
        except errors.Error as error:
            raise BusError(f"{what}: {because(error)}") from error

    async def send(self, subject: str, raw: bytes) -> None:
        """Pass bytes to the connection. They are dropped if it is broken or far behind."""
        client = self.client
        if not client.is_connected or client.pending_data_size + len(raw) > self.config.unsent_bytes:
            return
        try:
            await client.publish(subject, raw)
        except errors.Error as error:
            logger.debug("dropped a message on %s: %s", subject, error)

    async def answer(self, subject: str, raw: bytes) -> None:
        """Pass an answer to the connection after pending data was written, so that many large answers do not
        drop one another.
        """
        until = asyncio.get_running_loop().time() + DRAIN_SECONDS
        while (  # noqa: ASYNC110 nats-py has no event for it
            self.client.pending_data_size + len(raw) > self.config.unsent_bytes
            and asyncio.get_running_loop().time() < until
        ):
            await asyncio.sleep(DRAIN_LOOK_SECONDS)
        await self.send(subject, raw)

    @asynccontextmanager
    async def subscription(
        self, subject: str, receive: Callable[[Msg], Awaitable[None]], queue: str = ""
    ) -> AsyncIterator[None]:
        """Subscribe across reconnects."""
        subscribed = _Renewed(subject, receive, queue)
        await self.wait_connected()
        with suppress(ValueError):  # permission may have been granted since the last denial
            self._denials.remove(("subscription", subject.lower()))
        await subscribed.attach(self.client)
        self.subscriptions.add(subscribed)
        try:
            yield
        finally:
            self.subscriptions.discard(subscribed)
            if subscribed.subscription is not None:
                with suppress(errors.Error):  # a closed connection has already ended it
                    await subscribed.subscription.unsubscribe()

    async def listen(
        self, stack: AsyncExitStack, subject: str, receive: Callable[[Msg], Awaitable[None]], queue: str = ""
    ) -> None:
        """Enter a subscription, with a bounded wait for the connection."""

        async def enter() -> None:
            await stack.enter_async_context(self.subscription(subject, receive, queue))

        await self.until_done(f"listening on {subject}", self.config.request_seconds, enter)

    async def flush(self) -> None:
        """Wait until the server has processed everything sent so far, including subscriptions. BusError if it
        denied one.
        """
        await self.until_done("subscribing", self.config.record_seconds, self._round_trips)
        for subscribed in self.subscriptions:
            refused = ("subscription", subscribed.subject.lower())
            if refused in self._denials:
                raise BusError(self.denial(refused))

    async def _round_trips(self) -> None:
        """Make two round trips: nats-py writes a ping at once, ahead of commands that wait for its flusher.
        The second ping follows them.
        """
        for _ in range(2):
            await self.client.flush(timeout=max(1, round(self.config.request_seconds)))

    async def close(self) -> None:
        self.closing = True
        self._announce_connected()
        if self._reopener is not None:
            self._reopener.cancel()
            await asyncio.wait([self._reopener])
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.client.close()
        except TimeoutError:
            logger.warning(
                "NATS at %s did not take the last messages in %s s; they are dropped",
                self.where,
                CLOSE_SECONDS,
            )
            # nats-py cannot discard unsent data: without this the socket would stay open.
            writer: asyncio.StreamWriter | None = getattr(self.client._transport, "_io_writer", None)
            if writer is not None:
                writer.transport.abort()
