"""`roost status`, `placement`, `popularity`, `explain`, `events`: inspect a fleet.

Implementations are imported when a command runs, because not every command needs the NATS client and the
router's types.
"""

import difflib
import re
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from bus.config import BusConfig
from deploy.terminal.options import (
    CONFIG,
    JSON,
    NATS,
    USAGE,
    CaOption,
    ConfigOption,
    JsonOption,
    KeyFileOption,
    NatsOption,
    UrlOption,
    bus_flags,
    bus_from,
    fail,
    key_from,
    names_bus,
    note,
    router_processes,
    router_url,
    settings_from,
    show,
    with_bus,
    with_login,
)
from fleet.facts.dynamo_kv import KvMetrics
from fleet.messages import STORED, AnyEvent
from router.config import RouterConfig
from router.scheduling.cost import TERMS

KINDS = (*(kind.__name__ for kind in AnyEvent.__args__), "KvEvents", KvMetrics.__name__)
FAMILIES = {
    "migration": (
        "MigrationPlanned",
        "MigrationStaged",
        "MigrationCommitted",
        "MigrationAborted",
        "PlanEvaluated",
        "PlacementCommitted",
    ),
    "membership": ("EngineJoined", "EngineLeft"),
    "loop": (
        "DispatchMeasured",
        "PopularityShifted",
        "HomesPublished",
        "MigrationPlanned",
        "MigrationCommitted",
        "MigrationAborted",
        "PlanEvaluated",
    ),
    "handover": (
        "ProposeHandover",
        "CommitHandover",
        "AbortHandover",
        "DescribeHandover",
        "HandoverDescribed",
    ),
}
"""Groups of message kinds that are often requested together, by name."""
_STORED = sorted(kind.__name__ for kind in STORED)
_FAMILY_HELP = (
    "Groups: " + "; ".join(f"{name} ({', '.join(kinds)})" for name, kinds in FAMILIES.items()) + "."
)
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def add_to(app: typer.Typer) -> None:
    """Register these commands."""
    for command in (status, placement, popularity, explain, events):
        app.command(command.__name__)(command)


def status(
    engine: Annotated[
        str | None, typer.Argument(help="Only this engine.  \\[default: all]", show_default=False)
    ] = None,
    url: UrlOption = None,
    api_key_file: KeyFileOption = None,
    ca: CaOption = None,
    nats: NatsOption = NATS,
    as_json: JsonOption = JSON,
    config: ConfigOption = CONFIG,
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
    layer: Annotated[int | None, typer.Option("--layer", min=0, help="Only this MoE layer.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help="Also write a picture, e.g. placement.png (needs the extra `plot`).",
        ),
    ] = None,
    before: Annotated[
        bool,
        typer.Option(
            "--before",
            help=(
                "With --plot: also show the first epoch of the engine's current incarnation, and the"
                " differences."
            ),
        ),
    ] = False,
    nats: NatsOption = NATS,
    as_json: JsonOption = JSON,
    config: ConfigOption = CONFIG,
) -> None:
    """Show the placement: for each engine the epoch, the slots, and the experts of each rank (* marks
    replicated experts)."""
    from deploy.views.placement import show_placement

    if before and plot is None:
        fail("--before needs --plot FILE, whose picture it extends", USAGE)
    show_placement(bus_from(config, nats), layer, plot, before=before, as_json=as_json)


