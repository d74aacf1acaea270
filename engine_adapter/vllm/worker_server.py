"""TCP server at which the plugin in vLLM's worker processes connects (`engine_adapter.vllm.wire`).

It outlives vLLM. Workers of one start of vLLM belong together; a start is represented once all of its workers
are connected. Whatever comes over a connection is bounded and checked; what is wrong is answered with
`error`, and the connection is closed."""

import asyncio
import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec

from engine_adapter.engine import EngineFailed
from engine_adapter.vllm.config import VllmConfig
from engine_adapter.vllm.wire import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    AgentHello,
    AgentWelcome,
    FromAgent,
    FromWorker,
    LinkError,
    WorkerHello,
    proof,
)
from engine_adapter.vllm.worker_maps import BadWorker, WorkerMaps

HANDSHAKE_SECONDS = 8.0
"""Time from a connection to its end of handshake. The plugin waits ten seconds."""
MAX_STRANGERS = 64
"""Connections that have not proved themselves yet, at most."""
_MAX_HELLO_BYTES = 2 * 1024 * 1024
_MAX_UNSENT_BYTES = 2 * MAX_FRAME_BYTES
_MAX_STARTS = 8
"""Starts of vLLM that are remembered, at most."""
_decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_encoder = msgspec.msgpack.Encoder()
log = logging.getLogger(__name__)


def framed(message: msgspec.Struct) -> bytes:
    """Return the frame of a message."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "big") + body


class WorkerLink:
    """Connection to one worker that has proved itself."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def send(self, message: FromAgent) -> None:
        """Send a message. A worker that reads nothing is cut off."""
        if self._writer.transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            self._writer.transport.abort()
        elif not self._writer.is_closing():
            self._writer.write(framed(message))

    def close(self) -> None:
        """End the connection; the worker will connect again."""
        self._writer.close()


