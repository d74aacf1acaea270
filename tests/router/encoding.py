"""What tests of reused token ids compare with: the tokenizer's own word on a whole text."""

import threading
from collections.abc import Sequence

from tokenizers import Tokenizer

from router.tokenization.tokenizer import ModelTokenizer


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def wrong_in_threads(model: ModelTokenizer, tokenizer: Tokenizer, texts: Sequence[str]) -> list[str]:
    """The texts that any of four threads, encoding all of them at once, got other ids for."""
    right = {text: whole(tokenizer, text) for text in texts}
    wrong: list[str] = []

    def encode() -> None:
        wrong.extend(text for text in texts if model.encode_rendered(text) != right[text])

    threads = [threading.Thread(target=encode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong
