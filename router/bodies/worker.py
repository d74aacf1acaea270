"""The process that decodes, renders and tokenises large bodies: one task after the other, from the socket on descriptor 0.

It is started by `router.bodies.worker_pool`, ends with the router (at the end of the socket, and by the kernel's signal when the router is killed
while a task runs), and is nicer than the router, so that its work does not slow down the router's own.
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
"""Bytes of a body behind which freed memory is given back to the system."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class BodyWorker:
    """State: tokenizers by digest."""

    def __init__(self) -> None:
        self._known: dict[str, ModelTokenizer] = {}

    def answer(self, asked: Task, blob: bytes) -> tuple[Answer, bytes]:
        """What the task comes to; every fault of the body is a `TaskRefused`."""
        try:
            return self._do(asked, blob)
        except ApiError as error:
            return TaskRefused(error.status, error.message, error.param, error.code), b""
        except MemoryError:
            return TaskRefused(413, "the body needs more memory to be read than one request may have", None, "body_too_large"), b""
        except Exception:
            log.exception("a large body could not be read")
            return TaskRefused(500, "the router failed; its log says why", None, "internal_error"), b""

    def _do(self, asked: Task, blob: bytes) -> tuple[Answer, bytes]:
        match asked:
            case LoadTokenizer():
                self._load(asked, blob)
                return Done(), b""
            case ReadRequest():
                request = tasks.read(asked.kind, blob)
                return RequestFields(isinstance(request, ChatRequest), tasks.as_json(request)), b""
            case ReadPassthrough():
                found = tasks.read_passthrough(asked.content_type, blob)
                fields = msgspec.structs.asdict(found)
                prompt = fields.pop("prompt")
                return PassthroughFields(json.dumps(fields).encode()), prompt
            case ReadPassed():
                values = passed_fields(tasks.decode(asked.kind, blob), blob).values
                return Done(), msgspec.msgpack.encode({name: bytes(value) for name, value in values.items()})
            case WriteSalt():
                return Done(), with_salt(blob, asked.salt)
            case Encode():
                tokenizer = self._known[asked.digest].within(asked.scope)
                ids = tasks.ids_of(tasks.decode(asked.kind, blob), tokenizer, tasks.PromptBounds(asked.context, asked.prompts))
                return Ids(tuple(map(len, ids))), b"".join(array("I", one).tobytes() for one in ids)

    def _load(self, asked: LoadTokenizer, archive: bytes) -> None:
        self._known = {digest: known for digest, known in self._known.items() if digest in asked.keep}
        seen = SegmentCache(asked.seen_bytes) if asked.seen_bytes else None
        self._known[asked.digest] = ModelTokenizer.from_archive(archive, seen)


def serve(incoming: BufferedReader, outgoing: BufferedWriter) -> None:
    """Answer until the other side closes."""
    worker = BodyWorker()
    while lengths := incoming.read(HEAD.size):
        message_bytes, blob_bytes = HEAD.unpack(lengths)
        asked, blob = task(incoming.read(message_bytes)), incoming.read(blob_bytes)
        answer, answer_blob = worker.answer(asked, blob)
        outgoing.write(head(answer, answer_blob))
        outgoing.write(answer_blob)
        outgoing.flush()
        if blob_bytes > _LARGE:
            del asked, blob, answer, answer_blob
            gc.collect()
            _libc.malloc_trim(0)


def main() -> None:
    """The arguments are PARENT_PID MEMORY_BYTES; descriptor 0 is a socket to the router."""
    parent, memory = int(sys.argv[1]), int(sys.argv[2])
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the router is gone already")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the router decides when this process ends
    os.nice(_NICENESS)
    os.putenv("TOKENIZERS_PARALLELISM", "false")  # no threads of its own: there is one text at a time
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    logging.basicConfig(level=logging.WARNING)
    with socket.socket(fileno=0) as connection, connection.makefile("rb") as incoming, connection.makefile("wb") as outgoing:
        serve(incoming, outgoing)
