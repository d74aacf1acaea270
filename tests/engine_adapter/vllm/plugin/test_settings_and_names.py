"""Settings from the environment, and the check of vLLM's private names."""

from pathlib import Path

import pytest
import roost_vllm
from roost_vllm.names import Name, missing_names
from roost_vllm.settings import from_environment


@pytest.fixture
def secret(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.write_bytes(b"  abc\n")
    return str(path)


def test_without_an_agent_there_are_no_settings() -> None:
    assert from_environment({"ROOST_SECRET_FILE": "/nowhere"}) is None


def test_without_an_agent_the_plugin_returns_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROOST_AGENT", raising=False)
    roost_vllm.register()  # would fail here: there is no vLLM


def test_address_and_secret_are_read(secret: str) -> None:
    settings = from_environment({"ROOST_AGENT": "[::1]:7200", "ROOST_SECRET_FILE": secret})
    assert settings is not None
    assert (settings.host, settings.port, settings.secret) == ("::1", 7200, b"abc")
    assert not settings.fallback
    assert not settings.asynchronous


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ROOST_AGENT", "7200", "HOST:PORT"),
        ("ROOST_AGENT", "host:99999", "HOST:PORT"),
        ("ROOST_SECRET_FILE", "", "ROOST_SECRET_FILE is not"),
        ("ROOST_SECRET_FILE", "/nowhere/at/all", "cannot be read"),
        ("ROOST_FALLBACK", "yes", "'vllm' or unset"),
        ("ROOST_ASYNC", "1", "'experimental' or unset"),
        ("ROOST_PATIENCE_SECONDS", "ten", "ROOST_PATIENCE_SECONDS is 'ten'; give a number of seconds"),
        ("ROOST_PATIENCE_SECONDS", "-1", "'-1'; give a number of seconds"),
        ("ROOST_PATIENCE_SECONDS", "nan", "'nan'; give a number of seconds"),
    ],
)
def test_a_wrong_value_is_named_with_the_remedy(secret: str, name: str, value: str, words: str) -> None:
    environment = {"ROOST_AGENT": "localhost:7200", "ROOST_SECRET_FILE": secret, name: value}
    with pytest.raises(ValueError, match=words):
        from_environment(environment)


def test_a_wrong_value_does_not_end_vllm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ROOST_AGENT", "localhost:7200")
    monkeypatch.setenv("ROOST_SECRET_FILE", "/nowhere/at/all")
    roost_vllm.register()
    assert "'/nowhere/at/all' cannot be read" in caplog.text


def test_options_are_taken(secret: str) -> None:
    settings = from_environment(
        {
            "ROOST_AGENT": "localhost:7200",
            "ROOST_SECRET_FILE": secret,
            "ROOST_FALLBACK": "vllm",
            "ROOST_ASYNC": "experimental",
            "ROOST_PATIENCE_SECONDS": "5",
        }
    )
    assert settings is not None
    assert (settings.fallback, settings.asynchronous, settings.patience) == (True, True, 5.0)


class Box:
    """A class that sets its attributes in its code."""

    def __init__(self) -> None:
        self.colour = "red"


def test_attributes_are_found_in_the_code_that_sets_them() -> None:
    boxes = Name(__name__, "Box.__init__", ("colour", "weight"))
    assert missing_names((boxes,)) == (f"{__name__}.Box.__init__(weight)",)


def test_names_that_lack_are_told_with_the_parameter() -> None:
    found = Name("pathlib", "Path.open", ("mode",))
    assert missing_names((found,)) == ()
    lacking = (Name("pathlib", "Path.open", ("colour",)), Name("pathlib", "Gone.away"), Name("gone", "x"))
    assert missing_names(lacking) == ("pathlib.Path.open(colour)", "pathlib.Gone.away", "gone.x")
