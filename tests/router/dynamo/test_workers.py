"""Dynamo's workers become engines of the fleet."""

import json
from typing import Any

import pytest

from router.dynamo.wire.discovery import EndpointName, Record, decode_record
from router.dynamo.workers import RoutedWorker, Workers, workers_of
from tests.router.dynamo.recorded import RECORDED, WORKER

OWN = EndpointName("roost", "router", "generate")


def found(records: list[dict[str, Any]], namespace: str = "dynamo") -> Workers:
    decoded = [decode_record(json.dumps(one).encode()) for one in records]
    kept: list[Record] = [one for one in decoded if one is not None]
    return workers_of(kept, namespace, OWN)


def changed(**card: Any) -> list[dict[str, Any]]:
    """The recorded worker with another card."""
    return [
        one | {"card_json": one["card_json"] | card} if one["type"] == "Model" else one
        for one in RECORDED["records"]
    ]


def only(records: list[dict[str, Any]]) -> RoutedWorker:
    (worker,) = found(records).serving.values()
    return worker


def test_a_worker_becomes_an_engine_with_its_ranks() -> None:
    worker = only(RECORDED["records"])
    joined = worker.joined
    assert (joined.worker_id, joined.model, joined.block_size, joined.kv_blocks) == (WORKER, "tiny", 16, 1000)
    assert (joined.max_context, joined.max_batch_tokens, len(joined.urls)) == (4096, 2048, 2)
    assert joined.capabilities.kv_events
    assert joined.capabilities.token_ids
    assert [worker.dp_rank(rank) for rank in (0, 1)] == [0, 1]


def test_a_single_rank_is_not_named() -> None:
    limits = RECORDED["records"][-1]["card_json"]["runtime_config"]
    worker = only(changed(runtime_config=limits | {"data_parallel_size": 1}))
    assert worker.dp_rank(0) is None


def test_ranks_count_from_the_first_of_the_worker() -> None:
    limits = RECORDED["records"][-1]["card_json"]["runtime_config"]
    worker = only(changed(runtime_config=limits | {"data_parallel_start_rank": 4}))
    assert [worker.dp_rank(rank) for rank in (0, 1)] == [4, 5]


@pytest.mark.parametrize(("missing", "why"), [("Endpoint", "it does not serve"), ("Model", "it has no card")])
def test_half_a_worker_is_none(missing: str, why: str) -> None:
    assert not found([one for one in RECORDED["records"] if one["type"] != missing]).serving, why


def test_workers_of_other_namespaces_are_left_out() -> None:
    assert not found(RECORDED["records"], "elsewhere").serving
    assert not found(RECORDED["records"], "elsewhere").channels


def test_the_router_is_not_its_own_worker() -> None:
    own = {"namespace": "roost", "component": "router", "endpoint": "generate"}
    records = [one | own if one["type"] in ("Model", "Endpoint") else one for one in RECORDED["records"]]
    assert not found(records, "roost").serving


@pytest.mark.parametrize(
    ("card", "reason"),
    [({"worker_type": "encode"}, "encode worker"), ({"model_input": "Text"}, "takes text")],
)
def test_workers_that_cannot_be_used_are_named_with_the_reason(card: dict[str, Any], reason: str) -> None:
    workers = found(changed(**card))
    assert not workers.serving
    assert reason in workers.unusable[WORKER]


@pytest.mark.parametrize(
    ("stated", "sources", "expected"), [(None, True, True), (None, False, False), (False, True, False)]
)
def test_kv_events_are_expected_where_they_are_published(
    stated: bool | None, sources: bool, expected: bool
) -> None:
    limits = RECORDED["records"][-1]["card_json"]["runtime_config"] | {"kv_event_publishing_enabled": stated}
    records = [one for one in changed(runtime_config=limits) if sources or one["type"] != "EventSource"]
    assert only(records).joined.capabilities.kv_events is expected


def test_tokenizers_are_compared_by_content_and_not_by_path() -> None:
    here = only(RECORDED["records"]).joined.tokenizer
    card = RECORDED["records"][-1]["card_json"]["tokenizer"]["hf_tokenizer_json"]
    moved = only(changed(tokenizer={"hf_tokenizer_json": card | {"path": "/elsewhere"}})).joined.tokenizer
    other = only(changed(tokenizer={"hf_tokenizer_json": card | {"checksum": "blake3:0"}})).joined.tokenizer
    assert here == moved != other
