"""Token ids reused by segments: always the ids of the entire text, for every kind of tokenizer, or no reuse
at all.
"""

from array import array
from functools import cache
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from deploy.demo_model import checkpoint_path
from router.foreign_api.lenient_fields import read
from router.tokenization.segment_cache import MAX_SEGMENTS, Cutter, SegmentCache
from router.tokenization.tokenizer import ModelTokenizer, first_difference
from tests.router.encoding import whole, wrong_in_threads
from tests.router.router_fixture import SCRIPT, MockRank, OpenHouse, Serve, archive, until

MARKS = ("<|start|>", "<|end|>", "<|start|>x", "</s>")
CHATML = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor"
    " %}<|start|>assistant\n"
)
LINES = [SCRIPT * 3, "user assistant system words words row two  spaces\n\nlines"]


def _trained(model: Any, trainer: Any, **parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def byte_level(*, prefix_space: bool) -> Tokenizer:
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    return _trained(
        models.BPE(), trainer, pre_tokenizer=level, post_processor=processors.ByteLevel(trim_offsets=True)
    )


def word_piece() -> Tokenizer:
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    parts = {"normalizer": normalizers.BertNormalizer(), "pre_tokenizer": pre_tokenizers.BertPreTokenizer()}
    tokenizer = _trained(models.WordPiece(unk_token="[UNK]"), trainer, **parts)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


def unigram(scheme: str) -> Tokenizer:
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    nfkc, metaspace = normalizers.NFKC(), pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return _trained(models.Unigram(), trainer, normalizer=nfkc, pre_tokenizer=metaspace)


def marked(tokenizer: Tokenizer, **kinds: bool) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(mark, **{"normalized": False, **kinds}) for mark in MARKS])
    return tokenizer


@cache
def known(kind: str) -> Tokenizer:
    return {
        "demo": lambda: Tokenizer.from_file(str(checkpoint_path() / "tokenizer.json")),
        "bytes": lambda: marked(byte_level(prefix_space=False)),
        "bytes, prefix space": lambda: marked(byte_level(prefix_space=True)),
        "pieces of words": lambda: marked(word_piece()),
        "unigram, first": lambda: marked(unigram("first")),
        "unigram, always": lambda: marked(unigram("always")),
        "unigram, strips": lambda: marked(unigram("first"), lstrip=True),
        "bytes, normalised": lambda: marked(byte_level(prefix_space=False), normalized=True),
        "words only": lambda: marked(byte_level(prefix_space=True), single_word=True),
    }[kind]()


@cache
def small_memory(kind: str) -> ModelTokenizer:
    """Return a cache that forgets much from one conversation to the next."""
    template = CHATML.replace("<|start|>", "\x00") if kind == "demo" else CHATML
    return ModelTokenizer(known(kind), {}, template, SegmentCache(4096))


EXACT = ("demo", "bytes", "bytes, prefix space", "pieces of words", "unigram, first", "unigram, always")
REFUSED = ("unigram, strips", "bytes, normalised", "words only")

NASTY = st.sampled_from(
    [
        *MARKS,
        "<|",
        "|>",
        "start",
        "\x00",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "'s",
        "e\u0301",
        "\u200d",
        "\u2581",
        "ﬁ",
        "漢字",
        "🐣",
        "[CLS]",
        "<unk>",
        "",
    ]
)
TEXTS = st.lists(NASTY | st.text(max_size=8), max_size=8).map("".join)
TALKS = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), TEXTS), min_size=1, max_size=6)


