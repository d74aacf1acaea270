"""Pool of worker processes for large bodies: started on demand, shared fairly, replaced when one dies or its
client disconnects.

A body of more than `_LARGEST_SHORT` bytes never takes the last free process, so that a body that takes a
fraction of a second does not wait behind one that takes many (head-of-line blocking). Queued tasks of
disconnected clients are dropped; a running task has `_GRACE_SECONDS` to finish before its process is killed.
"""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from array import array
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from fleet.completions import ApiError
from router.bodies.fair_turns import FairTurns
from router.bodies.frames import (
    HEAD,
    Answer,
    BodyTask,
    Done,
    Encode,
    EncodeForeign,
    Ids,
    LoadTokenizer,
    PassthroughFields,
    ReadPassed,
    ReadPassthrough,
    ReadRequest,
    RequestFields,
    Task,
    TaskRefused,
    WriteSalt,
    answer,
    head,
)
from router.bodies.tasks import EncodedPrompt, Kind, PromptBounds, decode
from router.foreign_api.lenient_fields import LenientRequest
from router.http.asgi_response import not_ready
from router.openai_api.request_schema import Request

log = logging.getLogger(__name__)

_LARGEST_SHORT = 1024 * 1024
_GRACE_SECONDS = 0.5
_MAX_SECONDS = 60.0
"""time limit of one task"""
_SLICE = 256 * 1024
"""bytes per write, which bounds the copying in one callback of the event loop"""
_ROOT = Path(__file__).resolve().parents[2]
"""directory of this product's packages"""


class WorkerDied(Exception):
    """The process ended during a task."""


