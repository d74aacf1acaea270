"""Answers to scripts in a browser: Roost has no CORS, on purpose (docs/operations.md)."""

import pytest

from tests.router.router_fixture import House

PREFLIGHT = {
    "origin": "https://example.org",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization",
}


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/route", "/health"]
)
async def test_a_preflight_is_refused_by_its_method_and_no_origin_is_allowed(house: House, path: str) -> None:
    async with house.http.options(f"{house.url}{path}", headers=PREFLIGHT) as answer:
        assert answer.status == 405
        assert set(answer.headers["allow"].replace(" ", "").split(",")) <= {"GET", "HEAD", "POST"}
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]
