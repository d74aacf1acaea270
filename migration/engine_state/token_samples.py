"""Experts of sampled tokens, which one token needs together. Pure; bounded; the time is an argument."""

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fleet.experts import ModelShape
from fleet.routings import SAMPLED_TOKENS

MAX_REQUESTS = 256
"""Requests kept per engine."""
MAX_BYTES = 16 << 20
"""Memory of an engine's sampled tokens."""


class TokenSamples:
    """Sampled tokens of an engine's recent requests.

    Where requests are many, the rate of taking them is limited, so that the kept ones span `seconds`
    and represent that time, not the last moment.
    """

    def __init__(self, shape: ModelShape) -> None:
        self._shape = (SAMPLED_TOKENS, shape.layers, shape.top_k)
        self._experts = shape.experts
        each = 2 * SAMPLED_TOKENS * shape.layers * shape.top_k
        self._kept: deque[NDArray[np.uint16]] = deque(maxlen=max(1, min(MAX_REQUESTS, MAX_BYTES // each)))
        self._allowed = float(MAX_REQUESTS)
        self._at = -np.inf

    def add(self, requests: Sequence[bytes], now: float, seconds: float) -> None:
        """Add the tokens of finished requests, each uint16 [tokens, layers, k]. ValueError, without any
        change, if they do not fit the model."""
        found = [self._checked(request) for request in requests]
        most = self._kept.maxlen or 1
        self._allowed = min(most, self._allowed + max(now - self._at, 0.0) * most / seconds)
        self._at = now
        taken = found[: int(self._allowed)]
        self._allowed -= len(taken)
        self._kept.extend(taken)

    def _checked(self, request: bytes) -> NDArray[np.uint16]:
        if len(request) != 2 * np.prod(self._shape):
            raise ValueError(f"{len(request)} bytes of sampled tokens; expected uint16 {list(self._shape)}")
        experts = np.frombuffer(request, "<u2").reshape(self._shape)
        if int(experts.max()) >= self._experts:
            raise ValueError(f"a sampled token with expert {experts.max()}; the model has {self._experts}")
        return experts

    def clear(self) -> None:
        """Forget all: demand has changed."""
        self._kept.clear()
        self._allowed = float(MAX_REQUESTS)

    def recent(self) -> NDArray[np.uint16] | None:
        """Return uint16 [requests, tokens, layers, k], oldest first; None: there are none."""
        return np.stack(self._kept) if self._kept else None
