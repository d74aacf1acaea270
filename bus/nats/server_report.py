"""Report of a NATS server about itself and about the user that asks, for diagnoses."""

import ssl
import time
from dataclasses import dataclass, replace
from datetime import datetime

import msgspec
from nats import errors

from bus.nats.link import Link
from bus.protocol.permissions import OWN_RIGHTS


@dataclass(frozen=True, slots=True)
class UserRights:
    """Patterns of subjects, as the server has them. allow None: everything that is not denied."""

    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerReport:
    """State of the server that one connection leads to."""

    version: str
    jetstream: bool
    tls: bool
    logins: bool
    """clients must log in"""
    user: str | None = None
    """None, with the next three: the server did not say, because this user may not ask"""
    publish: UserRights | None = None
    subscribe: UserRights | None = None
    clock_offset: float | None = None
    """seconds by which the server's clock is ahead of ours"""
    certificate_ends: float | None = None
    """Unix seconds; None: no TLS"""


class _Rights(msgspec.Struct):
    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()

    def of_user(self) -> UserRights:
        return UserRights(self.allow, self.deny)


class _Permissions(msgspec.Struct):
    publish: _Rights = msgspec.field(default_factory=_Rights)
    subscribe: _Rights = msgspec.field(default_factory=_Rights)


class _User(msgspec.Struct):
    user: str = ""
    permissions: _Permissions = msgspec.field(default_factory=_Permissions)


class _Server(msgspec.Struct):
    time: datetime


class _Answer(msgspec.Struct):
    server: _Server
    data: _User


async def server_report(link: Link) -> ServerReport:
    """Ask the server of an open link."""
    info = link.client._server_info
    asked = time.time()
    try:
        answer = await link.client.request(OWN_RIGHTS, b"", timeout=link.config.request_seconds)
        found = msgspec.json.decode(answer.data, type=_Answer)
    except (errors.Error, TimeoutError, msgspec.DecodeError):
        found = None
    received = time.time()
    report = ServerReport(
        version=str(info.get("version", "")),
        jetstream=bool(info.get("jetstream")),
        tls=bool(info.get("tls_required")),
        logins=bool(info.get("auth_required")),
        certificate_ends=_certificate_end(link),
    )
    if found is None:
        return report
    return replace(
        report,
        user=found.data.user,
        publish=found.data.permissions.publish.of_user(),
        subscribe=found.data.permissions.subscribe.of_user(),
        clock_offset=found.server.time.timestamp() - (asked + received) / 2,
    )


def _certificate_end(link: Link) -> float | None:
    """Return the end of the server's certificate; None without TLS."""
    writer = getattr(link.client._transport, "_io_writer", None)
    certificate = None if writer is None else writer.get_extra_info("peercert")
    return ssl.cert_time_to_seconds(str(certificate["notAfter"])) if certificate else None
