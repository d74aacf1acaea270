"""Codec: round trips of every message type, hostile bytes, and agreement with Dynamo's own wheel."""

import random
import re
from contextlib import suppress
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus import BusError, Message
from bus.protocol.codec import (
    BLOB_TOPIC,
    LARGE,
    PAYLOAD_BYTES,
    RENAMED_FIELDS,
    RENAMED_KINDS,
    WIRE_BYTES,
    BlobReference,
    RejectionReason,
    Rejections,
    Undeliverable,
    decode,
    encode,
    reference,
    referred,
    seal,
    topic_of,
    unseal,
)
from bus.protocol.subjects import Subjects, matches
from fleet.blocks import local_hashes, sequence_hashes
from fleet.event import Event
from fleet.experts import ModelShape
from fleet.facts.activity import (
    ExpertsActivated,
    RequestOutcome,
    RequestProfile,
    RequestsFinished,
    RequestsProfiled,
    SampledProfile,
    TokensSampled,
)
from fleet.facts.demand import DemandPublished, KeyedRows, TablesPublished, TrackerHeartbeat
from fleet.facts.dynamo_kv import KvBlock, KvChange, KvEvent, KvMetrics, KvRemoved, KvStored, RoutedKvEvent
from fleet.facts.engines import EngineHeartbeat, EngineJoined, EngineLeft
from fleet.facts.placements import HomesPublished
from fleet.layout import DP_ATTENTION
from fleet.messages import AnyEvent
from fleet.placement import Placement, linear
from fleet.popularity import ExpertCounts, ExpertTable
from fleet.requests.control_loop import LoopDescribed
from fleet.requests.engines import KvSnapshot
from fleet.requests.plans import DescribePlan, PlanDescribed

