"""Model card of a worker, and its place in a deployment."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine_adapter.dynamo.address import DynamoAddress
from engine_adapter.dynamo.card import card_of, model_folder, write_model_folder
from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.model.config import SimulatedConfig


def test_an_address_is_a_namespace_and_perhaps_a_component() -> None:
    assert DynamoAddress.parse("prod").endpoint == "prod.backend.generate"
    assert DynamoAddress.parse("prod.moe-1").endpoint == "prod.moe-1.generate"


@pytest.mark.parametrize("text", ["", ".", "a.", "a.b.c", "a b", "dyn://a"])
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be NAMESPACE or NAMESPACE\.COMPONENT.*e\.g\. dynamo"):
        DynamoAddress.parse(text)


def test_the_card_has_the_limits_of_a_rank_and_names_the_engine(tmp_path: Path) -> None:
    config = SimulatedConfig(ranks=4, kv_blocks=100)
    ranks = SimulatedEngine(config).ranks
    card = card_of(
        ranks[2].description,
        tmp_path,
        ranks=2,
        max_running=config.max_running,
        engine="e",
        worker_id=2**64 - 1,
    )
    assert (card.first_rank, card.ranks, card.kv_blocks) == (2, 2, 100)
    assert (card.max_context, card.max_batch_tokens) == (config.context, config.max_batch_tokens)
    assert json.loads(card.engine_data) == {"engine": "e", "worker_id": "ffffffffffffffff"}


def test_a_frontend_finds_the_tokenizer_and_the_end_token_in_the_folder(tmp_path: Path) -> None:
    tokenizer = SimulatedEngine(SimulatedConfig()).tokenizer
    write_model_folder(
        tmp_path / "model", tokenizer.archive, end_token=tokenizer.end, vocabulary=1000, max_context=512
    )
    read = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    assert read.encode(" the quick owl").ids == tokenizer.encode(" the quick owl")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["eos_token_id"], config["max_position_embeddings"]) == (tokenizer.end, 512)
    assert "chat_template" in json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())


def test_workers_of_one_model_name_the_same_folder_and_of_another_one_another(tmp_path: Path) -> None:
    tokenizer = SimulatedEngine(SimulatedConfig()).tokenizer

    def folder(context: int) -> Path:
        return model_folder(
            tmp_path / "models",
            tokenizer.archive,
            end_token=tokenizer.end,
            vocabulary=1000,
            max_context=context,
        )

    assert folder(512) == folder(512) != folder(1024)
    assert len(list((tmp_path / "models").iterdir())) == 2
    assert Tokenizer.from_file(str(folder(512) / "tokenizer.json")).encode(" the").ids
