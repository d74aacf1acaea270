"""TLS on the doors of routers and ranks. Certificates come from files and can be read again while connections
are open."""

import ssl
from pathlib import Path
from typing import NoReturn

from fleet.settings import FilePath


class CertificateError(ValueError):
    """A certificate or its key cannot be used; the text names the files and says why."""


class ServerTls:
    """One certificate for the doors of a process. New connections get the one that was loaded last, open ones
    keep theirs."""

    def __init__(self, cert: Path, key: Path) -> None:
        """cert: PEM with the certificate and those that lead to its authority. CertificateError when the
        files cannot be used."""
        self._cert, self._key = cert, key
        self.check()
        self.context = _context()
        self.load()

    @classmethod
    def of(cls, cert: Path | FilePath | None, key: Path | FilePath | None) -> "ServerTls | None":
        """None: the door speaks plain HTTP. CertificateError as above."""
        return None if cert is None or key is None else cls(Path(cert), Path(key))

    def check(self) -> None:
        """CertificateError unless the files can be used as they are now. What is loaded is not touched."""
        try:
            _context().load_cert_chain(self._cert, self._key, _no_password)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise CertificateError(f"the certificate {self._cert} with the key {self._key} cannot be used: {error}") from error

    def load(self) -> None:
        """Use the files as they are now. To be called after `check`."""
        self.context.load_cert_chain(self._cert, self._key, _no_password)


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    return context


def _no_password() -> NoReturn:
    raise ValueError("the key is encrypted; put an unencrypted one there, readable by its user alone")
