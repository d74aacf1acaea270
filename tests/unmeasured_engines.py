"""Engines that start without measuring their steps, which is most of the time that a tiny engine needs."""

import pytest

from engine_adapter.embedded import setup
from engine_adapter.embedded.calibration.calibrate import EngineCalibration
from fleet.timing import EngineSpeed


def skip_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let embedded engines of this process state default speeds."""
    monkeypatch.setattr(setup, "calibrated", lambda *_, **__: EngineCalibration(speed=EngineSpeed()))
