"""Requests to an engine for its description, its KV cache and its memory."""

from fleet.event import Event
from fleet.facts.dynamo_kv import KvEvent


class DescribeEngine(Event, frozen=True, kw_only=True):
    """Request to one engine for its `EngineJoined`."""

    worker_id: int


class KvSnapshotRequested(Event, frozen=True, kw_only=True):
    """Request to one rank for a snapshot of its KV cache and the sequence number of its last kv-events
    message.
    """

    worker_id: int
    rank: int
    after: int | None = None
    """a recent snapshot suffices if it includes the kv-events message of this number (-1: any); None: the
    present state
    """


class KvSnapshot(Event, frozen=True, kw_only=True):
    """Answer to `KvSnapshotRequested`: `events`, applied to an empty cache, give the state after message
    `sequence` of `publisher_id`.
    """

    worker_id: int
    rank: int
    publisher_id: int
    sequence: int
    """last kv-events message included; -1: none was sent yet"""
    events: tuple[KvEvent, ...]
    epoch: int = 0
    """as in `fleet.facts.dynamo_kv.RoutedKvEvent`"""


class DescribeMemory(Event, frozen=True, kw_only=True):
    """Request to one rank for the memory that it uses now."""

    worker_id: int
    rank: int


class MemoryDescribed(Event, frozen=True, kw_only=True):
    """Answer to `DescribeMemory`. Sizes are in bytes."""

    worker_id: int
    rank: int
    cell_bytes: int
    """size of a cell of expert memory"""
    cells: dict[str, int]
    """number of cells by use: in service `whole` and `sharded` (by the form of their layer) and `empty` (of
    slots without an expert), and `free`, `pulling`, `verifying`, `staged`, `draining` and `quarantined`
    (`fleet.handover.Cell`)
    """
    attention: int | None = None
    """weights of attention, with its norms and its table of positions; None: unknown, like the next four"""
    other_weights: int | None = None
    """all other weights beside experts: embeddings, gates, last norm and output"""
    kv_pool: int | None = None
    communicators: int | None = None
    """growth of the private memory while connections to other ranks and agents of transfers were opened"""
    runtime: int | None = None
    """private memory when the engine began to load: the interpreter and data of libraries"""
    note: str = ""
    """what the figures do not show, as text; empty: nothing"""
    ranks_in_process: int = 1
    """ranks of the engine in this process, which have the next four figures in common"""
    resident: int
    """resident size of the process; 0: the system does not state it"""
    resident_shared: int
    """part of it in shared memory: the rank's own cells and KV pool, and what it shares with other ranks"""
    resident_foreign: int
    """part of `resident_shared` beside the rank's own cells and KV pool: those of other ranks, mapped to be
    read, and buffers of communicators
    """
    resident_files: int
    """part of `resident` mapped from files: the code of libraries, which processes of a machine share"""
