"""Settings of the bus; read once at the composition root."""

from dataclasses import dataclass, fields

from bus.subjects import check_token


@dataclass(frozen=True, slots=True)
class BusConfig:
    """Where NATS is, how long to wait for it, and how much it may keep. ValueError names the field that is out of range."""

    url: str = "nats://127.0.0.1:4222"
    namespace: str = "roost"
    """first token of every subject, and of the names of the stream and the buckets"""
    connect_seconds: float = 5.0
    """the first connection must stand within this time; later ones are tried for ever"""
    request_seconds: float = 2.0
    """wait for one answer of the server"""
    record_seconds: float = 10.0
    """wait for a message to be stored, reconnects included"""
    reconnect_first_seconds: float = 0.05
    reconnect_most_seconds: float = 2.0
    """pause between attempts to reconnect: doubles from the first to the most"""
    ping_seconds: float = 5.0
    """a server that leaves two pings unanswered counts as gone"""
    unsent_bytes: int = 8 * 1024 * 1024
    """publishing drops messages while so much waits to be sent"""
    queue_bytes: int = 64 * 1024 * 1024
    """bytes a subscription holds for a slow reader before it drops the oldest"""
    stream_days: float = 30.0
    """how long stored messages are kept"""
    stream_bytes: int = 256 * 1024 * 1024
    """stored messages; the oldest go first, whatever they say. A handover stores two placements, of 58 layers x 288 slots with shares 270 kB together"""
    stream_messages_per_subject: int = 1024
    claims_bytes: int = 1024 * 1024
    blobs_bytes: int = 512 * 1024 * 1024
    """tokenizers, plans under way, stored messages too large for an envelope: kept until this is reached; then storing another is refused"""
    parcels_bytes: int = 128 * 1024 * 1024
    parcels_seconds: float = 600.0
    """how long the content of a telemetry message too large for an envelope is kept"""

    def __post_init__(self) -> None:
        check_token("bus.namespace", self.namespace)
        if "://" not in self.url:
            raise ValueError(f"bus.url must look like nats://host:port, not {self.url!r}")
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str) and not 0 < value < float("inf"):
                raise ValueError(f"bus.{field.name} must be finite and above 0, not {value}")
        if self.reconnect_most_seconds < self.reconnect_first_seconds:
            raise ValueError(f"bus.reconnect_most_seconds {self.reconnect_most_seconds} is below bus.reconnect_first_seconds {self.reconnect_first_seconds}")

    @property
    def stream_seconds(self) -> float:
        return self.stream_days * 86400.0