U64 = st.integers(0, (1 << 64) - 1)
NAMES = st.text(max_size=20)
KV_BLOCKS = st.builds(KvBlock, U64, U64)
KV_CHANGES = st.one_of(
    st.builds(
        KvChange,
        stored=st.builds(
            KvStored, blocks=st.lists(KV_BLOCKS, max_size=4).map(tuple), parent_hash=st.none() | U64
        ),
    ),
    st.builds(KvChange, removed=st.builds(KvRemoved, block_hashes=st.lists(U64, max_size=4).map(tuple))),
    st.just("cleared"),
)
KV_EVENTS = st.builds(KvEvent, event_id=U64, data=KV_CHANGES, dp_rank=st.integers(0, 1000))
SIZES = st.integers(1, 9)
TABLES = st.builds(
    lambda layers, experts, fill: ExpertTable.of(np.full((layers, experts), fill)),
    SIZES,
    SIZES,
    st.floats(0, 1e9, width=32),
)
COUNTS = st.builds(
    lambda layers, experts, fill: ExpertCounts.of(np.full((layers, experts), fill)),
    SIZES,
    SIZES,
    st.integers(0, 1 << 40),
)
PROFILES = st.builds(
    RequestProfile,
    decision=NAMES,
    tokens=U64,
    cached_tokens=U64,
    signature=st.binary(max_size=9),
    local=st.none() | st.floats(0, 1),
    parent=st.none() | U64,
    blocks=st.binary(max_size=16),
    block_signatures=st.binary(max_size=16),
    block_size=U64,
    sample=st.none() | st.builds(SampledProfile, prompt=COUNTS, completion=COUNTS),
)
OUTCOMES = st.builds(
    RequestOutcome,
    decision=NAMES,
    worker_id=U64,
    rank=st.integers(0, 9),
    prefix=U64,
    tokens=st.binary(max_size=16),
    session=U64,
    tenant=U64,
    predicted=st.binary(max_size=9),
    predicted_local=st.none() | st.floats(0, 1),
    prior_local=st.none() | st.floats(0, 1),
    spread=st.none() | st.floats(0, 1),
)
EVENTS: st.SearchStrategy[Message] = st.one_of(
    st.builds(EngineLeft, engine=NAMES, worker_id=U64, reason=NAMES),
    st.builds(EngineHeartbeat, engine=NAMES, worker_id=U64, epoch=U64),
    st.builds(TrackerHeartbeat, protocol=U64, reports=U64),
    st.builds(
        ExpertsActivated,
        engine=NAMES,
        worker_id=U64,
        rank=st.integers(0, 1000),
        model=NAMES,
        epoch=U64,
        seconds=st.floats(0, 1e6),
        tokens=U64,
        cached_tokens=U64,
        counts=COUNTS,
    ),
    st.builds(
        DemandPublished,
        engine=NAMES,
        worker_id=U64,
        rank=st.integers(0, 9),
        model=NAMES,
        version=U64,
        tokens_per_second=st.floats(0, 1e9),
        demand=TABLES,
        pairs=st.floats(0, 1e9),
    ),
    st.builds(
        HomesPublished,
        engine=NAMES,
        worker_id=U64,
        model=NAMES,
        version=U64,
        epoch=U64,
        clusters=U64,
        count=st.integers(1, 9),
        ranks=st.integers(1, 9),
        homes=st.binary(max_size=16),
        reason=NAMES,
    ),
    st.builds(
        DescribePlan,
        engine=NAMES,
        policy=NAMES,
        budget_bytes=st.none() | U64,
        memory=st.booleans(),
        dead=st.lists(st.integers(0, 9), max_size=3).map(tuple),
        layers=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    ),
    st.builds(PlanDescribed, engine=NAMES, worker_id=U64, record=st.binary(max_size=16)),
    st.builds(
        RequestsProfiled,
        engine=NAMES,
        worker_id=U64,
        rank=st.integers(0, 9),
        model=NAMES,
        epoch=U64,
        clusters=U64,
        requests=st.lists(PROFILES, max_size=3).map(tuple),
    ),
    st.builds(
        TokensSampled,
        engine=NAMES,
        worker_id=U64,
        rank=st.integers(0, 9),
        model=NAMES,
        requests=st.lists(st.binary(max_size=9), max_size=3).map(tuple),
    ),
    st.builds(
        RequestsFinished,
        model=NAMES,
        tables=U64,
        clusters=U64,
        requests=st.lists(OUTCOMES, max_size=3).map(tuple),
    ),
    st.builds(
        TablesPublished,
        model=NAMES,
        version=U64,
        base=st.none() | U64,
        clusters=U64,
        shares=st.binary(max_size=9),
        trust=st.dictionaries(NAMES, st.floats(0, 9)),
        reliability=st.dictionaries(NAMES, st.floats(0, 1)),
        gain=st.floats(0, 1),
        buckets=U64,
        blocks=st.builds(KeyedRows, keys=st.binary(max_size=9), rows=st.binary(max_size=9)),
    ),
    st.builds(
        KvSnapshot,
        worker_id=U64,
        rank=st.integers(0, 9),
        publisher_id=U64,
        sequence=st.integers(-1, 1 << 63),
        events=st.lists(KV_EVENTS, max_size=3).map(tuple),
    ),
    st.builds(
        EngineJoined,
        engine=NAMES,
        worker_id=U64,
        model=NAMES,
        node=NAMES,
        urls=st.lists(NAMES, max_size=3).map(tuple),
        block_size=st.integers(1, 64),
        kv_blocks=U64,
        max_context=U64,
        max_batch_tokens=U64,
        attention=st.none() | st.just(DP_ATTENTION),
        shape=st.none() | st.just(ModelShape(layers=2, experts=8, top_k=2, hidden=4, expert_intermediate=8)),
        placement=st.none()
        | st.integers(1, 4).map(lambda ranks: linear(layers=2, experts=8, ranks=ranks).record()),
    ),
)
ROUTED = st.lists(st.builds(RoutedKvEvent, worker_id=U64, event=KV_EVENTS), max_size=3).map(tuple)
METRICS = st.builds(
    KvMetrics,
    worker_id=U64,
    dp_rank=st.integers(0, 9),
    kv_used_blocks=st.none() | U64,
    waiting=st.none() | U64,
)


@given(
    st.tuples(st.just("anything"), EVENTS)
    | st.tuples(st.just("kv-events"), ROUTED)
    | st.tuples(st.just("kv_metrics"), METRICS)
)
def test_what_is_encoded_is_decoded_to_the_same(said: tuple[str, Message]) -> None:
    topic, message = said
    assert decode(topic, encode(topic, message)) == message


@given(U64, U64, st.floats(0, 4e9), NAMES, st.binary(max_size=200))
def test_an_envelope_is_dynamos_five_field_map(
    publisher_id: int, sequence: int, published_at: float, topic: str, payload: bytes
) -> None:
    raw = seal(publisher_id, sequence, published_at, topic, payload)
    fields = msgspec.msgpack.decode(raw)
    assert fields == {
        "publisher_id": publisher_id,
        "sequence": sequence,
        "published_at": int(published_at * 1000),
        "topic": topic,
        "payload": payload,
    }
    assert list(fields) == ["publisher_id", "sequence", "published_at", "topic", "payload"]
    envelope = unseal(raw)
    assert (envelope.publisher_id, envelope.sequence, envelope.topic, envelope.payload) == (
        publisher_id,
        sequence,
        topic,
        payload,
    )


