"""TLS of the HTTP servers of routers and ranks. Certificate files can be reloaded while connections are
open."""

import ssl
from pathlib import Path
from typing import NoReturn

from fleet.settings import FilePath


class CertificateError(ValueError):
    """Unusable certificate or key; the text names the files and the reason."""


class ServerTls:
    """Certificate of a process's HTTP servers. New connections get the last one loaded; open connections keep
    theirs."""

    def __init__(self, cert: Path, key: Path) -> None:
        """Load the files. cert: PEM with the certificate and its chain. Raises CertificateError."""
        self._cert, self._key = cert, key
        self.check()
        self.context = _context()
        self.load()

    @classmethod
    def of(cls, cert: Path | FilePath | None, key: Path | FilePath | None) -> "ServerTls | None":
        """Return the certificate; None: plain HTTP. Raises CertificateError."""
        return None if cert is None or key is None else cls(Path(cert), Path(key))

    def check(self) -> None:
        """Raise CertificateError unless the files are usable now. The loaded certificate stays unchanged."""
        try:
            _context().load_cert_chain(self._cert, self._key, _no_password)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise CertificateError(
                f"the certificate {self._cert} with the key {self._key} cannot be used: {error}"
            ) from error

    def load(self) -> None:
        """Load the files. Call `check` first."""
        self.context.load_cert_chain(self._cert, self._key, _no_password)


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    return context


def _no_password() -> NoReturn:
    raise ValueError("the key is encrypted; put an unencrypted one there, readable by its user alone")
