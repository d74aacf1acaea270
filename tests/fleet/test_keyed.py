"""Stored keys are found, single and many at once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fleet.keyed import KeySets

U64 = st.integers(1, (1 << 64) - 1)


@given(
    st.lists(U64, unique=True, max_size=60), st.lists(U64, max_size=20), st.integers(1, 40), st.integers(1, 8)
)
def test_a_key_lies_in_one_of_its_places_and_is_found_there_and_no_other_is(
    put: list[int], others: list[int], sets: int, ways: int
) -> None:
    index, lies = KeySets(sets, ways), dict[int, int]()
    for key in put:
        (places,) = index.places(np.array([key], np.uint64))
        assert places.tolist() == list(range(places[0], places[0] + ways))
        free = [place for place in places.tolist() if index.keys[place] == 0]
        if free:
            index.keys[free[-1]] = key
            lies[key] = free[-1]
    assert {key: index.slot(key) for key in put + others} == {key: lies.get(key, -1) for key in put + others}
    assert sorted(index.held()) == sorted(lies)


def test_what_is_no_key_is_nowhere() -> None:
    index = KeySets(2, 2)
    assert [index.slot(key) for key in (0, -1, 1 << 64)] == [-1, -1, -1]


def test_bytes_that_straddle_two_keys_are_no_key() -> None:
    index = KeySets(1, 2)
    index.keys[:] = (0x0102030405060708, 0x1112131415161718)
    straddling = int.from_bytes(index.keys.tobytes()[4:12], "little")
    assert index.slot(straddling) == -1
