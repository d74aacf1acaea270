"""Keys file: the caller that each valid line makes, and the error of each invalid line."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.completions import ApiError
from router.access.api_keys import (
    ALL_RIGHTS,
    DEFAULT_RIGHTS,
    RIGHTS,
    TRUSTED,
    Caller,
    ClientKeys,
    key_line,
    parse_keys,
)

CLASSES = ("high", "normal", "low")
HEX = hashlib.sha256(b"a key").hexdigest()


def parsed(text: str) -> ClientKeys:
    return parse_keys(text, CLASSES, "normal")


@pytest.mark.parametrize(
    ("words", "caller"),
    [
        ("acme", Caller("acme", "normal", frozenset({"infer"}))),
        ("acme low", Caller("acme", "low", frozenset({"infer"}))),
        ("acme infer,route", Caller("acme", "normal", frozenset({"infer", "route"}))),
        ("acme high metrics", Caller("acme", "high", frozenset({"metrics"}))),
        ("org:acme@eu-1 all", Caller("org:acme@eu-1", "normal", ALL_RIGHTS)),
    ],
)
def test_a_line_names_tenant_class_and_rights(words: str, caller: Caller) -> None:
    assert parsed(f"# keys\n\n  sha256:{HEX.upper()}  {words}\n").caller("Bearer a key") == caller


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("# nothing\n", r"no API key is given"),
        ("sha256:12ab acme", r"line 1: after sha256: come the 64 hexadecimal digits"),
        (f"\nsha256:{HEX}", r"line 2 must be: sha256:HEX tenant"),
        (f"sha256:{HEX} acme high infer more", r"line 1 must be"),
        (f"sha256:{HEX} ac/me", r"line 1: a tenant's name is .*'ac/me'"),
        (
            f"sha256:{HEX} acme urgent",
            r"line 1: 'urgent' is neither a class \(high, normal, low\) nor rights \(infer",
        ),
        (f"sha256:{HEX} acme high fly", r"line 1: there is no right 'fly'"),
        (f"sha256:{HEX} acme\n# and\nsha256:{HEX.upper()} other", r"lines 1 and 3 are the same key"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parsed(text)


def test_a_key_in_clear_is_refused_with_the_line_to_put_instead() -> None:
    with pytest.raises(ValueError, match="line 2 holds a key in clear") as refused:
        parsed(f"sha256:{HEX} acme\nsecret-two\n")
    assert "secret-two" not in str(refused.value)
    instead = str(refused.value).partition(": ")[2]
    assert parsed(instead).caller("Bearer secret-two") == Caller(
        "default", "normal", frozenset({"infer", "route"})
    )


@given(st.text(min_size=1).filter(lambda text: text.strip() == text and text.isprintable()), st.text())
def test_only_the_right_key_is_admitted(key: str, other: str) -> None:
    keys = parsed(key_line(key, "acme", None, DEFAULT_RIGHTS))
    acme = Caller("acme", "normal", DEFAULT_RIGHTS)
    assert keys.caller(f"Bearer {key}") == keys.caller(f"bearer {key}") == acme
    assert keys.caller(f"Bearer {other}") == (acme if other.strip() == key else None)
    assert keys.caller(None) is None
    assert keys.caller(key) is None


@given(st.sampled_from([None, *CLASSES]), st.sets(st.sampled_from(sorted(RIGHTS)), min_size=1))
def test_what_is_written_is_read_back(priority_class: str | None, rights: set[str]) -> None:
    line = key_line("k", "acme", priority_class, frozenset(rights))
    assert "k " not in line.replace("acme", "").partition(" ")[2]
    assert parsed(line).caller("Bearer k") == Caller("acme", priority_class or "normal", frozenset(rights))


def test_two_keys_of_one_tenant_are_valid_together() -> None:
    keys = parsed("\n".join(key_line(key, "acme", None, DEFAULT_RIGHTS) for key in ("old", "new")))
    assert keys.caller("Bearer old") == keys.caller("Bearer new") is not None


def test_a_gateway_speaks_for_the_tenant_it_names_and_then_for_no_other() -> None:
    gateway = Caller("gateway", None, ALL_RIGHTS)
    spoken = gateway.speaking_for("acme")
    assert spoken == Caller("acme", None, ALL_RIGHTS - {"any_tenant"})
    assert spoken.speaking_for("other") == spoken
    with pytest.raises(ApiError, match="tenant header must be") as refused:
        gateway.speaking_for("a b")
    assert refused.value.status == 400
    assert TRUSTED.speaking_for("acme") == TRUSTED  # without keys the header names no authenticated tenant


def test_keys_do_not_show_in_their_text_form() -> None:
    keys = parsed(f"sha256:{HEX} acme")
    assert HEX not in repr(keys)
    assert keys.caller("Bearer a key") is not None
