"""What `roost placement` prints of a placement."""

import json
from typing import Any

import numpy as np
import pytest

from bus.config import BusConfig
from deploy.client.placements import Placements
from deploy.views import placement as placement_view
from fleet.facts.engines import EngineJoined
from fleet.placement import FULL, Placement

TABLE = np.array([[0, 1, 2, 2, 3, 0], [0, 1, 2, 3, 2, 0]], np.int16)
JOINED = EngineJoined(
    engine="a",
    worker_id=7,
    model="m",
    node="n",
    urls=("http://x",),
    block_size=16,
    kv_blocks=8,
    max_context=512,
    max_batch_tokens=256,
)
EVEN = Placement(TABLE, experts=4, ranks=2)


def uneven() -> Placement:
    keep, spill, near = (part.copy() for part in EVEN.split)
    spill[0, [2, 3]] = FULL * 3 // 10, FULL - FULL * 3 // 10
    keep[0, [3, 4]] = FULL // 2
    near[1, 5] = FULL // 5
    return Placement(
        TABLE, experts=4, ranks=2, epoch=4, split=EVEN.split._replace(keep=keep, spill=spill, near=near)
    )


def shown(
    placement: Placement,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    layer: int | None = None,
    *,
    as_json: bool = False,
) -> str:
    def answer(config: BusConfig, ask: Any) -> dict[str, Placements]:
        return {"a": Placements(JOINED, None, placement)}

    monkeypatch.setattr(placement_view, "on_bus", answer)
    placement_view.show_placement(BusConfig(), layer, as_json=as_json)
    return capsys.readouterr().out


def test_an_even_split_is_not_spoken_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = shown(EVEN, monkeypatch, capsys)
    assert "1 0* 2*" in output
    assert "%" not in output
    assert json.loads(shown(EVEN, monkeypatch, capsys, as_json=True))["a"]["split"] is None


def test_a_replica_that_takes_another_share_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = shown(uneven(), monkeypatch, capsys)
    assert "1 0* 2*30%" in output
    assert "3 0* 2*70%,k50%" in output, "an expert with one replica goes there in any case"
    assert "3 0*n20% 2*" in output
    assert "the tokens that no rank keeps" in output
    split = json.loads(shown(uneven(), monkeypatch, capsys, 0, as_json=True))["a"]["split"]
    assert split["keep"] == {"0": [[FULL, FULL, FULL], [FULL // 2, FULL // 2, FULL]]}
