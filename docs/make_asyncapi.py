"""Write docs/asyncapi.yaml: every subject of `bus.protocol.subjects` and every message of `fleet.messages`,
with their fields, as AsyncAPI 3.0.

    python docs/make_asyncapi.py

Names, types and defaults come from the message types, descriptions from their docstrings. PUBLISHED and
REQUESTED list the messages of each subject. A test compares them with the existing subjects and kinds, and
the file with the output of this script.
"""

import ast
import inspect
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import yaml

from bus.protocol.codec import BlobReference, Envelope, PartRequest, PartsOffer
from bus.protocol.subjects import Subjects
from fleet import messages
from fleet.facts.dynamo_kv import KvMetrics, RoutedKvEvent
from fleet.messages import STORED, AnyEvent

FILE = Path(__file__).with_name("asyncapi.yaml")
KV_EVENTS = "KvEvents"
"""Our name for a batch in Dynamo's untagged form."""

PUBLISHED: dict[str, tuple[tuple[type, ...], str]] = {
    "kv_events": (
        (RoutedKvEvent,),
        "every rank that reports its KV cache, in batches, in Dynamo's own form",
    ),
    "kv_metrics": (
        (KvMetrics,),
        "every rank, in Dynamo's own form, when its load changes and once a second",
    ),
    "heartbeats": ((messages.EngineHeartbeat,), "rank 0 of every engine, once a second"),
    "experts": ((messages.ExpertsActivated,), "every rank, once a second while it computes"),
    "dispatched": (
        (messages.DispatchMeasured,),
        "every rank that can measure it, once a second while it computes",
    ),
    "requests_profiled": ((messages.RequestsProfiled,), "every rank, about requests that ended there"),
    "tokens_sampled": (
        (messages.TokensSampled,),
        "every rank, about some of the requests that ended there",
    ),
    "requests_read": ((messages.RequestsProfiled,), "routers"),
    "requests_finished": ((messages.RequestsFinished,), "routers"),
    "imports": ((messages.CountsImported,), "`roost popularity --learn`"),
    "clusters": ((messages.ClustersPublished,), "the tracker"),
    "tables": ((messages.TablesPublished,), "the tracker"),
    "shifts": ((messages.PopularityShifted,), "the tracker"),
    "tracker_heartbeat": ((messages.TrackerHeartbeat,), "the tracker, once a second"),
    "profiles": ((messages.ProfilePublished,), "the tracker"),
    "demand": ((messages.DemandPublished,), "the tracker"),
    "homes": ((messages.HomesPublished,), "the planner"),
    "handovers": (
        (messages.HandoverDescribed,),
        "every rank that takes part in a handover, at every step of progress",
    ),
    "reservations": ((messages.ReservationsChanged,), "routers"),
    "membership": ((messages.EngineJoined, messages.EngineLeft), "rank 0 of every engine"),
    "placements": ((messages.PlacementCommitted,), "the planner"),
    "migrations": (
        (
            messages.MigrationPlanned,
            messages.MigrationStaged,
            messages.MigrationCommitted,
            messages.MigrationAborted,
            messages.PlanEvaluated,
        ),
        "the planner",
    ),
    "drains": ((messages.RankDrained,), "`roost drain`"),
    "config": ((messages.ConfigChanged,), "routers and planners, and `roost up`"),
}
"""Published messages and their publisher, by member of Subjects."""
REQUESTED: dict[str, tuple[dict[type, type], str]] = {
    "describe_engine": ({messages.DescribeEngine: messages.EngineJoined}, "rank 0 of the engine"),
    "kv_snapshot": ({messages.KvSnapshotRequested: messages.KvSnapshot}, "the rank"),
    "describe_profile": (
        {
            messages.DescribeProfile: messages.ProfilePublished,
            messages.DescribeClusters: messages.ClustersPublished,
            messages.DescribeTables: messages.TablesPublished,
            messages.DescribePopularity: messages.PopularityDescribed,
        },
        "the tracker",
    ),
    "describe_plan": ({messages.DescribePlan: messages.PlanDescribed}, "the planner"),
    "migrate": (
        dict.fromkeys(
            (
                messages.MigrateExpert,
                messages.ApplyMap,
                messages.ApplyPlan,
                messages.RollBack,
                messages.SetLayout,
            ),
            messages.MigrationAccepted,
        ),
        "the leading planner",
    ),
    "loop": (
        {
            **dict.fromkeys((messages.DescribeLoop, messages.SetLoopState), messages.LoopDescribed),
            **dict.fromkeys((messages.DescribeLayouts, messages.SetLayoutChoice), messages.LayoutsDescribed),
        },
        "the leading planner",
    ),
    "handover": (
        {
            **dict.fromkeys(
                (
                    messages.ProposeHandover,
                    messages.CommitHandover,
                    messages.AbortHandover,
                    messages.DescribeHandover,
                ),
                messages.HandoverDescribed,
            ),
            messages.DescribeMemory: messages.MemoryDescribed,
        },
        "the rank; only the leading planner sends these requests, and `roost layout --memory` the last",
    ),
    "leases": (
        {messages.LeaseExperts: messages.ExpertsLeased, messages.EndLease: messages.LeaseEnded},
        "the rank; only ranks of its engine send these requests",
    ),
    "describe_reservations": ({messages.DescribeReservations: messages.ReservationsDescribed}, "the router"),
    "route": ({messages.RouteRequested: messages.RouteDecided}, "one of the routers"),
    "release": ({messages.RouteReleased: messages.RouteReleased}, "one of the routers"),
    "decision": ({messages.DescribeDecision: messages.DecisionDescribed}, "the router that made it"),
}
"""Answer of each request, and the answering party, by member of Subjects. RequestRefused may replace any
answer."""
PARAMETERS = {
    "namespace": "`[bus] namespace`; roost unless it is set",
    "engine": "the engine's name; * for all",
    "worker_id": "u64 of one incarnation of an engine",
    "rank": "number of a rank within its engine",
    "drained": "number of a rank, or all",
    "part": "name of a part of Roost",
    "router": "u64 of one router process",
    "tag": "the first letters of the ids of a router's decisions",
}
COMMON = {
    "kind": "name of the message",
    "engine": "the engine's name",
    "worker_id": "u64 of one incarnation of an engine",
    "rank": "number within the engine",
    "plan": "id of the plan",
    "epoch": "of placement and layout: each handover adds one",
}
"""Default descriptions of fields."""
LOGIN = """User and password of one role, as `roost up` and `roost bus credentials` write them (files of mode 0600).
`roost bus permissions` prints the subjects that a role may publish on and subscribe to. Answers come to subjects
below `_INBOX.<user>`, and nowhere else. The read-only user is `subscriber`. A server without users requires no
login: every client that reaches it may do everything."""
ABOUT = """Messages on Roost's bus: NATS, with JetStream for stored messages.

**Decoding.** Every message is an envelope, a msgpack map of five fields (schema Envelope, Dynamo's form). Its
`payload` is msgpack again: a map whose `kind` names the message (schemas below). Dynamo's own two topics are the
exception: `kv-events` carries an array of RoutedKvEvent, `kv_metrics` a KvMetrics, both without `kind`.
A `topic` of `roost-blob` marks a payload that was too large. It is a BlobReference then, and the content is stored
under its digest in the object store `<namespace>-parcels`. An answer that is too large has the topic `roost-parts`
and a PartsOffer instead: request each part with a PartRequest (topic `roost-part-wanted`) on the same subject. The
payload of the answer is the raw part (topic `roost-part`; `roost-no-part` from a server that does not have it).
Where a schema says `format: binary`, the wire has msgpack's bin type. Integers may need 64 bits, unsigned.

**Compatibility.** Ignore unknown fields and kinds: there will be more. `sequence` counts a publisher's messages
from 0, and a gap is a loss. A new `publisher_id` is a restart.

**Stored.** Channels marked `x-stored` are kept in the stream `<namespace>-stored`: an ordinary JetStream consumer
replays them, and subscribers receive them as well. Everything else is telemetry, published once.

**Requests.** NATS request and reply; the answer is an envelope like any other. `RequestRefused` gives the reason
when there is no answer.
"""


