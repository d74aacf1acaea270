"""The lower bound on the tokens of a text, compared with the tokenizers themselves."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from router.tokenization.token_lengths import longest_token
from router.tokenization.tokenizer import ModelTokenizer
from tests.router.router_fixture import archive, bpe

NFC = bpe(400)
NFC.normalizer = normalizers.NFC()
TOKENIZERS = [ModelTokenizer.from_archive(archive(one, {})) for one in (bpe(257), bpe(400), NFC)]
PIECES = st.sampled_from(
    [
        "words in a row; ",
        "<eos>",
        "\u212a",
        "e\u0301",
        "\u03b9\u0308\u0301",
        "\u1100\u1161\u11a8",
        "東京タワー",
        "🐣",
        "\x00",
        " " * 9,
        "\ud800",
    ]
)


@given(st.lists(PIECES | st.text(max_size=5), max_size=30).map("".join), st.sampled_from(TOKENIZERS))
def test_no_text_has_fewer_tokens_than_the_bound(text: str, tokenizer: ModelTokenizer) -> None:
    fewest = tokenizer.min_tokens(text)
    assert fewest > 0 or not text
    if "\ud800" not in text:
        assert len(tokenizer.encode_rendered(text)) >= fewest


def test_a_text_of_the_longest_token_alone_has_exactly_as_many() -> None:
    tokenizer = bpe(400)
    longest = max(tokenizer.get_vocab(with_added_tokens=False), key=len)
    text = tokenizer.decode([tokenizer.token_to_id(longest)])
    assert (
        ModelTokenizer.from_archive(archive(tokenizer, {})).min_tokens(text)
        == len(tokenizer.encode(text).ids)
        == 1
    )


def changed(**parts: Any) -> Tokenizer:
    tokenizer = bpe(300)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def with_added(token: AddedToken) -> Tokenizer:
    tokenizer = bpe(300)
    tokenizer.add_special_tokens([token])
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        changed(normalizer=normalizers.Strip()),
        changed(normalizer=normalizers.NFKC()),
        changed(
            pre_tokenizer=pre_tokenizers.Sequence(
                [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        ),
        changed(pre_tokenizer=pre_tokenizers.Whitespace()),
        with_added(AddedToken("<pad>", lstrip=True)),
        Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
        Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[])),
    ],
)
def test_lossy_tokenizers_have_no_bound(tokenizer: Tokenizer) -> None:
    assert longest_token(tokenizer) is None
