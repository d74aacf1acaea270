"""Client keys: the tenant, the highest priority class and the rights of each key. Pure.

A keys file holds one line per key, `sha256:HEX tenant [class] [rights,...]`, where HEX is the SHA-256 of the
key, so that a stolen file gives no access. Several lines may name one tenant, so that its keys can be rotated
without a gap. Keys are looked up by their digest. A client cannot choose the digests of the keys it presents,
so the time of a look-up reveals nothing about the keys in the file.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from fleet.completions import ApiError

INFER, ROUTE, METRICS, DOCS, ADMIN, ANY_TENANT, TRACE = (
    "infer",
    "route",
    "metrics",
    "docs",
    "admin",
    "any_tenant",
    "trace",
)
RIGHTS = {
    INFER: "chat and completions, and the other routes of OpenAI's API",
    ROUTE: "/v1/route, reservations, and /v1/decisions of its tenant",
    METRICS: "/metrics, /v1/backends, /v1/status, and the details of /ready",
    DOCS: "/docs and /openapi.json",
    ADMIN: "administration of the servers behind the router, draining them, /v1/events, plans, and the loop",
    ANY_TENANT: "name another tenant in the tenant header, as a gateway does, and see what belongs to any",
    TRACE: "have the traces that its traceparent names continued, whether they are sampled included",
}
ALL_RIGHTS = frozenset(RIGHTS)
DEFAULT_RIGHTS = frozenset({INFER})
"""Rights of a line that lists none."""
ALL = "all"
"""Every right, in a keys file."""
_CLEAR_TEXT_RIGHTS = frozenset({INFER, ROUTE})
"""Rights of a key in the old file format, in clear text."""

KEY_PREFIX = "rk_"
"""Prefix of generated keys, for scanners of leaked secrets."""
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")
_HASHED = re.compile(r"sha256:([0-9a-fA-F]{64})")
_SCHEME = "sha256:"


class Caller(NamedTuple):
    """The sender of a request. tenant: "" without a keys file. priority_class: the most urgent class it may
    use; None: any.
    """

    tenant: str
    priority_class: str | None
    rights: frozenset[str]

    def require(self, right: str) -> None:
        """Raise ApiError 403 unless the caller has this right."""
        if right not in self.rights:
            raise ApiError(
                403,
                f"this key has no right to do this; its line in the router's keys file must name {right!r}",
                code="insufficient_rights",
            )

    @property
    def sees(self) -> str | None:
        """Tenant whose decisions and reservations the caller may see and end; None: any tenant's."""
        return None if not self.tenant or self.rights & {ANY_TENANT, ADMIN} else self.tenant

    def most_urgent(self, classes: Sequence[str]) -> int:
        """Return the index of the most urgent class that the caller may request, 0 being the most urgent. A
        class that a reload removed counts as the last.
        """
        if self.priority_class is None:
            return 0
        return classes.index(self.priority_class) if self.priority_class in classes else len(classes) - 1

    def speaking_for(self, tenant: str) -> "Caller":
        """Return the caller of a request that names a tenant in its header: that tenant, without the right to
        name others.

        A caller without the right `any_tenant` stays itself. ApiError 400 for an invalid tenant name.
        """
        if ANY_TENANT not in self.rights or not self.tenant:
            return self
        if not is_tenant(tenant):
            raise ApiError(
                400, f"the tenant header must be {TENANT_FORM}, not {tenant[:64]!r}", code="invalid_value"
            )
        return self._replace(tenant=tenant, rights=self.rights - {ANY_TENANT})


TRUSTED = Caller("", None, ALL_RIGHTS)
"""Every caller, if no keys file is configured."""
TENANT_FORM = "1 to 128 letters, digits or . _ : @ -, the first a letter or digit"


def is_tenant(name: str) -> bool:
    """True for a valid tenant name (`TENANT_FORM`)."""
    return _TENANT.fullmatch(name) is not None


