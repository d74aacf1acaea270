"""Curves and crossings of an engine's layouts, as reports state them."""

from collections.abc import Sequence
from itertools import combinations

from fleet.layout_times import LayoutName
from fleet.requests.layouts import LayoutCrossing, StepTimeCurve
from migration.layouts.live_curves import LiveCurves

_POINTS = 16
"""Batches of a curve."""


def curves_at(curves: LiveCurves, names: Sequence[LayoutName], context: float) -> tuple[StepTimeCurve, ...]:
    """Return the curve of each layout at a context, at batches evenly spaced in their logarithm; () if
    nothing was measured."""
    if not names:
        return ()
    common = curves.curves.measured_range
    ratio = common.most / common.fewest
    batches = sorted({round(common.fewest * ratio ** (at / (_POINTS - 1))) for at in range(_POINTS)})
    return tuple(
        StepTimeCurve(
            layout=name,
            sequences=tuple(batches),
            seconds=tuple(curves.step_seconds(name, batch, context) for batch in batches),
            deviation=tuple(curves.deviation(name, batch, context) for batch in batches),
        )
        for name in names
    )


def crossings_at(
    curves: LiveCurves, names: Sequence[LayoutName], context: float
) -> tuple[LayoutCrossing, ...]:
    """Return where the curves of any two layouts cross at a context, as they are believed now, ascending."""
    corrected = curves.corrected()
    found = [
        LayoutCrossing(sequences=each.sequences, below=each.below, above=each.above)
        for one, other in combinations(names, 2)
        for each in corrected.crossings(one, other, context)
    ]
    return tuple(sorted(found, key=lambda one: one.sequences))
