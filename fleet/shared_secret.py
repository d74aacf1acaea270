"""Fleet secret: routers present it to ranks, so that ranks serve routers only. Pure.

A file holds one secret, or two during a rotation. Both are accepted; the first one is presented.
"""

import hashlib
import hmac
from collections.abc import Iterator

MIN_CHARACTERS = 16
MAX_SECRETS = 2


class SharedSecret:
    """One secret, or two during a rotation. Its text form shows neither."""

    def __init__(self, *secrets: str) -> None:
        """Raise ValueError unless there are one or two secrets of at least MIN_CHARACTERS printable ASCII
        characters. The error contains no secret.
        """
        if not 1 <= len(secrets) <= MAX_SECRETS:
            raise ValueError(f"it must hold one secret, or two while it is changed; it holds {len(secrets)}")
        for number, secret in enumerate(secrets, 1):
            if (
                len(secret) < MIN_CHARACTERS
                or not secret.isascii()
                or not secret.isprintable()
                or " " in secret
            ):
                raise ValueError(
                    f"secret {number} must be at least {MIN_CHARACTERS} printable ASCII characters without"
                    " spaces"
                )
        self._secrets = secrets
        self._digests = [hashlib.sha256(secret.encode()).digest() for secret in secrets]

    @classmethod
    def parse(cls, text: str) -> "SharedSecret":
        """Parse the secrets of a file, one per line. Empty lines and lines that begin with # are ignored.

        ValueError as in the constructor.
        """
        return cls(*_lines(text))

    @property
    def authorization(self) -> str:
        """Authorization header by which a router proves membership of the fleet."""
        return f"Bearer {self._secrets[0]}"

    def admits(self, authorization: str | None) -> bool:
        """Return True for a header that carries one of the secrets.

        Constant time: the duration reveals neither which secret matched nor how much of it was right.
        """
        scheme, _, secret = (authorization or "").partition(" ")
        presented = hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(digest, presented)
        return found and scheme.lower() == "bearer"

    def derive(self, *parts: str) -> bytes:
        """Derive a key of 32 bytes for one purpose from the first secret: HMAC-SHA256 over the parts, each
        with a length prefix.

        Every holder of the secret derives the same key. Others cannot.
        """
        text = b"".join(
            len(encoded).to_bytes(8) + encoded
            for encoded in (part.encode("utf-8", "surrogatepass") for part in parts)
        )
        return hmac.digest(self._secrets[0].encode(), text, "sha256")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SharedSecret) and self._secrets == other._secrets

    def __hash__(self) -> int:
        return hash(self._digests[0])

    def __repr__(self) -> str:
        return "one secret" if len(self._secrets) == 1 else f"{len(self._secrets)} secrets"


def _lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        line = line.strip()
        if line and not line.startswith("#"):
            yield line