class WorkerProcess:
    """One process and the socket to it. Created by `start`."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self.loaded: set[str] = set()
        """digests of the tokenizers it has loaded"""

    @classmethod
    async def start(cls, memory_bytes: int) -> "WorkerProcess":
        """Start a process with this much address space. OSError when no further process can be created."""
        ours, its = socket.socketpair()
        try:
            with its:
                process = _started(its, memory_bytes)
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def call(self, task: Task, blob: bytes) -> tuple[Answer, bytes]:
        """Execute a task. WorkerDied when the process ends; after a cancellation the process must be
        killed."""
        try:
            self._writer.write(head(task, blob))
            view = memoryview(blob)
            for start in range(0, len(blob), _SLICE):
                self._writer.write(view[start : start + _SLICE])
                await self._writer.drain()
            message_bytes, blob_bytes = HEAD.unpack(await self._reader.readexactly(HEAD.size))
            message = await self._reader.readexactly(message_bytes)
            return answer(message), await self._reader.readexactly(blob_bytes)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise WorkerDied(
                f"the process for large bodies {self.pid} ended in the middle of a task"
            ) from error

    async def kill(self) -> None:
        """Kill the process and wait for its end."""
        self._process.kill()
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        await asyncio.to_thread(self._process.wait)


class BodyWorkers:
    """Pool of workers. State: idle processes, and running jobs. Processes end with the context."""

    def __init__(
        self,
        processes: int,
        max_waiting: int,
        max_per_client: int,
        *,
        memory_bytes: int,
        seen_bytes: int,
        archive: Callable[[str], bytes | None],
        digests: Callable[[], Collection[str]],
    ) -> None:
        """memory_bytes: address space of one process. seen_bytes: part of it for token ids of texts seen
        before. archive: returns a tokenizer's archive, by digest. digests: returns the digests in use.
        """
        self._turns = FairTurns("large requests", processes, max_waiting, max_per_client)
        self._huge = FairTurns("large requests", max(1, processes - 1), max_waiting, max_per_client)
        self._memory_bytes = memory_bytes
        self._seen_bytes = seen_bytes
        self._archive = archive
        self._digests = digests
        self._idle: list[WorkerProcess] = []
        self._jobs: set[asyncio.Task[tuple[Answer, bytes]]] = set()
        self._open = False
        self.started = self.died = 0
        """processes started, and processes that ended during a task"""

    async def __aenter__(self) -> "BodyWorkers":
        self._open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self._open = False
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        await asyncio.gather(*(worker.kill() for worker in self._idle))
        self._idle.clear()

    @property
    def waiting(self) -> int:
        return self._turns.waiting + self._huge.waiting

    @property
    def pids(self) -> list[int]:
        """Process ids of the idle processes."""
        return [worker.pid for worker in self._idle]

    async def read(self, client: str, kind: Kind, body: bytes) -> Request:
        """Read a request, as `tasks.read`. ApiError also when too many wait (see `FairTurns.take`), or the
        process fails.
        """
        fields, _ = await self._run(client, ReadRequest(kind), body)
        assert isinstance(fields, RequestFields)
        return decode("chat" if fields.is_chat else "text", fields.request)

    async def read_passed(self, client: str, kind: Kind, body: bytes) -> dict[str, msgspec.Raw]:
        """Return the values of `request_schema.passed_fields`. ApiError as in `read`."""
        _, blob = await self._run(client, ReadPassed(kind), body)
        return {
            name: msgspec.Raw(value)
            for name, value in msgspec.msgpack.decode(blob, type=dict[str, bytes]).items()
        }

    async def read_passthrough(self, client: str, content_type: str, body: bytes) -> LenientRequest:
        """Read the fields that routing uses, as `tasks.read_passthrough`. ApiError when too many wait, or the
        process fails.
        """
        fields, prompt = await self._run(client, ReadPassthrough(content_type), body)
        assert isinstance(fields, PassthroughFields)
        return LenientRequest(**msgspec.json.decode(fields.fields), prompt=prompt)

    async def with_salt(self, client: str, body: bytes, salt: str) -> bytes:
        """Replace the salt of a body, as `tenancy.with_salt`. ApiError as in `read`."""
        _, blob = await self._run(client, WriteSalt(salt), body)
        return blob

    async def encode(
        self, client: str, kind: Kind, body: bytes, digest: str, room: PromptBounds, scope: str = ""
    ) -> list[list[int]]:
        """Tokenise, as `tasks.ids_of` with `ModelTokenizer.within` the scope. ApiError as in `read`."""
        ids, blob = await self._run(client, Encode(kind, digest, room.context, room.prompts, scope), body)
        assert isinstance(ids, Ids)
        every, start, found = array("I", blob), 0, []
        for length in ids.lengths:
            found.append(every[start : start + length].tolist())
            start += length
        return found

    async def foreign_prompt(
        self, client: str, body: bytes, digest: str, context: int, scope: str, *, chat: bool
    ) -> EncodedPrompt | None:
        """Make the ids of a body's prompt, as `tasks.foreign_prompt`. ApiError as in `read`."""
        ids, blob = await self._run(client, EncodeForeign(chat, digest, context, scope), body)
        assert isinstance(ids, Ids)
        if not ids.lengths:
            return None
        return EncodedPrompt(array("I", blob).tolist(), ids.asks, ids.fields)

    async def _run(self, client: str, task: BodyTask, body: bytes) -> tuple[Answer, bytes]:
        turns = [self._huge, self._turns] if len(body) > _LARGEST_SHORT else [self._turns]
        taken: list[FairTurns] = []
        try:
            for turn in turns:
                await turn.take(client)
                taken.append(turn)
            if not self._open:
                raise not_ready("the router is stopping")  # noqa: TRY301
        except BaseException:
            _give_back(taken)
            raise
        job = asyncio.create_task(self._do(task, body), name="a large body in another process")
        self._jobs.add(job)
        job.add_done_callback(lambda done: self._ended(done, taken))
        try:
            result = await asyncio.shield(job)
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_later(_GRACE_SECONDS, job.cancel)
            raise
        if isinstance(result[0], TaskRefused):
            raise ApiError(result[0].status, result[0].message, param=result[0].param, code=result[0].code)
        return result

    def _ended(self, job: "asyncio.Task[tuple[Answer, bytes]]", taken: list[FairTurns]) -> None:
        self._jobs.discard(job)
        if not job.cancelled():
            job.exception()  # marks it as retrieved: the client may have disconnected
        _give_back(taken)

    async def _do(self, task: BodyTask, body: bytes) -> tuple[Answer, bytes]:
        """Execute one task in an idle or new process; a process that fails, or is cancelled, is killed."""
        worker = self._idle.pop() if self._idle else await self._start()
        try:
            async with asyncio.timeout(_MAX_SECONDS):
                if isinstance(task, Encode | EncodeForeign) and task.digest not in worker.loaded:
                    await self._load(worker, task.digest)
                result = await worker.call(task, body)
        except BaseException as error:
            await asyncio.shield(worker.kill())
            if isinstance(error, WorkerDied):
                self.died += 1
                log.warning("%s", error)
                raise ApiError(
                    503, "the process that read this body failed", code="body_worker_failed"
                ) from error
            if isinstance(error, TimeoutError):
                raise ApiError(
                    503,
                    f"this body takes longer than {_MAX_SECONDS:g} s to be read",
                    code="body_worker_failed",
                ) from error
            raise
        self._idle.append(worker)
        return result

    async def _start(self) -> WorkerProcess:
        try:
            worker = await WorkerProcess.start(self._memory_bytes)
        except OSError as error:
            log.error("no process can be started for large bodies: %s", error)  # noqa: TRY400 the text says it all
            raise ApiError(
                503, "no process can be started to read this body", code="body_worker_failed", retry_after=2.0
            ) from error
        self.started += 1
        return worker

    async def _load(self, worker: WorkerProcess, digest: str) -> None:
        archive = self._archive(digest)
        if archive is None:
            raise not_ready("the model's tokenizer has not been loaded yet")
        keep = (*self._digests(), digest)
        loaded, _ = await worker.call(LoadTokenizer(digest, self._seen_bytes, keep), archive)
        if isinstance(loaded, Done):
            worker.loaded = (worker.loaded & set(keep)) | {digest}


def _started(its: socket.socket, memory_bytes: int) -> "subprocess.Popen[bytes]":
    """Start a worker process with its end of the socket. Takes a millisecond or two: the child shares our
    memory until it executes (vfork).
    """
    program = f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from router.bodies.worker import main; main()"
    command = [sys.executable, "-P", "-c", program, str(os.getpid()), str(memory_bytes)]
    return subprocess.Popen(command, stdin=its.fileno(), stdout=subprocess.DEVNULL)


def _give_back(taken: list[FairTurns]) -> None:
    for turn in taken:
        turn.give_back()
