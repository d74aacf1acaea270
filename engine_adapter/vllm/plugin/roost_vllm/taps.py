"""Experts of single requests, where this build of vLLM can tell them.

On the CPU the routers' capture hook gives the rows of a step, and the runner's batch says whose they are.
Under CUDA graphs no Python runs in a forward pass: there `--enable-return-routed-experts` (Model Runner V2)
copies the rows to the host, and the plugin reads them from what it hands to the scheduler. That path was read
in vLLM's source, and not run."""

import functools
import logging
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from roost_vllm.routed import NUDGE, RoutedRequests, Span
from roost_vllm.wire import RoutedRequest

logger = logging.getLogger("vllm.roost")

_PATCHED = "_roost_patched"


class RequestTap:
    """Requests of this rank's target: which of them run in a step, and the experts of their tokens."""

    def __init__(self, layers: int) -> None:
        self.is_counted = True
        """the step holds other requests than the agent's own"""
        self._requests = RoutedRequests()
        self._spans: list[Span] | None = None
        self._rows: list[torch.Tensor | None] = [None] * layers
        self._copied: deque[tuple[list[Span], np.ndarray]] = deque(maxlen=1000)

    def begin(self, scheduled: Any) -> list[RoutedRequest]:
        """Take a `SchedulerOutput`, and return the reports of requests that ended."""
        while self._copied:
            self._requests.add(*self._copied.popleft())
        reports = self._requests.end(scheduled.finished_req_ids)
        for request in scheduled.scheduled_new_reqs:
            self._requests.begin(request.req_id, request.prompt_len)
        self.is_counted = any(NUDGE not in name for name in scheduled.num_scheduled_tokens)
        self._spans = None
        return reports

    def forward(self, runner: Any, scheduled: Any) -> None:
        """Note whose rows the coming forward pass has, from the batch of Model Runner V1."""
        batch = getattr(runner, "input_batch", None)
        first = getattr(batch, "num_computed_tokens_cpu", None)
        if first is None:
            return
        tokens = scheduled.num_scheduled_tokens
        self._spans = [Span(name, int(first[at]), tokens[name]) for at, name in enumerate(batch.req_ids)]

    def capture(self, layer: int, experts: torch.Tensor) -> None:
        """Take the logical experts of one layer, [rows, k]."""
        if self._spans is not None:
            self._rows[layer] = experts

    def end_forward(self) -> None:
        """Add the rows of the forward pass to their requests."""
        spans, self._spans = self._spans, None
        rows, self._rows = self._rows, [None] * len(self._rows)
        known = [layer for layer in rows if layer is not None]
        if spans is None or len(known) < len(rows):
            return
        count = sum(span.tokens for span in spans)
        if min(len(layer) for layer in known) >= count:
            table = torch.stack([layer[:count] for layer in known], dim=1)
            self._requests.add(spans, table.to(torch.int16).numpy())

    def copied(self, layers: Sequence[int], pending: Any) -> None:
        """Take the rows of a `PendingAuxOutput`, which vLLM copied to the host itself. Called from its output
        thread. layers: numbers of the MoE layers."""
        spans, rows = _host_rows(pending, layers)
        if spans:
            self._copied.append((spans, np.concatenate(rows).astype(np.int16)))


def follow_captures(tap: RequestTap, model: Any) -> None:
    """Capture each MoE layer's experts, after whatever captures them already."""
    for at, layer in enumerate(model.moe_layers):
        router = getattr(layer, "router", None)
        if not hasattr(router, "set_capture_fn"):
            logger.warning("roost: layer %d has no capture hook: experts of requests stay unknown", at)
            return
        router.set_capture_fn(_chained(router.capture_fn, functools.partial(tap.capture, at)))


def _chained(
    first: Callable[[torch.Tensor], None] | None, second: Callable[[torch.Tensor], None]
) -> Callable[[torch.Tensor], None]:
    if first is None:
        return second

    def both(experts: torch.Tensor) -> None:
        first(experts)
        second(experts)

    return both


def follow_copies(copied: Callable[[Sequence[int], Any], None], model: Any) -> None:
    """Hand over the rows that `--enable-return-routed-experts` copies to the host. copied: takes the numbers
    of the MoE layers and a `PendingAuxOutput`. It must not raise."""
    module = sys.modules.get("vllm.distributed.aux_output_connector.worker")
    owner = getattr(module, "AuxOutputWorkerConnector", None)
    if owner is None or hasattr(owner, _PATCHED):
        return
    setattr(owner, _PATCHED, True)
    original = owner.process_output
    layers = [layer.layer_id for layer in model.moe_layers]

    @functools.wraps(original)
    def process_output(self: Any, pending: Any) -> Any:
        result = original(self, pending)
        copied(layers, pending)
        return result

    owner.process_output = process_output


def _host_rows(pending: Any, layers: Sequence[int]) -> tuple[list[Span], list[np.ndarray]]:
    """Return the spans of a `PendingAuxOutput` and the rows of each, [rows, MoE layers, k], without the
    tokens that speculative decoding rejected."""
    spans, rows = [], []
    ends = pending.query_start_loc
    for at, name in enumerate(pending.request_ids):
        part = pending.routed_experts[ends[at] : ends[at + 1] - int(pending.num_rejected[at])]
        spans.append(Span(name, int(pending.token_starts[at]), len(part)))
        rows.append(part[:, list(layers)])
    return spans, rows
