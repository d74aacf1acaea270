"""Salts: unambiguous, equal in all routers, and passed on to servers correctly."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.completions import ApiError
from fleet.facts.engines import Capabilities
from fleet.shared_secret import SharedSecret
from router.access.tenancy import MAX_SALT, cache_salt, framed, with_salt
from router.credentials import RouterCredentials
from tests.router.router_fixture import House, MockRank, Serve, chat

names = st.text(min_size=1, max_size=8)


@given(st.lists(st.text(max_size=4), max_size=4), st.lists(st.text(max_size=4), max_size=4))
def test_two_lists_of_fields_are_never_framed_alike(one: list[str], other: list[str]) -> None:
    assert (framed(one) == framed(other)) == (one == other)


@given(names, st.none() | names, names, st.none() | names)
def test_two_tenants_or_two_salts_of_one_never_share_a_salt(
    tenant: str, own: str | None, other: str, others: str | None
) -> None:
    same = (tenant, own) == (other, others)
    assert (cache_salt(b"key", tenant, own) == cache_salt(b"key", other, others)) == same


@given(names, st.none() | names)
def test_a_salt_is_unknown_to_those_without_the_fleets_key(tenant: str, own: str | None) -> None:
    assert cache_salt(b"one", tenant, own) != cache_salt(b"other", tenant, own)
    assert len(cache_salt(b"one", tenant, own)) == 64


def test_without_client_keys_only_the_clients_own_salt_counts() -> None:
    assert cache_salt(b"key", "", None) == ""
    assert cache_salt(b"key", "", "mine") == "mine"


@pytest.mark.parametrize("own", ["", "s" * (MAX_SALT + 1)])
def test_a_salt_that_is_empty_or_too_long_is_refused_by_name(own: str) -> None:
    with pytest.raises(ApiError, match="cache_salt must have 1 to") as refused:
        cache_salt(b"key", "tenant", own)
    assert (refused.value.status, refused.value.param) == (400, "cache_salt")


@given(
    st.dictionaries(
        st.text(max_size=5), st.none() | st.integers() | st.text() | st.lists(st.floats(-1e6, 1e6))
    ),
    names,
)
def test_a_body_says_the_salt_in_place_of_its_own_and_all_else_as_before(
    body: dict[str, object], salt: str
) -> None:
    assert json.loads(with_salt(msgspec.json.encode(body), salt)) == {**body, "cache_salt": salt}


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b' {"a": [1.50]} \n',
        b'{"cache_salt": "x"}',
        b'{"cache\\u005fsalt": "x"}',
        b'{"cache_salt": 1, "cache\\u005fsalt": 2}',
    ],
)
def test_no_way_to_write_the_field_keeps_a_clients_own_salt(body: bytes) -> None:
    assert json.loads(with_salt(body, "salt"))["cache_salt"] == "salt"


@pytest.mark.parametrize("body", [b"[]", b'"cache_salt"', b'{"cache_salt"', b"\xff cache_salt"])
def test_a_body_that_can_say_no_salt_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError, match="must be a JSON object"):
        with_salt(body, "salt")


def test_routers_of_one_fleet_make_one_salt_and_those_of_another_make_others() -> None:
    one, same, other = (RouterCredentials(None, None, SharedSecret(secret * 16)) for secret in "aab")
    assert one.cache_salt("acme", None) == same.cache_salt("acme", None) != other.cache_salt("acme", None)
    rotating = RouterCredentials(None, None, SharedSecret("a" * 16, "b" * 16))
    assert rotating.cache_salt("acme", None) == one.cache_salt("acme", None)


@pytest.mark.parametrize("isolates", [True, False])
async def test_a_salt_goes_to_ranks_that_take_it_and_a_decision_says_whose_cache_it_may_use(
    house: House, serve_rank: Serve, byte_archive: bytes, isolates: bool
) -> None:
    rank = await serve_rank(MockRank(byte_archive))
    await house.join(
        "alone",
        [rank.url],
        byte_archive,
        capabilities=Capabilities(kv_events=False, isolates_tenants=isolates),
    )
    caches = []
    for more in ({}, {"cache_salt": "mine"}):
        answer = await house.post("/v1/chat/completions", chat(**more))
        assert answer.status == 200
        caches.append(
            (await house.get(f"/v1/decisions/{answer.headers['x-roost-decision-id']}")).json["cache"]
        )
    assert [request.cache_salt for request in rank.requests] == [None, "mine" if isolates else None]
    assert caches == ["common", "tenant" if isolates else "shared"]


async def test_a_guess_of_what_a_rank_has_cached_is_made_under_the_salt(
    house: House, serve_rank: Serve, byte_archive: bytes
) -> None:
    rank = await serve_rank(MockRank(byte_archive))
    await house.join(
        "alone", [rank.url], byte_archive, capabilities=Capabilities(kv_events=False, isolates_tenants=True)
    )
    await house.post("/v1/chat/completions", chat("a prompt of some blocks", cache_salt="mine"))
    bodies = [
        chat("a prompt of some blocks", **more)
        for more in ({"cache_salt": "mine"}, {"cache_salt": "other"}, {})
    ]
    overlaps = [
        (await house.post("/v1/route", body)).json["candidates"][0]["overlap_blocks"] for body in bodies
    ]
    assert overlaps[0] > 5
    assert overlaps[1:] == [0, 0]
