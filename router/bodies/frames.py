"""What the router and its worker processes send each other: frames of a message and a blob. Values only, without I/O."""

import struct

import msgspec

from router.bodies.tasks import Kind

HEAD = struct.Struct("<II")
"""bytes of the message and of the blob behind it"""


class LoadTokenizer(msgspec.Struct, frozen=True, tag=True):
    """Read a tokenizer; the blob is its archive. Those not in `keep` are forgotten."""

    digest: str
    seen_bytes: int
    """memory for token ids of seen texts"""
    keep: tuple[str, ...]


class ReadRequest(msgspec.Struct, frozen=True, tag=True):
    """Read the fields of the request in the blob. Answered by `RequestFields`."""

    kind: Kind


class ReadPassthrough(msgspec.Struct, frozen=True, tag=True):
    """Read what routing uses of the request in the blob, leniently. Answered by `PassthroughFields`; its blob is what the prompt begins with."""

    content_type: str


class ReadPassed(msgspec.Struct, frozen=True, tag=True):
    """Read the fields of the request in the blob that go on as they came. Answered by `Done`; its blob is their JSON by name, as MessagePack."""

    kind: Kind


class Encode(msgspec.Struct, frozen=True, tag=True):
    """Tokenise the prompts of the request in the blob. Answered by `Ids`; its blob is u32, native byte order."""

    kind: Kind
    digest: str
    context: int
    prompts: int
    scope: str = ""
    """`ModelTokenizer.within`"""


class WriteSalt(msgspec.Struct, frozen=True, tag=True):
    """Put this salt into the body in the blob, as `tenancy.with_salt`. Answered by `Done`; its blob is the new body."""

    salt: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """All that is to be said is in the blob."""


class RequestFields(msgspec.Struct, frozen=True, tag=True):
    is_chat: bool
    request: bytes
    """JSON, abridged"""


class PassthroughFields(msgspec.Struct, frozen=True, tag=True):
    asked: bytes
    """the fields, as JSON"""


class Ids(msgspec.Struct, frozen=True, tag=True):
    lengths: tuple[int, ...]
    """token ids of each prompt"""


class TaskRefused(msgspec.Struct, frozen=True, tag=True):
    """An ApiError."""

    status: int
    message: str
    param: str | None
    code: str | None


BodyTask = ReadRequest | ReadPassthrough | ReadPassed | WriteSalt | Encode
"""The blob is a request's body."""
Task = LoadTokenizer | BodyTask
Answer = Done | RequestFields | PassthroughFields | Ids | TaskRefused
_TASKS = msgspec.msgpack.Decoder(Task)
_ANSWERS = msgspec.msgpack.Decoder(Answer)


def head(message: Task | Answer, blob: bytes) -> bytes:
    """What precedes the blob."""
    encoded = msgspec.msgpack.encode(message)
    return HEAD.pack(len(encoded), len(blob)) + encoded


def task(message: bytes) -> Task:
    found: Task = _TASKS.decode(message)
    return found


def answer(message: bytes) -> Answer:
    found: Answer = _ANSWERS.decode(message)
    return found
