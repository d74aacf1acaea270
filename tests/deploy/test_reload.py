"""Settings read again: what may differ, and what is said of what may not."""

from pathlib import Path

import pytest

from deploy.configuration_loader import ConfigError, Configuration
from deploy.reload import check, planner_settings, router_settings
from deploy.sections import read_settings


@pytest.fixture
def read(tmp_path: Path) -> "Settings":
    return Settings(tmp_path / "roost.toml")


class Settings:
    """A roost.toml that is written and read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __call__(self, text: str) -> Configuration:
        self.file.write_text(text)
        return self.again()

    def again(self) -> Configuration:
        return read_settings(self.file, {}, self.file.parent).with_flags({("router", "port"): ("--port", 0)})


def test_flags_stay_and_reloadable_settings_may_differ(read: Settings) -> None:
    old = read("[router]\nqueue_weight = 1.0\nport = 8600\n")
    settings = router_settings(old, read.again)
    new = read("[router]\nqueue_weight = 2.0\nport = 9000\n")
    check(old, new)
    assert (settings().queue_weight, settings().port) == (2.0, 0)


def test_router_and_planner_each_take_their_own_settings_of_one_file(read: Settings) -> None:
    old = read("")
    router, planner = router_settings(old, read.again), planner_settings(old, read.again)
    new = read('[router]\nqueue_weight = 2.0\n[planner]\npolicy = "eplb"\nbudget_bytes = 7\n')
    check(old, new)
    assert (router().queue_weight, planner().policy, planner().budget_bytes) == (2.0, "eplb", 7)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[router]\nhost = "::1"\n', "these settings need a restart: host"),
        ("[tracker]\nclusters = 8\n", "these settings need a restart: tracker.clusters"),
        ("[router]\nqueue_weight = -1.0\n", "router.queue_weight must be a number of at least 0, not -1.0"),
        ("[up]\nengines = 3\n", "these settings need a restart: up.engines"),
        (
            "[planner]\nlease_seconds = 7.0\n",
            "these settings need a restart: lease_seconds (now 3.0, asked for 7.0)",
        ),
        ("[planner]\ncycle_seconds = 0.0\n", "planner.cycle_seconds must be a number above 0, not 0.0"),
    ],
)
def test_a_fleet_refuses_what_needs_a_restart_and_what_cannot_be(
    read: Settings, text: str, says: str
) -> None:
    old = read("")
    with pytest.raises(ConfigError) as refusal:
        check(old, read(text))
    assert says in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[router]\nquue_weight = 1.0\n", "no key 'quue_weight' in [router]; did you mean queue_weight?"),
        ("[router]\nqueue_weight = -1.0\n", "router.queue_weight must be a number of at least 0, not -1.0"),
        ('[bus]\nurl = "nats://elsewhere"\n', "these settings need a restart: bus.url"),
        ("[router\n", "roost.toml"),
    ],
)
def test_a_router_hears_in_words_why_settings_cannot_be_used(read: Settings, text: str, says: str) -> None:
    settings = router_settings(read(""), read.again)
    read.file.write_text(text)
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 its text is checked
        settings()
    assert says in str(refusal.value)
