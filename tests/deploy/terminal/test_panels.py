"""What heat maps show: who holds what and how that changed, who wants what and how much of it is near."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from bus.config import BusConfig
from bus.memory import MemoryBus
from bus.protocol.subjects import Subjects
from deploy.client.placements import placements
from deploy.terminal.drawing import drawer
from deploy.terminal.panels import MAX_LAYERS, Panel, Rows, demand_panels, placement_panels, shown_layers
from deploy.views import placement as placement_view
from deploy.views import popularity
from fleet.facts.engines import EngineJoined
from fleet.facts.placements import PlacementCommitted
from fleet.layout import DP_ATTENTION
from fleet.placement import Placement, linear, with_rows
from tests.deploy.commands import roost

SUBJECTS = Subjects()
FIRST = Placement(np.array([[0, 1, -1, 2, 3, -1]] * 2), experts=4, ranks=2)
NOW = Placement(np.array([[0, 1, 2, 2, 3, -1], [3, 1, -1, 2, 0, -1]]), experts=4, ranks=2, epoch=5)
NODE = np.zeros(2, np.intp)


def joined(name: str = "engine-0", worker_id: int = 7, nodes: tuple[str, ...] = ()) -> EngineJoined:
    return EngineJoined(
        engine=name,
        worker_id=worker_id,
        model="m",
        node="n",
        nodes=nodes,
        urls=("http://x", "http://y"),
        block_size=16,
        kv_blocks=8,
        max_context=512,
        max_batch_tokens=256,
        placement=FIRST.record(),
    )


def test_a_placement_is_shown_by_replicas_and_by_rank_in_one_scale() -> None:
    (replicas,), (first,), (second,) = placement_panels(NOW, None)
    assert replicas.values.tolist() == [[1, 1, 2, 1], [1, 1, 1, 1]]
    assert first.values.tolist() == [
        [1, 1, 2, 0],
        [0, 0, 2, 1],
    ], "a replicated expert is marked with how many there are"
    assert second.values.tolist() == [[0, 1, 0, 1], [1, 0, 1, 0]]
    assert {panel.maximum for panel in (replicas, first, second)} == {2.0}
    assert (replicas.down, first.down) == ("layer", "rank")


def test_what_came_and_went_stands_beside_before_and_now() -> None:
    replicas, first, second = placement_panels(NOW, FIRST)
    assert replicas[2].values.tolist() == [[0, 0, 1, 0], [0, 0, 0, 0]]
    assert first[2].values.tolist() == [[0, 0, 1, 0], [0, 0, 0, 0]]
    assert second[2].values.tolist() == [[-1, 0, 0, 1], [1, 0, 0, -1]]
    assert [panel.scale for panel in second] == ["holding", "holding", "signed"]
    assert "epoch 5" in second[1].title
    (only,) = placement_panels(NOW, FIRST, layer=1)
    assert only[2].values.tolist() == second[2].values.tolist()


def test_a_sharded_layer_is_shown_as_such_and_has_no_local_share() -> None:
    sharded = with_rows(NOW, {1: None}, epoch=6)
    replicas, (_, whole, _), (before, after, went) = placement_panels(sharded, NOW)
    assert replicas[1].values.tolist() == [[1, 1, 2, 1], [0, 0, 0, 0]]
    assert [
        panel.title.endswith("sharded: every rank holds a part of each") for panel in (whole, before)
    ] == [
        False,
        False,
    ]
    assert after.title == "layer 1: now, epoch 6, sharded: every rank holds a part of each"
    assert not after.values.any()
    assert (went.values <= 0).all()
    (first,), (second,) = demand_panels(np.ones((2, 2, 4)), [("now", sharded)], NODE)
    assert "% local" in first.title
    assert second.title == "layer 1: now, sharded: every rank holds a part of each"
    assert second.marks is not None
    assert not second.marks.any()


def test_placements_of_different_shapes_are_not_compared() -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        placement_panels(NOW, linear(layers=2, experts=8, ranks=2))


def test_of_many_layers_some_are_drawn_rank_by_rank_the_first_and_the_last_among_them() -> None:
    assert shown_layers(3) == [0, 1, 2]
    many = shown_layers(58)
    assert (len(many), many[0], many[-1]) == (MAX_LAYERS, 0, 57)


def test_demand_is_shown_with_what_ranks_hold_and_what_of_it_is_near() -> None:
    demand = np.zeros((2, 2, 4))
    demand[0, :, 3], demand[1, :, 0], demand[1, :, 1] = 10.0, 5.0, 5.0
    first, second = demand_panels(demand, [("at the start", FIRST), ("now", NOW)], NODE)
    assert first[0].values.tolist() == [
        [0, 0, 0, 4],
        [2, 2, 0, 0],
    ], "times the even share of the rank's own demand"
    assert [panel.title.split(", ")[1] for panel in second] == ["0% local", "75% local"]
    assert second[1].marks is not None
    assert second[1].marks.tolist() == [[False, True, False, True], [True, False, True, False]]
    (alone,), _ = demand_panels(demand, [], NODE)
    assert alone.marks is None


async def test_the_first_placement_of_this_life_is_known_beside_the_last() -> None:
    bus = MemoryBus()
    await bus.record(SUBJECTS.membership("engine-0"), joined(nodes=("a", "b")))
    found = (await placements(bus, SUBJECTS))["engine-0"]
    assert found.first == found.now == FIRST
    for worker_id, placement in ((7, NOW), (6, FIRST)):
        await bus.record(
            SUBJECTS.placements("engine-0"),
            PlacementCommitted(
                engine="engine-0", worker_id=worker_id, attention=DP_ATTENTION, placement=placement.record()
            ),
        )
        found = (await placements(bus, SUBJECTS))["engine-0"]
    assert found.first == FIRST
    assert found.now == FIRST, "the log's last word is of another life"
    assert found.node.tolist() == [0, 1]
    await bus.close()


def test_each_engine_has_a_picture_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn: dict[str, Rows] = {}
    monkeypatch.setattr(
        placement_view, "drawer", lambda: lambda path, rows, title: drawn.update({path.name: rows})
    )
    monkeypatch.setattr(
        placement_view,
        "on_bus",
        lambda config, ask: {
            name: placement_view.Placements(joined(name), FIRST, NOW) for name in ("a", "b")
        },
    )
    placement_view.show_placement(BusConfig(), None, tmp_path / "out.png", before=True, as_json=False)
    assert drawn.keys() == {"out-a.png", "out-b.png"}
    assert {len(row) for row in drawn["out-a.png"]} == {3}
    assert "out-b.png" in capsys.readouterr().err
    monkeypatch.setattr(
        placement_view, "on_bus", lambda config, ask: {"c": placement_view.Placements(joined("c"), None, NOW)}
    )
    placement_view.show_placement(BusConfig(), 1, tmp_path / "out.svg", before=True, as_json=True)
    assert [len(row) for row in drawn["out.svg"]] == [1]
    assert "did not say with which placement it began" in capsys.readouterr().err


def test_a_picture_is_drawn_or_it_is_said_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: Rows = [
        (
            Panel("marked", np.ones((2, 4)), down="rank", marks=np.eye(2, 4) > 0),
            Panel("signed", np.zeros((2, 4)), "signed"),
        )
    ]
    drawer()(tmp_path / "out.png", rows, "a title")
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(typer.Exit):
        drawer()(tmp_path / "no" / "out.png", rows, "a title")
    assert "cannot draw" in capsys.readouterr().err


def test_demand_by_rank_is_drawn_for_engines_of_the_model_that_want_something() -> None:
    relative = np.ones((2, 4))
    found: dict[str, Any] = {name: popularity.Placements(joined(name), FIRST, NOW) for name in ("a", "b")}
    pictures = popularity.rank_panels(
        "m", {("a", 1): relative, ("b", 0): np.ones((3, 4)), ("a", 9): relative, ("gone", 0): relative}, found
    )
    assert list(pictures) == ["a"], "what b says is of another shape"
    title, rows = pictures["a"]
    assert [len(row) for row in rows] == [2, 2], "at the start, and now"
    assert title.startswith("a: ")
    assert popularity.rank_panels("other", {("a", 1): relative}, found) == {}


def test_before_needs_a_picture() -> None:
    result = roost("placement", "--before")
    assert result.exit_code == 2
    assert "--before needs --plot FILE" in result.stderr
