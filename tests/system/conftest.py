"""One fleet per topology for all tests of this folder."""

import shutil
from collections.abc import Iterator

import pytest

from tests.system.fleets import Fleet, Home, leave_nothing, new_home


@pytest.fixture
def home() -> Iterator[Home]:
    home = new_home()
    yield home
    shutil.rmtree(home.state)


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    """One engine of two ranks. Requests wait long for it to restart: a busy machine takes its time."""
    waits = {f"ROOST_ROUTER_{what}_WAIT_SECONDS": "45.0" for what in ("NO_ENGINE", "QUEUE")}
    fleet = Fleet(new_home(**waits), "--ranks", "2")
    yield fleet
    leave_nothing(fleet)


@pytest.fixture(scope="session")
def pair() -> Iterator[Fleet]:
    """Two engines of two ranks each, with a short step time-out."""
    fleet = Fleet(
        new_home(ROOST_ENGINE_STEP_TIMEOUT_SECONDS="2.0", ROOST_ENGINE_KV_BLOCKS="256"),
        "--ranks",
        "2",
        "--engines",
        "2",
    )
    yield fleet
    leave_nothing(fleet)
