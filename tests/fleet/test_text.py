"""Text for people: users and passwords of URLs appear in no log line, error, printed configuration or span; and
quantities are as people read them."""

import logging
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus import BusError
from bus.config import BusConfig
from bus.nats import NatsBus
from bus.protocol.subjects import Subjects
from deploy.process import WithoutSecrets
from deploy.sections import read_settings
from engine_adapter.openai_backend import BackendAgentConfig
from fleet.redaction import without_secrets
from fleet.text import byte_size, counted, duration, listed, read_duration
from router.config import RouterConfig

SECRET = "s3cr3t"
words = st.text(
    st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="@/:,'\"#?[]"), min_size=1
)
secrets = st.text(
    st.characters(min_codepoint=33, max_codepoint=0x2FF, exclude_categories=("Zs", "Cc", "Zl", "Zp")),
    min_size=6,
).filter(lambda text: "://" not in text and not set(text) <= set("*@:/"))


@given(user=words, password=secrets, host=words, before=words, after=words)
def test_no_password_is_left_in_any_text_around_any_url(
    user: str, password: str, host: str, before: str, after: str
) -> None:
    shown = without_secrets(f"{before} nats://{user}:{password}@{host}:4222 {after}")
    assert shown == f"{before} nats://***@{host}:4222 {after}"


@given(st.lists(st.tuples(words, words), min_size=2, max_size=4))
def test_each_url_of_a_list_keeps_its_host(servers: list[tuple[str, str]]) -> None:
    text = ",".join(f"nats://me:{urllib.parse.quote(password, safe='')}@{host}" for host, password in servers)
    assert without_secrets(text) == ",".join(f"nats://***@{host}" for host, _ in servers)


@given(words, words)
def test_text_without_a_user_in_a_url_stays_as_it_is(one: str, other: str) -> None:
    for text in (f"nats://{one}:4222 mail me@{other}", f"me@{other}", one):
        assert without_secrets(text) == text


@pytest.mark.parametrize("url", [f"nats://roost:{SECRET}@127.0.0.1:1", f"nats://{SECRET}@127.0.0.1:1"])
async def test_a_server_that_is_not_there_is_named_without_the_password(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(BusError, match=r"nats://\*\*\*@127\.0\.0\.1:1") as caught:
        await NatsBus.connect(url, Subjects(), BusConfig(connect_seconds=0.2))
    assert SECRET not in f"{caught.value}{caplog.text}"


def test_the_printed_configuration_hides_passwords_and_the_file_for_children_has_them(tmp_path: Path) -> None:
    text = (
        f'[bus]\nurl = "nats://roost:{SECRET}@h:1"\nurls = ["nats://a:{SECRET}@h:1",'
        f' "nats://b:{SECRET}@i:1"]\n[up]\nnats = "nats://me:{SECRET}@h"\n'
    )
    (tmp_path / "roost.toml").write_text(text)
    settings = read_settings(None, {}, tmp_path)
    for printed in (settings.as_toml(), settings.as_toml(sources=False), settings.as_json()):
        assert SECRET not in printed
        assert "nats://***@i:1" in printed
    assert settings.as_toml(secrets=True).count(SECRET) == 4


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (RouterConfig, {"backends": (f"http://me:{SECRET}@h:1",)}),
        (RouterConfig, {"backends": (f"ftp://me:{SECRET}@h:1",)}),
        (BackendAgentConfig, {"url": f"http://me:{SECRET}@h:1"}),
        (BusConfig, {"url": f"me:{SECRET}@h:1"}),
        (BusConfig, {"urls": (f"me:{SECRET}@h:1",)}),
    ],
)
def test_a_url_that_is_refused_is_not_repeated_with_its_password(kind: type, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\*\*\*@h:1") as caught:
        kind(**fields)
    assert SECRET not in str(caught.value)


def test_log_lines_and_their_tracebacks_show_no_password_whoever_wrote_them() -> None:
    try:
        raise OSError(f"cannot reach nats://me:{SECRET}@h")  # noqa: TRY301
    except OSError as error:
        record = logging.LogRecord(
            "other.library",
            logging.ERROR,
            "x.py",
            1,
            "lost %s",
            (f"nats://me:{SECRET}@h",),
            (OSError, error, error.__traceback__),
        )
    shown = WithoutSecrets("%(message)s").format(record)
    assert "lost nats://***@h" in shown
    assert SECRET not in shown


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (2_500_000, "2.5 MB"), (12_345_678_901, "12.3 GB")],
)
def test_bytes_are_in_powers_of_a_thousand(count: int, text: str) -> None:
    assert byte_size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 us"), (4e-5, "40 us"), (-0.0012345, "-1.23 ms"), (0.5, "500 ms")]
)
def test_times_of_steps_are_in_milliseconds_or_microseconds(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_noun_follows_its_number() -> None:
    assert [counted(1, "copy", "copies"), counted(1200, "rank")] == ["1 copy", "1,200 ranks"]


def test_a_long_list_is_cut_and_says_how_much_is_missing() -> None:
    assert [listed(range(3)), listed(range(9), 8), listed([])] == [
        "0, 1, 2",
        "0, 1, 2, 3, 4, 5, 6, 7 and 1 more",
        "",
    ]


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("1.5s", 1.5), ("15m", 900.0), ("2h", 7200.0), ("1d", 86400.0)]
)
def test_a_duration_has_a_number_and_a_unit(text: str, seconds: float) -> None:
    assert read_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1s", "1w", "1 h", "1e3", "\u0661s", "1" * 10])
def test_another_text_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="use a number and s, m, h or d"):
        read_duration(text)
