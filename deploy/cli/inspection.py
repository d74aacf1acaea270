"""`roost status`, `placement`, `popularity`, `explain`: inspect a fleet.

Implementations are imported when a command runs, because not every command needs the NATS client and the
router's types.
"""

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from bus.config import BusConfig
from deploy.terminal.command_settings import (
    bus_flags,
    bus_from,
    key_from,
    names_bus,
    refuse,
    router_processes,
    router_url,
    settings_from,
    with_bus,
    with_login,
)
from deploy.terminal.options import CaOption, ConfigOption, JsonOption, KeyFileOption, NatsOption, UrlOption
from deploy.terminal.output import USAGE, fail, show
from router.config import RouterConfig
from router.scheduling.cost import TERMS

OnlyEngineArgument = Annotated[
    str | None, typer.Argument(help="Only this engine.  \\[default: all]", show_default=False)
]
LayerOption = Annotated[int | None, typer.Option("--layer", min=0, help="Only this MoE layer.")]
PlacementPlotOption = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Also write a picture, e.g. placement.png (needs the extra `plot`).",
    ),
]
BeforeOption = Annotated[
    bool,
    typer.Option(
        "--before",
        help="With --plot: also show the first epoch of the engine's current incarnation, and the"
        " differences.",
    ),
]
ServedModelOption = Annotated[
    str | None, typer.Option("--model", help="Model.  \\[default: the one that is served]")
]
PopularityPlotOption = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Also write heat maps, e.g. experts.png, and experts-ENGINE.png by rank (needs the extra"
        " `plot`).",
    ),
]
FromOption = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="Show a load from a file: SGLang's recorder .pt; .npy .npz .json .csv.",
    ),
]
LearnOption = Annotated[
    Path | None,
    typer.Option(
        "--learn", metavar="FILE", help="Add such a file to the tracker's profile of --model, once."
    ),
]
TopKOption = Annotated[
    int | None,
    typer.Option(
        "--top-k",
        min=1,
        help="With --learn: experts per token, if neither an engine nor the file states it.",
    ),
]
TokensOption = Annotated[
    int | None,
    typer.Option(
        "--tokens", min=1, help="With --learn: number of tokens that a file of proportions represents."
    ),
]
PromptArgument = Annotated[
    str | None, typer.Argument(help="User message to decide on. The request is not run.", show_default=False)
]
DecisionOption = Annotated[
    str | None,
    typer.Option(
        "--id", metavar="ID", help="Show the decision of a served request (header x-roost-decision-id)."
    ),
]
FirstModelOption = Annotated[
    str | None, typer.Option("--model", help="Model.  \\[default: the first one served]")
]
MaxTokensOption = Annotated[
    int | None, typer.Option("--max-tokens", min=1, help="max_tokens of the request.")
]
SessionOption = Annotated[
    str | None, typer.Option("--session", metavar="NAME", help="Decide as for this session.")
]
TenantOption = Annotated[
    str | None, typer.Option("--tenant", metavar="NAME", help="Decide as for this tenant.")
]
WithoutOption = Annotated[
    list[str] | None,
    typer.Option(
        "--without",
        metavar="TERM",
        help=f"Decide without this cost term; repeat for more. Terms: {', '.join(TERMS)}.",
    ),
]
GoneOption = Annotated[
    list[str] | None,
    typer.Option(
        "--gone",
        metavar="ENGINE/RANK",
        help="Decide without this rank, or without all ranks of ENGINE; repeat for more.",
    ),
]
RouterOption = Annotated[
    str | None,
    typer.Option(
        "--router", metavar="URL", help="URL of the router.  \\[default: that of the running `roost up`]"
    ),
]


def add_to(app: typer.Typer) -> None:
    """Register these commands."""
    for command in (status, placement, popularity, explain):
        app.command(command.__name__)(command)


