"""Messages between the agent and the plugin in vLLM's worker processes.

A worker process is one expert rank. It connects to the agent over TCP. A frame is a u32 (big endian), the
length of what follows, and one msgpack map, in which `type` names the message. A reader ignores keys that it
does not know. The plugin has its own copy of these names, because it imports nothing of Roost;
`tests/engine_adapter/vllm` compares the two.

Both sides prove that they know the secret, HMAC-SHA256 over the other's nonce, before anything else is sent:
`hello`, `worker`, `welcome`. Maps are int16 little endian [layers, slots], rank-major, as in
`fleet.placement.PlacementRecord`. A digest names a map: `map_digest`.
"""

import hashlib
import hmac
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.layout import AttentionKind

PROTOCOL = 1
"""Version of these messages. Agent and plugin must agree."""
MAX_FRAME_BYTES = 64 * 1024 * 1024

WorkerState = Literal["idle", "staged", "voting", "refused"]
"""Handover state of a worker: no map is held; a validated map is held; the worker votes for it; it has
dropped a map that it may have voted for, and serves the old one."""


def map_digest(table: NDArray[np.int16], experts: int) -> str:
    """Return the digest of a map, int16 [layers, slots]: 16 hexadecimal digits."""
    layers, slots = table.shape
    about = f"{layers},{slots},{experts};".encode()
    return hashlib.blake2b(about + table.astype("<i2").tobytes(), digest_size=8).hexdigest()


def proof(secret: bytes, role: Literal["worker", "agent"], nonce: bytes) -> bytes:
    """Return the proof that one side knows the secret, over the nonce of the other."""
    return hmac.digest(secret, role.encode() + nonce, "sha256")


# Both directions


class LinkError(msgspec.Struct, frozen=True, kw_only=True, tag="error"):
    """The sender closes the connection, or could not carry out a message."""

    reason: str


# From the worker


class WorkerHello(msgspec.Struct, frozen=True, kw_only=True, tag="worker"):
    """Introduction of a worker process."""

    protocol: int
    proof: bytes
    nonce: bytes
    plugin: str
    """version of the plugin"""
    engine: str
    """version of vLLM"""
    missing: tuple[str, ...] = ()
    """private names of vLLM that the plugin needs and did not find; it then serves no placements"""
    refuses: str = ""
    """why it serves no placements although no name is missing; empty: it serves them"""
    instance: str
    """identity of this start of vLLM, common to all of its workers"""
    pid: int
    rank: int
    """expert rank"""
    ranks: int
    target: int
    """data-parallel rank whose requests this process computes; 0 under tensor parallelism alone"""
    targets: int
    model: str
    layers: int
    """MoE layers"""
    experts: int
    slots: int
    """physical experts of one rank and layer"""
    top_k: int
    expert_bytes: int
    """weights and scales of one expert in one layer"""
    all2all: str
    """vLLM's `all2all_backend`"""
    dtype: str
    quantisation: str = ""
    asynchronous: bool = False
    """EPLB moves experts layer by layer beside the forward pass"""
    map: bytes
    """map in force"""
    state: WorkerState = "idle"
    handover: int = 0
    """number of the map that is held or was dropped; 0: none since the start"""
    flipped: int = 0
    """number of the handover that brought the map in force; 0: it is the initial one"""
    epoch: int = 0
    """epoch of the map in force; 0: the agent never named one"""

    @property
    def attention(self) -> AttentionKind:
        """Attention of the engine, which vLLM does not change while it runs."""
        return "tp" if self.targets == 1 < self.ranks else "dp"


class MapStatus(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """State of a worker's handover. Sent at every change, and as the answer to `StageMap`, `PermitVote`,
    `DropMap` and `DescribeWorker`."""

    state: WorkerState
    handover: int
    digest: str
    """of the map that is held; empty: none"""
    served: str
    """digest of the map in force"""
    flipped: int
    epoch: int
    reason: str = ""
    """why a map was refused or dropped; empty: it was not"""
    layers_done: int = 0
    """layers in which the newest map is in force (asynchronous EPLB)"""


class MapMoved(msgspec.Struct, frozen=True, kw_only=True, tag="moved"):
    """A map came into force on this worker."""

    handover: int
    """0: vLLM's own policy chose it"""
    map: bytes
    received: int
    """(layer, expert) pairs that arrived here"""
    seconds: float
    """duration of vLLM's rearrangement"""


class WorkerDemand(msgspec.Struct, frozen=True, kw_only=True, tag="demand"):
    """Demand of this worker's target and load of its rank since the last message, under one map."""

    served: str
    """digest of that map"""
    steps: int
    """steps with tokens"""
    seconds: float
    """total duration of these steps"""
    tokens: int
    """tokens of this target"""
    demand: bytes
    """int64 little endian [layers, experts]: (token, k) pairs of this target's tokens, to be added up over
    its ranks. Empty if a lower rank counts the same tokens"""
    slots: bytes = b""
    """int64 little endian [layers, slots of all ranks]: pairs by physical expert, as counted here"""
    balance: bytes = b""
    """float64 little endian [layers]: mean / highest load of a rank, summed over the steps; empty: unknown"""
    votes: int = 0
    vote_seconds: float = 0.0
    plugin_seconds: float = 0.0
    """processor time of the plugin: around the steps, and of its thread. It leaves out the counting that it
    makes vLLM do in every step, and the capture hooks in a forward pass"""


class RoutedRequest(msgspec.Struct, frozen=True, kw_only=True, tag="routed"):
    """Experts of one ended request, where the build can tell. Positions not covered are unknown."""

    request: str
    """its external request id: the `X-Request-Id` of the attempt"""
    prompt_tokens: int
    first: int
    """first position that was routed here: earlier ones were cached"""
    positions: int
    top_k: int
    experts: bytes
    """int16 little endian [positions, layers, k]"""


class SlotMismatch(msgspec.Struct, frozen=True, kw_only=True, tag="mismatch"):
    """The weights in a slot are not those of the expert that the map names."""

    layer: int
    slot: int
    """over all ranks"""
    expert: int
    expected: str
    found: str


class ExpertDigests(msgspec.Struct, frozen=True, kw_only=True, tag="digests"):
    """Digest of each expert's weights and scales on this rank, in hexadecimal: [layers][slots of this rank].
    Sent after each change when all are checked, and at the start of a connection, when some may be empty: not
    checked yet under the map in force."""

    served: str
    digests: tuple[tuple[str, ...], ...]


# From the agent


class AgentHello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """First message of a connection."""

    protocol: int
    nonce: bytes


class AgentWelcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The agent's proof, and what the plugin is to do."""

    proof: bytes
    epoch: int
    """epoch of the map in force, if the worker knows none; 0: it is named when the worker connects anew"""
    report_seconds: float
    vote_steps: int
    """steps between votes; all workers change it together, by agreement"""
    expert_digests: tuple[tuple[str, ...], ...] = ()
    """[layers][experts]: digests that other ranks have reported; empty: none yet"""


class StageMap(msgspec.Struct, frozen=True, kw_only=True, tag="stage"):
    """Hold a map for a handover. Answered with `MapStatus`: staged, or idle with the reason."""

    handover: int
    epoch: int
    replaces: str
    """digest of the map that must be in force"""
    map: bytes


class PermitVote(msgspec.Struct, frozen=True, kw_only=True, tag="permit"):
    """Vote for the map that is held."""

    handover: int


class DropMap(msgspec.Struct, frozen=True, kw_only=True, tag="drop"):
    """Drop the map that is held, unless the vote has passed. A number that never arrived is past from then
    on."""

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
