"""What a soak reports can be told and drawn."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.rig.evidence import tell_soak
from tests.system.crowd import Tide, Told
from tests.system.mishaps import Happened, Mishap
from tests.system.test_soak import Soak
from tests.system.vigil import MIB, Epochs, Life

DOMAINS = ("c", "ja")
TIDE = Tide("even", 1200.0, np.full(2, 0.5), np.full(2, 0.5))


def reported(lost: list[str]) -> dict[str, Any]:
    """Of twenty minutes that never were."""
    looks = np.arange(0.0, 1200.0, 5.0)
    lives = [Life("nats", 7, looks.tolist(), [24 * MIB] * len(looks)), Life("router-0", 8, [3.0], [90 * MIB])]
    happened = Happened(
        [Mishap(60.0, "NATS killed", "nats", "pid 7", 0.25), Mishap(90.0, "loop paused", "planner"), Mishap(80.0, "NATS killed", "nats", "", 1.5)]
    )
    told = Told(came=1500, answered=1499, seconds=[1.0], refused=Counter({503: 2}), lost=lost)
    parts: dict[str, Any] = {
        "crowd": SimpleNamespace(told=told),
        "mischief": SimpleNamespace(happened=happened),
        "memories": SimpleNamespace(lives=lives, left_over=[]),
        "records": SimpleNamespace(history=lambda _: SimpleNamespace(migrations=[])),
        "movers": None,
    }
    soak = Soak(1200.0, 6, [TIDE], epochs=Epochs(heard=9, committed=4), began=0.0, **cast("Any", parts))
    soak.progress += [(60.0, 70, 60), (1200.0, 1500, 1499)]
    return soak.report(DOMAINS)


@pytest.mark.parametrize("lost", [[], ["prompt 3 was never answered"]])
def test_the_report_of_a_soak_becomes_a_page_and_a_picture(tmp_path: Path, lost: list[str]) -> None:
    (tmp_path / "report").write_text(json.dumps(reported(lost), allow_nan=False))
    tell_soak(tmp_path / "report", tmp_path)
    page = (tmp_path / "soak.md").read_text()
    assert ("prompt 3 was never answered" in page) == bool(lost)
    assert ("Nothing failed" in page) != bool(lost)
    assert "| NATS killed | 2 | 1.5 s |\n| loop paused | 1 | - |" in page
    assert "| of these answered, each whole | 1,499 |" in page
    assert "| nats (pid 7) | 20 | 24.0 | 24.0 | +0.0 MiB |" in page
    assert "(soak.svg)" in page
    drawn = (tmp_path / "soak.svg").read_text()
    assert "</svg>" in drawn
    kept = json.loads((tmp_path / "soak.json").read_text())
    tell_soak(tmp_path / "soak.json", tmp_path)
    again = json.loads((tmp_path / "soak.json").read_text()), (tmp_path / "soak.md").read_text(), (tmp_path / "soak.svg").read_text()
    assert again == (kept, page, drawn), "all of it can be written anew from what was kept"