@given(st.binary(max_size=300), st.sampled_from(["kv-events", "kv_metrics", "heartbeat", BLOB_TOPIC]))
def test_random_bytes_are_refused_and_nothing_else_is_raised(raw: bytes, topic: str) -> None:
    for attempt in (
        lambda: unseal(raw),
        lambda: decode(topic, raw),
        lambda: referred(unseal(seal(1, 1, 1.0, topic, raw))),
    ):
        with suppress(Undeliverable):
            attempt()


@given(EVENTS, st.data())
def test_a_message_with_some_bytes_changed_is_read_or_refused(message: Message, data: st.DataObject) -> None:
    raw = bytearray(encode("x", message))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        read = decode("x", bytes(raw[: data.draw(st.integers(0, len(raw)))]))
    except Undeliverable:
        return
    assert isinstance(read, Event)


def test_every_event_of_the_union_is_known_as_a_kind() -> None:
    assert {kind.__name__ for kind in get_args(AnyEvent)} == {
        kind.__name__ for kind in Event.__subclasses__()
    }


FIGURES = {"remote_ranks": 1.5, "local": 0.5, "balance": 0.9, "step_seconds": 0.01}
OLD_MESSAGES: dict[str, dict[str, Any]] = {
    "SteerLoop": {"paused": True, "reason": "an upgrade"},
    "PlanJudged": {
        "engine": "sim-0",
        "worker_id": 7,
        "plan": "p",
        "epoch": 3,
        "verdict": "kept",
        "predicted_before": FIGURES,
        "predicted_after": FIGURES,
        "trust": 0.5,
        "reason": "faster",
    },
}


@pytest.mark.parametrize(("old", "kind"), RENAMED_KINDS.items())
def test_a_message_under_its_old_kind_is_read_as_the_present_one(old: str, kind: str) -> None:
    renamed = {RENAMED_FIELDS.get(kind, {}).get(name, name): it for name, it in OLD_MESSAGES[old].items()}
    present = decode("migrations", msgspec.msgpack.encode(renamed | {"kind": kind}))
    assert type(present).__name__ == kind
    assert decode("migrations", msgspec.msgpack.encode(OLD_MESSAGES[old] | {"kind": old})) == present
    assert decode("migrations", msgspec.msgpack.encode(OLD_MESSAGES[old] | {"kind": kind})) == present


def test_an_answer_with_old_names_of_nested_fields_is_read() -> None:
    loop = {
        "kind": "LoopDescribed",
        "policy": "roost",
        "automatic": True,
        "paused": False,
        "budget_bytes": 1,
        "budget_seconds": 1.0,
        "cycle_seconds": 1.0,
        "engines": [{"engine": "e", "worker_id": 7, "epoch": 3, "trust": 0.5}],
    }
    found = decode("event", msgspec.msgpack.encode(loop))
    assert isinstance(found, LoopDescribed)
    assert found.engines[0].plan_discount == 0.5
    nested: Any = 0.5
    for _ in range(700):
        nested = [nested]
    for broken in ({"trust": "high"}, {"other": 1}, {"trust": nested}):
        one = loop | {"engines": [{"engine": "e", "worker_id": 7, "epoch": 3} | broken]}
        with pytest.raises(Undeliverable, match="LoopDescribed"):
            decode("event", msgspec.msgpack.encode(one))


@pytest.mark.parametrize(
    ("topic", "payload", "reason"),
    [
        ("heartbeat", {"kind": "FromTheFuture", "x": 1}, RejectionReason.KIND),
        (
            "heartbeat",
            {"kind": "EngineHeartbeat", "engine": "e", "worker_id": "seven", "epoch": 0},
            RejectionReason.PAYLOAD,
        ),
        ("heartbeat", {"engine": "e"}, RejectionReason.PAYLOAD),
        ("heartbeat", [1, 2], RejectionReason.PAYLOAD),
        ("kv-events", {"worker_id": 1}, RejectionReason.PAYLOAD),
        ("kv_metrics", [1], RejectionReason.PAYLOAD),
        (BLOB_TOPIC, {"kind": "EngineHeartbeat"}, RejectionReason.PAYLOAD),
    ],
)
def test_a_refusal_names_its_reason(topic: str, payload: Any, reason: RejectionReason) -> None:
    with pytest.raises(Undeliverable) as refusal:
        decode(topic, msgspec.msgpack.encode(payload))
    assert refusal.value.reason is reason