def status(
    engine: OnlyEngineArgument = None,
    url: UrlOption = None,
    api_key_file: KeyFileOption = None,
    ca: CaOption = None,
    nats: NatsOption = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
) -> None:
    """Show engines, ranks, load and epochs; the loop's measurements, predictions, decisions and migrations;
    and the servers given by --backend. Live view: roost top."""
    from deploy.views.backends import backends_if_any, backends_of, show_backends
    from deploy.views.decision import RouterAddress
    from deploy.views.status import show_status

    settings = with_login(
        with_bus(settings_from(config, bus_flags(nats), BusConfig, RouterConfig)), "operator"
    )
    door = RouterAddress(url or router_url(settings), key_from(api_key_file), ca)
    backends = backends_if_any(door) if url is None else backends_of(door)
    if url is not None or (backends and not names_bus(settings)):
        show_backends(door, [one for one in backends if engine in (None, one.name)], as_json=as_json)
        return
    bus = settings.part(BusConfig)
    show_status(bus, router_processes(bus.servers), engine, backends, as_json=as_json)


def placement(
    layer: LayerOption = None,
    plot: PlacementPlotOption = None,
    before: BeforeOption = False,
    nats: NatsOption = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
) -> None:
    """Show the placement: for each engine the epoch, the slots, and the experts of each rank (* marks
    replicated experts)."""
    from deploy.views.placement import show_placement

    if before and plot is None:
        fail("--before needs --plot FILE, whose picture it extends", USAGE)
    show_placement(bus_from(config, nats), layer, plot, before=before, as_json=as_json)


def popularity(
    model: ServedModelOption = None,
    plot: PopularityPlotOption = None,
    file: FromOption = None,
    learn: LearnOption = None,
    top_k: TopKOption = None,
    tokens: TokensOption = None,
    nats: NatsOption = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
) -> None:
    """Show expert popularity: skew per layer, demand per rank, clusters, drift, and prediction quality."""
    from deploy.views.popularity import learn_load, show_load, show_popularity

    if file is not None and learn is not None:
        fail("--from shows a file, --learn hands it to the tracker: use one of them", USAGE)
    if learn is not None and plot is not None:
        fail(
            "--learn draws nothing: look at the file with --from FILE --plot FILE, or at the model with"
            " --plot FILE afterwards",
            USAGE,
        )
    if learn is None:
        refuse({"--top-k": top_k, "--tokens": tokens}, "describes a file for --learn; name it")
    if file is not None:
        show_load(file, plot, as_json=as_json)
    elif learn is None:
        show_popularity(bus_from(config, nats), model, plot, as_json=as_json)
    elif model is None:
        fail("--learn needs --model, the owner of these experts", USAGE)
    else:
        learn_load(bus_from(config, nats), learn, model, top_k, tokens)


def explain(
    prompt: PromptArgument = None,
    decision: DecisionOption = None,
    model: FirstModelOption = None,
    max_tokens: MaxTokensOption = None,
    session: SessionOption = None,
    tenant: TenantOption = None,
    without: WithoutOption = None,
    gone: GoneOption = None,
    router: RouterOption = None,
    api_key_file: KeyFileOption = None,
    ca: CaOption = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
) -> None:
    """Explain a routing decision: the cost terms of every candidate, the reason for the choice, and the
    choice without each term."""
    from deploy.views.decision import RouterAddress, show_decision

    if (prompt is None) == (decision is None):
        fail(
            'give a prompt, or a decision to read back: roost explain "prompt", or roost explain --id ID',
            USAGE,
        )
    if decision is not None:
        refuse(
            {"--session": session, "--tenant": tenant, "--without": without, "--gone": gone},
            "is for a prompt: a served decision is shown as it was made",
        )
    settings = settings_from(config, {}, RouterConfig)
    address = RouterAddress(router or router_url(settings), key_from(api_key_file), ca)
    if decision is not None:
        answer = address.get(f"/v1/decisions/{decision}")
    else:
        names = settings.part(RouterConfig)
        headers = {names.session_header: session, names.tenant_header: tenant}
        body: dict[str, Any] = {
            "model": model or address.first_model(),
            "messages": [{"role": "user", "content": prompt}],
            **({} if max_tokens is None else {"max_tokens": max_tokens}),
        }
        changes = urlencode({"without": without or (), "gone": gone or ()}, doseq=True)
        answer = address.post(
            f"/v1/route?{changes}".rstrip("?"),
            body,
            {name: value for name, value in headers.items() if value is not None},
        )
    if as_json:
        show(answer.decode())
    else:
        show_decision(answer)
