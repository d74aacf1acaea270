"""`roost key`: create client keys for the router's keys file."""

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from deploy.terminal.command_settings import settings_from
from deploy.terminal.options import ConfigOption
from deploy.terminal.output import USAGE, fail, note, show
from router.access.api_keys import (
    ALL,
    DEFAULT_RIGHTS,
    KEY_PREFIX,
    RIGHTS,
    TENANT_FORM,
    is_tenant,
    key_line,
    parse_keys,
    parse_rights,
)
from router.config import RouterConfig

_SECRET_BYTES = 32
_RIGHTS_HELP = "; ".join(f"{name}: {about}" for name, about in {**RIGHTS, ALL: "every right"}.items())


def add_to(app: typer.Typer) -> None:
    """Register these commands."""
    key = typer.Typer(name="key", help="Keys that clients present to the router.", no_args_is_help=True)
    key.command("new")(new)
    key.callback()(_group)
    app.add_typer(key)


def _group() -> None:
    """Keys that clients present to the router."""


def new(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Tenant that owns the key.")],
    priority_class: Annotated[
        str | None,
        typer.Option(
            "--class",
            metavar="CLASS",
            help="Most urgent class that the key may request.  [default: \\[router] default_class]",
        ),
    ] = None,
    rights: Annotated[str, typer.Option("--rights", metavar="RIGHT,...", help=f"{_RIGHTS_HELP}.")] = ",".join(
        sorted(DEFAULT_RIGHTS)
    ),
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", metavar="FILE", help="Keys file to append to.  [default: \\[router] api_key_file]"
        ),
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Create a key. Print the secret once, and append its hashed line to the keys file.

    Without a keys file the line is printed instead. `roost reload` activates the key.
    """
    if not is_tenant(tenant):
        fail(f"TENANT must be {TENANT_FORM}; not {tenant!r}", USAGE)
    router = settings_from(config, {}, RouterConfig).part(RouterConfig)
    if priority_class is not None and priority_class not in router.classes:
        fail(f"--class {priority_class!r} is none of [router] classes: {', '.join(router.classes)}", USAGE)
    try:
        chosen = parse_rights(rights, "--rights: ")
    except ValueError as error:
        fail(str(error), USAGE)
    key = KEY_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
    line = key_line(key, tenant, priority_class, chosen)
    path = file or (None if router.api_key_file is None else Path(router.api_key_file))
    if path is not None:
        _add_line(path, line, router)
        note(
            f"its line is in {path}; `roost reload` makes it valid in routers that run. This is the only time"
            " that the key is shown:"
        )
    show(key)
    if path is None:
        show(line)


def _add_line(path: Path, line: str, router: RouterConfig) -> None:
    """Append a line to a keys file. A missing file is created with mode 0600.

    Ends the command if the resulting file would be invalid.
    """
    try:
        with os.fdopen(
            os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "r+", encoding="utf-8"
        ) as file:
            before = file.read()
            gap = "\n" if before and not before.endswith("\n") else ""
            parse_keys(before + gap + line, router.classes, router.default_class)
            file.write(f"{gap}{line}\n")
    except (OSError, ValueError) as error:
        fail(f"{path}: {error}")
