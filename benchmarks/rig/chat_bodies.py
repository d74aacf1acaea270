"""Chat requests for router measurements, and a tokenizer of production size, made from the text of any Python
installation.

Half of each prompt's words are shared with an eighth of the other prompts, the other half is unique: no two
requests are equal, and no cache of whole prompts can replace a tokenizer. `in_turns` puts the shared half
into a system message, as conversations do.
"""

import json
import os
import random
import re
from collections import Counter
from pathlib import Path

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

GROUPS = 8
OUTPUT_TOKENS = 8
VOCABULARY = 16_000
_WORDS = 5_000
_LONGEST_FILE = 200_000
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] +"
    " '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def sources() -> list[str]:
    """Return the source text: Python's standard library."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return [file.read_text(encoding="utf-8", errors="replace")[:_LONGEST_FILE] for file in files]


def common_words(texts: list[str]) -> list[str]:
    """Return the most frequent words, in order."""
    counts = Counter(word for text in texts for word in re.findall(r"[A-Za-z]{3,}", text))
    return [word for word, _ in counts.most_common(_WORDS)]


def write_model(folder: Path, texts: list[str]) -> None:
    """A model folder without weights: a byte-level BPE tokenizer trained on the texts, its chat template, and
    a configuration."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 65536,
        "eos_token": "<|im_end|>",
        "chat_template": _TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    about = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-5,
    }
    (folder / "config.json").write_text(
        json.dumps({**about, **shape, "bos_token_id": 0, "eos_token_id": 2}), encoding="utf-8"
    )
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 0, "eos_token_id": 2}), encoding="utf-8"
    )


def shared_half(words: list[str], group: int, count: int) -> str:
    """Return the common prefix of a group's prompts."""
    return " ".join(random.Random(group).choices(words, k=count // 2))


def bodies(
    model: str,
    words: list[str],
    number: int,
    *,
    count: int,
    stream: bool,
    seed: int | str,
    in_turns: bool = False,
) -> list[bytes]:
    """Return `number` chat requests of `count` words each, as JSON. Another seed gives other requests of the
    same groups; the same seed gives requests that a cache knows."""
    chance = random.Random(seed)
    shared = [shared_half(words, group, count) for group in range(GROUPS)]
    made = []
    for at in range(number):
        begin, own = shared[at % GROUPS], " ".join(chance.choices(words, k=count - count // 2))
        turns = [("system", begin), ("user", own)] if in_turns else [("user", f"{begin} {own}")]
        messages = [{"role": role, "content": content} for role, content in turns]
        made.append(
            msgspec.json.encode(
                {"model": model, "messages": messages, "max_tokens": OUTPUT_TOKENS, "stream": stream}
            )
        )
    return made
