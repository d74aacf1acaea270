"""The one error of this room. Pure."""


class Malformed(Exception):
    """Data of another process that cannot be read. The reader counts and drops it."""


UNDECODABLE = (ValueError, RecursionError, OverflowError, MemoryError)
"""All exceptions that msgspec raises for hostile bytes. Its own errors and bad UTF-8 are ValueErrors."""
