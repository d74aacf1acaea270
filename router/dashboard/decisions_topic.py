"""Topic `decisions`: the recent decisions of a router process."""

import time
from collections.abc import Iterator
from itertools import islice

from router.dashboard.topic import Topic
from router.dashboard.views.decisions import (
    SHOWN,
    DecisionFilter,
    DecisionList,
    DecisionRow,
    decision_row,
    filtered,
)
from router.scheduling.decision import Decision
from router.service import RouterService


class DecisionsTopic(Topic):
    """The newest decisions. A row is made once."""

    name = "decisions"

    def __init__(self, service: RouterService) -> None:
        self._service = service
        self._clock_began = time.time() - service.clock()
        """Unix seconds at 0 of the router's clock"""
        self._rows: dict[str, DecisionRow] = {}
        """rows of the last view, by decision id"""

    def view(self) -> DecisionList:
        known = self._rows
        newest = list(islice(self._recent(), SHOWN))
        self._rows = {
            decision.id: known.get(decision.id) or decision_row(decision, at) for decision, at in newest
        }
        return self._listed(list(self._rows.values()))

    def search(self, wanted: DecisionFilter) -> DecisionList:
        """Return the newest decisions that a filter admits."""
        return self._listed([decision_row(*each) for each in filtered(self._recent(), wanted)])

    def _listed(self, rows: list[DecisionRow]) -> DecisionList:
        return DecisionList(rows=rows, kept=len(self._service.scheduler.kept))

    def _recent(self) -> Iterator[tuple[Decision, float]]:
        for booked in self._service.scheduler.kept.recent():
            yield booked.decision, self._clock_began + booked.booked_at
