"""docs/asyncapi.yaml: equal to its script's output, complete and consistent, and true to real messages."""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from bus.protocol import codec
from bus.protocol.subjects import Subjects
from fleet.experts import ModelShape
from fleet.facts.dynamo_kv import KvMetrics, RoutedKvEvent
from fleet.messages import STORED, AnyEvent

DOCS = Path(__file__).resolve().parents[2] / "docs"
NO_CHANNELS = {
    "published",
    "namespace",
    "everything",
    "stored",
    "claim",
    "coordinator",
    "handover_key",
    "loop_key",
}
"""Members of Subjects that are patterns, or keys of claims."""
SHAPE = ModelShape(layers=2, experts=8, top_k=2, hidden=4, expert_intermediate=8)
"""A shape validates its own numbers, so examples need a valid one."""
KINDS = [*AnyEvent.__args__, KvMetrics]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "make_asyncapi.py"))


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DOCS / "asyncapi.yaml").read_text(encoding="utf-8"))
    return found


def resolved(document: dict[str, Any], reference: str) -> Any:
    assert reference.startswith("#/"), reference
    found: Any = document
    for key in reference[2:].split("/"):
        found = found[key]
    return found


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def problems(document: dict[str, Any], schema: dict[str, Any], value: Any, at: str = "") -> Iterator[str]:
    """Yield the defects of a value by JSON Schema draft 7, as far as the file uses it.

    Bytes are strings of format binary. An unknown keyword is a defect.
    """
    if "type" in schema and not is_type(schema["type"], schema.get("format"), value):
        yield f"{at}: {value!r:.60} is no {schema['type']}"
        return
    for keyword, stated in schema.items():
        match keyword:
            case "$ref":
                yield from problems(document, resolved(document, stated), value, at)
            case "allOf":
                for one in stated:
                    yield from problems(document, one, value, at)
            case "anyOf":
                if all([*problems(document, one, value, at)] for one in stated):
                    yield f"{at}: {value!r:.60} is none of {stated}"
            case "enum" if value not in stated:
                yield f"{at}: {value!r} is not one of {stated}"
            case "minimum" if value < stated:
                yield f"{at}: {value} < {stated}"
            case "minItems" if len(value) < stated:
                yield f"{at}: {len(value)} items"
            case "maxItems" if len(value) > stated:
                yield f"{at}: {len(value)} items"
            case "required":
                yield from (f"{at}: {name} is missing" for name in stated if name not in value)
            case "properties":
                for name, inner in stated.items():
                    if name in value:
                        yield from problems(document, inner, value[name], f"{at}.{name}")
            case "additionalProperties":
                for name, inner in value.items():
                    yield from problems(document, stated, inner, f"{at}.{name}")
            case "items":
                pairs = (
                    zip(stated, value, strict=False)
                    if isinstance(stated, list)
                    else ((stated, one) for one in value)
                )
                for number, (inner, one) in enumerate(pairs):
                    yield from problems(document, inner, one, f"{at}[{number}]")
            case (
                "enum"
                | "type"
                | "minimum"
                | "minItems"
                | "maxItems"
                | "additionalItems"
                | "description"
                | "default"
                | "format"
            ):
                pass
            case _:
                yield f"{at}: keyword {keyword}"


def is_type(stated: str, form: str | None, value: Any) -> bool:
    plain = {
        "object": dict,
        "array": list,
        "boolean": bool,
        "null": type(None),
        "string": bytes if form == "binary" else str,
    }
    if stated in plain:
        return isinstance(value, plain[stated])
    return isinstance(value, int if stated == "integer" else int | float) and not isinstance(value, bool)


def example(about: Any, *, full: bool) -> Any:
    """Return a value of a type (`msgspec.inspect`). full: with every optional field, and an element in every
    list.
    """
    kinds = msgspec.inspect
    match about:
        case kinds.StructType() if about.cls is ModelShape:
            return SHAPE
        case kinds.StructType():
            fields = {
                field.name: example(field.type, full=full) for field in about.fields if full or field.required
            }
            return about.cls(**fields)
        case kinds.UnionType():
            ordered = sorted(about.types, key=lambda one: full == isinstance(one, kinds.NoneType))
            return example(ordered[0], full=full)
        case kinds.TupleType():
            return tuple(example(one, full=full) for one in about.item_types)
        case kinds.VarTupleType():
            return (example(about.item_type, full=full),) * full
        case kinds.DictType():
            return {example(about.key_type, full=full): example(about.value_type, full=full)} if full else {}
        case kinds.LiteralType():
            return about.values[0]
        case kinds.IntType():
            return (1 << 64) - 1 if full else 0
        case kinds.BytesType():
            return b"\x00\xff"
    return {
        kinds.FloatType: 0.5,
        kinds.BoolType: True,
        kinds.StrType: "text",
        kinds.AnyType: None,
        kinds.NoneType: None,
    }[type(about)]


