"""Dashboards ask for series that exist."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import deploy
from migration.telemetry.metrics import MigrationMetrics
from router.telemetry.metrics import RouterMetrics
from tracker.metrics import TrackerMetrics

DASHBOARDS = Path(deploy.__file__).parent / "dashboards"


def families(*parts: RouterMetrics | MigrationMetrics | TrackerMetrics) -> set[str]:
    return {
        line.split()[2]
        for part in parts
        for line in part.exposition().decode().splitlines()
        if line.startswith("# TYPE")
    }


def board(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DASHBOARDS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def targets(name: str) -> Iterator[dict[str, str]]:
    return (target for panel in board(name)["panels"] for target in panel.get("targets", ()))


def asked(name: str) -> set[str]:
    return {found for target in targets(name) for found in re.findall(r"roost_\w+", target["expr"])}


@pytest.mark.parametrize(
    ("name", "parts"),
    [("router", (RouterMetrics(),)), ("loop", (MigrationMetrics(), TrackerMetrics(), RouterMetrics()))],
)
def test_every_metric_of_a_dashboard_exists(name: str, parts: tuple[Any, ...]) -> None:
    known, wanted = families(*parts), asked(name)
    assert len(wanted) > 20
    assert not {
        found
        for found in wanted
        if found not in known and re.sub(r"_(bucket|sum|count)$", "", found) not in known
    }
    panels = board(name)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


def test_what_the_loop_is_told_by_is_on_its_dashboard() -> None:
    loop = {
        found
        for found in families(MigrationMetrics())
        if found.startswith("roost_loop_") and not found.endswith("_created")
    }
    assert loop <= asked("loop")


def test_labels_in_legends_are_labels_of_the_series() -> None:
    for name in ("router", "loop"):
        for target in targets(name):
            grouped = re.search(r"by \(([^)]*)\)", target["expr"])
            named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            if grouped is not None:
                assert named <= {label.strip() for label in grouped[1].split(",")}, target
