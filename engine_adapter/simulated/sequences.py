"""State of one request in a simulated rank. Its routing trace is a row per token instead of a table."""

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_adapter.batching.sampling import TokenLogprobs
from engine_adapter.serving.generation import AnswerDelta, ScoredToken
from engine_adapter.serving.sequences import ServedSequence
from engine_adapter.simulated.model.routing_model import RoutingModel
from engine_adapter.simulated.model.text import Script
from fleet.routings import UNKNOWN


class RowTrace:
    """Rows of one request's tokens by position: a `RoutedExperts` with two bytes per position."""

    def __init__(self, routing: RoutingModel) -> None:
        self._routing = routing
        self._rows = array("h")

    @property
    def positions(self) -> int:
        return len(self._rows)

    def note(self, start: int, rows: NDArray[np.int16]) -> None:
        """Record the rows of the tokens at positions start, start + 1, and so on. A recomputed position is
        overwritten."""
        if start > len(self._rows):
            self._rows.extend([UNKNOWN] * (start - len(self._rows)))
        self._rows[start : start + len(rows)] = array("h", rows.tobytes())

    @property
    def nbytes(self) -> int:
        """Allocated memory in bytes. The table of `chosen` may be a thousand times as large."""
        return 2 * len(self._rows)

    def chosen(self) -> NDArray[np.int16]:
        return self._routing.chosen(np.array(self._rows, np.int16))


@dataclass(slots=True, eq=False, kw_only=True)
class SimulatedSequence(ServedSequence[RowTrace]):
    """One request, with the answer that it will get."""

    script: Script

    def next_delta(self, token: int, now: int) -> AnswerDelta:
        """Return the delta for a token that was just appended to `state`."""
        return self.emit(token, now, self._scored(token))

    def _scored(self, token: int) -> list[ScoredToken]:
        """Score a token with log-probability 0, because no other token was possible."""
        requested = self.request.sampling.logprobs
        if requested is None:
            return []
        return [
            ScoredToken(token, TokenLogprobs(0.0, ((token, 0.0),) if requested else ()), self.text.decoded)
        ]
