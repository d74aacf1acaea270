"""Messages between the router and its worker processes: frames of a message and a blob. Values only, without
I/O.
"""

import struct

import msgspec

from router.bodies.tasks import Kind

HEAD = struct.Struct("<II")
"""lengths in bytes of the message and of the blob that follows it"""


class LoadTokenizer(msgspec.Struct, frozen=True, tag=True):
    """Load a tokenizer, whose archive is the blob. Tokenizers that are not in `keep` are dropped."""

    digest: str
    seen_bytes: int
    """memory for the token ids of texts seen before"""
    keep: tuple[str, ...]


class ReadRequest(msgspec.Struct, frozen=True, tag=True):
    """Read the fields of the request in the blob. The answer is `RequestFields`."""

    kind: Kind


class ReadPassthrough(msgspec.Struct, frozen=True, tag=True):
    """Read the fields that routing uses of the request in the blob, leniently. The answer is
    `PassthroughFields`; its blob is the beginning of the prompt.
    """

    content_type: str


class ReadPassed(msgspec.Struct, frozen=True, tag=True):
    """Read the fields of the request in the blob that are forwarded unchanged. The answer is `Done`; its blob
    maps names to JSON, as MessagePack.
    """

    kind: Kind


class Encode(msgspec.Struct, frozen=True, tag=True):
    """Tokenise the prompts of the request in the blob. The answer is `Ids`; its blob is u32, native byte
    order.
    """

    kind: Kind
    digest: str
    context: int
    prompts: int
    scope: str = ""
    """argument of `ModelTokenizer.within`"""


class EncodeForeign(msgspec.Struct, frozen=True, tag=True):
    """Make the ids of the prompt in the blob as a server that gets text does (`tasks.foreign_prompt`). The
    answer is `Ids`, of no prompt if they cannot be known; its blob is u32, native byte order.
    """

    chat: bool
    digest: str
    context: int
    scope: str = ""
    """argument of `ModelTokenizer.within`"""


class WriteSalt(msgspec.Struct, frozen=True, tag=True):
    """Put this salt into the body in the blob, as `tenancy.with_salt`. The answer is `Done`; its blob is the
    new body.
    """

    salt: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """Result without fields: the blob holds everything."""


class RequestFields(msgspec.Struct, frozen=True, tag=True):
    is_chat: bool
    request: bytes
    """the request as abridged JSON"""


class PassthroughFields(msgspec.Struct, frozen=True, tag=True):
    fields: bytes
    """the fields as JSON"""


class Ids(msgspec.Struct, frozen=True, tag=True):
    lengths: tuple[int, ...]
    """number of token ids of each prompt"""
    asks: bool = False
    """this and the next: `tasks.EncodedPrompt`"""
    fields: bytes = b""


class TaskRefused(msgspec.Struct, frozen=True, tag=True):
    """Result of a task that raised an ApiError."""

    status: int
    message: str
    param: str | None
    code: str | None


BodyTask = ReadRequest | ReadPassthrough | ReadPassed | WriteSalt | Encode | EncodeForeign
"""Tasks whose blob is a request's body."""
Task = LoadTokenizer | BodyTask
Answer = Done | RequestFields | PassthroughFields | Ids | TaskRefused
_TASKS = msgspec.msgpack.Decoder(Task)
_ANSWERS = msgspec.msgpack.Decoder(Answer)


def head(message: Task | Answer, blob: bytes) -> bytes:
    """Return the bytes that precede the blob."""
    encoded = msgspec.msgpack.encode(message)
    return HEAD.pack(len(encoded), len(blob)) + encoded


def task(message: bytes) -> Task:
    found: Task = _TASKS.decode(message)
    return found


def answer(message: bytes) -> Answer:
    found: Answer = _ANSWERS.decode(message)
    return found
