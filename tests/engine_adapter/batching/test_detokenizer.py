"""Text as it comes out of ids: whole characters, no part of a stop string, exact continuation at any
point."""

import io
import json
import random
import time
import zipfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.batching.detokenizer import StopStrings, TextState, TextStream
from engine_adapter.serving.checkpoint_tokenizer import CheckpointTokenizer

STOPS = ["ab", "aba", "\u00fc", "the ", "\ufffd\ufffd", "\n\n"]


@pytest.fixture(scope="module", params=["byte_folder", "merging_folder", "fallback_folder"])
def tokenizer(request: pytest.FixtureRequest) -> CheckpointTokenizer:
    return CheckpointTokenizer(request.getfixturevalue(request.param))


@pytest.fixture(scope="module")
def by_bytes(byte_folder: Path) -> CheckpointTokenizer:
    return CheckpointTokenizer(byte_folder)


def feed_all(stream: TextStream, ids: list[int]) -> str:
    text = ""
    for token in ids:
        text += stream.feed(token)
        if stream.stopped:
            return text
    return text + stream.finish()


def odd_ids(tokenizer: CheckpointTokenizer, draws: random.Random, length: int) -> list[int]:
    """Ids with whole texts, halves of characters and noise in any mix."""
    ids: list[int] = []
    while len(ids) < length:
        kind = draws.random()
        if kind < 0.4:
            text = draws.choice(["the ", "aba", "\u00fcber", "\U0001f600", "\u65e5\u672c", "\n\n", "a"])
            piece = tokenizer.encode(text)
            ids += piece[: draws.randint(1, len(piece))]
        else:
            ids.append(draws.randrange(tokenizer.vocabulary))
    return ids


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), stops=st.lists(st.sampled_from(STOPS), max_size=3))
def test_a_stream_that_moves_to_another_process_at_any_token_has_the_unbroken_text(
    tokenizer: CheckpointTokenizer, seed: int, stops: list[str]
) -> None:
    draws = random.Random(seed)
    ids = odd_ids(tokenizer, draws, draws.randint(1, 40))
    stays, travels = (TextStream(tokenizer.detokenizer(), stops) for _ in range(2))
    text = ""
    for token in ids:
        text += travels.feed(token)
        stays.feed(token)
        packed = msgspec.msgpack.encode(travels.state)
        travels = TextStream(tokenizer.detokenizer(), stops)
        travels.restore(msgspec.msgpack.decode(packed, type=TextState))
        assert (travels.stopped, travels.decoded) == (stays.stopped, stays.decoded)
        if travels.stopped:
            break
    else:
        text += travels.finish()
    assert text == feed_all(TextStream(tokenizer.detokenizer(), stops), ids)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), stops=st.lists(st.sampled_from(STOPS), max_size=3))
def test_a_stream_broken_anywhere_and_resumed_has_the_unbroken_text(
    tokenizer: CheckpointTokenizer, seed: int, stops: list[str]
) -> None:
    draws = random.Random(seed)
    ids = odd_ids(tokenizer, draws, draws.randint(1, 40))
    whole = feed_all(TextStream(tokenizer.detokenizer(), stops), ids)
    cut = draws.randint(0, len(ids))
    first = TextStream(tokenizer.detokenizer(), stops)
    before = "".join(first.feed(token) for token in ids[:cut])
    if first.stopped:
        assert before == whole
        return
    second = TextStream(tokenizer.detokenizer(), stops)
    second.resume(ids[:cut])
    assert second.decoded == first.decoded
    assert before + feed_all(second, ids[cut:]) == whole


@pytest.mark.parametrize("folder", ["byte_folder", "merging_folder"])
def test_pieces_put_together_are_the_text_of_all_ids(folder: str, request: pytest.FixtureRequest) -> None:
    tokenizer = CheckpointTokenizer(request.getfixturevalue(folder))
    draws = random.Random(1)
    for _ in range(500):
        ids = odd_ids(tokenizer, draws, draws.randint(1, 30))
        assert feed_all(TextStream(tokenizer.detokenizer()), ids) == tokenizer.decode(ids)


