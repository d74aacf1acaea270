"""Shared parts of all commands: options, settings, output, and user-facing errors."""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from bus.config import BusConfig
from bus.protocol.roles import Role
from deploy.config import ConfigError, Configuration, Key
from deploy.process import FAILURE, print_error
from deploy.run_directory import Running, home, live_runs
from deploy.security.credentials import of_run
from deploy.security.exposure import missing_at_ranks, missing_at_router
from deploy.security.tls import CertificateError, ServerTls
from deploy.settings import WorkerConfig, read_settings
from engine_adapter.serving.admission import NoSecret, RouterAdmission
from fleet.redaction import without_secrets
from router.config import RouterConfig
from router.credentials import RouterCredentials

USAGE = 2
"""Exit status of a command with invalid arguments or configuration."""

LARGEST_EXACT = 2**53
"""Largest magnitude below which every integer is exact as a double."""

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Read settings from this file instead of ./roost.toml."),
]
CONFIG: Path | None = None
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
JSON = False
NatsOption = Annotated[
    str | None,
    typer.Option(
        "--nats",
        metavar="URL",
        help="NATS server, e.g. nats://127.0.0.1:4222.  \\[default: that of the running `roost up`]",
    ),
]
NATS: str | None = None
ClientKeysOption = Annotated[
    Path | None,
    typer.Option(
        "--client-keys",
        metavar="FILE",
        help=(
            "Keys file written by `roost key new`. With it, clients must present a key; without it, they need"
            " none."
        ),
    ),
]
CaOption = Annotated[
    Path | None,
    typer.Option(
        "--ca", metavar="FILE", help="PEM file of the certificate authorities for an https:// router."
    ),
]
TlsCertOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert",
        metavar="FILE",
        help="PEM file of the server certificate; with --tls-key it enables TLS.",
    ),
]
TlsKeyOption = Annotated[
    Path | None, typer.Option("--tls-key", metavar="FILE", help="PEM file of the certificate's key.")
]
TlsTerminatedOption = Annotated[
    bool,
    typer.Option("--tls-terminated", help="A proxy or a service mesh terminates TLS: listen without it."),
]
InsecureOption = Annotated[
    bool, typer.Option("--insecure", help="Allow listening for other machines without keys and TLS.")
]
ProcessesOption = Annotated[
    int | None,
    typer.Option(
        "--processes",
        min=1,
        help="Router processes that share the port and their state.  \\[default: 1]",
        show_default=False,
    ),
]
ModelShapeOption = Annotated[
    str | None,
    typer.Option(
        "--model-shape",
        help="simulated: deepseek-v3, qwen3-235b or demo.  \\[default: demo]",
        show_default=False,
    ),
]
AccessLogOption = Annotated[
    str | None,
    typer.Option(
        "--access-log",
        metavar="FILE|none",
        help="Destination of request lines; a file may be rotated.  \\[default: standard output]",
        show_default=False,
    ),
]
Flags = Mapping[Key, tuple[str, Any]]


