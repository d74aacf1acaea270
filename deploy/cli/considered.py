"""Options of `roost layout` for a model on hardware that is only considered."""

from pathlib import Path
from typing import Annotated

import typer

_PANEL = "Before buying: no bus, no engine"
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME|FILE",
        help="Compare layouts of a model that does not run yet: a bundled one (qwen3-235b, qwen3-30b,"
        " deepseek-v3, gpt-oss-120b, mixtral-8x7b, mixtral-8x22b) or its config.json.",
        rich_help_panel=_PANEL,
    ),
]
HardwareOption = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        metavar="NAME",
        help="h200-nvl, h100, b200 or a100.  \\[default: h200-nvl]",
        rich_help_panel=_PANEL,
    ),
]
RanksOption = Annotated[
    int | None, typer.Option("--ranks", help="GPUs of the engine.  \\[default: 8]", rich_help_panel=_PANEL)
]
ContextOption = Annotated[
    int | None,
    typer.Option("--context", help="Tokens of each sequence.  \\[default: 1024]", rich_help_panel=_PANEL),
]
KernelsOption = Annotated[
    str | None,
    typer.Option(
        "--kernels",
        metavar="NAME|FILE",
        help="Kernels that decode steps are predicted for: vllm, sglang, or a file of your own timings"
        " (docs/before-buying.md).  \\[default: both]",
        rich_help_panel=_PANEL,
    ),
]
PlotOption = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Write the curves of the layouts as a picture (.svg, .png; needs matplotlib).",
        rich_help_panel=_PANEL,
    ),
]
DEFAULT_HARDWARE, DEFAULT_RANKS, DEFAULT_CONTEXT = "h200-nvl", 8, 1024


def compare(
    model: str,
    hardware: str | None,
    ranks: int | None,
    context: int | None,
    kernels: str | None,
    plot: Path | None,
    *,
    as_json: bool,
) -> None:
    """Print what follows from dimensions, rates and timings. None: the default."""
    from deploy.terminal.output import in_json, note, show
    from deploy.views.considered import considered, show_sizes, sizes_record
    from deploy.views.predicted_steps import draw_plots, predicted, show_steps, steps_record

    one = considered(
        model,
        DEFAULT_HARDWARE if hardware is None else hardware,
        DEFAULT_RANKS if ranks is None else ranks,
        DEFAULT_CONTEXT if context is None else context,
    )
    found, why = predicted(one, kernels)
    if plot is not None and found:
        draw_plots(plot, one, found)
    elif plot is not None:
        note(f"{plot} is not written: there are no timings to draw")
    if as_json:
        show(in_json({**sizes_record(one), "decode": steps_record(one, found, why)}))
        return
    show_sizes(one)
    show_steps(one, found, why)
