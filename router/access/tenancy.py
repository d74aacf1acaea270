"""Isolation of tenants' KV caches: the salt under which a request may share KV blocks, and its path to a
server. Pure.

salt = HMAC-SHA256(key, tenant, own) in hexadecimal digits. tenant: of the client's key. own: the `cache_salt`
that the client sent, with which a tenant may divide its own cache further. The key is derived from the
fleet's secret. So every router computes the same salts, a rank's cache serves a tenant through any router,
and no tenant can name another's salt. Without client keys nothing authenticates a tenant: then the client's
own `cache_salt` counts unchanged (vLLM's meaning of the field), and requests without one share all KV blocks.
"""

import hmac
from collections.abc import Sequence

import msgspec

from fleet.completions import UNREADABLE, ApiError

MAX_SALT = 512
"""longest `cache_salt` of a client, in characters"""
_FIELD = "cache_salt"
SALT_FIELD = _FIELD.encode()
"""Field name as bytes. A body that contains them anywhere is decoded to find its salt."""


def cache_salt(key: bytes, tenant: str, own: str | None) -> str:
    """Return the salt of a tenant's request. tenant: "" without client keys. Result "": the request shares KV
    blocks with all requests without a salt. ApiError 400 for a `cache_salt` that is empty or too long.
    """
    if own is not None and not 1 <= len(own) <= MAX_SALT:
        message = f"cache_salt must have 1 to {MAX_SALT} characters, not {len(own)}; or leave it out"
        raise ApiError(400, message, param=_FIELD, code="invalid_value")
    if not tenant:
        return own or ""
    fields = (tenant,) if own is None else (tenant, own)
    return hmac.digest(key, framed(fields), "sha256").hex()


def framed(fields: Sequence[str]) -> bytes:
    """Concatenate fields, each preceded by its length in bytes (u64 big endian), so that no two lists give
    the same bytes.
    """
    encoded = [field.encode("utf-8", "surrogatepass") for field in fields]
    return b"".join(len(field).to_bytes(8) + field for field in encoded)


def with_salt(body: bytes, salt: str) -> bytes:
    """Return a JSON body with this salt in place of its own; all other fields stay unchanged.

    The last value of a repeated name counts, and the salt comes last, so a client gains nothing by escaping
    characters of the name. ApiError 400 when the body is no JSON object.
    """
    if SALT_FIELD not in body and (end := body.rstrip())[-1:] == b"}":  # avoids parsing large bodies again
        inside = end[:-1].rstrip()
        return (
            inside
            + (b"" if inside[-1:] == b"{" else b",")
            + b'"cache_salt":'
            + msgspec.json.encode(salt)
            + b"}"
        )
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except UNREADABLE as error:
        raise ApiError(400, f"the body must be a JSON object: {error}", code="invalid_json") from error
    fields[_FIELD] = msgspec.Raw(msgspec.json.encode(salt))
    return msgspec.json.encode(fields)
