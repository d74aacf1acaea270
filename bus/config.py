"""Settings of the bus; read once at the composition root."""

from dataclasses import dataclass, fields

from bus.protocol.subjects import check_token
from fleet.redaction import without_secrets
from fleet.settings import FilePath

MOST_REPLICAS = 5
"""JetStream's own limit."""


@dataclass(frozen=True, slots=True)
class BusConfig:
    """Where NATS is, how long to wait for it, and how much it may keep. ValueError names the field that is out of range."""

    url: str = "nats://127.0.0.1:4222"
    """one server; used where `urls` names none"""
    urls: tuple[str, ...] = ()
    """servers of one cluster: whichever answers is connected to, and the next one when it goes away"""
    credentials_file: FilePath | None = None
    """JSON with `user`, `password` and optionally `inbox_prefix` (a context file of the NATS command line will do; default prefix: `_INBOX.` and
    the user); read again at every connection. Unset: the user part of the URL, or none"""
    tls_ca: FilePath | None = None
    """PEM file of the authorities that may vouch for the server; unset: the system's, where the URL begins with tls://"""
    tls_cert: FilePath | None = None
    """PEM file with our own certificate, for servers that ask for one; needs `tls_key`"""
    tls_key: FilePath | None = None
    tls_hostname: str | None = None
    """name that the server's certificate must bear; unset: the URL's host"""
    replicas: int = 1
    """servers of the cluster that keep each stream and bucket when it is made; 3 survive the loss of one server. Existing ones are left as they are"""
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
    parcels_seconds: float = 30.0
    """how long the content of a telemetry message too large for an envelope is kept; its readers fetch it at once"""
    answers_bytes: int = 256 * 1024 * 1024
    """memory for answers too large for one message, which askers fetch in parts; further ones are refused while all of it is being fetched"""
    answers_seconds: float = 10.0
    """how long such an answer is kept after the last part that was fetched"""

    def __post_init__(self) -> None:
        check_token("bus.namespace", self.namespace)
        for name, urls in (("url", (self.url,)), ("urls", self.urls)):
            for url in urls:
                if "://" not in url:
                    raise ValueError(f"bus.{name} must look like nats://host:port, not {without_secrets(f'nats://{url}')[7:]!r}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("bus.tls_cert and bus.tls_key belong together; set both or neither")
        if not 1 <= self.replicas <= MOST_REPLICAS:
            raise ValueError(f"bus.replicas must be 1 to {MOST_REPLICAS}, not {self.replicas}")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not 0 < value < float("inf"):
                raise ValueError(f"bus.{field.name} must be finite and above 0, not {value}")
        if self.reconnect_most_seconds < self.reconnect_first_seconds:
            raise ValueError(f"bus.reconnect_most_seconds {self.reconnect_most_seconds} is below bus.reconnect_first_seconds {self.reconnect_first_seconds}")

    @property
    def servers(self) -> tuple[str, ...]:
        """URLs of the servers to connect to, with their secrets."""
        return self.urls or (self.url,)

    @property
    def where(self) -> str:
        """The same for people and logs, without secrets."""
        return ", ".join(without_secrets(url) for url in self.servers)

    @property
    def uses_tls(self) -> bool:
        return any(value is not None for value in (self.tls_ca, self.tls_cert, self.tls_hostname)) or any(url.startswith("tls://") for url in self.servers)

    @property
    def stream_seconds(self) -> float:
        return self.stream_days * 86400.0
