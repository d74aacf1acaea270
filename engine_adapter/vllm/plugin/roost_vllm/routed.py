"""Experts of each request, put together from the rows of the steps that computed its tokens. Pure."""

import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from roost_vllm.wire import MAX_FRAME_BYTES, RoutedRequest

NUDGE = "roost-nudge-"
"""In the id of a request of the agent's own, which keeps an idle engine at work and is no demand."""
_MOST_BYTES = MAX_FRAME_BYTES // 2
"""of one request's experts: a longer one stays unknown, because its report would fit no frame"""
_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_CHILD = re.compile(r"^\d+_(?=chatcmpl-|cmpl-)")


class Span(NamedTuple):
    """Rows of one request in a step's batch."""

    request: str
    first: int
    """position of its first token in this step"""
    tokens: int


def external_id(request: str) -> str:
    """Return the id that the front end gave a request, without vLLM's own eight random digits, and without
    the number of a choice."""
    return _CHILD.sub("", _SUFFIX.sub("", request))


class _Route:
    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.first = 0
        self.rows: list[NDArray[np.int16]] = []
        self.positions = 0

    def add(self, first: int, rows: NDArray[np.int16]) -> None:
        """Add rows from a position on. Positions that are computed anew replace the old ones; after a gap the
        older part is dropped, because a report covers one range."""
        if first != self.first + self.positions:
            self._keep_until(first)
        if not self.positions:
            self.first = first
        self.rows.append(rows.copy())  # a view would keep the rows of all requests of its step
        self.positions += len(rows)

    def _keep_until(self, end: int) -> None:
        is_gap = end > self.first + self.positions
        kept = 0 if is_gap else max(0, end - self.first)
        self.rows = [np.concatenate(self.rows)[:kept]] if kept else []
        self.positions = kept


class RoutedRequests:
    """Requests that run, and the experts of their tokens."""

    def __init__(self) -> None:
        self._routes: dict[str, _Route] = {}

    def begin(self, request: str, prompt_tokens: int) -> None:
        """Follow a request. One that is begun again (resumed) keeps what is known."""
        if NUDGE not in request:
            self._routes.setdefault(request, _Route(prompt_tokens))

    def add(self, spans: Iterable[Span], experts: NDArray[np.int16]) -> None:
        """Add a step: experts [rows, layers, k], the spans' rows one after another."""
        at = 0
        for span in spans:
            route = self._routes.get(span.request)
            if route is not None and span.tokens:
                route.add(span.first, experts[at : at + span.tokens])
                if route.positions * experts[0].nbytes > _MOST_BYTES:
                    del self._routes[span.request]
            at += span.tokens

    def end(self, requests: Iterable[str]) -> list[RoutedRequest]:
        """Return the reports of requests that ended, and forget them. Those without a row have none."""
        ended = [(name, self._routes.pop(name, None)) for name in requests]
        return [_report(name, route) for name, route in ended if route is not None and route.positions]


def _report(name: str, route: _Route) -> RoutedRequest:
    experts = np.concatenate(route.rows)
    return RoutedRequest(
        request=external_id(name),
        prompt_tokens=route.prompt_tokens,
        first=route.first,
        positions=route.positions,
        top_k=experts.shape[2],
        experts=experts.astype("<i2").tobytes(),
    )
