"""Requests to a rank during a handover, from the coordinator and from other ranks (`fleet.handover`)."""

import msgspec

from fleet.event import Event
from fleet.facts.migrations import PullReport
from fleet.placement import PlacementRecord


class ExpertCopy(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Copy of an expert's weights from one slot to another. Slots are numbered over all ranks, as in
    `Placement`.
    """

    layer: int
    expert: int
    source: int
    """slot to read from, in the epoch in service"""
    slot: int
    """slot that serves the expert from the next epoch on"""


class ProposeHandover(Event, frozen=True, kw_only=True):
    """Request to one rank: prepare (stage) the next epoch (`fleet.handover`). The rank answers immediately
    with `HandoverDescribed`. It publishes the end of staging, and reports it in the answer to a repeated
    proposal.
    """

    engine: str
    worker_id: int
    rank: int
    token: int
    """fencing token of the coordinator's lease"""
    handover: int
    """number of the handover; increases monotonically"""
    plan: str
    placement: PlacementRecord
    """placement of the next epoch"""
    copies: tuple[ExpertCopy, ...] = ()
    """copies of all ranks: each rank finds its own reads and the reads of others from it"""
    deadline_seconds: float
    """time limit for staging, counted from the rank's receipt of the proposal"""
    traceparent: str = ""
    """W3C trace context of the handover's span"""


class CommitHandover(Event, frozen=True, kw_only=True):
    """Request to one rank: serve the new epoch as soon as every rank is ready. Sent only after the decision
    is durable.
    """

    worker_id: int
    rank: int
    token: int
    handover: int


class AbortHandover(Event, frozen=True, kw_only=True):
    """Request to one rank: abort the handover and drop staged weights."""

    worker_id: int
    rank: int
    token: int
    handover: int
    reason: str


class DescribeHandover(Event, frozen=True, kw_only=True):
    """Request to one rank: report the state of your handover."""

    worker_id: int
    rank: int
    token: int = 0
    """fencing token of the requesting coordinator: the rank rejects lower tokens from then on; 0: read-only
    request
    """


class HandoverDescribed(Event, frozen=True, kw_only=True):
    """Handover state of one rank. Answer to every handover command, and published at every change. Not
    stored.
    """

    worker_id: int
    rank: int
    state: str
    """one of `fleet.handover.RankState`"""
    served: int
    """epoch in service"""
    token: int
    """highest fencing token seen"""
    handover: int
    """number of the open handover; 0: none"""
    concluded: int
    """highest number of a finished handover"""
    flipped: int
    """number of the last handover that was flipped to"""
    verdict: str = ""
    """`fleet.handover.Verdict` on the command that this answers; empty: not an answer to a command"""
    failure: str = ""
    """reason why staging failed, with cause and remedy"""
    fault: str = ""
    """the same as a short code, for metrics"""
    seconds: float = 0.0
    """time since the open handover was proposed, or duration of the last one"""
    pulls: tuple[PullReport, ...] = ()
    free: int = 0
    """cells available for incoming experts; 0 for an engine that rearranges, which has no cells"""
    quarantined: int = 0
    """cells in which late bytes may still arrive"""
    draining: int = 0
    """cells that other ranks may still read"""
    oldest_seconds: float = 0.0
    """age of the oldest quarantined or draining cell"""
    pending: str = ""
    """what a ready rank of an engine that rearranges waits for: "idle" (the engine makes no steps, so no
    vote), "N of L layers", or "unknown" (other ranks serve the new map, and this one has not said so). Empty:
    nothing out of the ordinary
    """


class MemoryAddress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Address at which another rank can read a rank's expert memory. Readers validate every number before use
    as an address.
    """

    cells: int
    cell_bytes: int
    layout: str
    """hash of the cell format: tensor names, dtypes, shapes and offsets, and the number of parts"""
    parts: int = 1
    """parts of an expert (`fleet.sharding`); 1: experts cannot be cut"""
    base: int
    """virtual address in the process"""
    device: int = 0
    kind: str = "DRAM"
    """NIXL's name of the memory type"""
    agent: str = ""
    """NIXL agent name with its incarnation; empty: no NIXL"""
    metadata: bytes = b""
    """NIXL metadata of that agent"""
    host: str = ""
    """identity of machine and process namespace; processes with equal values can share memory"""
    pid: int = 0
    descriptor: int = -1
    """file descriptor of the memory in that process; -1: not shareable"""
    inode: int = 0
    """inode of that file, to detect a reused descriptor"""


class LeaseExperts(Event, frozen=True, kw_only=True):
    """Request between ranks of one engine: grant a read lease on these experts or parts. The owner does not
    change them during the lease. A repetition renews the lease.
    """

    worker_id: int
    rank: int
    """owner, the receiver of the request"""
    reader: int
    """reader, the sender of the request"""
    handover: int
    experts: tuple[tuple[int, int, int, int], ...]
    """(layer, slot over all ranks, expert, part); part -1: the whole expert. In a sharded layer the slot is
    that of the expert's group, and the part is the owner's rank
    """
    seconds: float
    """duration of the lease without renewal"""


class ExpertsLeased(Event, frozen=True, kw_only=True):
    """Answer to `LeaseExperts`."""

    worker_id: int
    rank: int
    lease: int
    memory: MemoryAddress
    cells: tuple[int, ...]
    """cell of each requested expert or part"""
    checksums: tuple[tuple[int, ...], ...]
    """u64 per tensor of each requested part, or [tensors, parts] row by row for a whole expert, as loaded or
    verified, not computed from the present memory
    """


class EndLease(Event, frozen=True, kw_only=True):
    """Request: release a lease after the last read. Answered with `LeaseEnded`, also for unknown leases."""

    worker_id: int
    rank: int
    lease: int


class LeaseEnded(Event, frozen=True, kw_only=True):
    """Answer to `EndLease`."""

    worker_id: int
    rank: int
    lease: int
