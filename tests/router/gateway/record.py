"""Record the fields of Envoy's messages, as its own generated classes declare them, for the test that compares
ours. By hand, in an environment of its own, since the package overwrites files of others:

    python -m venv /tmp/xds && /tmp/xds/bin/pip install xds-protos grpcio-health-checking
    /tmp/xds/bin/python tests/router/gateway/record.py
"""

import json
from importlib import metadata
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_name("recorded.json")


_KINDS = {8: "bool", 9: "string", 11: "message", 12: "bytes", 14: "enum"}
_OF_BASE = ("HeaderMap", "HeaderValue", "HeaderValueOption", "Metadata")


def _fields(descriptor: Any) -> dict[str, list[Any]]:
    """Return number, kind, name of the message, repetition and group of each field."""
    found: dict[str, list[Any]] = {}
    for field in descriptor.fields:
        kind = _KINDS.get(field.type, "other")
        named = field.message_type.full_name if field.message_type else ""
        group = field.containing_oneof.name if field.containing_oneof else ""
        found[field.name] = [field.number, kind, named, field.is_repeated, group]
    return found


def main() -> None:
    """Write the file."""
    from envoy.config.core.v3 import base_pb2
    from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
    from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
    from envoy.type.v3 import http_status_pb2
    from grpc_health.v1 import health_pb2

    found = [base_pb2.DESCRIPTOR.message_types_by_name[name] for name in _OF_BASE]
    for file in (ext_proc.DESCRIPTOR, http_status_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR):
        found += file.message_types_by_name.values()
    messages = {message.full_name: _fields(message) for message in found}
    entry = base_pb2.Metadata.DESCRIPTOR.nested_types_by_name["FilterMetadataEntry"]
    messages[entry.full_name] = _fields(entry)
    modes = dict(processing_mode_pb2.ProcessingMode.BodySendMode.items())
    service = ext_proc.DESCRIPTOR.services_by_name["ExternalProcessor"]
    recorded = {
        "xds-protos": metadata.version("xds-protos"),
        "body_modes": modes,
        "append_actions": dict(base_pb2.HeaderValueOption.HeaderAppendAction.items()),
        "serving": dict(health_pb2.HealthCheckResponse.ServingStatus.items()),
        "method": [service.full_name, service.methods[0].name],
        "messages": dict(sorted(messages.items())),
    }
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
