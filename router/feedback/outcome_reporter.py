"""Reports of finished requests to the tracker: the keys of each request, and the prediction for the rank that
served it. Batched and bounded.
"""

import asyncio
import contextlib
import logging
from collections import deque
from itertools import groupby
from typing import NamedTuple

import numpy as np

from bus import Bus, BusError
from bus.protocol.subjects import Subjects
from fleet.facts.activity import RequestOutcome, RequestsFinished
from fleet.prediction import MAX_TOKENS
from fleet.signatures import PACKED, pack
from router.prefix_index.prompt import Prompt
from router.scheduling.decision import Decision
from router.telemetry.metrics import RouterMetrics

log = logging.getLogger(__name__)

BATCH = 64
MAX_WAITING = 4096
"""Finished requests that may wait to be reported; further ones are dropped and counted."""


class _Ended(NamedTuple):
    decision: Decision
    looked_up: "list[int]"


class OutcomeReporter:
    """Queue of finished requests. `note` is for the hot path and only queues; `run` publishes at a fixed
    interval, and at once when BATCH requests wait.
    """

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        metrics: RouterMetrics,
        *,
        seconds: float,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._publisher = bus.publisher(subjects.requests_finished)
        self._metrics = metrics
        self._seconds = seconds
        self._max_waiting = max_waiting
        self._waiting: deque[_Ended] = deque()
        self._many = asyncio.Event()

    def note(self, decision: Decision, prompt: Prompt, *, reported: bool = False) -> None:
        """Queue a choice that this decision's rank completed. Skipped if neither the engine nor its answer
        (`reported`) reports experts: then there is nothing to compare a prediction with.
        """
        engine = decision.target.engine
        if engine.shape is None or not (engine.capabilities.experts or reported):
            return
        if len(self._waiting) >= self._max_waiting:
            self._metrics.outcomes_dropped.inc()
            return
        looked_up = (
            slice(0, MAX_TOKENS) if decision.prediction is None else decision.prediction.request.looked_up
        )
        self._waiting.append(_Ended(decision, list(prompt.ids[looked_up])))
        if len(self._waiting) >= BATCH:
            self._many.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):  # the interval passed with less than a batch
                async with asyncio.timeout(self._seconds):
                    await self._many.wait()
            self._many.clear()
            while self._waiting:
                await self._publish([self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))])

    async def _publish(self, ended: list[_Ended]) -> None:
        for about, group in groupby(sorted(ended, key=_about), key=_about):
            outcomes = _outcomes(list(group))
            model, tables, clusters = about
            try:
                await self._publisher.publish(
                    RequestsFinished(model=model, tables=tables, clusters=clusters, requests=outcomes)
                )
            except BusError as error:
                log.warning("%d outcomes could not be reported: %s", len(outcomes), error)
                self._metrics.outcomes_dropped.inc(len(outcomes))
            else:
                self._metrics.outcomes_published.inc(len(outcomes))


def _about(ended: _Ended) -> tuple[str, int, int]:
    """Return model, tables version and cluster version; versions 0: there were no tables."""
    prediction = ended.decision.prediction
    return (
        (ended.decision.ask.model, 0, 0)
        if prediction is None
        else (ended.decision.ask.model, prediction.request.tables, prediction.request.clusters)
    )


def _outcomes(ended: list[_Ended]) -> tuple[RequestOutcome, ...]:
    """Convert requests whose decisions used the same tables."""
    predictions = [one.decision.prediction.request for one in ended if one.decision.prediction is not None]
    weights = [one.weights if one.prompt is None else one.prompt.predicted for one in predictions]
    packed = pack(np.stack(weights)) if weights else np.zeros((len(ended), PACKED), np.uint8)
    return tuple(_outcome(one, row.tobytes()) for one, row in zip(ended, packed, strict=True))


def _outcome(ended: _Ended, predicted: bytes) -> RequestOutcome:
    decision = ended.decision
    worker_id, rank = decision.target.key
    prediction, at = decision.prediction, decision.chosen
    # the tracker learns the worth of predictions: what a prefill worker reported is none
    is_predicted = prediction is not None and prediction.request.prompt is None
    priced = is_predicted and prediction is not None and bool(prediction.priced[at])
    return RequestOutcome(
        spread=_spread(decision) if priced else None,
        decision=decision.id,
        worker_id=worker_id,
        rank=rank,
        prefix=0 if prediction is None else prediction.request.prefix,
        tokens=_u32(ended.looked_up),
        session=decision.ask.keys.session,
        tenant=decision.ask.keys.tenant,
        predicted=predicted,
        predicted_local=float(prediction.local[at]) if prediction is not None and priced else None,
        prior_local=float(prediction.prior_local[at]) if prediction is not None and priced else None,
    )


def _spread(decision: Decision) -> float | None:
    """Return the lead of the most local candidate over the mean of the candidates of the chosen engine
    (`RequestOutcome.spread`).
    """
    prediction, engines = decision.prediction, decision.target_table.engine[decision.at]
    if prediction is None:
        return None
    beside = (prediction.local - prediction.prior_local)[engines == engines[decision.chosen]]
    return float(min(max(beside.max() - beside.mean(), 0.0), 1.0))


def _u32(ids: list[int]) -> bytes:
    """Encode as u32 little endian; ids were validated on entry."""
    return np.asarray(ids, "<u4").tobytes()