class ClientKeys:
    """Callers by their keys. Immutable."""

    def __init__(self, callers: dict[bytes, Caller]) -> None:
        """Store callers by the SHA-256 of their keys."""
        self._callers = callers

    def caller(self, authorization: str | None) -> Caller | None:
        """Return the caller of an `Authorization: Bearer KEY` header; None without a known key."""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        return self._callers.get(hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest())

    @property
    def tenants(self) -> frozenset[str]:
        """Names of the tenants that have a key."""
        return frozenset(caller.tenant for caller in self._callers.values())

    def compared(self, old: "ClientKeys") -> str:
        """Describe the number of keys that were added, removed or changed since `old`."""
        mine, before = self._callers, old._callers
        other = sum(mine[digest] != before[digest] for digest in mine.keys() & before.keys())
        return (
            f"{len(mine.keys() - before.keys())} added, {len(before.keys() - mine.keys())} removed, {other}"
            " changed"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClientKeys) and self._callers == other._callers

    def __hash__(self) -> int:
        return hash(frozenset(self._callers))

    def __repr__(self) -> str:
        return (
            f"{len(self._callers)} keys of {len({caller.tenant for caller in self._callers.values()})}"
            " tenants"
        )


def parse_keys(text: str, classes: Sequence[str], default_class: str) -> ClientKeys:
    """Parse a keys file. Empty lines and lines that begin with # are skipped.

    A key whose line names no class may request `default_class` at most. ValueError names the line, the
    problem and the correction, never a key.
    """
    callers: dict[bytes, Caller] = {}
    lines: dict[bytes, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        digest, caller = _parse_line(number, line, classes, default_class)
        if digest in lines:
            raise ValueError(f"lines {lines[digest]} and {number} are the same key; remove one")
        callers[digest], lines[digest] = caller, number
    if not callers:
        raise ValueError(
            "no API key is given; add one with `roost key new TENANT`, or leave api_key_file unset to ask for"
            " none"
        )
    return ClientKeys(callers)


def _parse_line(number: int, line: str, classes: Sequence[str], default_class: str) -> tuple[bytes, Caller]:
    if not line.startswith(_SCHEME):
        instead = key_line(line, "default", None, _CLEAR_TEXT_RIGHTS)
        raise ValueError(
            f"line {number} holds a key in clear; put this line instead (with the tenant's name for"
            f" 'default'): {instead}"
        )
    hashed, *words = line.split()
    match = _HASHED.fullmatch(hashed)
    if match is None:
        raise ValueError(f"line {number}: after sha256: come the 64 hexadecimal digits of the key's SHA-256")
    if not 1 <= len(words) <= 3:
        raise ValueError(
            f"line {number} must be: sha256:HEX tenant [class] [rights,...]; it has {len(words)} words after"
            " sha256:HEX"
        )
    tenant, *rest = words
    if not is_tenant(tenant):
        raise ValueError(f"line {number}: a tenant's name is {TENANT_FORM}; not {tenant[:64]!r}")
    chosen = rest.pop(0) if len(rest) == 2 or (rest and not {*rest[0].split(",")} <= {*RIGHTS, ALL}) else None
    if chosen is not None and chosen not in classes:
        raise ValueError(
            f"line {number}: {chosen[:64]!r} is neither a class ({', '.join(classes)}) nor rights"
            f" ({', '.join((*RIGHTS, ALL))}), split by commas"
        )
    rights = parse_rights(rest[0], f"line {number}: ") if rest else DEFAULT_RIGHTS
    return bytes.fromhex(match[1]), Caller(tenant, chosen or default_class, rights)


def parse_rights(text: str, place: str = "") -> frozenset[str]:
    """Parse `infer,route` into a set. ValueError, beginning with `place`, for an unknown right."""
    names = text.split(",")
    for name in names:
        if name not in RIGHTS and name != ALL:
            raise ValueError(f"{place}there is no right {name[:64]!r}; there are {', '.join((*RIGHTS, ALL))}")
    return ALL_RIGHTS if ALL in names else frozenset(names)


def key_line(key: str, tenant: str, priority_class: str | None, rights: frozenset[str]) -> str:
    """Return the line of a key in a keys file."""
    words = [
        _SCHEME + hashlib.sha256(key.encode()).hexdigest(),
        tenant,
        *([priority_class] if priority_class else []),
    ]
    if rights != DEFAULT_RIGHTS:
        words.append(ALL if rights == ALL_RIGHTS else ",".join(name for name in RIGHTS if name in rights))
    return " ".join(words)
