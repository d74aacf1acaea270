"""The OpenAPI document names every route that the router answers, and says which right it needs."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from starlette.routing import Route

from bus.protocol.subjects import Subjects
from router.access.api_keys import key_line
from router.api.app import RouterApp, create_app
from router.config import RouterConfig
from router.foreign_api.routes import route_of
from router.service import RouterService
from tests.router.router_fixture import OpenHouse

FILE = Path(__file__).resolve().parents[3] / "docs/openapi.yaml"
PAGES = {"/openapi.json", "/docs", "/redoc"}
"""Pages about the document itself."""


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return found


def operations(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (method.upper(), path): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def own_routes(app: RouterApp) -> set[tuple[str, str]]:
    return {
        (method, route.path.replace(":path", ""))
        for route in app.router.routes
        if isinstance(route, Route) and route.path not in PAGES
        for method in (route.methods or ()) - {"HEAD"}
    }


def test_every_route_of_the_application_is_described_and_no_other(document: dict[str, Any]) -> None:
    app = create_app(RouterService(None, Subjects(), RouterConfig()))
    assert isinstance(app, RouterApp)
    own, described = own_routes(app), set(operations(document))
    assert len(own) > 10
    assert own <= described
    for method, path in described - own:
        assert route_of(method, path.replace("{object_id}", "id-1"), ()) is not None, (method, path)


def test_every_operation_has_a_summary_a_schema_and_the_errors_of_its_right(document: dict[str, Any]) -> None:
    for (_, path), operation in operations(document).items():
        assert operation["summary"], path
        answer = operation["responses"]["200"]
        assert answer["content"], path
        if "x-right" in operation:
            assert {"401", "403"} <= set(operation["responses"]), path
            assert operation["security"] == [{"key": []}]
        for name in operation.get("parameters", ()):
            assert name["in"] != "path" or f"{{{name['name']}}}" in path


def test_every_reference_leads_to_a_schema(document: dict[str, Any]) -> None:
    def references(value: Any) -> set[str]:
        if isinstance(value, dict):
            own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set[str]()
            return own.union(*map(references, value.values()))
        return set[str]().union(*map(references, value)) if isinstance(value, list) else set()

    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert references(document) <= known


async def test_the_rights_in_the_document_are_those_that_the_routes_ask_for(
    open_house: OpenHouse, tmp_path: Path, document: dict[str, Any]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(key_line("weak", "acme", None, frozenset({"docs"})))
    house = await open_house(api_key_file=str(keys))
    for (method, path), operation in operations(document).items():
        if method != "GET" or path.startswith(("/v1/files", "/v1/batches", "/v1/responses", "/version")):
            continue
        answer = await house.get(path, {"authorization": "Bearer weak"})
        assert (answer.status == 403) == ("x-right" in operation), (path, answer.status)
