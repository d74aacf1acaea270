"""`roost router`, `tracker`, `planner`, `worker`: run one part, for production deployments."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from bus.config import BusConfig
from deploy.config import Configuration
from deploy.http.sockets import CannotListen, listen
from deploy.local.fleet import Fleet, serve_and_reload
from deploy.local.nats_server import NoNats
from deploy.local.router_sockets import RouterSockets
from deploy.local.supervise import UnitFailed
from deploy.parts.launch import log_as_set, run_part
from deploy.process import run as run_process
from deploy.reload import Read, planner_settings, router_settings
from deploy.run_directory import home, run_directory
from deploy.settings import UpConfig, WorkerConfig, read_settings
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
    bus_flags,
    check,
    check_engine_installed,
    check_rank_doors,
    check_router_door,
    console,
    door_flags,
    engine_flags,
    fail,
    names_bus,
    settings_from,
    with_login,
)
from engine_adapter.config import AgentConfig, EmbeddedConfig
from engine_adapter.simulated.model.config import SimulatedConfig
from migration.config import MigrationConfig
from router.config import RouterConfig
from tracker.config import TrackerConfig

MetricsOption = Annotated[
    str | None,
    typer.Option(
        "--metrics", metavar="HOST:PORT", help="Serve /metrics (Prometheus) and /health on this address."
    ),
]
ApiKeyOption = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file", metavar="FILE", help="File whose first line is the key sent to the static backends."
    ),
]


class WorkerKind(StrEnum):
    """Engine kinds that a worker can represent."""

    embedded = "embedded"
    simulated = "simulated"
    openai = "openai"


def add_to(app: typer.Typer) -> None:
    """Register these commands."""
    app.command("router")(router)
    app.command("tracker")(tracker)
    app.command("planner")(planner)
    app.command("worker")(worker)


def router(
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend", metavar="URL", help="OpenAI-compatible server; repeat for more. Needs no NATS."
        ),
    ] = None,
    api_key_file: ApiKeyOption = None,
    client_keys: ClientKeysOption = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", help="Port to listen on; 0: any free port.  \\[default: 8600]", show_default=False
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option("--host", help="Address to listen on.  \\[default: 127.0.0.1]", show_default=False),
    ] = None,
    processes: ProcessesOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    tls_terminated: TlsTerminatedOption = False,
    insecure: InsecureOption = False,
    nats: Annotated[
        str | None,
        typer.Option(
            "--nats", metavar="URL", help="NATS server; with --backend, used only if this option names it."
        ),
    ] = NATS,
    access_log: AccessLogOption = None,
    spans: Annotated[
        Path | None,
        typer.Option(
            "--spans", metavar="FILE", help="Append every OpenTelemetry span to this file, as JSON lines."
        ),
    ] = None,
    config: ConfigOption = CONFIG,
) -> None:
    """Run the router in front of engines on the bus, static backends (--backend), or both. SIGHUP: read file
    and environment again."""
    flags: Flags = {
        ("router", "backends"): ("--backend", backend or None),
        ("router", "backend_key_file"): ("--api-key-file", api_key_file and api_key_file.absolute()),
        ("router", "api_key_file"): ("--client-keys", client_keys and client_keys.absolute()),
        ("router", "port"): ("--port", port),
        ("router", "host"): ("--host", host),
        ("router", "processes"): ("--processes", processes),
        **door_flags("router", tls_cert, tls_key, terminated=tls_terminated, insecure=insecure),
        **bus_flags(nats),
        **access_log_flag(access_log),
        ("tracing", "spans"): ("--spans", spans and spans.absolute()),
    }
    settings = with_login(settings_from(config, flags, RouterConfig, BusConfig, UpConfig), "router")

    def read() -> Configuration:
        return with_login(read_settings(config, os.environ, Path.cwd()).with_flags(flags), "router")

    part = settings.part(RouterConfig)
    check_router_door(part)
    bus = (
        None
        if (part.backends or part.named_backends) and not names_bus(settings)
        else settings.part(BusConfig)
    )
    if part.processes > 1:
        log_as_set(settings)
        raise typer.Exit(
            run_process(
                _several_routers(settings, read, bus=bus is not None),
                expected=(UnitFailed, CannotListen, OSError),
                fast_loop=False,
            )
        )
    try:
        door = listen(part.host, part.port)
    except CannotListen as error:
        fail(str(error))
    _end_with("router", settings, door, bus, part, None, None, router_settings(settings, read))


def tracker(
    state: Annotated[
        Path | None,
        typer.Option(
            "--state",
            metavar="FILE",
            help="Save the learnt state to this file, and restore it after a restart.",
        ),
    ] = None,
    metrics: MetricsOption = None,
    nats: Annotated[str | None, typer.Option("--nats", metavar="URL", help="NATS server.")] = NATS,
    config: ConfigOption = CONFIG,
) -> None:
    """Run the tracker: expert activations, expert popularity, and predictions of which experts a request
    activates."""
    flags = {
        **bus_flags(nats),
        ("tracker", "state_file"): ("--state", state and state.absolute()),
        ("tracker", "metrics_address"): ("--metrics", metrics),
    }
    settings = with_login(settings_from(config, flags, TrackerConfig, BusConfig, UpConfig), "tracker")
    _end_with("tracker", settings, settings.part(BusConfig), settings.part(TrackerConfig), None)


def planner(
    metrics: MetricsOption = None,
    nats: Annotated[str | None, typer.Option("--nats", metavar="URL", help="NATS server.")] = NATS,
    config: ConfigOption = CONFIG,
) -> None:
    """Run the planner: it records placements, migrates experts automatically where that pays off, publishes
    the homes of requests, and answers `roost plan`.

    SIGHUP: read file and environment again.
    """
    flags = {**bus_flags(nats), ("planner", "metrics_address"): ("--metrics", metrics)}
    settings = with_login(settings_from(config, flags, MigrationConfig, BusConfig, UpConfig), "planner")

    def read() -> Configuration:
        return with_login(read_settings(config, os.environ, Path.cwd()).with_flags(flags), "planner")

    _end_with(
        "planner",
        settings,
        settings.part(BusConfig),
        settings.part(MigrationConfig),
        None,
        planner_settings(settings, read),
    )


def worker(
    engine: Annotated[
        WorkerKind | None,
        typer.Option(
            "--engine",
            help="embedded: Roost's own engine; simulated: no weights, GPU speeds from a model; "
            "openai: any OpenAI-compatible server at --url.  \\[default: embedded]",
            show_default=False,
        ),
    ] = None,
    url: Annotated[str | None, typer.Option("--url", help="Server behind --engine openai.")] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", help="Name of the engine, unique in the fleet.  \\[default: engine]", show_default=False
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            min=1,
            help="Number of ranks of an embedded or simulated engine.  \\[default: 2]",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="embedded: checkpoint folder; openai: one of the served models."),
    ] = None,
    model_shape: ModelShapeOption = None,
    host: Annotated[
        str | None,
        typer.Option(
            "--host",
            help="Address that the ranks listen on and routers connect to.  \\[default: 127.0.0.1]",
            show_default=False,
        ),
    ] = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    tls_terminated: TlsTerminatedOption = False,
    insecure: InsecureOption = False,
    api_key_file: ApiKeyOption = None,
    layers: Annotated[
        int | None,
        typer.Option(
            "--layers",
            help=(
                "openai: number of MoE layers of the model; with --experts and --top-k, the tracker learns"
                " from answers that name experts."
            ),
        ),
    ] = None,
    experts: Annotated[
        int | None, typer.Option("--experts", help="openai: routed experts per layer.")
    ] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", help="openai: routed experts per token.")] = None,
    isolates_tenants: Annotated[
        bool,
        typer.Option(
            "--isolates-tenants",
            help="openai: the server accepts cache_salt and separates its KV cache by it, as vLLM does.",
        ),
    ] = False,
    nats: Annotated[str | None, typer.Option("--nats", metavar="URL", help="NATS server.")] = NATS,
    spans: Annotated[
        Path | None,
        typer.Option(
            "--spans", metavar="FILE", help="Append every OpenTelemetry span to this file, as JSON lines."
        ),
    ] = None,
    config: ConfigOption = CONFIG,
) -> None:
    """Run one engine that joins the fleet over NATS.

    SIGHUP: the ranks read the fleet secret file again (not with --engine openai).
    """
    own = engine is not WorkerKind.openai
    checkpoint = Path(model) if model is not None and own else None
    flags: Flags = {
        **(
            engine_flags(config, engine, ranks=ranks, checkpoint=checkpoint, model_shape=model_shape)
            if own
            else {}
        ),
        ("worker", "name"): ("--name", name),
        ("worker", "host"): ("--host", host),
        **door_flags("worker", tls_cert, tls_key, terminated=tls_terminated, insecure=insecure),
        **bus_flags(nats),
        ("tracing", "spans"): ("--spans", spans and spans.absolute()),
    }
    settings = settings_from(config, flags, WorkerConfig, BusConfig, AgentConfig, UpConfig)
    settings = with_login(settings, "engine", settings.part(WorkerConfig).name)
    if not own:
        if model_shape is not None:
            fail("--model-shape belongs to --engine simulated", USAGE)
        _plain_worker(
            settings,
            api_key_file,
            url=url,
            model=model,
            layers=layers,
            experts=experts,
            top_k=top_k,
            isolates_tenants=isolates_tenants,
        )
    for option, value in (("--url", url), ("--layers", layers), ("--experts", experts), ("--top-k", top_k)):
        if value is not None:
            fail(f"{option} belongs to --engine openai", USAGE)
    part = settings.part(WorkerConfig)
    check(settings, SimulatedConfig if part.engine == "simulated" else EmbeddedConfig)
    check_rank_doors(part)
    check_engine_installed(settings)
    log_as_set(settings)

    def read() -> Configuration:
        return with_login(
            read_settings(config, os.environ, Path.cwd()).with_flags(flags), "engine", part.name
        )

    raise typer.Exit(
        run_process(
            _own_worker(settings, read), expected=(UnitFailed, CannotListen, NoNats, OSError), fast_loop=False
        )
    )


def _plain_worker(
    settings: Configuration, api_key_file: Path | None, *, url: str | None, **about: Any
) -> None:
    """Run the agent of a static backend. about: further fields of the agent's config."""
    # imports an HTTP client that no other command needs
    from engine_adapter.openai_backend import BackendAgentConfig

    if url is None:
        fail("--engine openai needs --url, e.g. --url http://127.0.0.1:8080", USAGE)
    try:
        key = (
            None if api_key_file is None else api_key_file.read_text(encoding="utf-8").split("\n")[0].strip()
        )
        plain = BackendAgentConfig(url=url, api_key=key, **about)
    except (OSError, ValueError) as error:
        fail(str(error), USAGE)
    _end_with(
        "plain",
        settings,
        settings.part(WorkerConfig).name,
        plain,
        settings.part(BusConfig),
        settings.part(AgentConfig),
    )


