"""`roost top` and `roost migration pause|resume|status`: watch and control the automatic control loop.

Implementations are imported when a command runs, because not every command needs the NATS client.
"""

from typing import Annotated

import typer

from deploy.terminal.command_settings import bus_from, key_from
from deploy.terminal.options import ConfigOption, JsonOption, KeyFileOption, NatsOption, UrlOption

migration = typer.Typer(
    name="migration",
    help=(
        "Control automatic planning: pause, resume, status. For single migrations use roost migrate, roost"
        " plan --apply or roost rollback."
    ),
    no_args_is_help=True,
)


def add_to(app: typer.Typer) -> None:
    """Register these commands."""
    app.command("top")(top)
    app.add_typer(migration)


def top(
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, help="Seconds between two updates.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one update and exit.")] = False,
    url: UrlOption = None,
    api_key_file: KeyFileOption = None,
    nats: NatsOption = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
) -> None:
    """Show the output of roost status live, with recent events below it, until q or Ctrl-C. With --url: show
    the servers given by --backend.

    If the output is not a terminal, print one page of text per interval; with --json print one object per
    line.
    """
    from deploy.views.backends import watch_backends
    from deploy.views.decision import RouterAddress
    from deploy.views.top import show_top

    if url is not None:
        watch_backends(RouterAddress(url, key_from(api_key_file)), interval, once=once, as_json=as_json)
        return
    show_top(bus_from(config, nats), interval, once=once, as_json=as_json)


@migration.command()
def pause(
    reason: Annotated[
        str, typer.Option("--reason", help="Reason, shown to anyone who asks why nothing moves.")
    ] = "",
    nats: NatsOption = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
) -> None:
    """Pause automatic planning until it is resumed. The pause survives a restart of the planner. Commands of
    operators are still executed.

    Pausing moves no experts back; use roost rollback for that.
    """
    from deploy.views.loop import show_loop_state

    show_loop_state(bus_from(config, nats), True, reason, as_json=as_json)


@migration.command()
def resume(nats: NatsOption = None, as_json: JsonOption = False, config: ConfigOption = None) -> None:
    """Resume automatic planning and carry out plans that pay off."""
    from deploy.views.loop import show_loop_state

    show_loop_state(bus_from(config, nats), False, "", as_json=as_json)


@migration.command("status")
def migration_status(
    nats: NatsOption = None, as_json: JsonOption = False, config: ConfigOption = None
) -> None:
    """Show if automatic planning is on, or since when it is paused. roost status shows everything else."""
    from deploy.views.loop import show_loop_state

    show_loop_state(bus_from(config, nats), None, "", as_json=as_json)
