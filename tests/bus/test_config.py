"""Invalid settings are refused by name."""

from typing import Any

import pytest

from bus.config import BusConfig
from migration.config import MigrationConfig
from tracker.config import TrackerConfig


@pytest.mark.parametrize(
    ("kind", "fields", "named"),
    [
        (BusConfig, {"url": "127.0.0.1:4222"}, r"^url"),
        (BusConfig, {"namespace": "a.b"}, r"^namespace"),
        (BusConfig, {"request_seconds": 0.0}, r"^request_seconds"),
        (BusConfig, {"record_seconds": float("nan")}, r"^record_seconds"),
        (BusConfig, {"stream_days": float("inf")}, r"^stream_days"),
        (BusConfig, {"stream_bytes": -1}, r"^stream_bytes"),
        (BusConfig, {"reconnect_max_seconds": 0.01}, r"^reconnect_max_seconds"),
        (TrackerConfig, {"fast_seconds": -1.0}, r"^fast_seconds"),
        (TrackerConfig, {"fast_seconds": 900.0}, r"^fast_seconds"),
        (TrackerConfig, {"state_seconds": 0.0}, r"^state_seconds"),
        (TrackerConfig, {"change": 1.0}, r"^change"),
        (MigrationConfig, {"retry_seconds": 0.0}, r"^retry_seconds"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(kind: type, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        kind(**fields)


def test_the_defaults_are_sound() -> None:
    assert BusConfig().stream_seconds == 30 * 86400
    TrackerConfig()
    MigrationConfig()
