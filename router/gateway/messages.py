"""Messages of Envoy's external processing service v3 and of gRPC's health service, with the fields that a
picker of endpoints reads or writes. Pure.

They are declared here because the package of Envoy's generated classes (xds-protos) overwrites files of
googleapis-common-protos and opentelemetry-proto, which OpenTelemetry's exporters need. On the wire only
numbers and types of fields count. Other fields are skipped. Enumerations are declared as int32, which is the
same on the wire.
"""

from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2
from google.protobuf.message import DecodeError, Message

Undecodable = DecodeError
"""Raised by `FromString` for bytes that are no message."""

_PACKAGE = "roost.gateway"
_STRUCT = "google.protobuf.Struct"
_TYPES = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _TYPES.TYPE_BOOL,
    "bytes": _TYPES.TYPE_BYTES,
    "int32": _TYPES.TYPE_INT32,
    "string": _TYPES.TYPE_STRING,
}


class Field(NamedTuple):
    """A field of a message. type: a scalar, or the name of a message. oneof: the group of which at most one
    field is set.
    """

    name: str
    number: int
    type: str
    repeated: bool = False
    oneof: str | None = None


_HEADERS, _BODY, _TRAILERS = "HttpHeaders", "HttpBody", "HttpTrailers"
_BODY_FIELDS = (
    Field("body", 1, "bytes"),
    Field("end_of_stream", 2, "bool"),
    Field("end_of_stream_without_message", 3, "bool"),
    Field("grpc_message_compressed", 4, "bool"),
)
FIELDS: dict[str, tuple[Field, ...]] = {
    "HeaderValue": (
        Field("key", 1, "string"),
        Field("value", 2, "string"),
        Field("raw_value", 3, "bytes"),
    ),
    "HeaderMap": (Field("headers", 1, "HeaderValue", repeated=True),),
    "HeaderValueOption": (Field("header", 1, "HeaderValue"), Field("append_action", 3, "int32")),
    "FilterMetadataEntry": (Field("key", 1, "string"), Field("value", 2, _STRUCT)),
    "Metadata": (Field("filter_metadata", 1, "FilterMetadataEntry", repeated=True),),
    "HttpStatus": (Field("code", 1, "int32"),),
    "HttpHeaders": (Field("headers", 1, "HeaderMap"), Field("end_of_stream", 3, "bool")),
    "HttpBody": _BODY_FIELDS,
    "HttpTrailers": (Field("trailers", 1, "HeaderMap"),),
    "ProtocolConfiguration": (
        Field("request_body_mode", 1, "int32"),
        Field("response_body_mode", 2, "int32"),
    ),
    "ProcessingRequest": (
        Field("request_headers", 2, _HEADERS, oneof="request"),
        Field("response_headers", 3, _HEADERS, oneof="request"),
        Field("request_body", 4, _BODY, oneof="request"),
        Field("response_body", 5, _BODY, oneof="request"),
        Field("request_trailers", 6, _TRAILERS, oneof="request"),
        Field("response_trailers", 7, _TRAILERS, oneof="request"),
        Field("metadata_context", 8, "Metadata"),
        Field("observability_mode", 10, "bool"),
        Field("protocol_config", 11, "ProtocolConfiguration"),
    ),
    "HeaderMutation": (
        Field("set_headers", 1, "HeaderValueOption", repeated=True),
        Field("remove_headers", 2, "string", repeated=True),
    ),
    "StreamedBodyResponse": _BODY_FIELDS,
    "BodyMutation": (
        Field("body", 1, "bytes", oneof="mutation"),
        Field("streamed_response", 3, "StreamedBodyResponse", oneof="mutation"),
    ),
    "CommonResponse": (
        Field("status", 1, "int32"),
        Field("header_mutation", 2, "HeaderMutation"),
        Field("body_mutation", 3, "BodyMutation"),
        Field("clear_route_cache", 5, "bool"),
    ),
    "HeadersResponse": (Field("response", 1, "CommonResponse"),),
    "BodyResponse": (Field("response", 1, "CommonResponse"),),
    "TrailersResponse": (Field("header_mutation", 1, "HeaderMutation"),),
    "ImmediateResponse": (
        Field("status", 1, "HttpStatus"),
        Field("headers", 2, "HeaderMutation"),
        Field("body", 3, "bytes"),
        Field("details", 5, "string"),
    ),
    "ProcessingResponse": (
        Field("request_headers", 1, "HeadersResponse", oneof="response"),
        Field("response_headers", 2, "HeadersResponse", oneof="response"),
        Field("request_body", 3, "BodyResponse", oneof="response"),
        Field("response_body", 4, "BodyResponse", oneof="response"),
        Field("request_trailers", 5, "TrailersResponse", oneof="response"),
        Field("response_trailers", 6, "TrailersResponse", oneof="response"),
        Field("immediate_response", 7, "ImmediateResponse", oneof="response"),
        Field("dynamic_metadata", 8, _STRUCT),
    ),
    "HealthCheckRequest": (Field("service", 1, "string"),),
    "HealthCheckResponse": (Field("status", 1, "int32"),),
}
"""Messages by name, without their packages."""


def _declared() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="roost/gateway.proto",
        package=_PACKAGE,
        syntax="proto3",
        dependency=[struct_pb2.DESCRIPTOR.name],
    )
    for name, fields in FIELDS.items():
        declared = file.message_type.add(name=name)
        groups = list(dict.fromkeys(field.oneof for field in fields if field.oneof is not None))
        for group in groups:
            declared.oneof_decl.add(name=group)
        for field in fields:
            made = declared.field.add(
                name=field.name,
                number=field.number,
                label=_TYPES.LABEL_REPEATED if field.repeated else _TYPES.LABEL_OPTIONAL,
                type=_SCALARS.get(field.type, _TYPES.TYPE_MESSAGE),
            )
            if field.type not in _SCALARS:
                made.type_name = f".{field.type}" if "." in field.type else f".{_PACKAGE}.{field.type}"
            if field.oneof is not None:
                made.oneof_index = groups.index(field.oneof)
    return file


_POOL = descriptor_pool.Default()
_POOL.Add(_declared())


def _class_of(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


ProcessingRequest = _class_of("ProcessingRequest")
ProcessingResponse = _class_of("ProcessingResponse")
HealthCheckRequest = _class_of("HealthCheckRequest")
HealthCheckResponse = _class_of("HealthCheckResponse")

__all__ = [
    "FIELDS",
    "Field",
    "HealthCheckRequest",
    "HealthCheckResponse",
    "Message",
    "ProcessingRequest",
    "ProcessingResponse",
    "Undecodable",
]
