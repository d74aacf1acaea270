"""Refusals reach the frontend's client with their status, and do not stop the frontend from asking again."""

import pytest

from fleet.completions import ApiError

exceptions = pytest.importorskip("dynamo.llm.exceptions")
runtime = pytest.importorskip("router.dynamo.runtime")


def refusal(error: ApiError) -> Exception:
    """The exception that a router without a deployment raises."""
    found = runtime.DynamoRuntime(None).refusal(error)
    assert isinstance(found, Exception)
    return found


@pytest.mark.parametrize(
    ("status", "code"), [(429, "saturated"), (502, "upstream_failed"), (503, "no_engine")]
)
def test_a_request_that_is_refused_says_nothing_about_the_next(status: int, code: str) -> None:
    found = refusal(ApiError(status, "why", code=code))
    assert isinstance(found, exceptions.HttpError)
    assert (found.code, found.message) == (status, "why")


@pytest.mark.parametrize("status", [400, 404])
def test_a_request_that_is_wrong_is_told_so_with_the_reason(status: int) -> None:
    found = refusal(ApiError(status, "why", code="invalid_value"))
    assert isinstance(found, exceptions.InvalidArgument)
    assert "why" in str(found)


def test_a_router_that_stops_is_left_alone() -> None:
    found = refusal(ApiError(503, "stopping", code="not_ready"))
    assert isinstance(found, exceptions.WorkerUnavailable)
