"""Simulated reads of experts between ranks. The small cells are really copied, after the time that the
experts' real size takes on the link between the two ranks."""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from engine_adapter.simulated.model.config import SimulatedConfig
from engine_adapter.simulated.model.faults import Faults
from engine_adapter.simulated.model.memory import SimulatedCells
from engine_adapter.transfer.address_validation import OpenRead, check_read, own_address
from engine_adapter.transfer.parts import CellFormat
from engine_adapter.transfer.port import AddressRefused, Landed, PeerGone, Pull, Pulled
from fleet.requests.handovers import MemoryAddress


class SimulatedLinks:
    """Links between all ranks of one engine. Concurrent reads of one rank queue on its link."""

    def __init__(self, config: SimulatedConfig, faults: Faults, chance: Callable[[float], bool]) -> None:
        """chance: returns True with this probability."""
        self._config = config
        self._faults = faults
        self._chance = chance
        self._ranks: dict[str, tuple[int, SimulatedCells]] = {}
        """Rank and memory by name."""

    def join(self, rank: int, memory: SimulatedCells) -> "SimulatedTransfer":
        """Add a rank, and return its transfer backend."""
        self._ranks[f"rank-{rank}"] = (rank, memory)
        return SimulatedTransfer(self, rank, memory)

    def memory(self, name: str) -> tuple[int, SimulatedCells] | None:
        """Return the rank and memory of a name. None: unknown name."""
        return self._ranks.get(name)

    @property
    def expert_bytes(self) -> int:
        """Real size of an expert of the model, as opposed to a cell."""
        return self._config.model_shape.expert_bytes

    def seconds(self, reader: int, source: int, size: float, now: float) -> float:
        """Real seconds to read `size` bytes of experts, of their real size."""
        config, node = self._config, self._config.node_of_rank
        speed = config.rank_bytes_per_second if node[reader] == node[source] else config.node_bytes_per_second
        return config.time_scale * size / speed * self._faults.factor("slow_reads", reader, now)

    def fails(self, kind: str, reader: int, now: float) -> bool:
        """Draw whether a fault of this kind hits a rank's read or one of its ranges."""
        return self._chance(self._faults.share(kind, reader, now))


class SimulatedTransfer:
    """Transfer backend of one rank (`engine_adapter.transfer.port.Transfer`)."""

    name = "simulated"
    opened_bytes = 0

    def __init__(self, links: SimulatedLinks, rank: int, memory: SimulatedCells) -> None:
        self._links = links
        self._rank = rank
        self._memory = memory
        self._own = own_address(memory)
        self.real_bytes = links.expert_bytes / CellFormat.of(memory).whole_bytes
        """Real bytes of an expert per byte of its cell."""
        self._free_at = 0.0
        """Time at which the link has finished earlier reads."""
        self._landing: set[asyncio.TimerHandle] = set()

    def address(self, address: MemoryAddress) -> MemoryAddress:
        return msgspec.structs.replace(address, agent=f"rank-{self._rank}")

    def reaches(self, address: MemoryAddress) -> bool:
        return self._links.memory(address.agent) is not None

    async def pull(
        self, address: MemoryAddress, pulls: Sequence[Pull], seconds: float, landed: Landed | None = None
    ) -> Pulled:
        check_read(address, pulls, self._own)
        found = self._links.memory(address.agent)
        if found is None:
            raise AddressRefused(f"{address.agent!r} is not a rank of this engine")
        source, memory = found
        loop, reading = asyncio.get_running_loop(), OpenRead()
        began = loop.time()
        size = self.real_bytes * sum(pull.bytes for pull in pulls)
        self._free_at = max(self._free_at, began) + self._links.seconds(self._rank, source, size, began)

        def land() -> None:
            self._landing.discard(landing)
            now = loop.time()
            if self._links.fails("break_reads", self._rank, now):
                return reading.end(PeerGone(f"rank {source} is gone (injected fault): read another replica"))
            for pull in pulls:
                here = self._memory.cell(pull.cell)[pull.offset : pull.offset + pull.bytes]
                here[:] = memory.cell(pull.source)[pull.source_offset : pull.source_offset + pull.bytes]
                if self._links.fails("corrupt_reads", self._rank, now):
                    here[-1] ^= 0xFF
            return reading.end(Pulled(round(size), now - began))

        landing = loop.call_at(self._free_at, land)
        self._landing.add(landing)
        return await reading.wait(seconds, f"reading {len(pulls)} ranges from rank {source}")

    def forget(self, address: MemoryAddress) -> None:
        """Do nothing: ranks of one engine end together."""

    def busy(self, active: bool) -> None:
        """Do nothing: the source takes no part in a read."""

    async def close(self) -> None:
        """Cancel pending reads. They never land and never settle."""
        for landing in self._landing:
            landing.cancel()
        self._landing.clear()