def test_fields_a_reader_does_not_know_are_ignored() -> None:
    raw = msgspec.msgpack.encode(
        {"kind": "EngineLeft", "engine": "e", "worker_id": 1, "reason": "r", "colour": {"deep": [1, 2]}}
    )
    assert decode("membership", raw) == EngineLeft(engine="e", worker_id=1, reason="r")
    envelope = msgspec.msgpack.encode(
        {"publisher_id": 1, "sequence": 2, "published_at": 3, "topic": "t", "payload": raw, "trace": "x"}
    )
    assert unseal(envelope).sequence == 2


def test_hostile_nesting_and_lengths_are_refused_without_taking_memory() -> None:
    deep = b"\x91" * 200_000
    for payload in (
        deep,
        b"\x82\xa4kind\xaaEngineLeft\xa1x" + deep,
        *(head + b"\xff" * 4 for head in (b"\xdd", b"\xdf", b"\xc6")),
    ):
        for topic in ("kv-events", "kv_metrics", "x"):
            with pytest.raises(Undeliverable):
                decode(topic, payload)


def test_what_is_too_large_is_neither_read_nor_sent() -> None:
    with pytest.raises(Undeliverable, match="oversize"):
        unseal(bytes(WIRE_BYTES + 1))
    with pytest.raises(BusError, match=str(PAYLOAD_BYTES)):
        reference("x", "0" * 64, bytes(PAYLOAD_BYTES + 1))
    with pytest.raises(Undeliverable, match="oversize"):
        referred(
            unseal(
                seal(
                    1,
                    1,
                    1.0,
                    BLOB_TOPIC,
                    msgspec.msgpack.encode(BlobReference(topic="x", digest="", size=1 << 60)),
                )
            )
        )
    assert LARGE < WIRE_BYTES


def test_a_message_on_the_wrong_topic_or_beyond_msgpack_is_the_callers_error() -> None:
    load, gone = KvMetrics(worker_id=1), EngineLeft(engine="", worker_id=1, reason="")
    for topic, message in (("heartbeat", load), ("kv-events", load), ("kv_metrics", gone), ("x", ())):
        with pytest.raises(BusError, match="topic"):
            encode(topic, message)
    with pytest.raises(BusError, match="encoded"):
        encode("x", EngineLeft(engine="", worker_id=1 << 64, reason=""))


def test_rejected_counts_by_reason_and_has_every_reason_from_the_start() -> None:
    rejected = Rejections()
    assert dict(rejected) == dict.fromkeys(("oversize", "envelope", "kind", "payload", "blob", "speaker"), 0)
    rejected.count(RejectionReason.KIND)
    assert (rejected["kind"], sum(rejected.values()), len(rejected)) == (1, 1, 6)


def test_topics_follow_dynamos_convention() -> None:
    subjects = Subjects("ns")
    topics = {
        subjects.kv_events: "kv-events",
        subjects.kv_metrics: "kv_metrics",
        subjects.heartbeats("e"): "heartbeat",
        subjects.membership("engine-0"): "membership",
        subjects.describe_engine("e", 7): "describe",
        subjects.kv_snapshot("e", 7, 1): "snapshot",
        "namespace.dynamo.component.backend.endpoint.generate.kv-events": "kv-events",
        "anything.else": "else",
        "namespace.short": "short",
    }
    assert {subject: topic_of(subject) for subject in topics} == topics


@given(
    st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=4),
    st.lists(st.sampled_from(["a", "b", "*"]), min_size=1, max_size=4),
    st.booleans(),
)
def test_a_pattern_matches_as_the_same_regular_expression_does(
    tokens: list[str], pattern: list[str], rest: bool
) -> None:
    expression = r"\.".join("[^.]+" if token == "*" else token for token in pattern) + (
        r"(\.[^.]+)+" if rest else ""
    )
    wanted = ".".join(pattern + [">"] * rest)
    assert matches(wanted, ".".join(tokens)) == bool(re.fullmatch(expression, ".".join(tokens)))


# Dynamo


