"""`roost layout --model`: what it prints without bus and engine, and what it refuses."""

import json
from pathlib import Path

import pytest

from migration.hardware.machines import MACHINES
from migration.hardware.models import MODELS
from tests.deploy.commands import roost

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_sizes_memory_and_switch_times_are_printed() -> None:
    output = roost("layout", "--model", "qwen3-235b").stdout
    for text in (
        "56.8 GB", "329 KiB", "141 KiB", "1,823,584", "911,794", "110 ms", "7.95 s", "spare layers (1)",
        "captured graphs of both layouts        unknown",
    ):  # fmt: skip
        assert text in output


@pytest.mark.parametrize("hardware", MACHINES)
@pytest.mark.parametrize("model", MODELS)
def test_every_bundled_model_is_compared_on_every_hardware(model: str, hardware: str) -> None:
    record = json.loads(roost("layout", "--model", model, "--hardware", hardware, "--json").stdout)
    assert (record["model"], record["hardware"], record["ranks"]) == (model, hardware, 8)
    assert len(record["switch"]) == 6
    if record["memory"]["kv_pool"] <= 0:
        assert "more on each GPU" in record["refused"]["ep"]
    else:
        assert record["refused"]["ep"] is None


def test_a_config_file_is_a_model_too(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 64, "num_experts": 16,
                "num_experts_per_tok": 2, "moe_intermediate_size": 96, "num_key_value_heads": 2,
                "vocab_size": 100,
            }
        )
    )  # fmt: skip
    output = roost("layout", "--model", str(config), "--ranks", "4").stdout
    assert "on 4 GPUs" in output


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--model", "gpt-5"], "'gpt-5' is neither a config.json nor one of qwen3-235b"),
        (["--model", "qwen3-30b", "--hardware", "v100"], "'v100' is not known; use one of h200-nvl"),
        (["--model", "qwen3-30b", "--ranks", "1"], "--ranks must be at least 2, not 1"),
        (["--model", "qwen3-30b", "--context", "0"], "--context must be at least 1 token, not 0"),
        (["--model", "qwen3-30b", "--set", "tp"], "--set does not go with --model"),
        (["--model", "qwen3-30b", "engine-0"], "ENGINE does not go with --model"),
        (["--hardware", "h100"], "--hardware belongs to --model"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: list[str], complaint: str) -> None:
    result = roost("layout", *options)
    assert result.exit_code == 2
    assert complaint in result.stderr
