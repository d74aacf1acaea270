"""Rules, the autoscaler and scrape configurations name metrics that exist, and each alert has its section."""

import re
from typing import Any

import pytest
import yaml

from router.telemetry.request_log import RequestEnd
from tests.deploy.manifests.exposed import series
from tests.deploy.manifests.started import ROOT

FOLDER = ROOT / "observability"
RUNBOOK = ROOT.parents[1] / "docs/runbook.md"


def read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


def alerts() -> list[dict[str, Any]]:
    return [rule for group in read("alerts.yaml")["groups"] for rule in group["rules"]]


def sections() -> dict[str, str]:
    """The runbook's sections by heading."""
    _, *parts = re.split(r"^### ", RUNBOOK.read_text(), flags=re.MULTILINE)
    return {part.splitlines()[0].strip(): part for part in parts}


def test_every_rule_is_promql_about_series_that_exist() -> None:
    promql_parser = pytest.importorskip("promql_parser", reason="promql-parser (extra dev) reads the rules")
    known = series()
    for alert in alerts():
        selectors: list[str] = []

        def note(part: Any, found: list[str] = selectors) -> None:
            if isinstance(part, promql_parser.VectorSelector):
                found.append(part.name)

        promql_parser.walk(promql_parser.parse(alert["expr"]), note)
        assert selectors, alert["alert"]
        assert set(selectors) <= known, alert["alert"]


def test_every_section_of_the_runbook_is_of_an_alert_and_says_what_to_do() -> None:
    assert sorted(sections()) == sorted(alert["alert"] for alert in alerts())
    for name, text in sections().items():
        assert "**Means:**" in text or "**Look and do:**" in text, name
        assert re.search(r"\*\*(Do|Look and do):\*\*", text), name


def test_every_alert_links_to_its_section() -> None:
    for alert in alerts():
        assert alert["annotations"]["runbook_url"] == f"docs/runbook.md#{alert['alert'].lower()}"
        assert set(alert) <= {"alert", "expr", "for", "labels", "annotations"}
        assert alert["labels"]["severity"] in {"critical", "warning", "info"}


def test_the_runbook_names_series_that_exist() -> None:
    named = set(re.findall(r"`(roost_(?:router|planner|tracker|migration|loop)_\w+)`", RUNBOOK.read_text()))
    known = series()
    assert named
    assert not {name for name in named if name not in known and f"{name}_bucket" not in known}


def test_outcomes_in_rules_are_outcomes_of_requests() -> None:
    text = (FOLDER / "alerts.yaml").read_text()
    named = re.findall(r"requests_total\{outcome[=!]~?\"([a-z_|]+)\"", text)
    assert named
    assert {one for group in named for one in group.split("|")} <= {end.value for end in RequestEnd}


def test_the_adapter_offers_series_that_exist() -> None:
    asked = {
        rule["seriesQuery"].partition("{")[0] for rule in read("prometheus-adapter.yaml")["rules"]["custom"]
    }
    assert asked <= series()


def test_the_rules_ask_for_jobs_that_are_scraped() -> None:
    jobs = {job["job_name"] for job in read("prometheus.yaml")["scrape_configs"]}
    text = (FOLDER / "alerts.yaml").read_text()
    assert set(re.findall(r'job="([^"]+)"', text)) <= jobs
    assert read("prometheus.yaml")["rule_files"] == ["alerts.yaml"]


def test_grafana_is_given_the_boards_folder_and_a_source() -> None:
    (provider,) = read("grafana/dashboards.yaml")["providers"]
    (source,) = read("grafana/datasource.yaml")["datasources"]
    assert provider["options"]["path"].startswith("/")
    assert source["type"] == "prometheus"
