"""Tenants' KV caches apart: the salt under which a request may share KV, and how it reaches a server. Pure.

salt = HMAC-SHA256(key, tenant, own) in hexadecimal digits. tenant: of the client's key. own: the `cache_salt`
that the client sent, by which a tenant may divide its own cache further. The key comes from the fleet's
secret: every router makes the same salts, so that a rank's cache serves a tenant whichever router it asks,
and no tenant can name another's salt. Without client keys nothing vouches for a tenant: then the client's own
`cache_salt` counts as it came (vLLM's meaning of it), and requests without one share all KV.
"""

import hmac
from collections.abc import Sequence

import msgspec

from fleet.completions import ApiError

MOST_SALT = 512
"""characters of a client's `cache_salt`"""
_FIELD = "cache_salt"
SALT_FIELD = _FIELD.encode()
"""A body that has these bytes somewhere is decoded to get its salt."""


def cache_salt(key: bytes, tenant: str, own: str | None) -> str:
    """The salt of a tenant's request (tenant "": there are no client keys); "": it shares KV with all without
    a salt. ApiError 400 for a `cache_salt` that is empty or too long."""
    if own is not None and not 1 <= len(own) <= MOST_SALT:
        said = f"cache_salt must have 1 to {MOST_SALT} characters, not {len(own)}; or leave it out"
        raise ApiError(400, said, param=_FIELD, code="invalid_value")
    if not tenant:
        return own or ""
    fields = (tenant,) if own is None else (tenant, own)
    return hmac.digest(key, framed(fields), "sha256").hex()


def framed(fields: Sequence[str]) -> bytes:
    """The fields, each with its length in bytes before it (u64 big endian): no two lists have the same
    bytes."""
    encoded = [field.encode("utf-8", "surrogatepass") for field in fields]
    return b"".join(len(field).to_bytes(8) + field for field in encoded)


def with_salt(body: bytes, salt: str) -> bytes:
    """A JSON body with this salt in place of its own; all other fields as they came.

    Of a name that is there twice the last value counts, and the salt stands last: a client gains nothing by writing the
    name with escapes. ApiError 400 for no JSON object.
    """
    if SALT_FIELD not in body and (end := body.rstrip())[-1:] == b"}":  # large bodies are not read again for this
        inside = end[:-1].rstrip()
        return inside + (b"" if inside[-1:] == b"{" else b",") + b'"cache_salt":' + msgspec.json.encode(salt) + b"}"
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body must be a JSON object: {error}", code="invalid_json") from error
    fields[_FIELD] = msgspec.Raw(msgspec.json.encode(salt))
    return msgspec.json.encode(fields)
