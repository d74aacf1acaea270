"""What the tracker knows outlives its process."""

import json
from typing import Any

import pytest

from tests.system.fleets import MODEL, Fleet, until


def popularity(fleet: Fleet) -> dict[str, Any] | None:
    """What the tracker answers; None while nobody does."""
    done = fleet.home.run("popularity", "--model", MODEL, "--json")
    return json.loads(done.stdout) if done.returncode == 0 else None


def learnt(fleet: Fleet) -> dict[str, Any] | None:
    found = popularity(fleet)
    return found if found and found["tokens"] > 0 else None


@pytest.mark.slow
def test_a_tracker_that_is_ended_and_started_again_goes_on_with_what_it_knew(fleet: Fleet) -> None:
    fleet.chat("Which experts does this need?")
    before, first = (
        until(lambda: learnt(fleet), "the tracker to hear of the request"),
        fleet.processes()["tracker"],
    )
    first.terminate()
    until(lambda: fleet.processes().get("tracker", first).pid != first.pid, "the tracker to be started again")
    after = until(lambda: popularity(fleet), "the tracker to answer again")
    assert after["tokens"] > 0.9 * before["tokens"]
    assert after["stored_blocks"] >= before["stored_blocks"]
