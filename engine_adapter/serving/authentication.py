"""Check that requests to a rank come from a router of its fleet. /health is open to all, and reveals only
that the rank is alive."""

import logging
from collections.abc import Iterable
from pathlib import Path

from fleet.completions import ApiError
from fleet.shared_secret import SharedSecret

log = logging.getLogger(__name__)

HEALTH_PATH = "/health"


class NoSecret(Exception):
    """The fleet's secret cannot be read. The text names the file and the reason."""


class RouterAuthentication:
    """Check of requests against the fleet's secret. Without a secret file, every request is admitted."""

    def __init__(self, file: Path | None) -> None:
        """NoSecret when the file cannot be used."""
        self._file = file
        self._secret = None if file is None else _read(file)

    def check(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """ApiError 401 unless the request carries the secret or its path is open to all."""
        if self._secret is None or path == HEALTH_PATH:
            return
        presented = next(
            (value.decode("latin-1") for name, value in headers if name == b"authorization"), None
        )
        if not self._secret.admits(presented):
            raise ApiError(
                401,
                "this rank answers routers that present the fleet's secret (fleet_secret_file)",
                code="invalid_api_key",
            )

    def reload(self) -> None:
        """Read the file again. An unusable file is logged and leaves the secret unchanged."""
        if self._file is None:
            return
        try:
            new = _read(self._file)
        except NoSecret as error:
            log.error("the fleet's secret is unchanged: %s", error)  # noqa: TRY400 an operator's mistake, not a fault
            return
        if new == self._secret:
            log.info("the fleet's secret was reloaded: no change")
            return
        self._secret = new
        log.info("the fleet's secret was reloaded and has changed")


def _read(file: Path) -> SharedSecret:
    try:
        return SharedSecret.parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise NoSecret(f"fleet_secret_file: {error}") from error
    except ValueError as error:
        raise NoSecret(f"fleet_secret_file {file}: {error}") from error
