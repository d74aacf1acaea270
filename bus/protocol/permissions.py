"""Permissions of each role on a NATS server: subjects in, allow lists out, also as a server configuration.
Pure.

A role may do exactly what its part of Roost does on the bus. Answers use `allow_responses`: a part may
publish once to the inbox of each requester, and to no other inbox. Each user subscribes to its own inbox
(`bus.protocol.roles.inbox_prefix`).
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass

from bus.protocol.names import StoreNames
from bus.protocol.roles import Login, Role, inbox_prefix, user_name
from bus.protocol.subjects import Subjects

RESPONSE_MINUTES = 5
"""A request may be answered within this time."""
OWN_RIGHTS = "$SYS.REQ.USER.INFO"
"""Request to the server: the rights of the user that asks."""


@dataclass(frozen=True, slots=True)
class Rights:
    """Subjects that a user may publish on and subscribe to; with `*` and `>`."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: bool
    """True if the user may answer requests that it receives"""


def rights(role: Role, subjects: Subjects, engine: str = "*", user: str | None = None) -> Rights:
    """Return the rights of a role.

    engine: the only engine that a user of the role "engine" may act as. user: owner of the inbox; None:
    `user_name`.
    """
    made = {
        "engine": _engine,
        "router": _router,
        "tracker": _tracker,
        "planner": _planner,
        "operator": _operator,
        "subscriber": _subscriber,
    }[role](subjects, StoreNames.of(subjects), engine)
    inbox = (
        f"{inbox_prefix(user or user_name(role, None if engine == '*' or role != 'engine' else engine))}.>"
    )
    return Rights((*made.publish, OWN_RIGHTS), (*made.subscribe, inbox), made.answers)


def _engine(subjects: Subjects, names: StoreNames, engine: str) -> Rights:
    """Publishes and answers on its own subjects; reads the log (for its previous placement) and the
    claims."""
    own = (
        subjects.kv_events,  # Dynamo's: shared by all engines
        subjects.kv_metrics,
        subjects.membership(engine),
        subjects.drains(engine, None),  # wrong weights: an agent drains its engine
        subjects.heartbeats(engine),
        subjects.experts(engine),
        subjects.dispatched(engine),
        subjects.requests_profiled(engine),
        subjects.tokens_sampled(engine),
        subjects.handovers(engine),
    )
    asks = (subjects.describe_profile, subjects.leases(engine, "*", "*"))
    keeps = (
        names.claim(subjects.claim(engine)),
        *names.contents(names.blobs),
        *names.contents(names.parcels),
    )
    answers = (
        subjects.describe_engine(engine, "*"),
        subjects.kv_snapshot(engine, "*", "*"),
        subjects.handover(engine, "*", "*"),
        subjects.leases(engine, "*", "*"),
    )
    return Rights((*own, *asks, *keeps, *_stores(names)), (subjects.clusters, *answers), answers=True)


def _router(subjects: Subjects, names: StoreNames, _: str) -> Rights:
    """Subscribes to engines, tracker, planner and the other routers; publishes its bookings and
    predictions."""
    publishes = (
        subjects.reservations,
        subjects.requests_finished,
        subjects.requests_read,
        subjects.imports,
        subjects.config("router"),
    )
    asks = (
        subjects.describe_engine("*", "*"),
        subjects.kv_snapshot("*", "*", "*"),
        subjects.describe_profile,
        subjects.describe_plan,
        subjects.loop,
        subjects.describe_reservations(),
        subjects.decision("*"),
    )
    hears = (
        subjects.kv_events,
        subjects.kv_metrics,
        subjects.heartbeats(),
        subjects.requests_profiled(),
        subjects.requests_read,
        subjects.clusters,
        subjects.tables,
        subjects.shifts,
        subjects.tracker_heartbeat,
        subjects.homes,
        subjects.reservations,
    )
    answers = (subjects.describe_reservations(), subjects.decision("*"), subjects.route, subjects.release)
    return Rights(
        (*publishes, *asks, *names.contents(names.parcels), *_stores(names), *_mends(names)),
        (*hears, *answers),
        answers=True,
    )


def _tracker(subjects: Subjects, names: StoreNames, _: str) -> Rights:
    """Subscribes to reports of ranks and routers; publishes what it learns from them."""
    publishes = (
        subjects.profiles,
        subjects.demand,
        subjects.clusters,
        subjects.tables,
        subjects.shifts,
        subjects.tracker_heartbeat,
    )
    hears = (
        subjects.experts(),
        subjects.heartbeats(),
        subjects.requests_profiled(),
        subjects.requests_read,
        subjects.requests_finished,
        subjects.imports,
        subjects.describe_profile,
    )
    return Rights(
        (*publishes, *names.contents(names.parcels), *_stores(names), *_mends(names)), hears, answers=True
    )


def _planner(subjects: Subjects, names: StoreNames, _: str) -> Rights:
    """Commands ranks; keeps its leadership, its handovers and its persistent state under its own keys."""
    publishes = (subjects.homes, subjects.placements(), subjects.migrations(), subjects.config("planner"))
    asks = (subjects.describe_engine("*", "*"), subjects.describe_profile, subjects.handover("*", "*", "*"))
    keys = (subjects.coordinator, subjects.loop_key, subjects.handover_key("*"))
    hears = (
        subjects.demand,
        subjects.kv_metrics,
        subjects.dispatched(),
        subjects.tokens_sampled(),
        subjects.experts(),
        subjects.shifts,
        subjects.clusters,
        subjects.tables,
        subjects.heartbeats(),
        subjects.handovers(),
    )
    answers = (subjects.describe_plan, subjects.migrate, subjects.loop)
    keeps = (*map(names.claim, keys), *names.contents(names.blobs), *names.contents(names.parcels))
    return Rights(
        (*publishes, *asks, *keeps, *_stores(names), *_extends(names), *_mends(names)),
        (*hears, *answers),
        answers=True,
    )


