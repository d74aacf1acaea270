"""Authentication with a NATS server, in both directions: credentials and certificates from files."""

import ssl
from pathlib import Path

import msgspec

from bus import BusError
from bus.config import BusConfig
from bus.protocol.roles import Login, inbox_prefix


class _File(msgspec.Struct):
    user: str
    password: str
    inbox_prefix: str = ""


def read_login(file: Path) -> Login:
    """Read the login from a credentials file. BusError if it cannot be read; the text never repeats its
    contents.
    """
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise BusError(f"bus.credentials_file {file} cannot be read: {error.strerror or error}") from error
    if raw.lstrip().startswith(b"-----BEGIN NATS"):
        raise BusError(
            f"bus.credentials_file {file} is a NATS .creds file; Roost takes JSON with a user and a password:"
            ' {"user": "...", "password": "..."}'
        )
    try:
        found = msgspec.json.decode(raw, type=_File)
    except msgspec.DecodeError:  # its text might quote the file
        raise BusError(
            f'bus.credentials_file {file} must hold JSON of this form: {{"user": "...", "password": "..."}}'
        ) from None
    return Login(found.user, found.password, found.inbox_prefix or inbox_prefix(found.user))


def tls_context(config: BusConfig) -> ssl.SSLContext | None:
    """Return the TLS context that verifies the server's certificate; None: TLS is not configured.

    BusError names the file that cannot be used.
    """
    if not config.uses_tls:
        return None
    try:
        context = ssl.create_default_context(cafile=None if config.tls_ca is None else str(config.tls_ca))
    except (OSError, ssl.SSLError) as error:
        raise BusError(f"bus.tls_ca {config.tls_ca} cannot be used: {error}") from error
    if config.tls_cert is not None and config.tls_key is not None:
        try:
            context.load_cert_chain(config.tls_cert, config.tls_key)
        except (OSError, ssl.SSLError) as error:
            raise BusError(
                f"bus.tls_cert {config.tls_cert} and bus.tls_key {config.tls_key} cannot be used: {error}"
            ) from error
    return context
