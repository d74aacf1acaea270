"""Speeds of the targets of a table, from all sources: corrected where speeds are stated
(`router.scheduling.speed_correction`), estimated where none is (`router.scheduling.speed_estimation`), and
marked where nothing was measured. Pure; the time comes in as an argument.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.fleet_state.target_table import REFERENCE, RankKey, Target, TargetTable
from router.scheduling.filters import QueuePrices
from router.scheduling.speed_correction import SpeedCorrection
from router.scheduling.speed_estimation import SpeedEstimation


class KnownSpeeds(NamedTuple):
    """Speeds of all targets of a table.

    factors: float64 [2, targets], multipliers of predicted prefill and decode seconds; None: 1. measured:
    bool [2, targets], true where these seconds are stated or measured, false where they are a guess that only
    compares targets; None: all true.
    """

    factors: NDArray[np.float64] | None
    measured: NDArray[np.bool_] | None
    queue: QueuePrices


class TargetSpeeds:
    """State: both kinds of measured speeds, and the result of `known` for each model's target table since
    their last change.
    """

    def __init__(self, limit: float) -> None:
        """limit: a stated speed is corrected by at most this factor, in either direction; 1: no
        correction."""
        self._stated = SpeedCorrection(limit)
        self._learnt = SpeedEstimation()
        self._known: dict[str, tuple[TargetTable, KnownSpeeds]] = {}

    def reconfigure(self, limit: float) -> None:
        """Apply another limit from the next refresh on."""
        self._stated.reconfigure(limit)

    def known(self, target_table: TargetTable) -> KnownSpeeds:
        """Return the speeds with which to price a decision over this target table."""
        found = self._known.get(target_table.model)
        if found is None or found[0] is not target_table:
            found = self._known[target_table.model] = target_table, self._find(target_table)
        return found[1]

    def of(self, target_table: TargetTable, target: int) -> tuple[float, float]:
        """Return the factors of predicted prefill and decode seconds of one target, an index into the
        table."""
        factors = self.known(target_table).factors
        return (1.0, 1.0) if factors is None else (float(factors[0, target]), float(factors[1, target]))

    def prefilled(
        self, target: Target, row: int, predicted_s: float, beside_s: float, observed_s: float
    ) -> None:
        """Record a first token, as `SpeedCorrection.prefilled` and `SpeedEstimation.first_token`. row: of the
        load tables.
        """
        if target.stated_speed is not None:
            self._stated.prefilled(target.key, row, predicted_s, beside_s, observed_s)
        else:
            self._learnt.first_token(target.engine.model, target.key, predicted_s, beside_s, observed_s)

    def stepped(
        self,
        key: RankKey,
        row: int,
        predicted_s: float,
        observed_s: float,
        weight: float = 1.0,
        *,
        pool: str | None,
    ) -> None:
        """Record a decode step. pool: base model of a server that states no speed; None: the server states
        one.
        """
        if pool is None:
            self._stated.stepped(key, row, predicted_s, observed_s, weight)
        else:
            self._learnt.step(pool, key, predicted_s, observed_s, weight)

    def refresh(self, now: float) -> None:
        """Compute factors from the evidence, which ages. Until then decisions are priced as before."""
        self._stated.refresh(now)
        self._learnt.age(now)
        self._known.clear()

    def forget_worker(self, worker_id: int) -> None:
        """Drop an incarnation. Its rows may be reused by another."""
        self._stated.forget_worker(worker_id)
        self._learnt.forget_worker(worker_id)
        self._known.clear()

    def _find(self, target_table: TargetTable) -> KnownSpeeds:
        factors = None
        if self._stated.measured:
            keys = (target.key for target in target_table.targets)
            self._stated.know(zip(keys, target_table.rows.tolist(), strict=True))
            factors = self._stated.factors(target_table.rows)
        measured: NDArray[np.bool_] | None = None
        unstated = (~target_table.stated).nonzero()[0].tolist()
        if unstated:
            factors = np.ones((2, len(target_table.targets))) if factors is None else factors
            measured = np.ones(factors.shape, np.bool_)
            guess = _guess(target_table, factors)
            for at in unstated:
                target = target_table.targets[at]
                found = self._learnt.of(target.engine.model, target.key)
                for kind, (factor, known) in enumerate(found):
                    factors[kind, at], measured[kind, at] = factor if known else guess[kind], known
        return KnownSpeeds(
            factors,
            None if measured is None or measured.all() else measured,
            _queue_prices(target_table, factors, measured),
        )


def _guess(target_table: TargetTable, factors: NDArray[np.float64]) -> tuple[float, float]:
    """Return factors of the reference for unmeasured targets: as fast as the first target that states a
    speed, for a fair comparison.
    """
    stated = target_table.stated.nonzero()[0]
    if not len(stated):
        return 1.0, 1.0
    at = int(stated[0])
    step = float(target_table.step_s[at] + target_table.decode_sequence_s[at]) / (
        REFERENCE.step + REFERENCE.decode_sequence
    )
    return (
        float(factors[0, at] * target_table.prefill_token_s[at]) / REFERENCE.prefill_token,
        float(factors[1, at]) * step,
    )


def _queue_prices(
    target_table: TargetTable, factors: NDArray[np.float64] | None, measured: NDArray[np.bool_] | None
) -> QueuePrices:
    """Return the queue prices. A queued token is free where the speed was not measured, so nothing is refused
    for it.
    """
    token_s = target_table.prefill_token_s if factors is None else target_table.prefill_token_s * factors[0]
    return QueuePrices.of(token_s if measured is None else np.where(measured[0], token_s, 0.0))