def show(text: str) -> None:
    """Print plain text to standard output and flush: a pipe may wait for each line."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """Print a remark to standard error."""
    sys.stderr.write(f"roost: {text}\n")


def in_json(value: Any) -> str:
    """Return JSON for programs; integers that a double cannot represent (64-bit ids) become text."""
    return msgspec.json.encode(_safe(msgspec.to_builtins(value))).decode()


def _safe(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _safe(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_safe(inner) for inner in value]
    return str(value) if isinstance(value, int) and abs(value) > LARGEST_EXACT else value


def console() -> Console:
    """Return the console for coloured text on standard output, if that is a terminal. Lines are never cut."""
    return Console(highlight=False, soft_wrap=True)


def printable(text: str) -> str:
    """Remove terminal control sequences from text of other sources."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print aligned columns; nothing is wrapped or cut, whatever the width of the terminal."""
    lines = [[escape(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(head, *lines, strict=True)]
    out = console()
    for row in (head, *lines):
        text = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        out.print(f"[bold]{text}[/bold]" if row is head else text)


def fail(text: str, status: int = FAILURE) -> NoReturn:
    """End the command with a user-facing error."""
    print_error(text)
    raise typer.Exit(status)


def settings_from(file: Path | None, flags: Flags, *parts: type) -> Configuration:
    """Return the effective configuration; end the command if these parts cannot use it."""
    try:
        settings = read_settings(file, os.environ, Path.cwd()).with_flags(flags)
    except ConfigError as error:
        fail(str(error), USAGE)
    check(settings, *parts)
    return settings


def door_flags(
    section: str, cert: Path | None, key: Path | None, *, terminated: bool, insecure: bool
) -> Flags:
    """Return the settings from `--tls-cert`, `--tls-key`, `--tls-terminated` and `--insecure`."""
    return {
        (section, "tls_cert"): ("--tls-cert", cert and cert.absolute()),
        (section, "tls_key"): ("--tls-key", key and key.absolute()),
        (section, "tls_terminated"): ("--tls-terminated", terminated or None),
        (section, "insecure"): ("--insecure", insecure or None),
    }


def check_router_door(config: RouterConfig) -> None:
    """End the command if the router's listen address lacks its security, or a file of keys, secrets or
    certificates is unusable."""
    _secured(missing_at_router(config), insecure=config.insecure)
    try:
        RouterCredentials.read(config)
        ServerTls.of(config.tls_cert, config.tls_key)
    except (OSError, ValueError) as error:
        fail(str(error), USAGE)


def check_rank_doors(config: WorkerConfig, *, secret_is_made: bool = False) -> None:
    """Check the listen addresses of an engine's ranks in the same way. secret_is_made: the command generates
    the fleet secret, if no file is set."""
    _secured(missing_at_ranks(config, secret_is_made=secret_is_made), insecure=config.insecure)
    try:
        RouterAdmission(config.fleet_secret_file)
        ServerTls.of(config.tls_cert, config.tls_key)
    except (NoSecret, CertificateError) as error:
        fail(str(error), USAGE)


def check_engine_installed(settings: Configuration) -> None:
    """End the command when its engines compute with torch, and torch is not installed."""
    embedded = settings.part(WorkerConfig).engine == "embedded"
    missing = [name for name in ("torch", "safetensors") if embedded and find_spec(name) is None]
    if missing:
        fail(
            f"the embedded engine needs {' and '.join(missing)}: pip install 'roost[engine]', or choose"
            " --engine simulated",
            USAGE,
        )


def _secured(complaint: str | None, *, insecure: bool) -> None:
    if complaint is not None and not insecure:
        fail(f"{complaint}; --insecure does so all the same", USAGE)


def check(settings: Configuration, *parts: type) -> None:
    """End the command if these parts cannot use their settings."""
    try:
        settings.check(*parts)
    except ConfigError as error:
        fail(str(error), USAGE)


def engine_flags(
    file: Path | None,
    kind: str | None,
    *,
    ranks: int | None,
    checkpoint: Path | None,
    model_shape: str | None,
) -> Flags:
    """Return the settings from `--engine`, `--ranks`, `--model` and `--model-shape`; end the command if one
    belongs to another engine kind.

    kind: as given; None: as configured.
    """
    given: Flags = {("worker", "engine"): ("--engine", kind)}
    chosen = settings_from(file, given, WorkerConfig).part(WorkerConfig).engine
    for option, value, owner in (
        ("--model", checkpoint, "embedded"),
        ("--model-shape", model_shape, "simulated"),
    ):
        if value is not None and chosen != owner:
            fail(f"{option} belongs to --engine {owner}, and these engines are {chosen}", USAGE)
    if chosen == "simulated":
        return {
            **given,
            ("simulated", "ranks"): ("--ranks", ranks),
            ("simulated", "shape"): ("--model-shape", model_shape),
        }
    return {
        **given,
        ("engine", "ranks"): ("--ranks", ranks),
        ("engine", "checkpoint"): ("--model", checkpoint and checkpoint.absolute()),
    }


def running() -> Running | None:
    """Return this user's running `roost up`; end the command if there are several."""
    found = [run for run in live_runs(home(os.environ)) if run.nats]
    if len(found) > 1:
        fail(
            "several fleets are running; name one with --nats:"
            f" {', '.join(without_secrets(str(run.nats)) for run in found)}",
            USAGE,
        )
    return found[0] if found else None


def router_processes(servers: Sequence[str]) -> tuple[str, ...]:
    """Return the URLs of single router processes of this user's runs on any of these NATS servers."""
    return tuple(
        url
        for run in live_runs(home(os.environ))
        if set(str(run.nats).split(",")) & set(servers)
        for url in run.routers
    )


UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help=(
            "URL of the router that serves the backends (--backend, \\[backends.NAME]); these are not on any"
            " bus."
        ),
    ),
]
KeyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file", metavar="FILE", help="File whose first line is a key accepted by the router."
    ),
]


