"""`roost up`: run a whole fleet on this machine."""

import json
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from deploy.config import Configuration
from deploy.http.sockets import CannotListen
from deploy.local.fleet import Fleet, serve_and_reload
from deploy.local.nats_server import NoNats
from deploy.local.router_sockets import RouterSockets
from deploy.local.supervise import UnitFailed
from deploy.process import run as run_process
from deploy.reload import Read
from deploy.run_directory import RunDirectory, home, run_directory
from deploy.settings import (
    DEMO_CHECKPOINT,
    SECTIONS,
    UpConfig,
    WorkerConfig,
    engine_ranks,
    read_settings,
    served_model,
)
from deploy.telemetry.tracing_config import TracingError, exporters
from deploy.terminal.options import (
    CONFIG,
    NATS,
    USAGE,
    AccessLogOption,
    ClientKeysOption,
    ConfigOption,
    Flags,
    InsecureOption,
    ModelShapeOption,
    ProcessesOption,
    TlsCertOption,
    TlsKeyOption,
    TlsTerminatedOption,
    access_log_flag,
    check_engine_installed,
    check_rank_doors,
    check_router_door,
    console,
    door_flags,
    engine_flags,
    fail,
    settings_from,
)
from engine_adapter.config import EmbeddedConfig
from fleet.redaction import without_secrets
from router.config import RouterConfig


class OwnEngineKind(StrEnum):
    """Engine kinds that `roost up` can start."""

    embedded = "embedded"
    simulated = "simulated"


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("up")(up)


def up(
    engines: Annotated[
        int | None,
        typer.Option("--engines", min=0, help="Number of engines.  \\[default: 1]", show_default=False),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", min=1, help="Number of ranks of each engine.  \\[default: 2]", show_default=False
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            metavar="FOLDER",
            help="Checkpoint folder (Hugging Face Qwen3-MoE).  \\[default: the demo model]",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            help="Prefix of engine names: NAME-0, NAME-1, ...  \\[default: engine]",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", help="Port of the router; 0: any free port.  \\[default: 8600]", show_default=False
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            "--host", help="Address the router listens on.  \\[default: 127.0.0.1]", show_default=False
        ),
    ] = None,
    nats: Annotated[
        str | None,
        typer.Option("--nats", metavar="URL", help="Use this NATS server instead of starting a private one."),
    ] = NATS,
    engine: Annotated[
        OwnEngineKind | None,
        typer.Option(
            "--engine",
            help=(
                "embedded: Roost's own engine; simulated: no weights, GPU speeds from a model.  \\[default:"
                " embedded]"
            ),
            show_default=False,
        ),
    ] = None,
    model_shape: ModelShapeOption = None,
    processes: ProcessesOption = None,
    client_keys: ClientKeysOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    tls_terminated: TlsTerminatedOption = False,
    insecure: InsecureOption = False,
    access_log: AccessLogOption = None,
    spans: Annotated[
        Path | None,
        typer.Option(
            "--spans", metavar="FILE", help="Append every OpenTelemetry span to this file, as JSON lines."
        ),
    ] = None,
    config: ConfigOption = CONFIG,
) -> None:
    """Run NATS, engines, tracker, planner and router on this machine. Ctrl-C stops everything and removes its
    files.

    SIGHUP (roost reload): read file and environment again.
    """
    flags: Flags = {
        ("up", "engines"): ("--engines", engines),
        ("up", "nats"): ("--nats", nats),
        ("worker", "name"): ("--name", name),
        **engine_flags(config, engine, ranks=ranks, checkpoint=model, model_shape=model_shape),
        ("router", "port"): ("--port", port),
        ("router", "host"): ("--host", host),
        ("router", "processes"): ("--processes", processes),
        ("router", "api_key_file"): ("--client-keys", client_keys and client_keys.absolute()),
        **door_flags("router", tls_cert, tls_key, terminated=tls_terminated, insecure=insecure),
        **access_log_flag(access_log),
        ("tracing", "spans"): ("--spans", spans and spans.absolute()),
    }
    settings = settings_from(config, flags, *SECTIONS.values())
    check_router_door(settings.part(RouterConfig))
    check_rank_doors(settings.part(WorkerConfig), secret_is_made=True)
    if settings.part(UpConfig).engines:
        check_engine_installed(settings)
    try:
        exporters(os.environ)
    except TracingError as error:
        fail(str(error), USAGE)

    def read() -> Configuration:
        return read_settings(config, os.environ, Path.cwd()).with_flags(flags)

    status = run_process(
        _up(settings, read), expected=(UnitFailed, CannotListen, NoNats, OSError), fast_loop=False
    )
    if status == 0:
        console().print("stopped; nothing is left behind")
    raise typer.Exit(status)


