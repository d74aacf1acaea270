"""`roost drain`, `reload`: what an operator does to a fleet that runs.

What does the work is imported when its command runs: the NATS client is not for every command.
"""

import os
from typing import Annotated

import typer

from deploy.run_directory import home, live_runs
from deploy.terminal.options import CONFIG, JSON, NATS, USAGE, ConfigOption, JsonOption, KeyFileOption, NatsOption, UrlOption, bus_from, fail, key_from
from fleet.redaction import without_secrets

RELOAD_SECONDS = 15.0
"""for every router process and the planner to say what became of the new settings"""


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    for command in (drain, reload):
        app.command(command.__name__)(command)


def drain(
    place: Annotated[str, typer.Argument(metavar="ENGINE[/RANK]", help="An engine, or one of its ranks, e.g. engine-0/1 (see roost status).")],
    undo: Annotated[bool, typer.Option("--undo", help="Let it have new requests again.")] = False,
    wait: Annotated[
        float | None, typer.Option("--wait", metavar="SECONDS", min=0, help="Wait until nothing runs there any more; status 1 if it takes longer.")
    ] = None,
    reason: Annotated[str, typer.Option("--reason", help="Why, for those who ask where requests went.")] = "",
    url: UrlOption = None,
    api_key_file: KeyFileOption = None,
    nats: NatsOption = NATS,
    as_json: JsonOption = JSON,
    config: ConfigOption = CONFIG,
) -> None:
    r"""Send no new requests to a rank or an engine; what runs there goes on. It holds for all routers, until it is undone or the engine starts again.

    With --url: to a server given by --backend or \[backends.NAME], at this router process, until it is undone or the process ends.
    """
    from deploy.views.backends import drain_backend
    from deploy.views.decision import RouterAddress
    from deploy.views.operation import show_drain

    if undo and (wait is not None or reason):
        fail("--undo takes neither --wait nor --reason", USAGE)
    if url is not None:
        drain_backend(RouterAddress(url, key_from(api_key_file)), place, undo=undo, wait=wait, reason=reason, as_json=as_json)
        return
    show_drain(bus_from(config, nats), place, undo=undo, wait=wait, reason=reason, as_json=as_json)


def reload(nats: NatsOption = NATS, as_json: JsonOption = JSON) -> None:
    """Let the running `roost up` read file and environment again, and its routers and planner use what may change while they run; 1 if it is refused.

    A `roost router` or `roost planner` that runs alone does the same on SIGHUP.
    """
    from deploy.views.operation import show_reload

    runs = [run for run in live_runs(home(os.environ)) if run.router and run.nats and run.nats == (nats or run.nats)]
    if not runs:
        fail("no fleet of this user with a router runs here; a `roost router` of one process reads its settings again on SIGHUP: kill -HUP PID")
    servers = sorted({str(run.nats) for run in runs})
    if len(servers) > 1:
        fail(f"several fleets are running; name one with --nats: {', '.join(map(without_secrets, servers))}", USAGE)
    show_reload(runs, RELOAD_SECONDS, as_json=as_json)
