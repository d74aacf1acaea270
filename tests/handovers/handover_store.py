"""Durable state in `handover_parties`: a key changed by compare-and-set, a log, and the history of events."""

import random
from dataclasses import dataclass, field

import msgspec

from fleet.facts.placements import PlacementCommitted
from fleet.handover import CoordinatorState
from migration.handover.coordinator import OpenHandover, Record
from tests.handovers.handover_fake_memory import Unsafe


@dataclass(eq=False)
class Store:
    """State on which all parties agree, and test-only knowledge. story: events, as sentences; known:
    handovers that a lost store had known.
    """

    dice: random.Random
    now: float = 0.0
    key: bytes | None = None
    revision: int = 0
    log: list[Record] = field(default_factory=list)
    decided: dict[tuple[int, int], set[CoordinatorState]] = field(default_factory=dict)
    """by incarnation and handover"""
    story: list[str] = field(default_factory=list)
    known: frozenset[tuple[int, int]] = frozenset()
    life: int = 0

    def claim(self, value: OpenHandover, revision: int | None) -> bool:
        """Compare-and-set."""
        if not self.accepts(revision):
            return False
        self.key, self.revision = msgspec.json.encode(value), self.revision + 1
        states = self.decided.setdefault((value.worker_id, value.handover), set())
        states.add(value.state)
        if {CoordinatorState.COMMITTING, CoordinatorState.ABORTING} <= states:
            raise self.unsafe(f"handover {value.handover} is both committed and aborted")
        return True

    def accepts(self, revision: int | None) -> bool:
        """Return True if it is the present one; None: there is none."""
        return revision == (None if self.key is None else self.revision)

    @property
    def open(self) -> OpenHandover | None:
        return None if self.key is None else msgspec.json.decode(self.key, type=OpenHandover)

    def committed(self) -> PlacementCommitted | None:
        return next((one for one in reversed(self.log) if isinstance(one, PlacementCommitted)), None)

    def tell(self, sentence: str) -> None:
        self.story.append(f"{self.now:6.2f}  {sentence}")

    def unsafe(self, promise: str) -> Unsafe:
        return Unsafe("\n".join([promise, *self.story[-60:]]))