def talk(turns: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


@pytest.mark.parametrize("kind", [*EXACT, *REFUSED])
@settings(max_examples=25, deadline=None)
@given(talks=st.lists(TALKS, min_size=1, max_size=3))
def test_ids_made_in_pieces_are_those_of_the_whole_conversation(
    kind: str, talks: list[list[tuple[str, str]]]
) -> None:
    model = small_memory(kind)
    for turns in talks:
        for length in range(1, len(turns) + 1):
            text = model.render(talk(turns[:length]))
            assert model.encode_rendered(text) == whole(known(kind), text)


@pytest.mark.parametrize("kind", EXACT)
def test_reuse_is_on_where_special_tokens_are_found_in_the_raw_text(kind: str) -> None:
    assert ModelTokenizer(known(kind), {}, None, SegmentCache(4096)).reuses_segments


@pytest.mark.parametrize("kind", REFUSED)
def test_reuse_is_off_and_logged_where_tokens_depend_on_their_context(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert not ModelTokenizer(known(kind), {}, None, SegmentCache(4096)).reuses_segments
    assert "cannot be reused" in caplog.text


def test_a_tokenizer_that_draws_ids_by_chance_is_not_cut() -> None:
    tokenizer = marked(byte_level(prefix_space=False))
    tokenizer.model.dropout = 0.5
    assert not ModelTokenizer(tokenizer, {}, None, SegmentCache(4096)).reuses_segments


def test_probes_find_a_tokenizer_that_puts_something_before_each_text() -> None:
    tokenizer = marked(unigram("first"), normalized=True)
    tokenizer.normalizer = normalizers.Prepend("▁")
    assert (
        first_difference(lambda text: whole(tokenizer, text), Cutter(MARKS, MARKS), list(MARKS)) is not None
    )


def test_probes_find_an_encoder_that_looks_back_across_a_special_token() -> None:
    def encode(text: str) -> list[int]:
        return [ord(one) + (1000 if before == " " else 0) for before, one in pairwise("." + text)]

    assert first_difference(encode, Cutter(["#"], ["#"]), ["#"]) == " #"


def test_the_next_turn_of_a_conversation_encodes_only_what_is_new() -> None:
    model = ModelTokenizer(known("bytes"), {}, CHATML, SegmentCache(65536))
    first = [("system", "be brief"), ("user", "a long question " * 20)]
    assert model.segments(model.render(talk(first))).unknown == len(model.render(talk(first)))
    model.encode_rendered(model.render(talk(first)))
    later = model.segments(model.render(talk([*first, ("assistant", "yes"), ("user", "why?")])))
    new = [text for text, ids in zip(later.texts, later.ids, strict=True) if ids is None]
    assert new == ["<|start|>assistant\nyes", "<|start|>user\nwhy?"]
    assert later.unknown == sum(map(len, new))


def test_the_texts_of_one_scope_are_not_known_in_another() -> None:
    cache = SegmentCache(65536)
    model = ModelTokenizer(known("bytes"), {}, CHATML, cache)
    text = model.render(talk([("system", "be brief"), ("user", "a long question " * 20)]))
    for scope in ("", "ours", "theirs"):
        scoped = model.within(scope)
        assert scoped.segments(text).unknown == len(text)
        assert scoped.encode_rendered(text) == whole(known("bytes"), text)
        assert scoped.segments(text).unknown == 0
    model.forget_segments()
    assert (len(cache), cache.bytes) == (0, 0)


def test_without_a_cache_texts_are_encoded_whole() -> None:
    model = ModelTokenizer(known("bytes"), {}, CHATML)
    assert not model.reuses_segments
    text = model.render(talk([("user", "hi")]))
    assert model.segments(text).texts == [text]
    assert model.encode_rendered(text) == whole(known("bytes"), text)


def test_the_longest_token_that_begins_leftmost_counts() -> None:
    assert Cutter(["<a", "<a>", "a>"], ["<a", "<a>", "a>"]).cut("x<a>y<ab a>") == ["x", "<a>y", "<ab ", "a>"]


def test_tokens_that_are_not_special_are_respected_but_not_cut_at() -> None:
    assert Cutter(["ab<", "<s>"], ["<s>"]).cut("<s>1ab<s>2<s>") == ["<s>1ab<s>2", "<s>"]


def test_a_text_of_very_many_segments_is_not_cut() -> None:
    text = "<s>" * (MAX_SEGMENTS + 1)
    assert Cutter(["<s>"], ["<s>"]).cut(text) == [text]


def test_a_cutter_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens to cut at"):
        Cutter(["a"], [])


def _ids(count: int) -> "array[int]":
    return array("I", range(count))


def test_the_least_recently_used_ids_go_when_the_budget_is_spent() -> None:
    cache = SegmentCache(4 * 2000)
    for text in "abcde":
        cache.keep(0, [(text, _ids(400))])
        cache.look_up(0, ["a"])
    assert [ids is not None for ids in cache.look_up(0, list("abcde")).ids] == [True, False, True, True, True]
    assert cache.look_up(0, ["a"]).ids == [_ids(400)]
    assert 0 < cache.bytes <= 8000


def test_an_entry_that_would_push_out_most_others_is_not_kept() -> None:
    cache = SegmentCache(8000)
    cache.keep(0, [("a", _ids(1000))])
    assert (len(cache), cache.bytes) == (0, 0)


def test_vocabularies_share_the_budget_but_not_the_ids() -> None:
    cache = SegmentCache(8000)
    cache.keep(0, [("a", _ids(1))])
    cache.keep(1, [("a", _ids(2))])
    assert cache.look_up(1, ["a"]).ids == [_ids(2)]
    cache.forget(1)
    assert (cache.look_up(0, ["a"]).ids, cache.look_up(1, ["a"]).ids) == ([_ids(1)], [None])
    cache.forget(0)
    assert (len(cache), cache.bytes) == (0, 0)


def test_many_threads_get_the_same_ids() -> None:
    model = ModelTokenizer(known("bytes"), {}, CHATML, SegmentCache(16384))
    texts = [
        model.render(talk([("system", f"s{at % 3}"), ("user", "hello " * (at % 7))])) for at in range(40)
    ]
    assert not wrong_in_threads(model, known("bytes"), texts)


async def test_only_what_is_new_of_a_long_conversation_leaves_the_event_loop(
    open_house: OpenHouse, serve_rank: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = archive(known("bytes"), {"chat_template": CHATML})
    house = await open_house(long_prompt_characters=1000)
    rank = await serve_rank(MockRank(packed))
    await house.join("alone", [rank.url], packed)
    left = 0
    submit = house.service.bodies.threads.submit

    def counted(*work: Any) -> Any:
        nonlocal left
        left += 1
        return submit(*work)

    monkeypatch.setattr(house.service.bodies.threads, "submit", counted)
    turns = [("system", "words in a row " * 100)]
    for words, leaves in (("hi", 1), ("and now", 1), ("so " * 400, 2), ("bye", 2)):
        turns += [("user", words)]
        assert (
            await house.post(
                "/v1/chat/completions", {"model": "demo", "messages": talk(turns), "max_tokens": 1}
            )
        ).status == 200
        assert left == leaves
        assert rank.requests[-1].prompt == whole(known("bytes"), rank.tokenizer.render(talk(turns)))
    seen = house.service.tokenizers.seen
    assert seen is not None
    assert seen.new_characters < seen.known_characters
    counted_characters = f'roost_router_conversation_characters_total{{ids="known"}} {seen.known_characters}'
    await until(lambda: counted_characters.encode() in house.service.metrics.exposition())


@settings(max_examples=30)
@given(turns=TALKS, later=TALKS)
def test_the_text_of_a_conversation_is_a_prefix_of_its_next_turn(
    turns: list[tuple[str, str]], later: list[tuple[str, str]]
) -> None:
    bodies = (
        msgspec.json.encode({"model": "demo", "messages": talk(some), "tools": [{"type": "function"}]})
        for some in (turns, turns + later)
    )
    before, after = (read(body, "application/json").prompt for body in bodies)
    assert after.startswith(before)


async def test_a_request_reuses_the_texts_of_its_own_salt_alone(
    open_house: OpenHouse, serve_rank: Serve
) -> None:
    packed = archive(known("bytes"), {"eos_token": "</s>", "chat_template": CHATML})
    rank = await serve_rank(MockRank(packed))
    house = await open_house()
    await house.join("alone", [rank.url], packed)
    kept = []
    for salt in ("ours", "ours", "theirs"):
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": "a long question " * 20}],
            "cache_salt": salt,
        }
        assert (await house.post("/v1/route", body)).status == 200
        assert house.service.tokenizers.seen is not None
        kept.append(len(house.service.tokenizers.seen))
    assert kept[0] == kept[1] > 0
    assert kept[2] == 2 * kept[0]
