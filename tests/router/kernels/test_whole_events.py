"""The compiled count of whole events in whole chunks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router import kernels
from router.passthrough.event_relay import whole_events


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


WORDS = (
    b"\n",
    b"\r\n",
    b"\n\n",
    b"data: a",
    b'"usage"',
    b":null",
    b": null",
    b":{}",
    b"[DONE]",
    b"[DON",
    b"usage",
)
CONTENTS = st.lists(st.sampled_from(WORDS), max_size=6).map(b"".join)
CHUNKS = st.one_of(
    CONTENTS.map(chunk),
    CONTENTS.map(lambda content: chunk(content + b"\n\n")),
    CONTENTS.map(lambda content: chunk(content + b"\n\n").upper()),
    st.binary(max_size=4),
    st.sampled_from([b"2\r\n", b"00002\r\n\n\n\r\n", b"000002\r\n\n\n\r\n", b"fffff\r\n", b" 2\r\n\n\n\r\n"]),
)


@settings(max_examples=1000, deadline=None)
@given(st.lists(CHUNKS, max_size=4).map(b"".join), st.integers(0, 8))
def test_both_forms_count_the_same(data: bytes, missing: int) -> None:
    library = kernels.compiled()
    assert library is not None, kernels.missing
    for one in (data, data[: len(data) - missing]):
        assert library.whole_events(one) == whole_events(one)


@pytest.mark.parametrize("wrong", ["text", None, bytearray(b"2\r\n\n\n\r\n")])
def test_only_bytes_are_taken(wrong: object) -> None:
    library = kernels.compiled()
    assert library is not None, kernels.missing
    with pytest.raises(TypeError):
        library.whole_events(wrong)  # type: ignore[arg-type]
