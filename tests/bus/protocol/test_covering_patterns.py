"""Whether one pattern of subjects covers another: against the subjects themselves."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from bus.protocol.permissions import covers, lacking, rights
from bus.protocol.roles import ROLES
from bus.protocol.subjects import Subjects, matches

TOKENS = "ab"
SUBJECTS = [".".join(one) for length in range(1, 6) for one in itertools.product(TOKENS, repeat=length)]
PATTERNS = st.builds(
    lambda tokens, tail: ".".join([*tokens, *tail]),
    st.lists(st.sampled_from([*TOKENS, "*"]), min_size=1, max_size=3),
    st.sampled_from([[], [">"]]),
) | st.just(">")


@given(PATTERNS, PATTERNS)
def test_a_pattern_covers_another_when_it_matches_all_its_subjects(one: str, other: str) -> None:
    assert covers(one, other) == all(matches(one, subject) for subject in SUBJECTS if matches(other, subject))


def test_what_is_denied_or_not_allowed_is_lacking() -> None:
    assert lacking(["a.b", "a.*", "c"], ["a.>", "c"], ["a.b"]) == ["a.b"]
    assert lacking(["a.*", "c"], ["a.b", "c"]) == ["a.*"]


def test_every_role_has_its_own_rights_and_none_those_of_the_operator() -> None:
    subjects = Subjects()
    wanted = rights("operator", subjects)
    for role in ROLES:
        own = rights(role, subjects)
        assert not lacking(own.publish, own.publish)
        assert bool(lacking(wanted.publish, own.publish)) == (role != "operator")
