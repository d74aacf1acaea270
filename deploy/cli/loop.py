"""`roost top`, `migration pause|resume|status`: the loop that closes by itself, watched and steered.

What does the work is imported when its command runs: the NATS client is not for every command.
"""

from typing import Annotated

import typer

from deploy.terminal.options import CONFIG, JSON, NATS, ConfigOption, JsonOption, KeyFileOption, NatsOption, UrlOption, bus_from, key_from

migration = typer.Typer(
    name="migration",
    help="Let the planner make plans by itself, or not: pause, resume, status. Single migrations: roost migrate, roost plan --apply, roost rollback.",
    no_args_is_help=True,
)


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command("top")(top)
    app.add_typer(migration)


def top(
    interval: Annotated[float, typer.Option("--interval", metavar="SECONDS", min=0.1, help="Between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, and end.")] = False,
    url: UrlOption = None,
    api_key_file: KeyFileOption = None,
    nats: NatsOption = NATS,
    as_json: JsonOption = JSON,
    config: ConfigOption = CONFIG,
) -> None:
    """Show what roost status shows live, with what happens below it, until q or Ctrl-C. With --url: the servers given by --backend.

    Where the output is no terminal it is text, one page per interval; with --json one object per line.
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
    reason: Annotated[str, typer.Option("--reason", help="Why, for those who wonder later that nothing moves.")] = "",
    nats: NatsOption = NATS,
    as_json: JsonOption = JSON,
    config: ConfigOption = CONFIG,
) -> None:
    """Make no plans until it is resumed, also after a restart of the planner; what operators ask for is still carried out.

    It moves no experts back: roost rollback does.
    """
    from deploy.views.loop import show_steering

    show_steering(bus_from(config, nats), True, reason, as_json=as_json)


@migration.command()
def resume(nats: NatsOption = NATS, as_json: JsonOption = JSON, config: ConfigOption = CONFIG) -> None:
    """Make plans again, and carry out those that pay."""
    from deploy.views.loop import show_steering

    show_steering(bus_from(config, nats), False, "", as_json=as_json)


@migration.command("status")
def migration_status(nats: NatsOption = NATS, as_json: JsonOption = JSON, config: ConfigOption = CONFIG) -> None:
    """Whether plans are made without being asked for, and since when not; roost status tells the rest."""
    from deploy.views.loop import show_steering

    show_steering(bus_from(config, nats), None, "", as_json=as_json)