async def _several_routers(settings: Configuration, read: Read, *, bus: bool) -> None:
    out = console()
    with (
        RouterSockets.listening(settings.part(RouterConfig)) as doors,
        run_directory(home(os.environ)) as run,
    ):
        out.print(f"[dim]starting; logs are in {run.path}[/dim]")
        async with Fleet(
            settings, run, os.environ, lambda text: out.print(f"  {text}", markup=False)
        ) as fleet:
            await fleet.start_routers(doors, bus=bus)
            out.print(
                f"{len(fleet.router_urls)} router processes listen on {fleet.router_url}; each alone, for"
                " /metrics and /health:"
            )
            out.print(f"  {' '.join(fleet.router_urls)}")
            try:
                await serve_and_reload(fleet, read)
            finally:
                # the routers close their copies; new connections are then refused instead of waiting in ours
                doors.close()


async def _own_worker(settings: Configuration, read: Read) -> None:
    out = console()
    with run_directory(home(os.environ)) as run:
        out.print(f"[dim]starting; logs are in {run.path}[/dim]")
        async with Fleet(
            settings, run, os.environ, lambda text: out.print(f"  {text}", markup=False)
        ) as fleet:
            await fleet.start_engine()
            await serve_and_reload(fleet, read)


def _end_with(part: str, settings: Configuration, *arguments: Any) -> NoReturn:
    """Run a part as this process and exit with its status."""
    raise typer.Exit(run_part(part, settings, os.environ, *arguments))
