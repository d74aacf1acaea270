"""Messages of the external processing service, compared with Envoy's own declarations (`record`)."""

import json
from typing import Any

import pytest

from router.gateway.messages import FIELDS, ProcessingRequest
from router.gateway.protocol import BodyMode, ProtocolFault, proceed, read_head
from router.gateway.server import EXT_PROC
from tests.router.gateway.record import RECORDED

ENVOY: dict[str, Any] = json.loads(RECORDED.read_text())
BY_NAME = {name.rpartition(".")[2]: fields for name, fields in ENVOY["messages"].items()}


@pytest.mark.parametrize("message", FIELDS)
def test_each_field_has_the_number_and_type_that_envoy_declares(message: str) -> None:
    declared = BY_NAME[message]
    for field in FIELDS[message]:
        number, kind, named, repeated, group = declared[field.name]
        ours = field.type.rpartition(".")[2]
        assert field.number == number
        assert ours == {"enum": "int32", "message": named.rpartition(".")[2]}.get(kind, kind) or (
            field.name == "filter_metadata" and ours == "FilterMetadataEntry"
        )
        assert (field.repeated, field.oneof or "") == (repeated, group)


def test_modes_and_the_method_have_envoys_names() -> None:
    assert {mode.name: mode.value for mode in BodyMode} == ENVOY["body_modes"]
    assert ENVOY["method"] == [EXT_PROC, "Process"]
    assert ENVOY["append_actions"]["OVERWRITE_IF_EXISTS_OR_ADD"] == 2
    assert (ENVOY["serving"]["SERVING"], ENVOY["serving"]["NOT_SERVING"]) == (1, 2)


def test_each_message_of_a_proxy_has_an_answer_of_the_same_name() -> None:
    asked = [name for name, field in BY_NAME["ProcessingRequest"].items() if field[4] == "request"]
    assert [proceed(name).WhichOneof("response") for name in asked] == asked


def test_a_body_mode_of_a_later_version_is_refused_by_name() -> None:
    message = ProcessingRequest()
    message.request_headers.end_of_stream = True
    message.protocol_config.request_body_mode = 17
    with pytest.raises(ProtocolFault, match="17"):
        read_head(message)