async def _up(settings: Configuration, read: Read) -> None:
    out = console()
    router = settings.part(RouterConfig)
    with RouterSockets.listening(router) as doors, run_directory(home(os.environ)) as run:
        out.print(f"[dim]starting; logs are in {run.path}[/dim]")
        async with Fleet(
            settings, run, os.environ, lambda text: out.print(f"  {text}", markup=False)
        ) as fleet:
            await fleet.start_up(doors)
            _print_summary(settings, fleet, run)
            try:
                await serve_and_reload(fleet, read)
            finally:
                out.print("stopping; running requests finish first, unless you press Ctrl-C again")
                # the routers close their copies; new connections are then refused instead of waiting in ours
                doors.close()


def _print_summary(settings: Configuration, fleet: Fleet, run: RunDirectory) -> None:
    """Print the running parts and a first request to try."""
    out, model = console(), served_model(settings)
    ranks, engines = engine_ranks(settings), settings.part(UpConfig).engines
    out.print(
        f"\n[bold]Roost is up[/bold]: {engines} engine{'s' * (engines != 1)} of {ranks}"
        f" rank{'s' * (ranks != 1)} serving {model!r}"
    )
    for name, place in (
        ("router", fleet.router_url),
        ("NATS", without_secrets(fleet.nats_url)),
        ("logs", run.path),
        ("logins", fleet.logins),
    ):
        if place is None:
            continue
        out.print(f"  {name:7} {place}")
    if fleet.router_urls:
        out.print(f"  each router process alone, for /metrics and /health: {' '.join(fleet.router_urls)}")
    for launcher in fleet.engines:
        out.print(f"  {launcher.name:7} {' '.join(launcher.urls)}")
    about, path, body = first_request(model, demo=_serves_demo_model(settings))
    if about:
        out.print(f"\n{about}", markup=False)
    if router_keys := settings.part(RouterConfig).api_key_file:
        out.print(f"\nClients need a key of {router_keys}: add -H 'authorization: Bearer KEY'", markup=False)
    out.print(
        f"\nTry:\n  curl -N {fleet.router_url}{path} -H 'content-type: application/json' -d '{body}'",
        markup=False,
    )
    out.print("\nCtrl-C stops everything.")


DEMO_PROMPT = "class Parser:\n    def __init__(self"
"""Prompt that the demo model continues as Python. The model was trained on source code and manual pages, not
on conversations."""


def first_request(model: str, *, demo: bool) -> tuple[str, str, str]:
    """Return a line about the model, then the path and the JSON body of a suitable first request."""
    asked: dict[str, object] = {"model": model, "stream": True, "max_tokens": 64, "temperature": 0}
    if demo:
        about = (
            "The demo model is a toy: 5 M parameters, 4 layers of 32 experts, trained on source code and"
            " manual pages.\nIt continues text and does not answer questions."
        )
        return about, "/v1/completions", json.dumps({**asked, "prompt": DEMO_PROMPT})
    return (
        "",
        "/v1/chat/completions",
        json.dumps({**asked, "messages": [{"role": "user", "content": "Tell me about Debian."}]}),
    )


def _serves_demo_model(settings: Configuration) -> bool:
    embedded = settings.part(WorkerConfig).engine == "embedded"
    return embedded and Path(settings.part(EmbeddedConfig).folder).resolve() == DEMO_CHECKPOINT.resolve()
