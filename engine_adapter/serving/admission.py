"""The check that a request to a rank comes from a router of its fleet. /health answers anyone, with nothing
but that the rank lives."""

import logging
from collections.abc import Iterable
from pathlib import Path

from fleet.completions import ApiError
from fleet.shared_secret import SharedSecret

log = logging.getLogger(__name__)

HEALTH_PATH = "/health"


class NoSecret(Exception):
    """The fleet's secret cannot be read; the text names the file and says why."""


class RouterAdmission:
    """Holds the fleet's secret, as its file has it. Without a file every request is admitted."""

    def __init__(self, file: Path | None) -> None:
        """NoSecret when the file cannot be used."""
        self._file = file
        self._secret = None if file is None else _read(file)

    def check(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """ApiError 401 unless the request carries the secret, or may do without."""
        if self._secret is None or path == HEALTH_PATH:
            return
        presented = next((value.decode("latin-1") for name, value in headers if name == b"authorization"), None)
        if not self._secret.admits(presented):
            raise ApiError(
                401,
                "this rank answers routers that present the fleet's secret (fleet_secret_file)",
                code="invalid_api_key",
            )

    def reload(self) -> None:
        """Read the file again. What cannot be used leaves the secret as it is, and is logged."""
        if self._file is None:
            return
        try:
            new = _read(self._file)
        except NoSecret as error:
            log.error("the fleet's secret stays as it was: %s", error)  # noqa: TRY400 an operator's mistake, not a fault
            return
        if new == self._secret:
            log.info("the fleet's secret was read again: nothing differs")
            return
        self._secret = new
        log.info("the fleet's secret was read again and has changed")


def _read(file: Path) -> SharedSecret:
    try:
        return SharedSecret.parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise NoSecret(f"fleet_secret_file: {error}") from error
    except ValueError as error:
        raise NoSecret(f"fleet_secret_file {file}: {error}") from error
