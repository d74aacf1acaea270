"""`roost events`: print bus messages."""

import difflib
from typing import Annotated

import typer

from bus.protocol.codec import RENAMED_KINDS
from deploy.terminal.command_settings import bus_from
from deploy.terminal.options import ConfigOption, JsonOption, NatsOption
from deploy.terminal.output import USAGE, fail, note
from fleet.facts.dynamo_kv import KvMetrics
from fleet.messages import STORED, AnyEvent
from fleet.text import read_duration

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
KindOption = Annotated[
    list[str] | None,
    typer.Option(
        "--kind",
        metavar="KIND",
        help=f"Only this kind; repeat for more. {_FAMILY_HELP} Kinds: {', '.join(KINDS)}.",
    ),
]
SinceOption = Annotated[
    str | None,
    typer.Option(
        "--since",
        metavar="TIME",
        help="First replay stored messages from this far back, e.g. 90s, 15m, 1h, 2d.",
    ),
]
FollowOption = Annotated[
    bool,
    typer.Option("--follow/--no-follow", help="Continue with new messages; --no-follow needs --since."),
]


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("events")(events)


def events(
    kind: KindOption = None,
    since: SinceOption = None,
    follow: FollowOption = True,
    nats: NatsOption = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
) -> None:
    """Print bus messages, one line each, until Ctrl-C."""
    # imports the NATS client, which not every command needs
    from deploy.views.events import show_events

    kinds, seconds = _kinds(kind or []), None if since is None else _seconds(since)
    if seconds is not None:
        kinds = _stored_only(kinds)
    elif not follow:
        fail("--no-follow needs --since: telemetry is not stored", USAGE)
    show_events(bus_from(config, nats), kinds, seconds, follow=follow, as_json=as_json)


def _kinds(names: list[str]) -> set[str]:
    return {kind for name in names for kind in FAMILIES.get(name.lower()) or (_kind(name),)}


def _kind(name: str) -> str:
    """Return a message kind by its name, a former name, or an unambiguous prefix of its name."""
    former = next((old for old in RENAMED_KINDS if old.lower() == name.lower()), None)
    if former is not None:
        note(f"{former} is now {RENAMED_KINDS[former]}")
        return RENAMED_KINDS[former]
    found: list[str] = [kind for kind in KINDS if kind.lower() == name.lower()] or [
        kind for kind in KINDS if kind.lower().startswith(name.lower())
    ]
    if len(found) > 1:
        fail(f"{name!r} is the beginning of {', '.join(found)}: name one of them", USAGE)
    if not found:
        known = {one.lower(): one for one in (*FAMILIES, *KINDS)}
        near = [known[one] for one in difflib.get_close_matches(name.lower(), known, cutoff=0.6)]
        remedy = f"did you mean {' or '.join(near)}?" if near else f"kinds: {', '.join(known.values())}"
        fail(f"no kind {name!r}; {remedy}", USAGE)
    return found[0]


def _stored_only(kinds: set[str]) -> set[str]:
    for name in sorted(kinds.difference(_STORED)):
        reason = (
            f"{name} is telemetry and is not stored (readers repair what they miss by snapshots), so it"
            " cannot be replayed"
        )
        fail(f"{reason}; stored kinds: {', '.join(_STORED)}. Without --since it can be followed", USAGE)
    if not kinds:
        note(
            f"replaying the stored kinds ({', '.join(_STORED)}); telemetry is not stored and can only be"
            " followed, without --since"
        )
    return kinds or set(_STORED)


def _seconds(text: str) -> float:
    try:
        return read_duration(text)
    except ValueError as error:
        fail(f"--since {error}", USAGE)
