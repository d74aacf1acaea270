"""Listening sockets, created before anything is served on them, and HTTP probes on this machine."""

import asyncio
import socket
import ssl
import urllib.parse

BACKLOG = 2048
_UNVERIFIED = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
_UNVERIFIED.check_hostname = False
_UNVERIFIED.verify_mode = ssl.CERT_NONE
"""TLS context for probes of this machine's own servers: they carry no secret, and certificates need not name
127.0.0.1."""


class CannotListen(Exception):
    """Address that cannot be bound; the text names it, the reason and the remedy."""


class HttpError(Exception):
    """HTTP answer with a status other than 200."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status


def listen(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket (port 0: any free port) with TCP_NODELAY. Raises CannotListen."""
    return _listening(host, port, shared=False)


def _listening(host: str, port: int, *, shared: bool) -> socket.socket:
    """Create a listening socket. shared: other sockets of this user may listen on the same port, if created
    the same way."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise CannotListen(
            f"cannot listen on {host!r}: {error.strerror}; give an address of this machine with --host"
        ) from error
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise CannotListen(
            f"cannot listen on {host}:{port}: {error.strerror}; is another server there? Choose another with"
            " --port (0: any free one)"
        ) from error
    return listener


def listen_together(host: str, port: int, processes: int) -> list[socket.socket]:
    """Return listening sockets on one port (0: any free port), one per process; the kernel spreads
    connections.

    One inherited socket would spread single connections as evenly. But it would give most of a burst to the
    process that wakes first, and a load balancer's persistent connections stay where they are. Raises
    CannotListen.
    """
    # checks that the port is free: a shared port would otherwise be shared with any process of this user
    with listen(host, port) as alone:
        port = alone.getsockname()[1]
    listeners: list[socket.socket] = []
    try:
        listeners += [_listening(host, port, shared=True) for _ in range(processes)]
    finally:
        if len(listeners) < processes:
            for listener in listeners:
                listener.close()
    return listeners


def adopt(descriptor: int) -> socket.socket:
    """Return the listening socket inherited from the parent. Raises CannotListen if the descriptor is no
    socket."""
    try:
        return socket.socket(fileno=descriptor)
    except OSError as error:
        raise CannotListen(f"file descriptor {descriptor} is no socket: {error.strerror}") from error


def url_of(listener: socket.socket, *, tls: bool = False, host: str | None = None) -> str:
    """Return the base URL of a listening socket as seen from this machine; with the name `host`, if given."""
    address, port = listener.getsockname()[:2]
    name = host or {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    return f"http{'s' if tls else ''}://{f'[{name}]' if ':' in name else name}:{port}"


async def probe(url: str, *, seconds: float = 5.0) -> None:
    """Request a page of a server on this machine. Raises HttpError for a status other than 200; OSError or
    TimeoutError without an answer."""
    parts = urllib.parse.urlsplit(url)
    async with asyncio.timeout(seconds):
        tls = _UNVERIFIED if parts.scheme == "https" else None
        reader, writer = await asyncio.open_connection(
            parts.hostname, parts.port or (443 if tls else 80), ssl=tls
        )
        try:
            writer.write(f"GET {parts.path or '/'} HTTP/1.0\r\nHost: {parts.netloc}\r\n\r\n".encode())
            status_line = (await reader.readline()).split(None, 2)
        finally:
            writer.close()
    if len(status_line) < 2 or not status_line[1].isdigit():
        raise ConnectionError(f"{url} does not speak HTTP")
    if int(status_line[1]) != 200:
        raise HttpError(int(status_line[1]))
