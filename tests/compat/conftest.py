"""The router in-process, as the router's own tests have it."""

from tests.router.conftest import open_house as open_house
