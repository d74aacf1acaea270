"""Fixtures of the router's tests, for its client."""

from tests.router.conftest import byte_archive, open_house, serve_rank

__all__ = ["byte_archive", "open_house", "serve_rank"]