def _operator(subjects: Subjects, names: StoreNames, _: str) -> Rights:
    """Users of `roost` commands, and the server's own tools: may subscribe to everything, send every request
    and command, and administer streams.
    """
    publishes = (subjects.drains(), subjects.config(), subjects.imports)
    asks = (
        subjects.describe_engine("*", "*"),
        subjects.kv_snapshot("*", "*", "*"),
        subjects.describe_profile,
        subjects.describe_plan,
        subjects.describe_reservations(),
        subjects.decision("*"),
        subjects.route,
        subjects.release,
        subjects.migrate,
        subjects.loop,
        subjects.handover("*", "*", "*"),
    )
    keeps = (names.claim(">"), *names.contents(names.blobs), *names.contents(names.parcels))
    return Rights(
        (*publishes, *asks, *keeps, "$JS.API.>", "$JS.FC.>", "$JS.ACK.>"),
        (subjects.everything,),
        answers=False,
    )


def _subscriber(subjects: Subjects, names: StoreNames, _: str) -> Rights:
    """Subscribes to and replays public messages. No requests and answers (some contain prompts), no claims,
    no blobs, and no publishing.
    """
    reads = (names.stream, f"OBJ_{names.parcels}")
    asks = (
        "$JS.API.INFO",
        "$JS.API.STREAM.NAMES",
        *(f"$JS.API.STREAM.INFO.{stream}" for stream in reads),
        *(subject for stream in reads for subject in _consumes(stream)),
        f"$JS.API.STREAM.MSG.GET.OBJ_{names.parcels}",
    )
    return Rights(asks, subjects.published, answers=False)


def covers(allowed: str, wanted: str) -> bool:
    """Return whether a pattern (with `*` and `>`) matches every subject that another one matches."""
    one, other = allowed.split("."), wanted.split(".")
    for at, token in enumerate(one):
        if token == ">":
            return at < len(other)
        if at >= len(other) or other[at] == ">" or (token != "*" and token != other[at]):
            return False
    return len(one) == len(other)


def lacking(wanted: Iterable[str], allowed: Iterable[str], denied: Iterable[str] = ()) -> list[str]:
    """Return the wanted patterns that no allowed one covers, or that a denied one covers."""
    allowed, denied = tuple(allowed), tuple(denied)
    return [
        one
        for one in dict.fromkeys(wanted)
        if not any(covers(may, one) for may in allowed) or any(covers(not_, one) for not_ in denied)
    ]


def _stores(names: StoreNames) -> tuple[str, ...]:
    """Find the streams, create missing ones (existing ones stay unchanged), read log, claims and contents."""
    objects = (f"OBJ_{names.blobs}", f"OBJ_{names.parcels}")
    return (
        *(f"$JS.API.STREAM.{what}.{stream}" for stream in names.streams for what in ("INFO", "CREATE")),
        *(f"$JS.API.STREAM.MSG.GET.{stream}" for stream in (f"KV_{names.claims}", *objects)),
        *(subject for stream in (names.stream, *objects) for subject in _consumes(stream)),
    )


def _consumes(stream: str) -> tuple[str, ...]:
    """Replay a stream and acknowledge what was read."""
    return (
        f"$JS.API.CONSUMER.CREATE.{stream}",
        f"$JS.API.CONSUMER.CREATE.{stream}.>",
        f"$JS.API.CONSUMER.INFO.{stream}.>",
        f"$JS.API.CONSUMER.MSG.NEXT.{stream}.>",
        f"$JS.FC.{stream}.>",
        f"$JS.ACK.{stream}.>",
    )


def _extends(names: StoreNames) -> tuple[str, ...]:
    """Add the subjects that a newer version stores to the log."""
    return (f"$JS.API.STREAM.UPDATE.{names.stream}",)


def _mends(names: StoreNames) -> tuple[str, ...]:
    """Delete contents: damaged ones, and plans that have ended."""
    return tuple(
        subject
        for bucket in (names.blobs, names.parcels)
        for subject in (f"$JS.API.STREAM.PURGE.OBJ_{bucket}", *(names.contents(bucket)))
    )


def server_users(subjects: Subjects, users: Iterable[tuple[Login, Role, str]]) -> str:
    """Return the `authorization` block of a nats-server configuration.

    users: login, role, engine (`*` for all engines, and for other roles).
    """
    lines = ["authorization {", "  users: ["]
    for login, role, engine in users:
        may = rights(role, subjects, engine, login.user)
        lines += [
            "    {",
            f"      user: {json.dumps(login.user)}, password: {json.dumps(login.password)}",
            "      permissions: {",
            f"        publish: {{ allow: {json.dumps(list(dict.fromkeys(may.publish)))} }}",
            f"        subscribe: {{ allow: {json.dumps(list(dict.fromkeys(may.subscribe)))} }}",
            *(
                [f'        allow_responses: {{ max: 1, expires: "{RESPONSE_MINUTES}m" }}']
                if may.answers
                else []
            ),
            "      }",
            "    }",
        ]
    return "\n".join([*lines, "  ]", "}"]) + "\n"