def router_url(settings: Configuration) -> str:
    """Return the URL of the configured router, or that of the running fleet."""
    chosen = settings.part(RouterConfig)
    if all(
        setting.source == "default"
        for (section, key), setting in settings.items()
        if section == "router" and key in ("host", "port")
    ):
        run = running()
        if run is not None and run.router is not None:
            return run.router
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(chosen.host, chosen.host)
    return f"http{'' if chosen.tls_cert is None else 's'}://{host}:{chosen.port}"


def key_from(file: Path | None) -> str | None:
    """Return the key in a file; end the command if it cannot be read."""
    try:
        return None if file is None else file.read_text(encoding="utf-8").split("\n")[0].strip()
    except OSError as error:
        fail(str(error), USAGE)


def access_log_flag(named: str | None) -> Flags:
    """Return the setting from `--access-log`: a file, relative to this working directory, or one of the words
    "-" and "none"."""
    return {
        ("up", "access_log"): (
            "--access-log",
            named if named in (None, "-", "none") else str(Path(named).absolute()),
        )
    }


def bus_flags(nats: str | None) -> Flags:
    """Return the setting from `--nats`: one URL, or several of one cluster separated by commas."""
    return {("bus", "urls"): ("--nats", None if nats is None else nats.split(","))}


def names_bus(settings: Configuration) -> bool:
    """Return whether a source other than the defaults sets the NATS server."""
    sources = dict(settings.items())
    return any(sources["bus", key].source != "default" for key in ("url", "urls"))


def bus_from(config: Path | None, nats: str | None) -> BusConfig:
    """Return the bus configuration (--nats, the configuration, or the running fleet), with the operator's
    login on a fleet of this user."""
    return with_login(with_bus(settings_from(config, bus_flags(nats), BusConfig)), "operator").part(BusConfig)


def with_login(settings: Configuration, role: Role, engine: str | None = None) -> Configuration:
    """Return the configuration with a role's login on the NATS server of this user's running fleet; unchanged
    if another server or login is set."""
    bus = settings.part(BusConfig)
    if bus.credentials_file is not None:
        return settings
    for run in live_runs(home(os.environ)):
        if run.credentials is not None and set(str(run.nats).split(",")) & set(bus.servers):
            return settings.with_flags(
                {("bus", "credentials_file"): ("the running fleet", of_run(run, role, engine))}
            )
    return settings


def with_bus(settings: Configuration) -> Configuration:
    """Return the configuration with the running fleet's NATS address if none was set."""
    if names_bus(settings):
        return settings
    run = running()
    return (
        settings
        if run is None
        else settings.with_flags(
            {
                ("bus", "urls"): ("the running fleet", str(run.nats).split(",")),
                ("bus", "namespace"): ("the running fleet", run.namespace),
            }
        )
    )
