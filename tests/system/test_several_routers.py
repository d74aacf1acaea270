"""Two router processes on one port: one for clients, two for operators."""

import json
import signal
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.system.fleets import Fleet, leave_nothing, new_home, until


@pytest.fixture(scope="module")
def twins() -> Iterator[Fleet]:
    fleet = Fleet(new_home(), "--engine", "simulated", "--ranks", "1", "--processes", "2")
    yield fleet
    leave_nothing(fleet)


def request_counts(fleet: Fleet, url: str) -> dict[str, float]:
    """Requests that one process has answered, by outcome."""
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    lines = [
        line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("roost_router_requests_total")
    ]
    return {name.split('outcome="')[1].split('"')[0]: float(value) for name, value in lines}


@pytest.mark.slow
def test_connections_spread_and_every_process_knows_every_decision(twins: Fleet) -> None:
    assert len(twins.routers) == 2
    assert json.loads(twins.home.output("status", "--json"))["routers"] == twins.routers
    decisions = []
    for number in range(20):
        with httpx.Client(
            base_url=twins.router, timeout=60, trust_env=False
        ) as client:  # a connection of its own
            answer = client.post(
                "/v1/chat/completions", json=twins.body(f"Number {number}?", max_tokens=1, model="demo")
            )
            assert answer.status_code == 200, answer.text
            decisions.append(answer.headers["x-roost-decision-id"])
    assert all(request_counts(twins, url).get("answered", 0) >= 1 for url in twins.routers)
    assert len({decision[:4] for decision in decisions}) == 2
    for url in twins.routers:
        for decision in decisions[:8]:
            assert httpx.get(f"{url}/v1/decisions/{decision}", trust_env=False).json()["id"] == decision


@pytest.mark.slow
def test_one_process_dies_and_it_alone_is_started_again(twins: Fleet) -> None:
    before = twins.processes()
    before["router-0"].send_signal(signal.SIGKILL)
    psutil.wait_procs([before["router-0"]], timeout=10)
    for number in range(12):
        with httpx.Client(base_url=twins.router, timeout=60, trust_env=False) as client:
            assert (
                client.post(
                    "/v1/chat/completions",
                    json=twins.body(f"Still there, {number}?", max_tokens=1, model="demo"),
                ).status_code
                == 200
            )
    until(lambda: "router-0" in twins.processes(), "the process to be there again", 20)
    until(
        lambda: httpx.get(f"{twins.routers[0]}/ready", trust_env=False).status_code == 200,
        "it to be ready",
        20,
    )
    after = twins.processes()
    assert after["router-0"].pid != before["router-0"].pid
    assert after["router-1"].pid == before["router-1"].pid
