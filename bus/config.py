"""Settings of the bus, read once at the composition root."""

from dataclasses import dataclass, fields

from bus.protocol.subjects import check_token
from fleet.redaction import without_secrets
from fleet.settings import FilePath

MOST_REPLICAS = 5
"""JetStream's own limit."""


@dataclass(frozen=True, slots=True)
class BusConfig:
    """Location, timeouts and storage limits of NATS. ValueError names the field that is out of range."""

    url: str = "nats://127.0.0.1:4222"
    """one server; used if `urls` is empty"""
    urls: tuple[str, ...] = ()
    """servers of one cluster; the bus connects to any of them, and to another one when the connection is lost
    """
    credentials_file: FilePath | None = None
    """JSON with `user`, `password` and optionally `inbox_prefix` (a context file of the NATS command line is
    accepted; default prefix: `_INBOX.` and the user); read again for every connection. Unset: the user part
    of the URL, or none
    """
    tls_ca: FilePath | None = None
    """PEM file of the trusted certificate authorities; unset: the system's, if the URL begins with tls://"""
    tls_cert: FilePath | None = None
    """PEM file with the client certificate, for servers that require one; needs `tls_key`"""
    tls_key: FilePath | None = None
    tls_hostname: str | None = None
    """host name expected in the server's certificate; unset: the URL's host"""
    replicas: int = 1
    """replicas of each stream and bucket, set at creation; 3 survive the loss of one server. Existing streams
    are not changed
    """
    namespace: str = "roost"
    """first token of every subject, and of the names of the stream and the buckets"""
    connect_seconds: float = 5.0
    """timeout of the first connection; reconnects are retried indefinitely"""
    request_seconds: float = 2.0
    """timeout of one server response"""
    record_seconds: float = 10.0
    """timeout for storing a message, reconnects included"""
    reconnect_first_seconds: float = 0.05
    reconnect_most_seconds: float = 2.0
    """pause between attempts to reconnect: doubles from the first to the most"""
    ping_seconds: float = 5.0
    """interval of pings; a server with two unanswered pings is considered lost"""
    unsent_bytes: int = 8 * 1024 * 1024
    """publishing drops messages while more than this waits to be sent"""
    queue_bytes: int = 64 * 1024 * 1024
    """bytes that a subscription buffers for a slow reader before it drops the oldest"""
    stream_days: float = 30.0
    """retention of stored messages"""
    stream_bytes: int = 256 * 1024 * 1024
    """limit for stored messages; the oldest are evicted first, regardless of kind. A handover stores two
    placements, together 270 kB for 58 layers x 288 slots with shares
    """
    stream_messages_per_subject: int = 1024
    claims_bytes: int = 1024 * 1024
    blobs_bytes: int = 512 * 1024 * 1024
    """limit for tokenizers, plans in progress and stored messages too large for an envelope; further content
    is rejected
    """
    parcels_bytes: int = 128 * 1024 * 1024
    parcels_seconds: float = 30.0
    """retention of telemetry content too large for an envelope; readers fetch it immediately"""
    answers_bytes: int = 256 * 1024 * 1024
    """memory for answers too large for one message, fetched in parts; further answers are rejected while all
    of it is in use
    """
    answers_seconds: float = 10.0
    """retention of such an answer after the last part was fetched"""

    def __post_init__(self) -> None:
        check_token("bus.namespace", self.namespace)
        for name, urls in (("url", (self.url,)), ("urls", self.urls)):
            for url in urls:
                if "://" not in url:
                    raise ValueError(
                        f"bus.{name} must look like nats://host:port, not"
                        f" {without_secrets(f'nats://{url}')[7:]!r}"
                    )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("bus.tls_cert and bus.tls_key belong together; set both or neither")
        if not 1 <= self.replicas <= MOST_REPLICAS:
            raise ValueError(f"bus.replicas must be 1 to {MOST_REPLICAS}, not {self.replicas}")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not 0 < value < float("inf"):
                raise ValueError(f"bus.{field.name} must be finite and above 0, not {value}")
        if self.reconnect_most_seconds < self.reconnect_first_seconds:
            raise ValueError(
                f"bus.reconnect_most_seconds {self.reconnect_most_seconds} is below"
                f" bus.reconnect_first_seconds {self.reconnect_first_seconds}"
            )

    @property
    def servers(self) -> tuple[str, ...]:
        """URLs of the servers to connect to, including credentials."""
        return self.urls or (self.url,)

    @property
    def where(self) -> str:
        """The same URLs for display and logs, without credentials."""
        return ", ".join(without_secrets(url) for url in self.servers)

    @property
    def uses_tls(self) -> bool:
        return any(value is not None for value in (self.tls_ca, self.tls_cert, self.tls_hostname)) or any(
            url.startswith("tls://") for url in self.servers
        )

    @property
    def stream_seconds(self) -> float:
        return self.stream_days * 86400.0
