"""Discovery records are read as Dynamo writes them, and nothing else raises anything but Malformed."""

import json
import random

import pytest

from router.dynamo.wire.discovery import (
    EventChannel,
    EventSource,
    ModelRecord,
    ServedEndpoint,
    decode_record,
)
from router.dynamo.wire.malformed import Malformed
from tests.router.dynamo.recorded import RECORDED, RECORDS, WORKER, mutated


def test_every_record_of_a_worker_is_read() -> None:
    kinds = {
        "Endpoint": ServedEndpoint,
        "Model": ModelRecord,
        "EventChannel": EventChannel,
        "EventSource": EventSource,
    }
    for plain, record in zip(RECORDED["records"], RECORDS, strict=True):
        assert type(decode_record(record)) is kinds[plain["type"]]


def test_a_model_card_states_blocks_context_and_ranks() -> None:
    model = next(one for one in map(decode_record, RECORDS) if isinstance(one, ModelRecord))
    card = model.card_json
    assert (card.display_name, card.context_length, card.kv_cache_block_size) == ("tiny", 4096, 16)
    assert (card.runtime_config.total_kv_blocks, card.runtime_config.data_parallel_size) == (1000, 2)
    assert (model.instance_id, model.name.path) == (WORKER, "dynamo.backend.generate")


def test_instance_ids_above_63_bits_stay_exact() -> None:
    record = {
        "type": "Endpoint",
        "namespace": "a",
        "component": "b",
        "endpoint": "c",
        "instance_id": 2**64 - 1,
    }
    found = decode_record(json.dumps(record).encode())
    assert isinstance(found, ServedEndpoint)
    assert found.instance_id == 2**64 - 1


def test_channels_have_an_address_only_over_zeromq() -> None:
    channels = [one for one in map(decode_record, RECORDS) if isinstance(one, EventChannel)]
    assert [one.address is not None for one in channels] == [True, True, True]
    nats = json.dumps({"type": "EventChannel", "scope": {}, "topic": "kv-events", "instance_id": 1}).encode()
    found = decode_record(nats)
    assert isinstance(found, EventChannel)
    assert found.address is None


def test_records_of_other_types_are_left_out() -> None:
    assert decode_record(b'{"type": "LoraTable", "anything": [1]}') is None


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"null",
        b"[]",
        b'{"type": "Model"}',
        b'{"type": 7}',
        b"[" * 100_000,
        b'{"type":"Endpoint","namespace":"a","component":"b","endpoint":"c","instance_id":-1}',
        b'{"type":"Endpoint","namespace":"a","component":"b","endpoint":"c","instance_id":18446744073709551616}',
    ],
)
def test_what_is_no_record_is_malformed(value: bytes) -> None:
    with pytest.raises(Malformed, match="discovery record"):
        decode_record(value)


def test_a_thousand_mutations_are_read_or_malformed() -> None:
    chance, malformed = random.Random(1), 0
    for _ in range(1000):
        try:
            decode_record(mutated(chance.choice(RECORDS), chance))
        except Malformed:
            malformed += 1
    assert 0 < malformed < 1000
