"""`roost router`, `tracker`, `planner`, `worker`: run one part, for production deployments."""

import os
from collections.abc import Sequence
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from bus.config import BusConfig
from deploy.cli.supervised import supervise, supervised
from deploy.configuration_loader import Configuration
from deploy.http.sockets import CannotListen, listen
from deploy.local.fleet import serve_and_reload
from deploy.local.router_sockets import RouterSockets
from deploy.parts.launch import run_part, set_up_logging_of
from deploy.reload import Read, planner_settings, router_settings
from deploy.run_directory import home
from deploy.sections import UpConfig, WorkerConfig
from deploy.security.exposure import missing_at_agent
from deploy.security.plugin_secret import NoPluginSecret, plugin_secret
from deploy.terminal.command_settings import (
    Flags,
    access_log_flag,
    bus_flags,
    check_engine_installed,
    check_rank_security,
    check_router_security,
    checked,
    engine_flags,
    key_from,
    names_bus,
    refuse,
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
    ServerOption,
    SpansOption,
    TlsCertOption,
    TlsKeyOption,
    TlsTerminatedOption,
)
from deploy.terminal.output import USAGE, console, fail
from engine_adapter.config import AgentConfig, EmbeddedConfig
from engine_adapter.sglang.config import SglangConfig
from engine_adapter.simulated.model.config import SimulatedConfig
from engine_adapter.vllm.config import VllmConfig
from migration.config import MigrationConfig
from router.config import RouterConfig
from router.dynamo.config import DynamoConfig
from tracker.config import TrackerConfig


