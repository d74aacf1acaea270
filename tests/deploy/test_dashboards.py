"""Dashboards ask for series that exist."""

import json
import re
from pathlib import Path

import deploy
from router.metrics import RouterMetrics

DASHBOARDS = Path(deploy.__file__).parent / "dashboards"


def test_every_metric_of_the_routers_dashboard_is_one_of_the_router() -> None:
    board = json.loads((DASHBOARDS / "router.json").read_text(encoding="utf-8"))
    families = {line.split()[2] for line in RouterMetrics().exposition().decode().splitlines() if line.startswith("# TYPE")}
    asked = {name for panel in board["panels"] for target in panel.get("targets", ()) for name in re.findall(r"roost_\w+", target["expr"])}
    assert len(asked) > 20
    missing = {name for name in asked if name not in families and re.sub(r"_(bucket|sum|count)$", "", name) not in families}
    assert not missing
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
