"""`roost bus`: users and permissions for a NATS server that you run yourself."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bus.config import BusConfig
from bus.protocol.permissions import rights
from bus.protocol.roles import ROLES
from bus.protocol.subjects import Subjects
from deploy.run_directory import private_text
from deploy.security.credentials import ServerCredentials
from deploy.terminal.command_settings import settings_from
from deploy.terminal.options import ConfigOption, JsonOption
from deploy.terminal.output import USAGE, fail, show

AUTHORIZATION = "authorization.conf"
EngineOption = Annotated[
    list[str] | None,
    typer.Option("--engine", metavar="NAME", help="An engine with its own user; repeat for more."),
]


class RoleName(StrEnum):
    """Roles on the bus."""

    engine = "engine"
    router = "router"
    tracker = "tracker"
    planner = "planner"
    operator = "operator"
    subscriber = "subscriber"


def add_to(app: typer.Typer) -> None:
    """Register these commands."""
    group = typer.Typer(help="Users and permissions for your own NATS server.", no_args_is_help=True)
    group.command("permissions")(permissions)
    group.command("credentials")(credentials)
    app.add_typer(group, name="bus")


def permissions(
    role: Annotated[
        RoleName | None,
        typer.Option("--role", help="Print this role only.  \\[default: all]", show_default=False),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            "--engine", metavar="NAME", help="Engine that the role `engine` may publish for; *: any."
        ),
    ] = "*",
    as_json: JsonOption = False,
    config: ConfigOption = None,
) -> None:
    r"""Print the subjects that each role may publish and subscribe to, in the namespace of \[bus]."""
    subjects = Subjects(settings_from(config, {}, BusConfig).part(BusConfig).namespace)
    try:
        found = {
            name: rights(name, subjects, engine if name == "engine" else "*")
            for name in ROLES
            if role is None or name == role.value
        }
    except ValueError as error:
        fail(str(error), USAGE)
    if as_json:
        content = {
            name: {"publish": may.publish, "subscribe": may.subscribe, "allow_responses": may.answers}
            for name, may in found.items()
        }
        return show(json.dumps(content))
    for name, may in found.items():
        show(f"{name}{': answers requests that reach it' if may.answers else ''}")
        for what, allowed in (("publish", may.publish), ("subscribe", may.subscribe)):
            for subject in dict.fromkeys(allowed):
                show(f"  {what:9} {subject}")
    return None


def credentials(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="Folder for the files; created if missing. Existing files are replaced."
        ),
    ],
    engine: EngineOption = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            metavar="URL",
            help="URL of the server, written to the files for use by your own programs.",
        ),
    ] = None,
    config: ConfigOption = None,
) -> None:
    r"""Generate random logins for every role and every --engine.

    Writes one file per user, for the setting \[bus] credentials_file, and the server's `authorization` block.
    Include FOLDER/authorization.conf in the configuration of nats-server, then reload that server
    (nats-server --signal reload). To rotate the secrets, run this command again: the server disconnects
    clients that use an old secret; they read their file again and reconnect.
    """
    namespace = settings_from(config, {}, BusConfig).part(BusConfig).namespace
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        drawn = ServerCredentials(folder, Subjects(namespace), engine or ())
        drawn.write_files(url)
        private_text(folder / AUTHORIZATION, drawn.authorization())
    except (OSError, ValueError) as error:
        fail(str(error), USAGE)
    show(
        f"logins of {len(ROLES) + len(engine or ())} users are in {folder}; include {folder / AUTHORIZATION}"
        " in the server's configuration"
    )
