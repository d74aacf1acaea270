"""Timing of a request: its first token, and the tokens after it."""

import json

import pytest

from router.telemetry.metrics import RouterMetrics
from router.telemetry.request_log import RequestEnd, RequestLog


def request_log(tokens: int, choices: int = 1) -> RequestLog:
    """Request that started at 10 s, with its first token at 11 s."""
    made = RequestLog("r", "d", "/v1/completions", 10.0)
    made.first_token(11.0)
    made.output_tokens, made.finish_reasons = tokens, ["stop"] * choices
    return made


@pytest.mark.parametrize(
    ("tokens", "choices", "expected"), [(5, 1, 0.5), (10, 2, 0.5), (1, 1, None), (2, 2, None), (0, 1, None)]
)
def test_time_per_output_token_is_the_mean_between_a_choices_tokens(
    tokens: int, choices: int, expected: float | None
) -> None:
    assert request_log(tokens, choices).time_per_output_token(13.0) == expected


def test_an_answer_whose_first_token_was_not_seen_has_none() -> None:
    unseen = request_log(5)
    unseen.whole = True
    assert unseen.time_per_output_token(13.0) is None
    assert RequestLog("r", "d", "/", 0.0).time_per_output_token(1.0) is None


def test_metrics_have_it_by_model() -> None:
    metrics = RouterMetrics()
    request_log(5).finish(RequestEnd.ANSWERED, 13.0, 0, metrics)
    assert b"roost_router_time_per_output_token_seconds_sum{model=" in metrics.exposition()
    assert b'roost_router_time_per_output_token_seconds_sum{model="other"} 0.5' in metrics.exposition()


def test_the_log_line_bears_the_time_of_the_end_not_of_its_writing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "roost.access"):
        request_log(5).finish(RequestEnd.ANSWERED, 13.0, 1_700_000_000_123_456_789, RouterMetrics())
    line = json.loads(caplog.messages[0])
    assert (line["time"], line["total_ms"]) == ("2023-11-14T22:13:20.123+00:00", 3000.0)
