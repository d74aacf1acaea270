"""Token ids reused by words: always the ids of the entire text, for every accepted pattern, and no reuse for
any other.
"""

from array import array
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from deploy.demo_model import checkpoint_path
from router.tokenization.pretokenizer_proof import byte_sizes, first_wrong, why_not
from router.tokenization.segment_cache import SegmentCache
from router.tokenization.tokenizer import ModelTokenizer
from router.tokenization.word_cache import WORD, WordCache
from tests.router.encoding import whole, wrong_in_threads
from tests.router.router_fixture import SCRIPT

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
DEEPSEEK3 = "|".join(
    [
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
CJK = "[一-龥\u3040-ゟ\u30a0-ヿ]+"
LINES = [SCRIPT * 3, "two words  it's it'll IT'S camelCase 1234 foo.bar\n\n  indented\r\nlines été 漢字 ..."]


def split(*patterns: str, behavior: str = "isolated") -> Any:
    splits = [pre_tokenizers.Split(Regex(pattern), behavior) for pattern in patterns]
    return pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def trained(pre_tokenizer: Any, normalizer: Any = None, **model: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    tokenizer.add_tokens(["<tool>", "été", "   "])
    return tokenizer


@cache
def accepted(kind: str) -> Tokenizer:
    return {
        "gpt2": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
        "gpt2 as a split": lambda: trained(split(GPT2)),
        "digits first": lambda: trained(
            pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
            )
        ),
        "llama3": lambda: trained(split(LLAMA3), ignore_merges=True),
        "qwen2": lambda: trained(split(QWEN2), normalizers.NFC()),
        "o200k": lambda: trained(split(O200K)),
        "deepseek3": lambda: trained(split(r"\p{N}{1,3}", CJK, DEEPSEEK3)),
    }[kind]()


def with_token(**kinds: Any) -> Tokenizer:
    tokenizer = trained(split(LLAMA3))
    tokenizer.add_tokens([AddedToken(**{"content": "<new>", "normalized": False, **kinds})])
    return tokenizer


REFUSED = {
    "prefix space": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "no pattern": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
    "pattern of its own": lambda: trained(split(LLAMA3 + r"|foo bar")),
    "pattern that looks behind": lambda: trained(split(LLAMA3.replace(r"|\s+(?!", r"|(?<=a)\s+(?!"))),
    "spaces not matched": lambda: trained(split(LLAMA3.removesuffix(r"|\s+"))),
    "pattern that removes": lambda: trained(split(LLAMA3, behavior="removed")),
    "spaces at the end of words": lambda: trained(split(r"\p{L}+ ?|\s+")),
    "text, no pattern": lambda: trained(
        pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.ByteLevel(False)])
    ),
    "bytes too early": lambda: trained(
        pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(False), pre_tokenizers.Digits()])
    ),
    "other normaliser": lambda: trained(split(LLAMA3), normalizers.NFKC()),
    "no bytes": lambda: Tokenizer(models.BPE(vocab={"a": 0}, merges=[])),
    "chance": lambda: trained(split(LLAMA3), dropout=0.5),
    "no byte-pair encoding": lambda: Tokenizer(models.WordLevel({"a": 0}, "a")),
    "two words as one token": lambda: with_token(content="New York"),
    "token that takes spaces": lambda: with_token(lstrip=True),
    "token of whole words": lambda: with_token(single_word=True),
    "demo": lambda: Tokenizer.from_file(str(checkpoint_path() / "tokenizer.json")),
}

KINDS = ("gpt2", "gpt2 as a split", "digits first", "llama3", "qwen2", "o200k", "deepseek3")
PIECES = st.sampled_from(
    [
        *(
            "a",
            "two",
            "words",
            "Word",
            "camelCase",
            "IT'S",
            "it's",
            "'ll",
            "'",
            "''",
            "12",
            "12345",
            "a1",
            "1a",
            "é",
            "e\u0301",
            "\u0301",
            "été",
            "漢字",
            "カ",
            "ß",
        ),
        *(
            "привет",
            "\u0e33",
            "ǅ",
            "\u1e9b\u0323",
            "\u212a",
            "👩\u200d🚀",
            "🐣",
            "\u200d",
            "...",
            "):",
            "//",
            "_",
            "<tool>",
            "<|end|>",
            "<|",
            "q" * 70,
            "x" * 300,
        ),
        *(
            " ",
            " ",
            " ",
            " ",
            "  ",
            "   ",
            "\n",
            "\n\n",
            "\r\n",
            "\t",
            "\u3000",
            "\u00a0",
            "\u2028",
            "\x85",
            "\u180e",
            "\u1680",
            "\x00",
            "\x1c",
        ),
    ]
)
TEXTS = st.lists(PIECES | st.text(max_size=5), max_size=40).map("".join)
LONG = st.lists(PIECES, min_size=150, max_size=250).map(" ".join)


@cache
def remembering(kind: str, budget: int) -> ModelTokenizer:
    return ModelTokenizer(accepted(kind), {}, None, SegmentCache(budget))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4), long=LONG)