def popularity(
    model: Annotated[
        str | None,
        typer.Option("--model", help="Model.  \\[default: the one that is served]", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help=(
                "Also write heat maps, e.g. experts.png, and experts-ENGINE.png by rank (needs the extra"
                " `plot`)."
            ),
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Show a load from a file: SGLang's recorder .pt; .npy .npz .json .csv.",
        ),
    ] = None,
    learn: Annotated[
        Path | None,
        typer.Option(
            "--learn", metavar="FILE", help="Add such a file to the tracker's profile of --model, once."
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            "--top-k",
            min=1,
            help="With --learn: experts per token, if neither an engine nor the file states it.",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens", min=1, help="With --learn: number of tokens that a file of proportions represents."
        ),
    ] = None,
    nats: NatsOption = NATS,
    as_json: JsonOption = JSON,
    config: ConfigOption = CONFIG,
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
    if learn is None and (top_k is not None or tokens is not None):
        fail("--top-k and --tokens say more about a file for --learn; name it", USAGE)
    if file is not None:
        show_load(file, plot, as_json=as_json)
    elif learn is None:
        show_popularity(bus_from(config, nats), model, plot, as_json=as_json)
    elif model is None:
        fail("--learn needs --model, the owner of these experts", USAGE)
    else:
        learn_load(bus_from(config, nats), learn, model, top_k, tokens)


def explain(
    prompt: Annotated[str | None, typer.Argument(help="User message to decide on; it is not run.")] = None,
    decision: Annotated[
        str | None,
        typer.Option(
            "--id", metavar="ID", help="Show the decision of a served request (header x-roost-decision-id)."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Model.  \\[default: the first one served]", show_default=False),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="max_tokens of the request.")
    ] = None,
    session: Annotated[
        str | None, typer.Option("--session", metavar="NAME", help="Decide as for this session.")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="NAME", help="Decide as for this tenant.")
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
            "--without",
            metavar="TERM",
            help=f"Decide without this cost term; repeat for more. Terms: {', '.join(TERMS)}.",
        ),
    ] = None,
    gone: Annotated[
        list[str] | None,
        typer.Option(
            "--gone",
            metavar="ENGINE/RANK",
            help="Decide without this rank, or without all ranks of ENGINE; repeat for more.",
        ),
    ] = None,
    router: Annotated[
        str | None,
        typer.Option(
            "--router", metavar="URL", help="URL of the router.  \\[default: that of the running `roost up`]"
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file", metavar="FILE", help="File whose first line is a key accepted by the router."
        ),
    ] = None,
    ca: CaOption = None,
    as_json: JsonOption = JSON,
    config: ConfigOption = CONFIG,
) -> None:
    """Explain a routing decision: the cost terms of every candidate, the reason for the choice, and the
    choice without each term."""
    from deploy.views.decision import RouterAddress, show_decision

    if (prompt is None) == (decision is None):
        fail(
            'give a prompt, or a decision to read back: roost explain "prompt", or roost explain --id ID',
            USAGE,
        )
    if decision is not None and (session, tenant, without, gone) != (None,) * 4:
        fail(
            "--session, --tenant, --without and --gone are for a prompt: a served decision is read back as it"
            " was made",
            USAGE,
        )
    settings = settings_from(config, {}, RouterConfig)
    door = RouterAddress(router or router_url(settings), key_from(api_key_file), ca)
    if decision is not None:
        answer = door.get(f"/v1/decisions/{decision}")
    else:
        names = settings.part(RouterConfig)
        headers = {
            name: value
            for name, value in ((names.session_header, session), (names.tenant_header, tenant))
            if value is not None
        }
        supposed = urlencode(
            [*(("without", term) for term in without or ()), *(("gone", name) for name in gone or ())]
        )
        body: dict[str, Any] = {
            "model": model or door.first_model(),
            "messages": [{"role": "user", "content": prompt}],
        }
        answer = door.post(
            f"/v1/route?{supposed}".rstrip("?"),
            body if max_tokens is None else {**body, "max_tokens": max_tokens},
            headers,
        )
    if as_json:
        show(answer.decode())
    else:
        show_decision(answer)


def events(
    kind: Annotated[
        list[str] | None,
        typer.Option(
            "--kind",
            metavar="KIND",
            help=f"Only this kind; repeat for more. {_FAMILY_HELP} Kinds: {', '.join(KINDS)}.",
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="TIME",
            help="First replay stored messages from this far back, e.g. 90s, 15m, 1h, 2d.",
        ),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow/--no-follow", help="Continue with new messages; --no-follow needs --since."),
    ] = True,
    nats: NatsOption = NATS,
    as_json: JsonOption = JSON,
    config: ConfigOption = CONFIG,
) -> None:
    """Print bus messages, one line each, until Ctrl-C."""
    from deploy.views.events import show_events

    wanted, seconds = _kinds(kind or []), None if since is None else _seconds(since)
    if seconds is not None:
        wanted = _stored_only(wanted)
    elif not follow:
        fail("--no-follow only makes sense with --since: telemetry is not stored", USAGE)
    show_events(bus_from(config, nats), wanted, seconds, follow=follow, as_json=as_json)


def _kinds(names: list[str]) -> set[str]:
    return {kind for name in names for kind in FAMILIES.get(name.lower()) or (_kind(name),)}


def _kind(name: str) -> str:
    """Return a message kind by its name or by an unambiguous prefix."""
    found: list[str] = [kind for kind in KINDS if kind.lower() == name.lower()] or [
        kind for kind in KINDS if kind.lower().startswith(name.lower())
    ]
    if len(found) > 1:
        fail(f"{name!r} is the beginning of {', '.join(found)}: say which", USAGE)
    if not found:
        known = {one.lower(): one for one in (*FAMILIES, *KINDS)}
        near = [known[one] for one in difflib.get_close_matches(name.lower(), known, cutoff=0.6)]
        fail(
            f"no kind {name!r}; "
            + (f"did you mean {' or '.join(near)}?" if near else f"kinds: {', '.join((*FAMILIES, *KINDS))}"),
            USAGE,
        )
    return found[0]


def _stored_only(wanted: set[str]) -> set[str]:
    for name in sorted(wanted.difference(_STORED)):
        reason = (
            f"{name} is telemetry and is not stored (readers repair what they miss by snapshots), so it"
            " cannot be replayed"
        )
        fail(f"{reason}; stored kinds: {', '.join(_STORED)}. Without --since it can be followed", USAGE)
    if not wanted:
        note(
            f"replaying the stored kinds ({', '.join(_STORED)}); telemetry is not stored and can only be"
            " followed, without --since"
        )
    return wanted or set(_STORED)


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None:
        fail(f"--since {text!r}: use a number and s, m, h or d, e.g. 15m", USAGE)
    return float(match[1]) * _UNITS[match[2]]
