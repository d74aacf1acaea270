"""One rank of one incarnation of an engine, and the bus on which it reports."""

from dataclasses import dataclass
from typing import Any

from bus import Bus
from bus.protocol.subjects import Subjects
from engine_adapter.engine import EngineDescription


@dataclass(frozen=True, slots=True)
class RankContext:
    """Common inputs of all reports and handovers of a rank."""

    bus: Bus
    subjects: Subjects
    engine: str
    worker_id: int
    about: EngineDescription

    @property
    def rank(self) -> int:
        return self.about.rank

    @property
    def name(self) -> str:
        """Name in logs and of tasks."""
        return f"rank {self.rank} of {self.engine}"

    @property
    def address(self) -> tuple[str, int, int]:
        """Engine, worker and rank: the arguments of the subjects at which a rank is asked."""
        return self.engine, self.worker_id, self.rank

    @property
    def sender(self) -> dict[str, Any]:
        """Fields that say, in each of its reports, whose report it is."""
        return {
            "engine": self.engine,
            "worker_id": self.worker_id,
            "rank": self.rank,
            "model": self.about.model,
        }
