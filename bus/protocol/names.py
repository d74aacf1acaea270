"""Server-side names of a namespace's stores: stream, key-value bucket, object buckets, and the subjects below
them. Pure.
"""

from typing import NamedTuple

from bus.protocol.subjects import Subjects


class StoreNames(NamedTuple):
    """Store names of one namespace."""

    stream: str
    """the durable log"""
    claims: str
    blobs: str
    parcels: str

    @classmethod
    def of(cls, subjects: Subjects) -> "StoreNames":
        return cls(*(f"{subjects.namespace}-{kind}" for kind in ("stored", "claims", "blobs", "parcels")))

    @property
    def streams(self) -> tuple[str, ...]:
        """JetStream's names of all four."""
        return (self.stream, f"KV_{self.claims}", f"OBJ_{self.blobs}", f"OBJ_{self.parcels}")

    def claim(self, key: str) -> str:
        """Return the subject on which a claim is written."""
        return f"$KV.{self.claims}.{key}"

    @staticmethod
    def contents(bucket: str) -> tuple[str, str]:
        """Return the subjects on which an object bucket's chunks and their descriptions are written."""
        return f"$O.{bucket}.C.>", f"$O.{bucket}.M.>"
