"""Reports of a simulated engine to layout policies, and estimates of its step times by calibration."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.rig.layout_loads.engine import SimulatedEngine
from benchmarks.rig.layout_loads.engine_model import StepTimes
from benchmarks.rig.layout_loads.schedule import Decide
from fleet.layout_times import LayoutName, LayoutTimes
from migration.layouts.curves_record import CurveKey
from migration.layouts.live_curves import LiveCurves
from migration.layouts.policy import LayoutLoad, LayoutPolicy

LIVE_NOISE = 0.01
"""relative error of the step times that reports tell"""


class Calibrated(NamedTuple):
    """Step times that were measured once, and follow the live steps."""

    curves: LiveCurves
    dice: np.random.Generator
    """draws the errors of live steps"""

    def observe(self, engine: SimulatedEngine) -> None:
        """Tell the curves the duration of the engine's decode steps, with an error."""
        if engine.running:
            context = engine.kv / engine.running
            seconds = engine.model.times[engine.layout].seconds(engine.running, context)
            error = float(np.exp(self.dice.normal(0.0, LIVE_NOISE)))
            self.curves.observe(engine.layout, engine.running, context, seconds * error, engine.at)


def decisions(policy: LayoutPolicy, calibrated: Calibrated | None = None) -> Decide:
    """Return the decisions of a policy that hears a report of the engine at every slot.

    calibrated: the step times that the policy decides by, if they follow the engine's.
    """
    reports = _Reports()

    def decide(engine: SimulatedEngine) -> LayoutName | None:
        load = reports.next(engine)
        if load is None:
            return None
        if calibrated is not None:
            calibrated.observe(engine)
        return policy.decide(load).target

    return decide


class _Reports:
    """Loads of one engine, each with the work since the one before."""

    def __init__(self) -> None:
        self._steps = self._prefilled = 0
        self._layout: LayoutName | None = None
        self._settled_at = float("-inf")

    def next(self, engine: SimulatedEngine) -> LayoutLoad | None:
        """Return the load; None while a switch is under way."""
        if engine.target is not None:
            return None
        if engine.layout != self._layout:
            if self._layout is not None:
                self._settled_at = engine.at
            self._layout = engine.layout
        load = LayoutLoad(
            at=engine.at,
            layout=engine.layout,
            running=engine.running,
            waiting=engine.waiting,
            kv_tokens=engine.kv,
            steps=engine.steps - self._steps,
            prefilled=engine.prefilled - self._prefilled,
            settled_at=self._settled_at,
        )
        self._steps, self._prefilled = engine.steps, engine.prefilled
        return load


def calibrated(
    times: Mapping[LayoutName, StepTimes],
    seed: int,
    sequences: Sequence[int] = (1, 5, 21, 98, 448, 2048),
    contexts: Sequence[int] = (256, 4096),
    noise: float = 0.02,
) -> Calibrated:
    """Return curves from measured times of every layout, each with a log-normal error of this standard
    deviation. times: what is measured; other times than the engine's make a wrong profile."""
    dice = np.random.default_rng(seed)
    found = []
    for layout, one in times.items():
        errors = np.exp(dice.normal(0.0, noise, (len(contexts), len(sequences)))).tolist()
        found.append(
            LayoutTimes(
                layout=layout,
                sequences=tuple(sequences),
                contexts=tuple(contexts),
                seconds=tuple(
                    tuple(
                        one.seconds(number, context) * error
                        for number, error in zip(sequences, row, strict=True)
                    )
                    for context, row in zip(contexts, errors, strict=True)
                ),
                noise=noise,
                prefill_token=one.prefill_token * float(np.exp(dice.normal(0.0, noise))),
            )
        )
    return Calibrated(LiveCurves(CurveKey(weights="", hardware="", ranks=8), found, 0.0), dice)
