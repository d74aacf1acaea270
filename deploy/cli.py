"""The `roost` command: the composition root, where every choice between implementations is made."""

import os
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from deploy import commands_bus, commands_keys, commands_loop, commands_migrate, commands_operate, commands_parts, commands_plan, commands_up, commands_views
from deploy.commandline import CONFIG, JSON, ConfigOption, JsonOption, fail, running, settings_from, show
from deploy.rundir import home, settings_file
from deploy.settings import SECTIONS

app = typer.Typer(
    name="roost",
    help="Front-end router and migration service for Mixture-of-Experts LLM serving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
commands_up.add_to(app)
commands_parts.add_to(app)
commands_views.add_to(app)
commands_plan.add_to(app)
commands_migrate.add_to(app)
commands_loop.add_to(app)
commands_operate.add_to(app)
commands_keys.add_to(app)
commands_bus.add_to(app)


def _version(wanted: bool) -> None:
    if wanted:
        try:
            show(version("roost"))
        except PackageNotFoundError:
            show("not installed (running from a source folder)")
        raise typer.Exit


@app.callback()
def _root(wanted: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")] = False) -> None:
    """Front-end router and migration service for Mixture-of-Experts LLM serving."""


@app.command()
def config(
    in_force: Annotated[bool, typer.Option("--running", help="What the running fleet uses, not what it would use if it started now.")] = False,
    file: ConfigOption = CONFIG,
    as_json: JsonOption = JSON,
) -> None:
    """Print the effective roost.toml, every key with its source."""
    if in_force:
        run = running()
        if run is None:
            fail("no fleet of this user runs here")
        try:
            file = settings_file(home(os.environ), run)
        except OSError as error:
            fail(f"its settings cannot be read: {error}")
        if not as_json:
            show(file.read_text(encoding="utf-8").rstrip("\n"))
            return
    settings = settings_from(file, {}, *SECTIONS.values())
    show(settings.as_json() if as_json else settings.as_toml().rstrip("\n"))


def main() -> None:
    """Entry point of the command."""
    app(prog_name="roost")
