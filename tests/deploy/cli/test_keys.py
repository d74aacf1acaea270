"""`roost key new`: the secret is shown once, the keys file gets its hashed line."""

from pathlib import Path

import pytest

from router.access.api_keys import Caller, parse_keys
from tests.deploy.commands import roost

pytestmark = pytest.mark.usefixtures("elsewhere")
CLASSES = ("high", "normal", "low")


def callers(file: Path, *keys: str) -> list[Caller | None]:
    parsed = parse_keys(file.read_text(), CLASSES, "normal")
    return [parsed.caller(f"Bearer {key}") for key in keys]


def test_keys_are_added_to_a_file_that_only_its_user_can_read(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    first = roost("key", "new", "acme", "--file", str(file))
    second = roost("key", "new", "acme", "--class", "low", "--rights", "route,infer", "--file", str(file))
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert file.stat().st_mode & 0o777 == 0o600
    old, new = first.stdout.strip(), second.stdout.strip()
    assert old.startswith("rk_")
    assert old != new
    assert old not in file.read_text() + first.stderr
    assert callers(file, old, new) == [
        Caller("acme", "normal", frozenset({"infer"})),
        Caller("acme", "low", frozenset({"infer", "route"})),
    ]


def test_without_a_file_the_line_is_printed(tmp_path: Path) -> None:
    key, line = roost("key", "new", "acme", "--rights", "all").stdout.split("\n")[:2]
    (tmp_path / "keys").write_text(line)
    found = callers(tmp_path / "keys", key)[0]
    assert found is not None
    assert (found.tenant, "admin" in found.rights) == ("acme", True)


def test_the_configured_keys_file_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "roost.toml").write_text(f'[router]\napi_key_file = "{tmp_path / "configured"}"\n')
    key = roost("key", "new", "acme").stdout.strip()
    assert callers(tmp_path / "configured", key) == [Caller("acme", "normal", frozenset({"infer"}))]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("a b",), "TENANT must be"),
        (("acme", "--class", "urgent"), "none of [router] classes: high, normal, low"),
        (("acme", "--rights", "infer,fly"), "--rights: there is no right 'fly'"),
    ],
)
def test_what_makes_no_key_is_refused_by_name(arguments: tuple[str, ...], complaint: str) -> None:
    result = roost("key", "new", *arguments)
    assert result.exit_code == 2
    assert complaint in result.output


def test_a_file_with_a_key_in_clear_is_left_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("in-clear")
    result = roost("key", "new", "acme", "--file", str(file))
    assert result.exit_code == 1
    assert "line 1 holds a key in clear" in result.output
    assert file.read_text() == "in-clear"
