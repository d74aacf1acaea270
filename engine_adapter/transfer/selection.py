"""Select the transfer backends of a rank."""

import logging

from engine_adapter.config import TransferConfig
from engine_adapter.engine import ExpertMemory
from engine_adapter.transfer.nixl import NixlTransfer
from engine_adapter.transfer.port import Transfer, TransferError
from engine_adapter.transfer.rate_limit import RateLimit
from engine_adapter.transfer.shared_memory import SharedTransfer, this_host

_log = logging.getLogger(__name__)


async def open_transfers(
    config: TransferConfig,
    memory: ExpertMemory,
    agent: str,
    *,
    one_machine: bool,
    limit: RateLimit | None = None,
) -> tuple[Transfer, ...]:
    """Return the transfer backends in order of preference. Those needed from the start are open. The caller
    closes them.

    agent: name of this rank's NIXL agent, if it gets one. one_machine: all ranks of the engine are on this
    machine. `auto` then defers opening NIXL until a rank must be read that shared memory cannot reach. NIXL
    takes a moment to load and then costs a few wake-ups per second. limit: rate limit of all reads of the
    rank. None: each backend has its own. TransferError when the requested backend, or every backend, is
    impossible here.
    """
    can_share = memory.descriptor >= 0 and bool(this_host())
    if config.backend == "shared":
        if not can_share:
            raise TransferError(
                "transfer.backend is shared, and this rank's memory cannot be shared (no memfd, or no /proc):"
                " set it to nixl, or to auto"
            )
        _log.info("experts are read through shared memory, and by no other backend")
        return (SharedTransfer(memory, config, limit),)
    over_network = NixlTransfer(memory, config, agent, limit)
    if config.backend == "nixl":
        await over_network.open()
        _log.info("experts are read over NIXL, and by no other backend")
        return (over_network,)
    shared = SharedTransfer(memory, config, limit)
    if can_share and one_machine:
        _log.info(
            "experts are read through shared memory: all ranks are on this machine; over NIXL only if that"
            " fails to reach one"
        )
        return shared, over_network
    return await _both(shared, over_network, can_share)


async def _both(shared: SharedTransfer, over_network: NixlTransfer, can_share: bool) -> tuple[Transfer, ...]:
    try:
        await over_network.open()
    except TransferError as error:
        if not can_share:
            raise
        _log.warning("experts can be read only by ranks of the same machine: %s", error)
        return (shared,)
    _log.info("experts are read through shared memory where it reaches, and else over NIXL")
    return shared, over_network
