"""`roost up`: run a whole fleet on this machine."""

import json
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.supervised import supervise, supervised
from deploy.configuration_loader import Configuration
from deploy.local.fleet import Fleet, serve_and_reload
from deploy.local.router_sockets import RouterSockets
from deploy.reload import Read
from deploy.sections import DEMO_CHECKPOINT, SECTIONS, UpConfig, WorkerConfig, engine_ranks, served_model
from deploy.telemetry.tracing_config import TracingError, exporters
from deploy.terminal.command_settings import (
    Flags,
    access_log_flag,
    check_engine_installed,
    check_rank_security,
    check_router_security,
    checked,
    engine_flags,
    security_flags,
    settings_reader,
)
from deploy.terminal.options import (
    AccessLogOption,
    ClientKeysOption,
    ConfigOption,
    InsecureOption,
    ModelShapeOption,
    PortOption,
    ProcessesOption,
    RouterHostOption,
    SpansOption,
    TlsCertOption,
    TlsKeyOption,
    TlsTerminatedOption,
)
from deploy.terminal.output import USAGE, console, fail
from engine_adapter.config import EmbeddedConfig
from fleet.redaction import without_secrets
from fleet.text import counted
from router.config import RouterConfig


class OwnEngineKind(StrEnum):
    """Engine kinds that `roost up` can start."""

    embedded = "embedded"
    simulated = "simulated"


EnginesOption = Annotated[
    int | None, typer.Option("--engines", min=0, help="Number of engines.  \\[default: 1]")
]
RanksOption = Annotated[
    int | None, typer.Option("--ranks", min=1, help="Number of ranks of each engine.  \\[default: 2]")
]
ModelOption = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="FOLDER",
        help="Checkpoint folder (Hugging Face Qwen3-MoE).  \\[default: the demo model]",
    ),
]
PrefixOption = Annotated[
    str | None,
    typer.Option("--name", help="Prefix of engine names: NAME-0, NAME-1, ...  \\[default: engine]"),
]
OwnServerOption = Annotated[
    str | None,
    typer.Option("--nats", metavar="URL", help="Use this NATS server instead of starting a private one."),
]
KindOption = Annotated[
    OwnEngineKind | None,
    typer.Option(
        "--engine",
        help="embedded: Roost's own engine; simulated: no weights, GPU speeds from a model."
        "  \\[default: embedded]",
    ),
]


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("up")(up)


def up(
    engines: EnginesOption = None,
    ranks: RanksOption = None,
    model: ModelOption = None,
    name: PrefixOption = None,
    port: PortOption = None,
    host: RouterHostOption = None,
    nats: OwnServerOption = None,
    engine: KindOption = None,
    model_shape: ModelShapeOption = None,
    processes: ProcessesOption = None,
    client_keys: ClientKeysOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    tls_terminated: TlsTerminatedOption = False,
    insecure: InsecureOption = False,
    access_log: AccessLogOption = None,
    spans: SpansOption = None,
    config: ConfigOption = None,
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
        ("router", "api_key_file"): ("--client-keys", client_keys),
        **security_flags("router", tls_cert, tls_key, terminated=tls_terminated, insecure=insecure),
        **access_log_flag(access_log),
        ("tracing", "spans"): ("--spans", spans),
    }
    read = settings_reader(config, flags)
    settings = checked(read, *SECTIONS.values())
    check_router_security(settings.part(RouterConfig))
    check_rank_security(settings.part(WorkerConfig), secret_is_made=True)
    if settings.part(UpConfig).engines:
        check_engine_installed(settings)
    try:
        exporters(os.environ)
    except TracingError as error:
        fail(str(error), USAGE)
    status = supervise(_up(settings, read))
    if status == 0:
        console().print("stopped; nothing is left behind")
    raise typer.Exit(status)


async def _up(settings: Configuration, read: Read) -> None:
    with RouterSockets.listening(settings.part(RouterConfig)) as sockets:
        async with supervised(settings) as fleet:
            await fleet.start_up(sockets)
            _print_summary(settings, fleet)
            try:
                await serve_and_reload(fleet, read)
            finally:
                console().print("stopping; running requests finish first, unless you press Ctrl-C again")
                # the routers close their copies; new connections are then refused instead of waiting in ours
                sockets.close()


def _print_summary(settings: Configuration, fleet: Fleet) -> None:
    """Print the running parts and a first request to try."""
    out, model = console(), served_model(settings)
    dashboard = f"{fleet.router_url}/dashboard" if settings.part(RouterConfig).dashboard else None
    ranks, engines = engine_ranks(settings), settings.part(UpConfig).engines
    out.print(
        f"\n[bold]Roost is up[/bold]: {counted(engines, 'engine')} of {counted(ranks, 'rank')}"
        f" serving {model!r}"
    )
    for name, place in (
        ("router", fleet.router_url),
        ("dashboard", dashboard),
        ("NATS", without_secrets(fleet.nats_url)),
        ("logs", fleet.run.path),
        ("logins", fleet.logins),
    ):
        if place is not None:
            out.print(f"  {name:9} {place}")
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

DEMO_MODEL_IS = (
    "The demo model is a toy: 5 M parameters, 4 layers of 32 experts, trained on source code and manual"
    " pages.\nIt continues text and does not answer questions."
)


def first_request(model: str, *, demo: bool) -> tuple[str, str, str]:
    """Return a line about the model, then the path and the JSON body of a suitable first request."""
    body: dict[str, object] = {"model": model, "stream": True, "max_tokens": 64, "temperature": 0}
    if demo:
        return DEMO_MODEL_IS, "/v1/completions", json.dumps({**body, "prompt": DEMO_PROMPT})
    messages = [{"role": "user", "content": "Tell me about Debian."}]
    return "", "/v1/chat/completions", json.dumps({**body, "messages": messages})


def _serves_demo_model(settings: Configuration) -> bool:
    embedded = settings.part(WorkerConfig).engine == "embedded"
    return embedded and Path(settings.part(EmbeddedConfig).folder).resolve() == DEMO_CHECKPOINT.resolve()
