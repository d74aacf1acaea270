"""The `roost` command: composition root that chooses every implementation."""

import os
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from deploy.cli import bus, doctor, events, inspection, keys, layout, loop, migrate, operate, parts, plan, up
from deploy.run_directory import home, settings_file
from deploy.sections import SECTIONS
from deploy.terminal.command_settings import running, settings_from
from deploy.terminal.options import ConfigOption, JsonOption
from deploy.terminal.output import fail, show
from engine_adapter.embedded import kernels as layers
from migration import kernels as solvers
from router import kernels as decisions

app = typer.Typer(
    name="roost",
    help="Front-end router and migration service for Mixture-of-Experts LLM serving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for group in (up, parts, inspection, events, plan, migrate, layout, loop, operate, keys, bus, doctor):
    group.add_to(app)


def _version(given: bool) -> None:
    if given:
        try:
            show(version("roost"))
        except PackageNotFoundError:
            show("not installed (running from a source folder)")
        for name, form in (("solvers", solvers), ("decisions", decisions)):
            show(f"{name}: {f'in Python; {form.missing}' if form.missing else 'compiled'}")
        show(f"embedded engine: {f'by torch; {layers.missing}' if layers.missing else 'compiled'}")
        raise typer.Exit


@app.callback()
def _root(
    print_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Front-end router and migration service for Mixture-of-Experts LLM serving."""


@app.command()
def config(
    in_force: Annotated[
        bool,
        typer.Option(
            "--running",
            help="Print the settings of the running fleet instead of those a new fleet would get.",
        ),
    ] = False,
    file: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the effective roost.toml and the source of every key."""
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
    """Run the command line."""
    app(prog_name="roost")
