"""What every test needs."""

import asyncio


def pytest_configure() -> None:
    """Say that no event loop is set: otherwise pytest-asyncio, asking for the old one, makes one on Python 3.11 and never closes it."""
    asyncio.set_event_loop(None)