def test_ids_made_by_words_are_those_of_the_whole_text(kind: str, texts: list[str], long: str) -> None:
    for budget in (4096, 1 << 20):
        model = remembering(kind, budget)
        assert model.reuses_words
        for text in (*texts, long, texts[-1] + " and more", long + texts[0]):
            assert model.encode_rendered(text) == whole(accepted(kind), text)


@given(text=TEXTS)
def test_words_are_the_text_and_begin_at_spaces_behind_something_visible(text: str) -> None:
    words = WORD.findall(text)
    assert "".join(words) == text
    assert all(word.startswith(" ") for word in words[1:])
    assert not any(word[-1].isspace() for word in words[:-1])


@pytest.mark.parametrize("kind", REFUSED)
def test_a_tokenizer_that_is_not_proven_to_cut_before_spaces_is_used_as_it_is(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    tokenizer = REFUSED[kind]()
    assert why_not(tokenizer) is not None
    model = ModelTokenizer(tokenizer, {}, None, SegmentCache(1 << 20))
    assert not model.reuses_words
    assert "seen words cannot be reused" in caplog.text


def test_probes_find_what_the_structure_does_not_show() -> None:
    tokenizer = accepted("gpt2")

    def looks_ahead(text: str) -> list[int]:
        return [*whole(tokenizer, text), *([1] if "word 1" in text else [])]

    sizes = byte_sizes(tokenizer)
    assert first_wrong(lambda text: whole(tokenizer, text), sizes, lambda text: True) is None
    assert "word 1" in str(first_wrong(looks_ahead, sizes, lambda text: True))
    assert (
        first_wrong(lambda text: whole(tokenizer, text), array("I", [1] * len(sizes)), lambda text: True)
        is not None
    )


def test_only_words_that_are_new_are_encoded() -> None:
    seen = SegmentCache(1 << 20)
    model = ModelTokenizer(accepted("llama3"), {}, None, seen)
    model.encode_rendered("a text of few words")
    model.encode_rendered("a few words of other text")
    assert (seen.new_characters, seen.known_characters) == (
        len("a text of few words other"),
        len("a few words of text"),
    )


def test_a_text_of_new_words_is_encoded_in_one_go_and_teaches_a_few() -> None:
    seen = SegmentCache(1 << 20)
    model = ModelTokenizer(accepted("llama3"), {}, None, seen)
    text = " ".join(f"x{at}y" for at in range(400))
    assert model.encode_rendered(text) == whole(accepted("llama3"), text)
    assert seen.new_characters == len(text)
    assert 0 < len(seen.words) <= 32


def test_what_normalising_changes_is_encoded_whole() -> None:
    seen = SegmentCache(1 << 20)
    model = ModelTokenizer(accepted("qwen2"), {}, None, seen)
    for text in ("one e\u0301 two", "one \u00e9 two", "one e\u0301 two"):
        assert model.encode_rendered(text) == whole(accepted("qwen2"), text)
    before = seen.new_characters
    model.encode_rendered("two e\u0301")
    assert seen.new_characters > before, "the word that normalising changes is not known"


@settings(max_examples=50)
@given(
    calls=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(1, 9)), max_size=80),
    budget=st.integers(500, 6000),
)
def test_words_stay_within_their_bytes_and_have_their_own_ids(
    calls: list[tuple[int, int, int]], budget: int
) -> None:
    cache = WordCache(budget)
    for owner, number, length in calls:
        if number == 0:
            cache.forget(owner)
            assert cache.find(owner, ["w1", "w2"]) == [None, None]
            continue
        found = cache.find(owner, [f"w{number}"])
        assert found[0] is None or found[0][:2] == (owner, number)
        cache.keep(owner, [(f"w{number}", (owner, number) + (7,) * length)])
        assert 0 <= cache.bytes <= budget
    for owner in range(3):
        cache.forget(owner)
    assert (cache.bytes, len(cache)) == (0, 0)


def test_words_in_use_outlast_those_that_came_once() -> None:
    cache = WordCache(20_000)
    for at in range(1000):
        cache.keep(0, [(f"once{at}", (at,)), ("often", (1, 2))])
        assert cache.find(0, ["often"]) == [(1, 2)]
    assert cache.find(0, ["once0"]) == [None]


def test_texts_and_words_share_one_budget() -> None:
    seen = SegmentCache(40_000)
    model = ModelTokenizer(accepted("gpt2"), {}, None, seen)
    for at in range(60):
        model.encode_rendered(" ".join(f"w{at * 10 + one}" for one in range(30)))
        assert seen.bytes + seen.words.bytes <= 40_000
    assert seen.words.bytes > 0
    assert seen.bytes > 0
    model.forget_segments()
    assert (seen.bytes, seen.words.bytes) == (0, 0)


def test_many_threads_find_the_same_words() -> None:
    model = remembering("llama3", 8192)
    texts = [" ".join(f"thread{(at * one) % 97}" for one in range(40)) for at in range(30)]
    assert not wrong_in_threads(model, accepted("llama3"), texts)