class WorkerServer:
    """Server of the workers. `serve` listens until it is cancelled."""

    def __init__(self, config: VllmConfig, secret: bytes, next_epoch: Callable[[], Awaitable[int]]) -> None:
        """next_epoch: returns the epoch of a map that was never named one, above all on record."""
        self.listening = asyncio.Event()
        self.address = config.address
        """Address that it listens on; the port is a real one once it is listening."""
        self._config = config
        self._secret = secret
        self._next_epoch = next_epoch
        self._starts: dict[str, WorkerMaps] = {}
        self._links: dict[WorkerLink, str] = {}
        self._naming = asyncio.Lock()
        self._strangers = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._change = asyncio.Event()

    async def serve(self) -> None:
        """Listen until cancelled. EngineFailed when the address cannot be listened on."""
        host, port = self._config.address
        try:
            server = await asyncio.start_server(self._accept, host, port)
        except OSError as error:
            raise EngineFailed(
                f"cannot listen on {self._config.listen} for vLLM's workers: {error}; if another agent has"
                " this port, give it another address with --listen"
            ) from error
        self.address = server.sockets[0].getsockname()[:2]
        self.listening.set()
        try:
            await server.serve_forever()
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def current(self) -> WorkerMaps | None:
        """Return the start of vLLM whose workers were complete last and still are. None: there is none."""
        return next((one for one in reversed(self._starts.values()) if one.complete), None)

    async def another(self, than: str | None) -> WorkerMaps:
        """Return another start than this one, once it is complete. than: its instance; None: any start."""
        while (found := self.current()) is None or found.instance == than:
            self._change.clear()
            await self._change.wait()
        return found

    def forget(self, maps: WorkerMaps) -> None:
        """Close the connections of a start. Its workers connect again and introduce themselves anew."""
        self._starts.pop(maps.instance, None)
        for link, instance in list(self._links.items()):
            if instance == maps.instance:
                link.close()

    # connections

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of our own: before Python 3.12, one that asyncio makes logs a traceback when it is cancelled.
        task = asyncio.create_task(self._connected(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._converse(reader, writer)
        except (ValueError, TimeoutError, EngineFailed) as error:
            reason = str(error) or "the handshake took too long"
            log.warning("a worker of vLLM at %s is refused: %s", writer.get_extra_info("peername"), reason)
            with suppress(OSError):
                writer.write(framed(LinkError(reason=reason)))
        except (OSError, asyncio.IncompleteReadError) as error:
            log.debug("a connection of a worker has ended: %s", error)
        finally:
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._strangers >= MAX_STRANGERS:
            raise BadWorker("too many connections are not authenticated yet")
        self._strangers += 1
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                hello = await self._shake_hands(reader, writer)
                maps = await self._start_of(hello)
        finally:
            self._strangers -= 1
        link = WorkerLink(writer)
        welcome = AgentWelcome(
            proof=proof(self._secret, "agent", hello.nonce),
            epoch=maps.epoch_for(hello),
            report_seconds=self._config.report_seconds,
            vote_steps=self._config.vote_steps,
            expert_digests=maps.expert_digests,
        )
        maps.join(hello, link)
        link.send(welcome)
        self._links[link] = hello.instance
        if maps.complete:
            # the newest complete start is the current one: move it to the end
            self._starts[hello.instance] = self._starts.pop(hello.instance, maps)
        self._change.set()
        try:
            while True:
                maps.receive(hello.rank, link, await _read(reader, MAX_FRAME_BYTES))
        finally:
            self._left(maps, hello, link)

    async def _shake_hands(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> WorkerHello:
        nonce = secrets.token_bytes(32)
        writer.write(framed(AgentHello(protocol=PROTOCOL, nonce=nonce)))
        hello = await _read(reader, _MAX_HELLO_BYTES)
        if isinstance(hello, LinkError):
            raise BadWorker(f"it says: {hello.reason}")
        if not isinstance(hello, WorkerHello):
            raise BadWorker("an introduction was expected (type worker)")
        if hello.protocol != PROTOCOL:
            raise BadWorker(
                f"the plugin speaks protocol {hello.protocol}, this agent {PROTOCOL}: install roost and"
                " roost-vllm of the same release"
            )
        if not hmac.compare_digest(hello.proof, proof(self._secret, "worker", nonce)):
            raise BadWorker(
                "it does not know the secret: ROOST_SECRET_FILE must name the agent's secret file"
            )
        return hello

    async def _start_of(self, hello: WorkerHello) -> WorkerMaps:
        """Return the start of vLLM that a worker belongs to. A map without an epoch gets one above all on
        record."""
        async with self._naming:
            known = self._starts.get(hello.instance)
            if known is not None:
                return known
            self._make_room()
            maps = WorkerMaps(hello, hello.epoch or await self._next_epoch())
            self._starts[hello.instance] = maps
            log.info(
                "workers of vLLM %s connect (plugin %s): %d expert ranks, epoch %d",
                hello.engine,
                hello.plugin,
                hello.ranks,
                maps.epoch,
            )
            return maps

    def _make_room(self) -> None:
        """Forget the oldest start without workers if there are many."""
        if len(self._starts) < _MAX_STARTS:
            return
        gone = next((name for name in self._starts if name not in self._links.values()), None)
        if gone is None:
            raise BadWorker("workers of too many starts of vLLM are connected")
        del self._starts[gone]

    def _left(self, maps: WorkerMaps, hello: WorkerHello, link: WorkerLink) -> None:
        del self._links[link]
        maps.leave(hello.rank, link)
        log.info("expert rank %d of %s (process %d) has disconnected", hello.rank, hello.model, hello.pid)
        self._change.set()


async def _read(reader: asyncio.StreamReader, limit: int) -> FromWorker:
    """Read one message. BadWorker for one that is too long or none of the protocol."""
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > limit:
        raise BadWorker(f"a message of {size} bytes; at most {limit} are read")
    try:
        return _decoder.decode(await reader.readexactly(size))
    except msgspec.DecodeError as error:
        raise BadWorker(f"no message of the protocol: {error}") from error
