"""Settings of the bus, read once at the composition root."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from bus.protocol.subjects import check_token
from fleet.redaction import without_secrets
from fleet.settings import FilePath, Positive, PositiveInt, check_bounds

MAX_REPLICAS = 5
"""JetStream's own limit."""
RECONNECT_FIRST_SECONDS = 0.05
"""Pause before the second attempt to reconnect."""
PARCELS_SECONDS = 30.0
"""Retention of telemetry content too large for an envelope; readers fetch it immediately."""
ANSWERS_SECONDS = 10.0
"""Retention of an answer in parts after its last part was fetched."""


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
    replicas: Annotated[int, Meta(ge=1, le=MAX_REPLICAS)] = 1
    """replicas of each stream and bucket, set at creation; 3 survive the loss of one server. Existing streams
    are not changed
    """
    namespace: str = "roost"
    """first token of every subject, and of the names of the stream and the buckets"""
    connect_seconds: Positive = 5.0
    """timeout of the first connection; reconnects are retried indefinitely"""
    request_seconds: Positive = 2.0
    """timeout of one server response"""
    record_seconds: Positive = 10.0
    """timeout for storing a message, reconnects included"""
    reconnect_max_seconds: Annotated[float, Meta(ge=RECONNECT_FIRST_SECONDS)] = 2.0
    """longest pause between attempts to reconnect; the first is 0.05 s, and each is twice the one before"""
    ping_seconds: Positive = 5.0
    """interval of pings; a server with two unanswered pings is considered lost"""
    unsent_bytes: PositiveInt = 8 * 1024 * 1024
    """publishing drops messages while more than this waits to be sent"""
    queue_bytes: PositiveInt = 64 * 1024 * 1024
    """bytes that a subscription buffers for a slow reader before it drops the oldest"""
    stream_days: Positive = 30.0
    """retention of stored messages"""
    stream_bytes: PositiveInt = 256 * 1024 * 1024
    """limit for stored messages; the oldest are evicted first, regardless of kind. A handover stores two
    placements, together 270 kB for 58 layers x 288 slots with shares
    """
    stream_messages_per_subject: PositiveInt = 1024
    claims_bytes: PositiveInt = 1024 * 1024
    blobs_bytes: PositiveInt = 512 * 1024 * 1024
    """limit for tokenizers, plans in progress and stored messages too large for an envelope; further content
    is rejected
    """
    parcels_bytes: PositiveInt = 128 * 1024 * 1024
    """limit for telemetry content too large for an envelope"""
    answers_bytes: PositiveInt = 256 * 1024 * 1024
    """memory for answers too large for one message, fetched in parts; further answers are rejected while all
    of it is in use
    """

    def __post_init__(self) -> None:
        check_bounds(self)
        check_token("namespace", self.namespace)
        for name, urls in (("url", (self.url,)), ("urls", self.urls)):
            for url in urls:
                if "://" not in url:
                    raise ValueError(
                        f"{name} must look like nats://host:port, not"
                        f" {without_secrets(f'nats://{url}')[7:]!r}"
                    )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together; set both or neither")

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
