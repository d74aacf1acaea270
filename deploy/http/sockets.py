"""Sockets and probes of HTTP on this machine: listening ones, made before anything is served on them, and small questions."""

import asyncio
import socket
import ssl
import urllib.parse

BACKLOG = 2048
_UNVERIFIED = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
_UNVERIFIED.check_hostname = False
_UNVERIFIED.verify_mode = ssl.CERT_NONE
"""For probes of this machine's own doors: they carry no secret, and certificates need not name 127.0.0.1."""


class CannotListen(Exception):
    """An address cannot be bound; the text says which, why, and what to do."""


class HttpError(Exception):
    """An HTTP answer other than 200."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket (port 0: any free one) whose connections send without delay. CannotListen says why not."""
    return _listening(host, port, shared=False)


def _listening(host: str, port: int, *, shared: bool) -> socket.socket:
    """shared: other sockets of this user may listen on the same port, if they are made in the same way."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise CannotListen(f"cannot listen on {host!r}: {error.strerror}; give an address of this machine with --host") from error
    door = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        door.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited by every connection
        door.bind(address)
        door.listen(BACKLOG)
    except OSError as error:
        door.close()
        raise CannotListen(
            f"cannot listen on {host}:{port}: {error.strerror}; is another server there? Choose another with --port (0: any free one)"
        ) from error
    return door


def listen_together(host: str, port: int, processes: int) -> list[socket.socket]:
    """Listening sockets on one port (0: any free one), one for each of several processes: the kernel spreads connections over them.

    One socket that all inherit would spread single connections as evenly, but most of a burst would go to the process that wakes first,
    and a load balancer's connections, once made, stay where they are. CannotListen says why not.
    """
    with listen(host, port) as alone:  # nobody else listens there: sockets that share a port would share it with anybody of this user
        port = alone.getsockname()[1]
    doors: list[socket.socket] = []
    try:
        doors += [_listening(host, port, shared=True) for _ in range(processes)]
    finally:
        if len(doors) < processes:
            for door in doors:
                door.close()
    return doors


def adopt(descriptor: int) -> socket.socket:
    """The listening socket a parent bound for us. CannotListen when the descriptor is none."""
    try:
        return socket.socket(fileno=descriptor)
    except OSError as error:
        raise CannotListen(f"file descriptor {descriptor} is no socket: {error.strerror}") from error


def url_of(door: socket.socket, *, tls: bool = False, host: str | None = None) -> str:
    """The base URL under which a listening socket can be reached from this machine; by the name `host`, if there is one."""
    address, port = door.getsockname()[:2]
    name = host or {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    return f"http{'s' if tls else ''}://{f'[{name}]' if ':' in name else name}:{port}"


async def probe(url: str, *, seconds: float = 5.0) -> None:
    """Ask for a page of a server on this machine. HttpError for a status other than 200; OSError, TimeoutError when nobody answers."""
    parts = urllib.parse.urlsplit(url)
    async with asyncio.timeout(seconds):
        tls = _UNVERIFIED if parts.scheme == "https" else None
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port or (443 if tls else 80), ssl=tls)
        try:
            writer.write(f"GET {parts.path or '/'} HTTP/1.0\r\nHost: {parts.netloc}\r\n\r\n".encode())
            words = (await reader.readline()).split(None, 2)
        finally:
            writer.close()
    if len(words) < 2 or not words[1].isdigit():
        raise ConnectionError(f"{url} does not speak HTTP")
    if int(words[1]) != 200:
        raise HttpError(int(words[1]))