class _Dumper(yaml.SafeDumper):
    """Write longer text in blocks, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def document() -> dict[str, Any]:
    """Return the whole document."""
    kinds = sorted(_kinds(), key=lambda kind: kind.__name__)
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Roost",
            "version": version("roost"),
            "description": ABOUT,
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/msgpack",
        "servers": {
            "nats": {
                "host": "127.0.0.1:4222",
                "protocol": "nats",
                "description": "a NATS server with JetStream; `roost status` says which",
                "security": [{"$ref": "#/components/securitySchemes/login"}],
            }
        },
        "channels": {
            **{name: _published(name) for name in PUBLISHED},
            **{name: _requested(name) for name in REQUESTED},
            "answers": _answers(),
        },
        "operations": {
            **{f"hear_{name}": _receive_operation(name) for name in PUBLISHED},
            **{
                kind.__name__: _request_operation(name, kind)
                for name in REQUESTED
                for kind in REQUESTED[name][0]
            },
        },
        "components": {
            "securitySchemes": {"login": {"type": "userPassword", "description": LOGIN}},
            "messages": {_name(kind): _message(kind) for kind in kinds},
            "schemas": dict(
                sorted(_schemas((*kinds, Envelope, BlobReference, PartsOffer, PartRequest)).items())
            ),
        },
    }


def text() -> str:
    """Return the content of the file."""
    head = (
        "# Written by docs/make_asyncapi.py from fleet/messages.py and bus/protocol/subjects.py; change"
        " those.\n"
    )
    return head + yaml.dump(document(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=150)


# Channels and operations


def _published(name: str) -> dict[str, Any]:
    kinds, by = PUBLISHED[name]
    stored = {"x-stored": True} if all(kind in STORED for kind in kinds) else {}
    return {**_channel(name, kinds, f"Published by {by}."), **stored}


def _requested(name: str) -> dict[str, Any]:
    requests, by = REQUESTED[name]
    return _channel(name, requests, f"Answered by {by}.")


def _channel(name: str, kinds: Iterable[type], more: str) -> dict[str, Any]:
    member = getattr(Subjects, name)
    about = inspect.cleandoc(member.__doc__ or "")
    address, parameters = _address(name)
    return {
        "address": address,
        "description": " ".join(part for part in (about, more) if part),
        "messages": {_name(kind): _ref("messages", _name(kind)) for kind in kinds},
        "parameters": {one: {"description": PARAMETERS[one]} for one in parameters},
    }


def _address(name: str) -> tuple[str, list[str]]:
    """Return the address with {parameters} in it, and their names."""
    subjects, given = Subjects("namespace-here"), _given(name)
    member = getattr(subjects, name)
    subject = member(*(value for value, _ in given)) if given else member
    tokens = subject.split(".")
    named = {"namespace-here": "namespace", **{str(value): parameter for value, parameter in given}}
    filled = (f"{{{named[token]}}}" if token in named else token for token in tokens)
    return ".".join(filled), ["namespace", *(parameter for _, parameter in given)]


def _given(name: str) -> list[tuple[Any, str]]:
    """Return example arguments for a member of Subjects, and the parameter that each stands for in the
    address."""
    if isinstance(getattr(Subjects, name), property):
        return []
    parameters = list(inspect.signature(getattr(Subjects, name)).parameters)[1:]
    numbers = {"worker_id": 7_000_001, "rank": 7_000_002, "router": 7_000_003}
    return [
        (numbers.get(one, f"{one}-here"), "drained" if (name, one) == ("drains", "rank") else one)
        for one in parameters
    ]


def _answers() -> dict[str, Any]:
    kinds = sorted(
        {answer for requests, _ in REQUESTED.values() for answer in requests.values()}
        | {messages.RequestRefused},
        key=lambda kind: kind.__name__,
    )
    return {
        "address": None,
        "description": "The inbox that a NATS request names for its reply.",
        "messages": {_name(kind): _ref("messages", _name(kind)) for kind in kinds},
    }


def _receive_operation(name: str) -> dict[str, Any]:
    return {
        "action": "receive",
        "channel": {"$ref": f"#/channels/{name}"},
        "messages": [_in_channel(name, kind) for kind in PUBLISHED[name][0]],
    }


def _request_operation(name: str, kind: type) -> dict[str, Any]:
    answers = (REQUESTED[name][0][kind], messages.RequestRefused)
    return {
        "action": "send",
        "channel": {"$ref": f"#/channels/{name}"},
        "messages": [_in_channel(name, kind)],
        "reply": {
            "address": {"location": "$message.header#/reply", "description": "NATS's reply subject"},
            "channel": {"$ref": "#/channels/answers"},
            "messages": [_in_channel("answers", answer) for answer in answers],
        },
    }


def _in_channel(channel: str, kind: type) -> dict[str, str]:
    return {"$ref": f"#/channels/{channel}/messages/{_name(kind)}"}


# Messages and their fields


def _kinds() -> set[type]:
    return {*AnyEvent.__args__, KvMetrics, RoutedKvEvent}


def _name(kind: type) -> str:
    return KV_EVENTS if kind is RoutedKvEvent else kind.__name__


def _message(kind: type) -> dict[str, Any]:
    if kind is RoutedKvEvent:
        payload: dict[str, Any] = {"type": "array", "items": _ref("schemas", kind.__name__)}
    else:
        payload = _ref("schemas", kind.__name__)
    about = " ".join(inspect.cleandoc(kind.__doc__ or "").split())
    stored = {"x-stored": True} if kind in STORED else {}
    return {
        "name": _name(kind),
        "summary": about.split(". ")[0].removesuffix(".") + ".",
        "payload": payload,
        **stored,
    }


def _schemas(kinds: Iterable[type]) -> dict[str, Any]:
    """Return JSON Schemas of draft 7, as AsyncAPI uses them, with descriptions of fields and bytes as
    binary."""
    _, found = msgspec.json.schema_components(tuple(kinds), ref_template="#/components/schemas/{name}")
    return {name: _described(name, _plain(schema)) for name, schema in found.items()}


def _plain(schema: Any) -> Any:
    """Return a schema without the keywords that draft 7 does not have."""
    if isinstance(schema, list):
        return [_plain(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {
        key: _plain(value)
        for key, value in schema.items()
        if key not in ("title", "contentEncoding", "prefixItems")
    }
    if "contentEncoding" in schema:
        plain["format"] = "binary"
    if "prefixItems" in schema:
        plain |= {"items": _plain(schema["prefixItems"]), "additionalItems": False}
    return plain


def _described(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    words = _documented().get(name, {})
    fields = {
        field: _with(about, words.get(field, COMMON.get(field)))
        for field, about in schema.get("properties", {}).items()
    }
    text = " ".join(schema.get("description", "").split())
    return {
        **({"description": text} if text else {}),
        **{key: value for key, value in schema.items() if key != "description"},
        **({"properties": fields} if fields else {}),
    }


def _with(schema: dict[str, Any], words: str | None) -> dict[str, Any]:
    """Return a schema with a description. In draft 7 a reference has none of its own, so it is wrapped in
    allOf."""
    if words is None:
        return schema
    return {"description": words, **({"allOf": [schema]} if "$ref" in schema else schema)}


@cache
def _documented() -> dict[str, dict[str, str]]:
    """Return the docstring of each field, by class and field."""
    modules = [module for name, module in sys.modules.items() if name.startswith(("fleet.", "bus."))]
    return {
        node.name: dict(_fields(node))
        for module in modules
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.ClassDef)
    }


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, words in zip(node.body, node.body[1:], strict=False):
        described = (
            isinstance(words, ast.Expr)
            and isinstance(words.value, ast.Constant)
            and isinstance(words.value.value, str)
        )
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and described:
            yield field.target.id, " ".join(words.value.value.split())


def _ref(kind: str, name: str) -> dict[str, str]:
    return {"$ref": f"#/components/{kind}/{name}"}


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