def test_the_file_is_what_its_script_writes(script: dict[str, Any]) -> None:
    assert (DOCS / "asyncapi.yaml").read_text(encoding="utf-8") == script["text"](), (
        "write it anew: python docs/make_asyncapi.py"
    )


def test_every_subject_is_a_channel_and_the_other_way_round(document: dict[str, Any]) -> None:
    members = {name for name in vars(Subjects) if not name.startswith("_")} - NO_CHANNELS
    assert set(document["channels"]) == members | {"answers"}
    for name, channel in document["channels"].items():
        assert set(re.findall(r"{(\w+)}", channel["address"] or "")) == set(channel.get("parameters", {})), (
            name
        )
    subjects = Subjects("roost")
    assert document["channels"]["heartbeats"]["address"].format(
        namespace="roost", engine="e"
    ) == subjects.heartbeats("e")
    assert document["channels"]["migrations"]["address"].format(
        namespace="roost", engine="e"
    ) == subjects.migrations("e")
    assert document["channels"]["handover"]["address"].format(
        namespace="roost", engine="e", worker_id=5, rank=1
    ) == subjects.handover("e", 5, 1)
    assert document["channels"]["drains"]["address"].format(
        namespace="roost", engine="e", drained="all"
    ) == subjects.drains("e", None)


def test_every_kind_is_said_or_asked_somewhere_and_what_is_stored_is_marked(document: dict[str, Any]) -> None:
    messages = document["components"]["messages"]
    assert set(messages) == {kind.__name__ for kind in KINDS} | {"KvEvents"}
    named = {name for channel in document["channels"].values() for name in channel["messages"]}
    assert named == set(messages)
    assert {name for name, message in messages.items() if message.get("x-stored")} == {
        kind.__name__ for kind in STORED
    }
    in_stored = {
        name
        for channel in document["channels"].values()
        if channel.get("x-stored")
        for name in channel["messages"]
    }
    assert in_stored == {kind.__name__ for kind in STORED}
    marked = [name for name, channel in document["channels"].items() if channel.get("x-stored")]
    subjects = Subjects("roost")
    wild = dict.fromkeys(("engine", "drained", "part", "rank"), "*")
    assert {
        document["channels"][name]["address"].format(namespace="roost", **wild) for name in marked
    } == set(subjects.stored)


def test_it_holds_together_as_asyncapi_3(document: dict[str, Any]) -> None:
    assert document["asyncapi"] == "3.0.0"
    assert {"title", "version"} <= set(document["info"])
    for reference in references(document):
        resolved(document, reference)
    for operation in document["operations"].values():
        assert operation["action"] in ("send", "receive")
        for about in (operation, *([operation["reply"]] if "reply" in operation else [])):
            there = f"{about['channel']['$ref']}/messages/"
            assert all(message["$ref"].startswith(there) for message in about["messages"])


def test_every_message_and_nearly_every_field_is_described(document: dict[str, Any]) -> None:
    assert all(len(message["summary"]) > 10 for message in document["components"]["messages"].values())
    assert all("description" in schema for schema in document["components"]["schemas"].values())
    staged = document["components"]["schemas"]["MigrationStaged"]["properties"]
    assert staged["number"]["description"] == "index of the handover in the plan, from 0"
    assert (
        "address in the process"
        in document["components"]["schemas"]["MemoryAddress"]["properties"]["base"]["description"]
    )


@pytest.mark.parametrize("full", [False, True], ids=["the least", "everything"])
@pytest.mark.parametrize("kind", [*KINDS, RoutedKvEvent], ids=lambda kind: kind.__name__)
def test_messages_as_they_travel_are_as_the_file_says(
    document: dict[str, Any], kind: type, full: bool
) -> None:
    one = example(msgspec.inspect.type_info(kind), full=full)
    name, topic, message = kind.__name__, "some-topic", one
    if kind is RoutedKvEvent:
        name, topic, message = "KvEvents", "kv-events", (one,)
    elif kind is KvMetrics:
        topic = "kv_metrics"
    raw = codec.seal(7, 3, 12.5, topic, codec.encode(topic, message))
    envelope = msgspec.msgpack.decode(raw)
    assert [*problems(document, document["components"]["schemas"]["Envelope"], envelope)] == []
    payload = msgspec.msgpack.decode(envelope["payload"])
    schema = document["components"]["messages"][name]["payload"]
    assert [*problems(document, schema, payload)] == []
    for field in msgspec.structs.fields(kind) if isinstance(payload, dict) else ():
        lacking = {key: value for key, value in payload.items() if key != field.encode_name}
        assert bool([*problems(document, schema, lacking)]) == field.required