def dynamo_message() -> bytes:
    """Return a kv-events message as Dynamo 1.6 writes it, with keys unknown to Roost."""
    blocks = [{"block_hash": 16382211095592908423, "tokens_hash": (1 << 64) - 1, "mm_extra_info": None}]
    stored = {"stored": {"parent_hash": None, "start_position": 0, "blocks": blocks}}
    removed = {"removed": {"block_hashes": [1 << 63]}}
    device, host = (
        {"storage_tier": tier, "residency_domain": "worker"} for tier in ("device", "host_pinned")
    )
    events = [
        {"worker_id": 16382211095592908423, **device, "event": {"event_id": 1, "data": stored, "dp_rank": 3}},
        {"worker_id": 7, **host, "event": {"event_id": 2, "data": removed, "dp_rank": 0, "new": {}}},
        {"worker_id": 7, **device, "event": {"event_id": 3, "data": "cleared", "dp_rank": 0}, "lora": [1]},
    ]
    payload = msgspec.msgpack.encode(events)
    return msgspec.msgpack.encode(
        {
            "publisher_id": (1 << 64) - 2,
            "sequence": 0,
            "published_at": 1_700_000_000_000,
            "topic": "kv-events",
            "payload": payload,
        }
    )


def test_a_message_of_dynamos_own_form_is_read_with_all_its_64_bits() -> None:
    envelope = unseal(dynamo_message())
    assert envelope.publisher_id == (1 << 64) - 2
    stored, removed, cleared = decode(envelope.topic, envelope.payload)  # type: ignore[misc]
    assert (stored.worker_id, stored.storage_tier, stored.event.dp_rank) == (
        16382211095592908423,
        "device",
        3,
    )
    assert stored.event.data.stored.blocks[0].tokens_hash == (1 << 64) - 1
    assert (removed.storage_tier, removed.event.data.removed.block_hashes) == ("host_pinned", (1 << 63,))
    assert cleared.event.data == "cleared"


def test_a_multimodal_block_of_dynamos_is_read() -> None:
    block = {
        "block_hash": 1,
        "tokens_hash": 2,
        "mm_extra_info": {"mm_objects": [{"mm_hash": 3, "offsets": [[0, 1]]}]},
    }
    event = {
        "worker_id": 7,
        "event": {"event_id": 1, "data": {"stored": {"parent_hash": None, "blocks": [block]}}, "dp_rank": 0},
    }
    (read,) = decode("kv-events", msgspec.msgpack.encode([event]))  # type: ignore[misc]
    assert read.event.data.stored.blocks[0].block_hash == 1


def test_our_kv_events_say_to_dynamos_index_what_they_mean() -> None:
    """Stored, removed and cleared blocks as JSON for RadixTree.apply_event, with hashes above 2^63, matched
    by local hashes.
    """
    dynamo = pytest.importorskip("dynamo.llm")
    tree = dynamo.RadixTree()
    worker = (1 << 64) - 5
    local = local_hashes(random.Random(7).choices(range(1000), k=64))
    chained = sequence_hashes(local)
    assert max(local + chained) > 1 << 63

    def apply(event_id: int, data: Any, rank: int = 0) -> None:
        event = RoutedKvEvent(worker_id=worker, event=KvEvent(event_id=event_id, data=data, dp_rank=rank))
        (read,) = decode("kv-events", encode("kv-events", (event,)))  # type: ignore[misc]
        tree.apply_event(read.worker_id, msgspec.json.encode(read.event))

    blocks = tuple(KvBlock(block, tokens) for block, tokens in zip(chained, local, strict=True))
    apply(1, KvChange(stored=KvStored(blocks=blocks[:2])))
    assert tree.find_matches(local).scores == {(worker, 0): 2}
    apply(2, KvChange(stored=KvStored(blocks=blocks[2:], parent_hash=chained[1])))
    apply(3, KvChange(stored=KvStored(blocks=blocks[:1])), rank=1)
    assert tree.find_matches(local).scores == {(worker, 0): 4, (worker, 1): 1}
    apply(4, KvChange(removed=KvRemoved(block_hashes=(chained[3],))))
    assert tree.find_matches(local).scores == {(worker, 0): 3, (worker, 1): 1}
    apply(5, "cleared", rank=1)
    assert tree.find_matches(local).scores == {(worker, 0): 3}


def test_a_placement_survives_the_journey() -> None:
    placement = linear(layers=3, experts=10, ranks=4)
    joined = EngineJoined(
        engine="e",
        worker_id=1,
        model="m",
        node="n",
        urls=(),
        block_size=16,
        kv_blocks=1,
        max_context=1,
        max_batch_tokens=1,
        placement=placement.record(),
    )
    read = decode("membership", encode("membership", joined))
    assert isinstance(read, EngineJoined)
    assert read.placement is not None
    assert Placement.from_record(read.placement) == placement
