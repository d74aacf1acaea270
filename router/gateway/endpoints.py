"""Endpoints as a gateway names them: address and port. Pure."""

import ipaddress
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit

from router.fleet_state.target_table import RankKey, TargetTable

_NOT_OFFERED = "the gateway does not offer its endpoint"
_NO_ENDPOINT = "its URL is no address and port, which gateways need: no name of a host, and no path"


class Subset(NamedTuple):
    """Endpoints from which the gateway lets choose."""

    endpoints: frozenset[str]
    addresses: frozenset[str]
    """addresses with all their ports"""

    @classmethod
    def of(cls, listed: Iterable[str]) -> "Subset":
        """Read a list such as `10.0.0.1:8000`, `[fd00::1]:8000`, `10.0.0.1`. Others never match."""
        endpoints, addresses = set(), set()
        for text in listed:
            address = _address(text)
            if address is not None:
                addresses.add(address)
            elif (endpoint := endpoint_of(f"http://{text}")) is not None:
                endpoints.add(endpoint)
        return cls(frozenset(endpoints), frozenset(addresses))

    def allows(self, endpoint: str) -> bool:
        return endpoint in self.endpoints or endpoint.rpartition(":")[0].strip("[]") in self.addresses


@lru_cache(maxsize=8192)
def endpoint_of(url: str) -> str | None:
    """Return `address:port` of a server's URL, IPv6 in brackets; None: it has a name or a path."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    address = _address(host or "")
    if address is None or parts.path not in ("", "/"):
        return None
    port = port or (443 if parts.scheme == "https" else 80)
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def barred(table: TargetTable, subset: Subset | None) -> Mapping[RankKey, str]:
    """Return the targets of a table to which the gateway cannot or will not forward, with reasons.

    subset: None: the gateway leaves the choice open.
    """
    found: dict[RankKey, str] = {}
    for target in table.targets:
        endpoint = endpoint_of(target.url)
        if endpoint is None:
            found[target.key] = _NO_ENDPOINT
        elif subset is not None and not subset.allows(endpoint):
            found[target.key] = _NOT_OFFERED
    return found


def _address(text: str) -> str | None:
    try:
        return str(ipaddress.ip_address(text.strip("[]")))
    except ValueError:
        return None
