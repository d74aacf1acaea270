"""`roost drain` and `roost reload`: operate a running fleet.

Implementations are imported when a command runs, because not every command needs the NATS client.
"""

import os
from typing import Annotated

import typer

from deploy.run_directory import home, live_runs
from deploy.terminal.command_settings import bus_from, key_from, one_server
from deploy.terminal.options import ConfigOption, JsonOption, KeyFileOption, NatsOption, UrlOption
from deploy.terminal.output import USAGE, fail

RELOAD_SECONDS = 15.0
"""Time limit for every router process and the planner to report the result of a reload."""


TargetArgument = Annotated[
    str,
    typer.Argument(metavar="ENGINE[/RANK]", help="Engine or rank, e.g. engine-0/1 (see roost status)."),
]
UndoOption = Annotated[bool, typer.Option("--undo", help="Resume routing to a drained rank or engine.")]
WaitOption = Annotated[
    float | None,
    typer.Option(
        "--wait",
        metavar="SECONDS",
        min=0,
        help="Wait until the target is idle; exit with status 1 if that takes longer.",
    ),
]
ReasonOption = Annotated[str, typer.Option("--reason", help="Reason, shown wherever the drain is reported.")]


def add_to(app: typer.Typer) -> None:
    """Register these commands."""
    for command in (drain, reload):
        app.command(command.__name__)(command)


def drain(
    place: TargetArgument,
    undo: UndoOption = False,
    wait: WaitOption = None,
    reason: ReasonOption = "",
    url: UrlOption = None,
    api_key_file: KeyFileOption = None,
    nats: NatsOption = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
) -> None:
    r"""Stop routing new requests to a rank or an engine. Running requests continue. The drain applies to all
    routers until it is undone or the engine restarts.

    With --url: drain a server given by --backend or \[backends.NAME]. That drain applies to this router
    process, until it is undone or the process ends.
    """
    from deploy.views.backends import drain_backend
    from deploy.views.decision import RouterAddress
    from deploy.views.operation import show_drain

    if undo and (wait is not None or reason):
        fail("--undo takes neither --wait nor --reason", USAGE)
    if url is not None:
        drain_backend(
            RouterAddress(url, key_from(api_key_file)),
            place,
            undo=undo,
            wait=wait,
            reason=reason,
            as_json=as_json,
        )
        return
    show_drain(bus_from(config, nats), place, undo=undo, wait=wait, reason=reason, as_json=as_json)


def reload(nats: NatsOption = None, as_json: JsonOption = False) -> None:
    """Make the running `roost up` read its file and environment again. Its routers and planner apply the
    settings that may change at run time. Exit status 1: a process refused the new settings.

    A `roost router` or `roost planner` started separately does the same on SIGHUP.
    """
    from deploy.views.operation import show_reload

    runs = [
        run
        for run in live_runs(home(os.environ))
        if run.router and run.nats and run.nats == (nats or run.nats)
    ]
    if not runs:
        fail(
            "no fleet of this user with a router runs here; a `roost router` of one process reads its"
            " settings again on SIGHUP: kill -HUP PID"
        )
    one_server(sorted({str(run.nats) for run in runs}))
    show_reload(runs, RELOAD_SECONDS, as_json=as_json)
