"""The API keys that clients may present. Comparing takes the same time whichever key is wrong, and wherever."""

import hashlib
import hmac
from pathlib import Path


class ApiKeys:
    """Digests of the keys; an empty set would let nobody in."""

    def __init__(self, keys: list[str]) -> None:
        if not keys:
            raise ValueError("no API key is given; leave api_key_file unset to ask for none")
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @classmethod
    def read(cls, path: Path) -> "ApiKeys":
        """One key per line; empty lines and lines that begin with # are left out. OSError, or ValueError when there is none."""
        lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
        try:
            return cls([line for line in lines if line and not line.startswith("#")])
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def admit(self, authorization: str | None) -> bool:
        """Whether an `Authorization` header carries one of the keys."""
        scheme, _, key = (authorization or "").partition(" ")
        presented = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = False
        for digest in self._digests:  # all of them, always
            found |= hmac.compare_digest(digest, presented)
        return found and scheme.lower() == "bearer"