def test_a_text_survives_encoding_and_streaming(tokenizer: CheckpointTokenizer) -> None:
    text = "the engine \u00fcber \u65e5\u672c\u8a9e \U0001f600 done."
    stream = TextStream(tokenizer.detokenizer())
    assert feed_all(stream, tokenizer.encode(text)) == text


def test_no_half_of_a_character_is_let_out(by_bytes: CheckpointTokenizer) -> None:
    stream = TextStream(by_bytes.detokenizer())
    assert [stream.feed(byte) for byte in "\u20ac!".encode()] == ["", "", "\u20ac", "!"]
    assert [stream.feed(byte) for byte in "\u20ac".encode()[:2]] == ["", ""]
    assert stream.finish() == "\ufffd"


def test_endless_invalid_bytes_are_shown_as_they_come_and_in_linear_time(
    tokenizer: CheckpointTokenizer,
) -> None:
    draws = random.Random(2)
    noise = [draws.choice([0xFF, 0x80, 0xE2, 0xC0]) for _ in range(4000)]
    stream = TextStream(tokenizer.detokenizer(), ["never"])
    began = time.perf_counter()
    held = 0
    for token in noise:
        held = 0 if stream.feed(token) else held + 1
        assert held <= 8
    assert time.perf_counter() - began < 2.0


def test_ids_outside_the_vocabulary_and_special_ones_have_no_text(tokenizer: CheckpointTokenizer) -> None:
    stream = TextStream(tokenizer.detokenizer())
    assert feed_all(stream, [0, tokenizer.vocabulary - 1, 0] if tokenizer.vocabulary > 256 else [0, 0]) == ""


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("abc", max_size=40),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    draws=st.randoms(use_true_random=False),
)
def test_the_text_ends_before_the_first_stop_string_to_complete(
    text: str, stops: list[str], draws: random.Random
) -> None:
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    expected = text
    if ends:
        first = text[: min(ends)]
        expected = min((first[: -len(stop)] for stop in stops if first.endswith(stop)), key=len)
    filtered = StopStrings(stops)
    shown, rest = "", text
    while rest and not filtered.matched:
        cut = draws.randint(1, len(rest))
        shown += filtered.feed(rest[:cut])
        rest = rest[cut:]
        assert expected.startswith(shown), "a part of a stop string got out"
    assert filtered.matched == bool(ends)
    assert shown + filtered.finish() == expected


def test_nothing_is_held_back_that_begins_no_stop_string() -> None:
    filtered = StopStrings(["xyz"])
    assert filtered.feed("abcx") == "abc"
    assert filtered.feed("ya") == "xya"


def test_log_probabilities_name_tokens_that_are_no_text_by_their_bytes(by_bytes: CheckpointTokenizer) -> None:
    assert by_bytes.piece(ord("a")) == "a"
    assert by_bytes.piece(0xE2) == "bytes:\\xe2"


def test_the_byte_tokenizer_encodes_any_text_to_its_bytes(by_bytes: CheckpointTokenizer) -> None:
    text = "a\u0100\x00\u20ac"
    assert by_bytes.encode(text) == list(text.encode())


def test_the_archive_holds_the_tokenizer_and_is_equal_for_equal_folders(byte_folder: Path) -> None:
    one, two = CheckpointTokenizer(byte_folder).archive, CheckpointTokenizer(byte_folder).archive
    assert one == two
    with zipfile.ZipFile(io.BytesIO(one)) as archive:
        assert archive.namelist() == ["tokenizer.json", "tokenizer_config.json"]
        assert archive.read("tokenizer.json") == (byte_folder / "tokenizer.json").read_bytes()


def test_the_end_token_comes_from_the_generation_config_first(byte_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((byte_folder / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 256, "eos_token_id": 3}))
    assert CheckpointTokenizer(tmp_path).eos == {3}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert CheckpointTokenizer(tmp_path).eos == {1, 2}


def test_a_broken_tokenizer_file_is_named(byte_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a JSON object"):
        CheckpointTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer"):
        CheckpointTokenizer(tmp_path)
