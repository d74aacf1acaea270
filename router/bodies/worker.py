"""Worker process that decodes, renders and tokenises large bodies: one task at a time, from the socket on
descriptor 0.

`router.bodies.worker_pool` starts it. It ends with the router: at the end of the socket, and by the kernel's
signal when the router is killed while a task runs. Its niceness is higher than the router's, so that it does
not slow the router down.
"""

import ctypes
import gc
import json
import logging
import os
import resource
import signal
import socket
import sys
from array import array
from io import BufferedReader, BufferedWriter

import msgspec

from fleet.completions import ApiError
from router.access.tenancy import with_salt
from router.bodies import tasks
from router.bodies.frames import (
    HEAD,
    Answer,
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
    head,
    task,
)
from router.openai_api.request_schema import ChatRequest, passed_fields
from router.tokenization.segment_cache import SegmentCache
from router.tokenization.tokenizer import ModelTokenizer

log = logging.getLogger(__name__)

_NICENESS = 5
_LARGE = 1024 * 1024
"""Body size in bytes above which freed memory is returned to the system."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class BodyWorker:
    """Executor of tasks. State: tokenizers by digest."""

    def __init__(self) -> None:
        self._known: dict[str, ModelTokenizer] = {}

    def answer(self, request: Task, blob: bytes) -> tuple[Answer, bytes]:
        """Execute a task. Every fault of the body becomes a `TaskRefused`."""
        try:
            return self._do(request, blob)
        except ApiError as error:
            return TaskRefused(error.status, error.message, error.param, error.code), b""
        except MemoryError:
            return (
                TaskRefused(
                    413,
                    "reading the body needs more memory than one request may have",
                    None,
                    "body_too_large",
                ),
                b"",
            )
        except Exception:
            log.exception("a large body could not be read")
            return TaskRefused(500, "the router failed; its log says why", None, "internal_error"), b""

    def _do(self, request: Task, blob: bytes) -> tuple[Answer, bytes]:
        match request:
            case LoadTokenizer():
                self._load(request, blob)
                return Done(), b""
            case ReadRequest():
                fields = tasks.read(request.kind, blob)
                return RequestFields(isinstance(fields, ChatRequest), tasks.as_json(fields)), b""
            case ReadPassthrough():
                found = tasks.read_passthrough(request.content_type, blob)
                values = msgspec.structs.asdict(found)
                prompt = values.pop("prompt")
                return PassthroughFields(json.dumps(values).encode()), prompt
            case ReadPassed():
                passed = passed_fields(tasks.decode(request.kind, blob), blob).values
                return Done(), msgspec.msgpack.encode({name: bytes(value) for name, value in passed.items()})
            case WriteSalt():
                return Done(), with_salt(blob, request.salt)
            case Encode():
                tokenizer = self._known[request.digest].within(request.scope)
                ids = tasks.ids_of(
                    tasks.decode(request.kind, blob),
                    tokenizer,
                    tasks.PromptBounds(request.context, request.prompts),
                )
                return Ids(tuple(map(len, ids))), b"".join(array("I", one).tobytes() for one in ids)
            case EncodeForeign():
                tokenizer = self._known[request.digest].within(request.scope)
                prompt = tasks.foreign_prompt(blob, tokenizer, request.context, chat=request.chat)
                if prompt is None:
                    return Ids(()), b""
                continued = tasks.continuable_fields(blob, chat=request.chat)
                return Ids((len(prompt.ids),), prompt.asks, continued), array("I", prompt.ids).tobytes()

    def _load(self, request: LoadTokenizer, archive: bytes) -> None:
        self._known = {digest: known for digest, known in self._known.items() if digest in request.keep}
        seen = SegmentCache(request.seen_bytes) if request.seen_bytes else None
        self._known[request.digest] = ModelTokenizer.from_archive(archive, seen)


def serve(incoming: BufferedReader, outgoing: BufferedWriter) -> None:
    """Answer until the other side closes."""
    worker = BodyWorker()
    while lengths := incoming.read(HEAD.size):
        message_bytes, blob_bytes = HEAD.unpack(lengths)
        request, blob = task(incoming.read(message_bytes)), incoming.read(blob_bytes)
        answer, answer_blob = worker.answer(request, blob)
        outgoing.write(head(answer, answer_blob))
        outgoing.write(answer_blob)
        outgoing.flush()
        if blob_bytes > _LARGE:
            del request, blob, answer, answer_blob
            gc.collect()
            _libc.malloc_trim(0)


def main() -> None:
    """Run the worker. The arguments are PARENT_PID MEMORY_BYTES; descriptor 0 is a socket to the router."""
    parent, memory = int(sys.argv[1]), int(sys.argv[2])
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the router is gone already")
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole process group; the router decides when this process ends
    os.nice(_NICENESS)
    os.putenv("TOKENIZERS_PARALLELISM", "false")  # no threads: the worker encodes one text at a time
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    logging.basicConfig(level=logging.WARNING)
    with (
        socket.socket(fileno=0) as connection,
        connection.makefile("rb") as incoming,
        connection.makefile("wb") as outgoing,
    ):
        serve(incoming, outgoing)
