"""Options of `roost layout` for a model on hardware that is only considered."""

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
DEFAULT_HARDWARE, DEFAULT_RANKS, DEFAULT_CONTEXT = "h200-nvl", 8, 1024
