"""Messages between the plugin and Roost's agent: the plugin's own copy of `engine_adapter/vllm/wire.py`,
because this distribution imports nothing of Roost. A test of Roost compares the two.

A frame is a u32 (big endian), the length of what follows, and one msgpack map, in which `type` names the
message. Keys that a reader does not know are ignored.
"""

import hashlib
import hmac
import struct
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

PROTOCOL = 1
MAX_FRAME_BYTES = 64 * 1024 * 1024

WorkerState = Literal["idle", "staged", "voting", "refused"]


class WireError(Exception):
    """Raised for a frame that is too long, is no message, or is of an unknown type."""


def map_digest(table: NDArray[np.int16], experts: int) -> str:
    """Return the digest of a map, int16 [layers, slots of all ranks]: 16 hexadecimal digits."""
    layers, slots = table.shape
    about = f"{layers},{slots},{experts};".encode()
    return hashlib.blake2b(about + table.astype("<i2").tobytes(), digest_size=8).hexdigest()


def proof(secret: bytes, role: Literal["worker", "agent"], nonce: bytes) -> bytes:
    """Return the proof that one side knows the secret, over the nonce of the other."""
    return hmac.digest(secret, role.encode() + nonce, "sha256")


class LinkError(msgspec.Struct, frozen=True, kw_only=True, tag="error"):
    """The sender closes the connection, or could not carry out a message."""

    reason: str


class WorkerHello(msgspec.Struct, frozen=True, kw_only=True, tag="worker"):
    """Introduction of this worker process."""

    protocol: int
    proof: bytes
    nonce: bytes
    plugin: str
    engine: str
    missing: tuple[str, ...] = ()
    refuses: str = ""
    instance: str
    pid: int
    rank: int
    ranks: int
    target: int
    targets: int
    model: str
    layers: int
    experts: int
    slots: int
    top_k: int
    expert_bytes: int
    all2all: str
    dtype: str
    quantisation: str = ""
    asynchronous: bool = False
    map: bytes
    state: WorkerState = "idle"
    handover: int = 0
    flipped: int = 0
    epoch: int = 0


class MapStatus(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """State of this worker's handover."""

    state: WorkerState
    handover: int
    digest: str
    served: str
    flipped: int
    epoch: int
    reason: str = ""
    layers_done: int = 0


class MapMoved(msgspec.Struct, frozen=True, kw_only=True, tag="moved"):
    """A map came into force on this worker."""

    handover: int
    map: bytes
    received: int
    seconds: float


class WorkerDemand(msgspec.Struct, frozen=True, kw_only=True, tag="demand"):
    """Demand of this worker's target and load of its rank since the last message, under one map."""

    served: str
    steps: int
    seconds: float
    tokens: int
    demand: bytes
    slots: bytes = b""
    balance: bytes = b""
    votes: int = 0
    vote_seconds: float = 0.0
    plugin_seconds: float = 0.0


class RoutedRequest(msgspec.Struct, frozen=True, kw_only=True, tag="routed"):
    """Experts of one ended request."""

    request: str
    prompt_tokens: int
    first: int
    positions: int
    top_k: int
    experts: bytes


class SlotMismatch(msgspec.Struct, frozen=True, kw_only=True, tag="mismatch"):
    """The weights in a slot are not those of the expert that the map names."""

    layer: int
    slot: int
    expert: int
    expected: str
    found: str


class ExpertDigests(msgspec.Struct, frozen=True, kw_only=True, tag="digests"):
    """Digest of each expert's weights and scales on this rank, [layers][slots of this rank]. Empty: not
    checked yet under the map in force."""

    served: str
    digests: tuple[tuple[str, ...], ...]


class AgentHello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """First message of a connection."""

    protocol: int
    nonce: bytes


class AgentWelcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The agent's proof, and what the plugin is to do."""

    proof: bytes
    epoch: int
    report_seconds: float
    vote_steps: int
    expert_digests: tuple[tuple[str, ...], ...] = ()


class StageMap(msgspec.Struct, frozen=True, kw_only=True, tag="stage"):
    """Hold a map for a handover."""

    handover: int
    epoch: int
    replaces: str
    map: bytes


class PermitVote(msgspec.Struct, frozen=True, kw_only=True, tag="permit"):
    """Vote for the map that is held."""

    handover: int


class DropMap(msgspec.Struct, frozen=True, kw_only=True, tag="drop"):
    """Drop the map that is held, unless the vote has passed."""

    handover: int
    reason: str


class DescribeWorker(msgspec.Struct, frozen=True, kw_only=True, tag="describe"):
    """Answer with `MapStatus`."""


FromWorker = (
    WorkerHello
    | MapStatus
    | MapMoved
    | WorkerDemand
    | RoutedRequest
    | SlotMismatch
    | ExpertDigests
    | LinkError
)
FromAgent = AgentHello | AgentWelcome | StageMap | PermitVote | DropMap | DescribeWorker | LinkError

_HEAD = struct.Struct(">I")
_decoder: "msgspec.msgpack.Decoder[FromAgent]" = msgspec.msgpack.Decoder(FromAgent)


def frame(message: FromWorker) -> bytes:
    """Return the frame of a message. WireError when it is too long."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a message of {len(body)} bytes is longer than {MAX_FRAME_BYTES}")
    return _HEAD.pack(len(body)) + body


def decode(body: bytes) -> FromAgent:
    """Return the message in the body of a frame. WireError when it is none, or of an unknown type."""
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a message of protocol {PROTOCOL}: {error}") from None


class Frames:
    """Bytes of a connection, cut into the bodies of frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the bodies that are complete with `data`. WireError for a frame that is too long."""
        self._buffer += data
        bodies = []
        while len(self._buffer) >= _HEAD.size:
            length = _HEAD.unpack_from(self._buffer)[0]
            if length > MAX_FRAME_BYTES:
                raise WireError(f"a frame of {length} bytes is longer than {MAX_FRAME_BYTES}")
            if len(self._buffer) < _HEAD.size + length:
                break
            bodies.append(bytes(self._buffer[_HEAD.size : _HEAD.size + length]))
            del self._buffer[: _HEAD.size + length]
        return bodies
