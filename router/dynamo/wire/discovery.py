"""Discovery records of Dynamo's runtime 1.6: endpoints, model cards, channels and sources of events. Pure.

The file store and etcd hold the same JSON. The type is in the record, so keys need not be read. Unknown
fields are ignored; so are records of other types.
"""

import re
from typing import Annotated, Any, NamedTuple

import msgspec

from router.dynamo.wire.malformed import UNDECODABLE, Malformed

U64 = Annotated[int, msgspec.Meta(ge=0)]
"""msgspec cannot express the upper bound; `decode_record` checks it"""
_MAX_U64 = 2**64 - 1
Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**40)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]

KV_EVENTS = "kv-events"
KV_METRICS = "kv_metrics"
_FLEET = "roost"
"""key of Roost's own data in the card of a worker (`engine_adapter.dynamo.card`)"""
_WORKER = re.compile(r"[0-9a-f]{16}")


class FleetEngine(NamedTuple):
    """An engine of Roost's fleet: its name, and the worker_id of its incarnation."""

    engine: str
    worker_id: int


class MeetingPoint(msgspec.Struct, frozen=True):
    """Address at which a prefill worker meets decode workers, who transfer the KV while it computes. None:
    not stated.
    """

    bootstrap_host: str | None = None
    bootstrap_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None


class RuntimeLimits(msgspec.Struct, frozen=True):
    """`runtime_config` of a model card. None: not stated."""

    total_kv_blocks: Count | None = None
    max_num_batched_tokens: Positive | None = None
    data_parallel_start_rank: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 0
    data_parallel_size: Ranks = 1
    kv_event_publishing_enabled: bool | None = None
    taints: frozenset[str] = frozenset()
    """labels that requests may require, those of its place in the topology included"""
    disaggregated_endpoint: MeetingPoint | None = None
    """of a prefill worker; None: decode workers fetch the KV once it is computed"""
    runtime_data: dict[str, Any] = {}
    """data of the engine's own, as JSON values"""

    @property
    def fleet_engine(self) -> FleetEngine | None:
        """Engine of Roost's fleet whose ranks a worker of ours serves; None: it names none."""
        told = self.runtime_data.get(_FLEET)
        engine, worker = (
            (told.get("engine"), told.get("worker_id")) if isinstance(told, dict) else (None, None)
        )
        if not isinstance(engine, str) or not isinstance(worker, str) or not _WORKER.fullmatch(worker):
            return None
        return FleetEngine(engine, int(worker, 16))


class DynamoCard(msgspec.Struct, frozen=True):
    """Model deployment card, as far as routing reads it."""

    display_name: Name
    source_path: str = ""
    """folder of the model's files on the worker's machine, or its name in a hub"""
    context_length: Count = 0
    """prompt and answer together, in tokens; 0: not stated"""
    kv_cache_block_size: Annotated[int, msgspec.Meta(ge=1, le=2**16)] = 16
    model_type: str = ""
    """public surfaces, such as "chat,completions"; empty: the frontend does not offer the model"""
    model_input: str = "Tokens"
    worker_type: str | None = None
    """aggregated, prefill, decode or encode; None: an older worker, which serves whole requests"""
    tokenizer: Any = None
    """location and checksum of the tokenizer's files"""
    runtime_config: RuntimeLimits = RuntimeLimits()

    @property
    def surfaces(self) -> tuple[str, ...]:
        """Names of the public surfaces."""
        return tuple(
            one.strip().lower() for one in self.model_type.replace("|", ",").split(",") if one.strip()
        )


class EndpointName(msgspec.Struct, frozen=True):
    """Name of an endpoint, which any number of instances serve."""

    namespace: Name
    component: Name
    name: Name

    @property
    def path(self) -> str:
        """The form that the runtime takes: namespace.component.endpoint."""
        return f"{self.namespace}.{self.component}.{self.name}"


class EndpointScope(msgspec.Struct, frozen=True):
    """Endpoint whose events a channel carries. None: events of a whole component or namespace."""

    endpoint: EndpointName | None = None


class ServedEndpoint(msgspec.Struct, frozen=True, tag="Endpoint"):
    """An instance that serves an endpoint."""

    namespace: Name
    component: Name
    endpoint: Name
    instance_id: U64

    @property
    def name(self) -> EndpointName:
        return EndpointName(self.namespace, self.component, self.endpoint)


class ModelRecord(msgspec.Struct, frozen=True, tag="Model"):
    """The model card of an instance."""

    namespace: Name
    component: Name
    endpoint: Name
    instance_id: U64
    card_json: DynamoCard

    @property
    def name(self) -> EndpointName:
        return EndpointName(self.namespace, self.component, self.endpoint)


class _Address(msgspec.Struct, frozen=True):
    endpoint: str = ""


class _Transport(msgspec.Struct, frozen=True):
    kind: str = ""
    config: _Address = _Address()


class EventChannel(msgspec.Struct, frozen=True, tag="EventChannel"):
    """Address of a publisher's events over ZeroMQ. Over NATS there are none."""

    scope: EndpointScope
    topic: str
    instance_id: U64
    """the publisher; not the worker"""
    transport: _Transport = _Transport()

    @property
    def address(self) -> str | None:
        """ZeroMQ address; None: another transport."""
        is_tcp = self.transport.config.endpoint.startswith("tcp://")
        return self.transport.config.endpoint if self.transport.kind == "Zmq" and is_tcp else None


class _Publisher(msgspec.Struct, frozen=True):
    worker_id: U64
    dp_rank: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 0


class _SourceMetadata(msgspec.Struct, frozen=True):
    worker: _Publisher


class EventSource(msgspec.Struct, frozen=True, tag="EventSource"):
    """A publisher that keeps an index of its rank's blocks, from which readers can recover."""

    scope: EndpointScope
    topic: str
    publisher_id: U64
    metadata: _SourceMetadata


Record = ServedEndpoint | ModelRecord | EventChannel | EventSource


class _Kind(msgspec.Struct, frozen=True):
    type: str


_KIND: msgspec.json.Decoder[_Kind] = msgspec.json.Decoder(_Kind)
_RECORD: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)
_KINDS = frozenset({"Endpoint", "Model", "EventChannel", "EventSource"})


def decode_record(value: bytes) -> Record | None:
    """Decode a record; None: of a type that routing does not need. Malformed if it is no record."""
    try:
        record = _RECORD.decode(value) if _KIND.decode(value).type in _KINDS else None
    except UNDECODABLE as error:
        raise Malformed(f"discovery record: {error}") from error
    if record is not None and max(_ids(record)) > _MAX_U64:
        raise Malformed(f"discovery record: an id of more than 64 bits: {max(_ids(record))}")
    return record


def _ids(record: Record) -> tuple[int, ...]:
    if isinstance(record, EventSource):
        return record.publisher_id, record.metadata.worker.worker_id
    return (record.instance_id,)
