"""Placement of an engine's previous incarnation: rank 0 reads it from the bus and leaves it in a file for all
ranks."""

import asyncio
import logging
from pathlib import Path

import msgspec

from bus import Bus, BusError, Received
from bus.protocol.subjects import Subjects
from deploy.client.last_plan_entry import before_verdicts
from engine_adapter.engine import EngineFailed
from engine_adapter.initial_placement import epoch_above, last_decided, last_is_left, leave_last
from fleet.facts.migrations import MigrationStaged
from fleet.facts.placements import PlacementCommitted
from fleet.handover import CoordinatorState
from fleet.placement import PlacementRecord
from migration.handover.coordinator import OpenHandover

READ_SECONDS = 10.0
"""Time limit for reading from the bus."""
_LOOK_SECONDS = 0.05

log = logging.getLogger(__name__)


async def agree(bus: Bus, subjects: Subjects, engine: str, rank: int, meeting: Path, seconds: float) -> None:
    """Return once all ranks of an engine can know its last placement.

    Raises EngineFailed if rank 0 does not report it within `seconds`.
    """
    if rank == 0:
        leave_last(meeting, await last_record(bus, subjects, engine))
        return
    try:
        async with asyncio.timeout(seconds):
            while not last_is_left(meeting):  # noqa: ASYNC110 another process makes the file
                await asyncio.sleep(_LOOK_SECONDS)
    except TimeoutError:
        raise EngineFailed(
            f"rank {rank}: rank 0 did not report within {seconds:g} s which epoch {engine} begins with; see"
            " why in its log"
        ) from None


async def last_record(bus: Bus, subjects: Subjects, engine: str) -> PlacementRecord | None:
    """Return the last epoch of the engine of this name; None: there was none, or the bus cannot tell.
    Starting at epoch 0 is always valid.

    The key is read before the log. A decision in the key is already in the log; a decision made in between
    may be included or not.
    """
    try:
        async with asyncio.timeout(READ_SECONDS):
            decided = await _decided(bus, subjects, engine)
            placement = await _latest(bus, subjects.placements(engine))
            newest = await _latest(bus, subjects.migrations(engine))
            migration = None if newest is None else await before_verdicts(bus, newest)
    except (BusError, TimeoutError) as error:
        log.warning(
            "%s starts with its configured placement: its last placement cannot be read: %s",
            engine,
            str(error) or "the bus did not answer",
        )
        return None
    record = last_decided(
        (
            placement.message
            if placement is not None and isinstance(placement.message, PlacementCommitted)
            else None
        ),
        migration if isinstance(migration, MigrationStaged) and migration.handover == decided else None,
    )
    if record is not None:
        log.info("%s resumes at epoch %d of its previous incarnation", engine, record.epoch)
    return record


async def next_epoch(bus: Bus, subjects: Subjects, engine: str) -> int:
    """Return the epoch under which an engine that moves its experts itself joins after a start: above all on
    record. BusError if the bus cannot tell.

    The key is read before the log: what is committed in between is then in one of the two."""
    async with asyncio.timeout(READ_SECONDS):
        claim = await bus.read_claim(subjects.handover_key(engine))
        placement = await _latest(bus, subjects.placements(engine))
        member = await _latest(bus, subjects.membership(engine))
    recorded = [
        record.epoch
        for received in (placement, member)
        if received is not None and (record := getattr(received.message, "placement", None)) is not None
    ]
    open_ = None
    if claim is not None:
        try:
            open_ = msgspec.json.decode(claim.value, type=OpenHandover).epoch
        except msgspec.DecodeError as error:
            raise BusError(f"the stored handover of engine {engine} cannot be read: {error}") from error
    return epoch_above(max(recorded, default=None), open_)


async def _latest(bus: Bus, subject: str) -> Received | None:
    stored = [received async for received in bus.replay(subject, latest=True, follow=False)]
    return stored[-1] if stored else None


async def _decided(bus: Bus, subjects: Subjects, engine: str) -> int | None:
    """Return the epoch of the engine's open handover if it was committed: its coordinator will finish it.
    Staging on all ranks is not yet a commit."""
    claim = await bus.read_claim(subjects.handover_key(engine))
    if claim is None:
        return None
    try:
        found = msgspec.json.decode(claim.value, type=OpenHandover)
    except msgspec.DecodeError as error:
        log.warning(
            "the stored handover of engine %s cannot be read, and counts as not decided: %s", engine, error
        )
        return None
    return found.handover if found.state is CoordinatorState.COMMITTING else None
