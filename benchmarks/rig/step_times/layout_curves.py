"""Step times of a real engine in EP, EXPERTS_TP and TP, with and without an emulated network.

Two ranks measure them at their start, as they state them when they join. `engine.link_seconds` delays each
token that is sent to another rank and back, `engine.collective_seconds` each exchange, in every layout alike.
Of several starts, each figure is the lowest, so that load of the machine counts little. The last columns say
which layout is the fastest, and by how much it is ahead of the slowest.

python -m benchmarks.rig.step_times.layout_curves --quick"""

from collections.abc import Sequence

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.rig.report import AsJson, Check, Quick, Report, Target
from benchmarks.rig.step_times.timed_engine import timed_engine
from benchmarks.step_model import KV_BLOCKS, RANKS, model
from fleet.layout_times import LayoutTimes
from fleet.placement import linear

NETWORKS = ((0.0, 0.0), (1e-5, 0.0), (5e-5, 0.0), (2e-5, 1e-4))
"""seconds of a token, and of an exchange"""
NOISE = 0.05
"""difference of step times that says which layout is faster"""


def fastest(starts: Sequence[tuple[LayoutTimes, ...]]) -> NDArray[np.float64]:
    """Return the lowest seconds of several starts: float64 [layouts, contexts, sequences]."""
    found: NDArray[np.float64] = np.array([[one.seconds for one in times] for times in starts]).min(axis=0)
    return found


def main(
    quick: bool = Quick,
    as_json: bool = AsJson,
    check: bool = Check,
    random: bool = typer.Option(False, "--random", help="a larger model of random weights"),
) -> None:
    """Compare layouts by their measured steps."""
    names = ("EP", "EXPERTS_TP", "TP")
    columns = ["token us", "exchange us", "context", "sequences", *(f"{name} ms" for name in names)]
    report = Report("steps of layouts", [*columns, "fastest", "ahead of the slowest %"])
    crossings = []
    with model(random) as (checkpoint, shape):
        placement = linear(layers=shape.layers, experts=shape.experts, ranks=RANKS)
        for link, exchange in NETWORKS[:2] if quick else NETWORKS:
            starts = []
            for _ in range(2 if quick else 5):
                delays = {"link_seconds": link, "collective_seconds": exchange}
                with timed_engine(checkpoint, placement, KV_BLOCKS, **delays) as engine:
                    starts.append(engine.layout_times)
                    engine.steps()
            seconds = fastest(starts)
            for at, context in enumerate(starts[0][0].contexts):
                for column, count in enumerate(starts[0][0].sequences):
                    cell = seconds[:, at, column]
                    ahead = 100 * (1 - cell.min() / cell.max())
                    times = (1e3 * float(one) for one in cell)
                    report.add(
                        1e6 * link, 1e6 * exchange, context, count, *times, names[int(cell.argmin())], ahead
                    )
            lead = seconds[2] / seconds[0] - 1
            crossings.append(bool((lead < -NOISE).any() and (lead > NOISE).any()))
            report.notes.append(
                f"token {1e6 * link:g} us, exchange {1e6 * exchange:g} us: TP beside EP takes"
                f" {100 * lead.min():+.0f} % at best and {100 * lead.max():+.0f} % at worst"
            )
    crossing = Target("networks of which EP and TP cross by 5 %", sum(crossings), 1, at_least=True, unit="")
    report.targets.append(crossing)
    report.finish(as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
