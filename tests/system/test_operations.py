"""What an operator does to a fleet that runs: draining, and new settings without a restart."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.system.fleets import Fleet, Home, leave_nothing, until

pytestmark = pytest.mark.slow
ASK: dict[str, Any] = {
    "model": "demo",
    "seed": 5,
    "max_tokens": 200,
    "messages": [{"role": "user", "content": "Tell me about the river."}],
}


@pytest.fixture
def fleet(home: Home) -> Iterator[Fleet]:
    """Two simulated engines of two ranks before two router processes."""
    (home.state / "roost.toml").write_text("[router]\nqueue_weight = 1.0\n")
    fleet = Fleet(home, "--engine", "simulated", "--engines", "2", "--ranks", "2", "--processes", "2")
    yield fleet
    fleet.http.close()
    leave_nothing(fleet)
    home.state.mkdir()


def routers(fleet: Fleet) -> list[str]:
    urls: list[str] = json.loads(next((fleet.home.state / "roost").glob("run-*/running.json")).read_text())[
        "routers"
    ]
    return urls


def decided(url: str) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/route", json=ASK, trust_env=False)
    assert answer.status_code == 200, answer.text
    record: dict[str, Any] = answer.json()
    return record


def test_a_drained_engine_gets_nothing_new_from_any_router_and_finishes_what_it_has(fleet: Fleet) -> None:
    with fleet.http.stream(
        "POST", "/v1/chat/completions", json=ASK | {"stream": True, "max_tokens": 60}
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        engine = fleet.decision(stream.headers["x-roost-decision-id"])["chosen"].split("/")[0]
        outcomes = fleet.home.output("drain", engine, "--reason", "new fan")
        assert f"{engine} takes no new requests; undo it with: roost drain {engine} --undo" in outcomes
        for url in routers(fleet):
            until(lambda url=url: len(decided(url)["excluded"]) == 2, "every router to have heard of it", 5)
            assert {(out["engine"], out["reason"]) for out in decided(url)["excluded"]} == {
                (engine, "draining: new fan")
            }
        assert list(lines)[-2] == "data: [DONE]"
    idle = fleet.home.run("drain", engine, "--wait", "20", "--reason", "new fan", "--json")
    assert (idle.returncode, json.loads(idle.stdout)["idle"]) == (0, True)
    assert f"{engine}: idle" in idle.stderr
    assert fleet.status()[engine]["ranks"][0]["draining"] == "new fan"
    assert "alive, draining: new fan" in fleet.home.output("status")
    assert f"{engine} takes new requests again" in fleet.home.output("drain", engine, "--undo")
    for url in routers(fleet):
        until(lambda url=url: not decided(url)["excluded"], "every router to have heard that, too", 5)


def test_settings_are_read_again_by_every_router_or_refused_and_both_can_be_read_back(fleet: Fleet) -> None:
    file = fleet.home.state / "roost.toml"
    pids = {name: process.pid for name, process in fleet.processes().items()}
    file.write_text('[router]\nqueue_weight = 2.5\npolicy = "kv"\n')
    assert sorted(fleet.home.output("reload").splitlines()) == sorted(
        [
            *(2 * ['router: policy = "kv"  (was "cost")', "router: queue_weight = 2.5  (was 1.0)"]),
            "planner: nothing differs",
        ],
    )
    for url in routers(fleet):
        assert (decided(url)["policy"], decided(url)["weights"]["queue"]) == ("kv", 2.5)
    assert 'policy = "kv"' in fleet.home.output("config", "--running")
    file.write_text("[router]\nqueue_weight = 3.5\n[tracker]\nclusters = 8\n")
    refused = fleet.home.run("reload")
    assert refused.returncode == 1
    assert "these settings need a restart: tracker.clusters" in refused.stderr
    for url in routers(fleet):
        assert decided(url)["weights"]["queue"] == 2.5
    events = [
        json.loads(line)["message"]
        for line in fleet.home.output(
            "events", "--kind", "config", "--since", "1h", "--no-follow", "--json"
        ).splitlines()
    ]
    assert sorted((event["part"], bool(event["changed"]), event["refused"] is None) for event in events) == [
        ("planner", False, True),
        ("router", True, True),
        ("router", True, True),
        ("up", False, False),
    ]
    assert {name: process.pid for name, process in fleet.processes().items()} == pids
