"""Names held for engines that a test makes up."""

import logging

import msgspec

from bus import Bus, BusError
from bus.claims import Holder, holder_of
from fleet.facts.engines import EngineJoined


async def claim_name(bus: Bus, joined: EngineJoined) -> None:
    """Hold an engine's name for a worker, whoever held it before."""
    key = f"engine.{joined.engine}"
    try:
        now = await bus.read_claim(key)
        if now is None or holder_of(now).worker_id != joined.worker_id:
            value = msgspec.json.encode(Holder(worker_id=joined.worker_id, node=joined.node, beat=0))
            await bus.claim(key, value, None if now is None else now.revision)
    except BusError as error:
        logging.getLogger(__name__).debug("the name of %s is not claimed: %s", joined.engine, error)
