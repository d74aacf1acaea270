"""Secrets of the router, read from the files that its settings name: at start and again at each reload."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fleet.completions import ApiError
from fleet.shared_secret import SharedSecret
from router.access.api_keys import TRUSTED, Caller, ClientKeys, parse_keys
from router.access.tenancy import cache_salt
from router.config import RouterConfig, base_url
from router.http.asgi_response import Headers


@dataclass(frozen=True, slots=True)
class RouterCredentials:
    """Hold the keys of clients and the secrets sent upstream; none of them appears in `repr`.

    clients: None when no key is required. backend_key: sent to static backends. fleet: sent to Roost's own
    ranks.
    """

    clients: ClientKeys | None
    backend_key: str | None = field(repr=False)
    fleet: SharedSecret | None = None
    named_backend_keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    """keys of the [backends.NAME] that have a key file of their own, by base URL"""

    @classmethod
    def read(cls, config: RouterConfig) -> "RouterCredentials":
        """Read the files. OSError, or ValueError that names the file, when one of them cannot be used."""
        return cls(
            None if config.api_key_file is None else _client_keys(Path(config.api_key_file), config),
            None if config.backend_key_file is None else _first_line(Path(config.backend_key_file)),
            None if config.fleet_secret_file is None else _fleet_secret(Path(config.fleet_secret_file)),
            {
                base_url(backend.url): _first_line(Path(backend.key_file))
                for backend in config.named_backends
                if backend.key_file is not None
            },
        )

    def backend_key_of(self, url: str) -> str | None:
        """Return the key that the server of a base URL requires as `Authorization: Bearer`; None: no key."""
        return self.named_backend_keys.get(url, self.backend_key)

    def cache_salt(self, tenant: str, own: str | None) -> str:
        """Return the salt of a tenant's request (`router.access.tenancy.cache_salt`), keyed with the fleet's
        secret, or with an empty key without one.
        """
        return cache_salt(b"" if self.fleet is None else self.fleet.derive("cache_salt"), tenant, own)

    def caller(self, authorization: str | None) -> Caller:
        """Return the caller that presents this header. ApiError 401 without a valid key."""
        found = TRUSTED if self.clients is None else self.clients.caller(authorization)
        if found is None:
            raise ApiError(
                401, "a valid API key is needed: Authorization: Bearer <key>", code="invalid_api_key"
            )
        return found

    @property
    def for_ranks(self) -> Headers:
        """Headers that Roost's own ranks require."""
        return [] if self.fleet is None else [(b"authorization", self.fleet.authorization.encode())]

    def rights(self, authorization: str | None) -> frozenset[str]:
        """Return the rights of the caller that presents this header; none without a valid key."""
        found = TRUSTED if self.clients is None else self.clients.caller(authorization)
        return frozenset() if found is None else found.rights

    def changes(self, new: "RouterCredentials") -> dict[str, tuple[str, str]]:
        """Return the old and new content of each file that differs in `new`, by setting, without any
        secret."""
        changed = {}
        if self.clients is not None and new.clients is not None and self.clients != new.clients:
            changed["api_key_file contents"] = (
                str(self.clients),
                f"{new.clients}: {new.clients.compared(self.clients)}",
            )
        if self.backend_key != new.backend_key:
            changed["backend_key_file contents"] = ("a key", "another key")
        if self.named_backend_keys != new.named_backend_keys:
            changed["key files of [backends.NAME]"] = (
                f"{len(self.named_backend_keys)} keys",
                f"{len(new.named_backend_keys)} keys, not the same",
            )
        if self.fleet != new.fleet:
            changed["fleet_secret_file contents"] = (str(self.fleet), f"{new.fleet}, not the same")
        return changed


def _first_line(path: Path) -> str:
    return path.read_text(encoding="utf-8").split("\n")[0].strip()


def _fleet_secret(path: Path) -> SharedSecret:
    try:
        return SharedSecret.parse(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _client_keys(path: Path, config: RouterConfig) -> ClientKeys:
    try:
        return parse_keys(path.read_text(encoding="utf-8"), config.classes, config.default_class)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