class WorkerKind(StrEnum):
    """Engine kinds that a worker can represent."""

    embedded = "embedded"
    simulated = "simulated"
    openai = "openai"
    sglang = "sglang"
    vllm = "vllm"


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
BackendOption = Annotated[
    list[str] | None,
    typer.Option(
        "--backend", metavar="URL", help="OpenAI-compatible server; repeat for more. Needs no NATS."
    ),
]
RouterServerOption = Annotated[
    str | None,
    typer.Option(
        "--nats", metavar="URL", help="NATS server; with --backend, used only if this option names it."
    ),
]
DynamoRouterOption = Annotated[
    str | None,
    typer.Option(
        "--dynamo",
        metavar="NAMESPACE",
        help="Route for Dynamo's frontends to the workers of this Dynamo namespace, with discovery and"
        " transports by Dynamo's variables DYN_... Needs no NATS of Roost's own.",
    ),
]
GatewayOption = Annotated[
    str | None,
    typer.Option(
        "--gateway",
        metavar="HOST:PORT",
        help="Pick endpoints for gateways here: Envoy's ext-proc over gRPC, as an InferencePool's"
        " endpointPickerRef asks for it.",
    ),
]
MigrationLimitOption = Annotated[
    int | None,
    typer.Option(
        "--frontend-migration-limit",
        metavar="N",
        help="--migration-limit of Dynamo's frontends. Must be 0, since Roost continues broken answers."
        "  \\[default: the variable DYN_MIGRATION_LIMIT]",
    ),
]
StateOption = Annotated[
    Path | None,
    typer.Option(
        "--state", metavar="FILE", help="Save the learnt state to this file, and restore it after a restart."
    ),
]
KindOption = Annotated[
    WorkerKind | None,
    typer.Option(
        "--engine",
        help="embedded: Roost's own engine; simulated: no weights, GPU speeds from a model; "
        "vllm: a vLLM server at --url; sglang: an SGLang server at --url (never run with SGLang); "
        "openai: any OpenAI-compatible server at --url."
        "  \\[default: embedded]",
    ),
]
BackendUrlOption = Annotated[
    list[str] | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="Server behind --engine openai, sglang or vllm; vllm: once per rank, in order, if each has a"
        " port.",
    ),
]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        metavar="FOLDER",
        help="vllm, sglang: folder with tokenizer.json, for sglang with config.json, too."
        "  \\[default: the folder that the server names]",
    ),
]
ListenOption = Annotated[
    str | None,
    typer.Option(
        "--listen",
        metavar="HOST:PORT",
        help="vllm: address at which the plugin in vLLM's workers connects.  \\[default: 127.0.0.1:7200]",
    ),
]
NameOption = Annotated[
    str | None,
    typer.Option("--name", help="Name of the engine, unique in the fleet.  \\[default: engine]"),
]
RanksOption = Annotated[
    int | None,
    typer.Option(
        "--ranks", min=1, help="Number of ranks of an embedded or simulated engine.  \\[default: 2]"
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", help="embedded: checkpoint folder; openai, vllm: one of the served models."),
]
RankHostOption = Annotated[
    str | None,
    typer.Option(
        "--host", help="Address that the ranks listen on and routers connect to.  \\[default: 127.0.0.1]"
    ),
]
LayersOption = Annotated[
    int | None,
    typer.Option(
        "--layers",
        help="openai: number of MoE layers of the model; with --experts and --top-k, the tracker learns"
        " from answers that name experts.",
    ),
]
ExpertsOption = Annotated[int | None, typer.Option("--experts", help="openai: routed experts per layer.")]
TopKOption = Annotated[int | None, typer.Option("--top-k", help="openai: routed experts per token.")]
DynamoOption = Annotated[
    str | None,
    typer.Option(
        "--dynamo",
        metavar="NAMESPACE[.COMPONENT]",
        help="embedded, simulated: serve as a worker of this Dynamo deployment, by its variables DYN_...;"
        " joins a fleet of Roost only if --nats is given.",
    ),
]
DisaggregationOption = Annotated[
    str | None,
    typer.Option(
        "--disaggregation-mode",
        metavar="agg|prefill|decode",
        help="embedded, simulated: half of requests that this engine serves in Dynamo; agg: both halves.",
    ),
]
IsolatesOption = Annotated[
    bool,
    typer.Option(
        "--isolates-tenants",
        help="openai: the server accepts cache_salt and separates its KV cache by it, as vLLM does.",
    ),
]


def add_to(app: typer.Typer) -> None:
    """Register these commands."""
    for command in (router, tracker, planner, worker):
        app.command(command.__name__)(command)


def router(
    backend: BackendOption = None,
    api_key_file: ApiKeyOption = None,
    client_keys: ClientKeysOption = None,
    port: PortOption = None,
    host: RouterHostOption = None,
    processes: ProcessesOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    tls_terminated: TlsTerminatedOption = False,
    insecure: InsecureOption = False,
    nats: RouterServerOption = None,
    dynamo: DynamoRouterOption = None,
    migration_limit: MigrationLimitOption = None,
    gateway: GatewayOption = None,
    access_log: AccessLogOption = None,
    spans: SpansOption = None,
    config: ConfigOption = None,
) -> None:
    """Run the router in front of engines on the bus, static backends (--backend), workers of Dynamo
    (--dynamo), or several of these. SIGHUP: read file and environment again."""
    flags: Flags = {
        ("router", "backends"): ("--backend", backend or None),
        ("router", "backend_key_file"): ("--api-key-file", api_key_file),
        ("router", "api_key_file"): ("--client-keys", client_keys),
        ("router", "port"): ("--port", port),
        ("router", "host"): ("--host", host),
        ("router", "processes"): ("--processes", processes),
        ("router", "gateway_address"): ("--gateway", gateway),
        **security_flags("router", tls_cert, tls_key, terminated=tls_terminated, insecure=insecure),
        **bus_flags(nats),
        **access_log_flag(access_log),
        ("tracing", "spans"): ("--spans", spans),
        ("dynamo", "namespace"): ("--dynamo", dynamo),
        ("dynamo", "frontend_migration_limit"): ("--frontend-migration-limit", migration_limit),
    }
    read = settings_reader(config, flags, "router")
    settings = checked(read, RouterConfig, BusConfig, UpConfig, DynamoConfig)
    part = settings.part(RouterConfig)
    check_router_security(part)
    in_dynamo = _checked_dynamo(settings.part(DynamoConfig), part)
    needs_bus = names_bus(settings) or not (part.backends or part.named_backends or in_dynamo)
    if part.processes > 1:
        set_up_logging_of(settings)
        raise typer.Exit(supervise(_several_routers(settings, read, bus=needs_bus)))
    try:
        listener = listen(part.host, part.port)
    except CannotListen as error:
        fail(str(error))
    bus = settings.part(BusConfig) if needs_bus else None
    reread = router_settings(settings, read)
    _end_with("router", settings, listener, bus, part, None, None, reread, in_dynamo)


def _checked_dynamo(config: DynamoConfig, router: RouterConfig) -> DynamoConfig | None:
    """Return the settings of a router inside Dynamo; None: it is not. End the command when it could not serve
    correctly."""
    if config.namespace is None:
        return None
    missing = [name for name in ("dynamo", "zmq") if find_spec(name) is None]
    if missing:
        fail("a router in Dynamo (--dynamo) needs Dynamo's runtime: pip install 'roost[dynamo]'", USAGE)
    if router.processes > 1:
        fail("--dynamo serves with one process; start several routers instead of --processes", USAGE)
    limit, variable = config.frontend_migration_limit, os.environ.get("DYN_MIGRATION_LIMIT")
    seen = variable if limit is None else str(limit)
    if seen is None:
        fail(
            "the router itself continues broken answers, and a frontend must not do so too: start Dynamo's"
            " frontends with --migration-limit 0, and say so with --frontend-migration-limit 0",
            USAGE,
        )
    if seen.strip() != "0":
        fail(
            f"Dynamo's frontends would continue broken answers themselves ({seen!r} times), as this router"
            " does; start them with --migration-limit 0",
            USAGE,
        )
    return config


def tracker(
    state: StateOption = None,
    metrics: MetricsOption = None,
    nats: ServerOption = None,
    config: ConfigOption = None,
) -> None:
    """Run the tracker: expert activations, expert popularity, and predictions of which experts a request
    activates."""
    flags = {
        **bus_flags(nats),
        ("tracker", "state_file"): ("--state", state),
        ("tracker", "metrics_address"): ("--metrics", metrics),
    }
    settings = checked(settings_reader(config, flags, "tracker"), TrackerConfig, BusConfig, UpConfig)
    _end_with("tracker", settings, settings.part(BusConfig), settings.part(TrackerConfig), None)


def planner(metrics: MetricsOption = None, nats: ServerOption = None, config: ConfigOption = None) -> None:
    """Run the planner: it records placements, migrates experts automatically where that pays off, publishes
    the homes of requests, and answers `roost plan`.

    SIGHUP: read file and environment again.
    """
    read = settings_reader(
        config, {**bus_flags(nats), ("planner", "metrics_address"): ("--metrics", metrics)}, "planner"
    )
    settings = checked(read, MigrationConfig, BusConfig, UpConfig)
    bus, part = settings.part(BusConfig), settings.part(MigrationConfig)
    _end_with("planner", settings, bus, part, None, planner_settings(settings, read))


def worker(
    engine: KindOption = None,
    url: BackendUrlOption = None,
    name: NameOption = None,
    dynamo: DynamoOption = None,
    disaggregation_mode: DisaggregationOption = None,
    ranks: RanksOption = None,
    model: ModelOption = None,
    model_shape: ModelShapeOption = None,
    host: RankHostOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    tls_terminated: TlsTerminatedOption = False,
    insecure: InsecureOption = False,
    api_key_file: ApiKeyOption = None,
    layers: LayersOption = None,
    experts: ExpertsOption = None,
    top_k: TopKOption = None,
    isolates_tenants: IsolatesOption = False,
    tokenizer: TokenizerOption = None,
    listen_at: ListenOption = None,
    nats: ServerOption = None,
    spans: SpansOption = None,
    config: ConfigOption = None,
) -> None:
    """Run one engine that joins the fleet over NATS, serves in Dynamo (--dynamo), or both.

    SIGHUP: the ranks read the fleet secret file again (not with --engine openai or vllm).
    """
    flags: Flags = {
        ("worker", "name"): ("--name", name),
        ("worker", "host"): ("--host", host),
        ("worker", "dynamo"): ("--dynamo", dynamo),
        ("worker", "disaggregation_mode"): ("--disaggregation-mode", disaggregation_mode),
        **security_flags("worker", tls_cert, tls_key, terminated=tls_terminated, insecure=insecure),
        **bus_flags(nats),
        ("tracing", "spans"): ("--spans", spans),
    }
    if engine in (WorkerKind.vllm, WorkerKind.openai):
        refuse(
            {"--dynamo": dynamo, "--disaggregation-mode": disaggregation_mode},
            "belongs to --engine embedded and simulated; Dynamo has workers of its own",
        )
    about = {"layers": layers, "experts": experts, "top_k": top_k, "isolates_tenants": isolates_tenants}
    if engine is WorkerKind.vllm:
        refuse({"--model-shape": model_shape, "--ranks": ranks}, "is of no use with --engine vllm")
        flags = {
            **flags,
            ("vllm", "urls"): ("--url", url or None),
            ("vllm", "model"): ("--model", model),
            ("vllm", "api_key_file"): ("--api-key-file", api_key_file),
            ("vllm", "tokenizer"): ("--tokenizer", tokenizer),
            ("vllm", "listen"): ("--listen", listen_at),
            ("vllm", "insecure"): ("--insecure", insecure or None),
        }
        _vllm(checked(settings_reader(config, flags, "engine"), *WORKER_PARTS, VllmConfig))
    refuse({"--listen": listen_at}, "belongs to --engine vllm")
    if engine is WorkerKind.sglang:
        refuse(
            {"--model": model, "--ranks": ranks, "--model-shape": model_shape},
            "is of no use with --engine sglang",
        )
        if len(url or ()) > 1:
            fail("--engine sglang needs one --url: its ranks share it", USAGE)
        flags = {
            **flags,
            ("sglang", "url"): ("--url", url[0] if url else None),
            ("sglang", "api_key_file"): ("--api-key-file", api_key_file),
            ("sglang", "tokenizer"): ("--tokenizer", tokenizer),
        }
        _sglang(checked(settings_reader(config, flags, "engine"), *WORKER_PARTS, SglangConfig))
    refuse({"--tokenizer": tokenizer}, "belongs to --engine vllm or sglang")
    if engine is WorkerKind.openai:
        refuse({"--model-shape": model_shape}, "belongs to --engine simulated")
        read = settings_reader(config, flags, "engine")
        _static_backend(checked(read, *WORKER_PARTS), api_key_file, urls=url or (), model=model, **about)
    refuse(
        {"--url": url or None, "--layers": layers, "--experts": experts, "--top-k": top_k},
        "belongs to --engine openai",
    )
    checkpoint = None if model is None else Path(model)
    own = engine_flags(config, engine, ranks=ranks, checkpoint=checkpoint, model_shape=model_shape)
    _own_engine(settings_reader(config, {**own, **flags}, "engine"))


WORKER_PARTS = (WorkerConfig, BusConfig, AgentConfig, UpConfig)


def _vllm(settings: Configuration) -> NoReturn:
    """Run the agent of a vLLM deployment."""
    config, name = settings.part(VllmConfig), settings.part(WorkerConfig).name
    if not config.urls:
        fail("--engine vllm needs --url, e.g. --url http://127.0.0.1:8000", USAGE)
    if find_spec("zmq") is None:
        fail("the agent of a vLLM needs pyzmq for its KV events: pip install 'roost[vllm]'", USAGE)
    lacks = missing_at_agent(config)
    if lacks is not None and not config.insecure:
        fail(f"{lacks}; --insecure does so all the same", USAGE)
    key = key_from(None if config.api_key_file is None else Path(config.api_key_file))
    file = Path(config.secret_file or home(os.environ) / "vllm" / f"{name}.secret").absolute()
    try:
        secret = plugin_secret(file)
    except NoPluginSecret as error:
        fail(str(error), USAGE)
    console().print(
        f"The plugin in vLLM's workers connects with ROOST_AGENT={config.listen}", highlight=False
    )
    console().print(f"ROOST_SECRET_FILE={file}", highlight=False, soft_wrap=True)
    agent = settings.part(AgentConfig)
    _end_with("vllm", settings, name, config, key, secret, settings.part(BusConfig), agent)


def _sglang(settings: Configuration) -> NoReturn:
    """Run the agent of an SGLang server."""
    config, worker = settings.part(SglangConfig), settings.part(WorkerConfig)
    if config.url is None:
        fail("--engine sglang needs --url, e.g. --url http://127.0.0.1:30000", USAGE)
    if find_spec("zmq") is None:
        fail("the agent of SGLang needs pyzmq for its KV events: pip install 'roost[sglang]'", USAGE)
    check_rank_security(worker)
    key = key_from(None if config.api_key_file is None else Path(config.api_key_file))
    console().print("This was written from SGLang's source and never run with SGLang: docs/sglang.md")
    agent = settings.part(AgentConfig)
    _end_with("sglang", settings, worker.name, config, key, worker, settings.part(BusConfig), agent)


def _static_backend(
    settings: Configuration, api_key_file: Path | None, *, urls: Sequence[str], **about: Any
) -> NoReturn:
    """Run the agent of a static backend. about: further fields of the agent's config."""
    # imports an HTTP client that no other command needs
    from engine_adapter.openai_backend import BackendAgentConfig

    if len(urls) != 1:
        fail("--engine openai needs one --url, e.g. --url http://127.0.0.1:8080", USAGE)
    try:
        backend = BackendAgentConfig(url=urls[0], api_key=key_from(api_key_file), **about)
    except ValueError as error:
        fail(str(error), USAGE)
    name = settings.part(WorkerConfig).name
    _end_with("static_backend", settings, name, backend, settings.part(BusConfig), settings.part(AgentConfig))


def _own_engine(read: Read) -> NoReturn:
    """Supervise the ranks of one of Roost's own engines."""
    simulated = checked(read, WorkerConfig).part(WorkerConfig).engine == "simulated"
    settings = checked(read, *WORKER_PARTS, SimulatedConfig if simulated else EmbeddedConfig)
    check_engine_installed(settings)
    check_rank_security(settings.part(WorkerConfig))
    in_dynamo = settings.part(WorkerConfig).dynamo is not None
    set_up_logging_of(settings)
    raise typer.Exit(supervise(_ranks(settings, read, bus=names_bus(settings) or not in_dynamo)))


async def _several_routers(settings: Configuration, read: Read, *, bus: bool) -> None:
    out = console()
    with RouterSockets.listening(settings.part(RouterConfig)) as sockets:
        async with supervised(settings) as fleet:
            await fleet.start_routers(sockets, bus=bus)
            out.print(
                f"{len(fleet.router_urls)} router processes listen on {fleet.router_url}; each alone, for"
                " /metrics and /health:"
            )
            out.print(f"  {' '.join(fleet.router_urls)}")
            try:
                await serve_and_reload(fleet, read)
            finally:
                # the routers close their copies; new connections are then refused instead of waiting in ours
                sockets.close()


async def _ranks(settings: Configuration, read: Read, *, bus: bool) -> None:
    async with supervised(settings) as fleet:
        await fleet.start_engine(bus=bus)
        await serve_and_reload(fleet, read)


def _end_with(part: str, settings: Configuration, *arguments: Any) -> NoReturn:
    """Run a part as this process and exit with its status."""
    raise typer.Exit(run_part(part, settings, os.environ, *arguments))
