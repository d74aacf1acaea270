"""`roost layout --model`: what it prints without bus and engine, and what it refuses."""

import json
import re
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


@pytest.mark.parametrize(
    ("model", "hardware"),
    [*((model, "h200-nvl") for model in MODELS), *(("mixtral-8x7b", hardware) for hardware in MACHINES)],
)
def test_every_bundled_model_and_every_hardware_is_compared(model: str, hardware: str) -> None:
    record = json.loads(roost("layout", "--model", model, "--hardware", hardware, "--json").stdout)
    assert (record["model"], record["hardware"], record["ranks"]) == (model, hardware, 8)
    assert len(record["switch"]) == 6
    timed = hardware in ("h200-nvl", "h100")
    assert (record["decode"]["unknown"] is None) == timed
    assert len(record["decode"]["steps"]) == (4 if timed else 0), "two stacks, two routings"
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
    assert "crossing of tp and ep: unknown: no published kernel timings" in output


def test_crossings_are_ranges_with_source_kernels_and_error() -> None:
    output = roost("layout", "--model", "qwen3-235b", "--kernels", "vllm").stdout
    assert re.search(r"vllm 0\.24\.0, tokens spread .* error of the form: ep \d\.\d%, tp \d\.\d%", output)
    assert re.search(r"crossing of tp and ep: \d+ to [\d,]+ sequences, from tp to ep", output)
    assert "certain beyond the error: tp 1 to" in output
    assert "Source: NVIDIA aiconfigurator-core 0.12.0" in output
    assert "ms per step, vllm 0.24.0" in output
    assert "sglang" not in output


def test_a_model_without_a_crossing_says_so() -> None:
    output = roost("layout", "--model", "mixtral-8x7b").stdout
    assert output.count("crossing of tp and ep: none from 1 to 2,048: tp is always faster") == 4


def test_long_contexts_that_were_not_timed_are_unknown() -> None:
    output = roost("layout", "--model", "qwen3-30b", "--context", "100000").stdout
    assert "context 100,000 (256 to 16,384 were timed)" in output


def test_without_timings_no_picture_is_written(tmp_path: Path) -> None:
    picture = tmp_path / "curves.svg"
    result = roost("layout", "--model", "qwen3-30b", "--hardware", "a100", "--plot", str(picture))
    assert result.exit_code == 0
    assert "is not written: there are no timings to draw" in result.stderr
    assert not picture.exists()


def test_own_timings_and_pictures(tmp_path: Path) -> None:
    times, picture = tmp_path / "times.toml", tmp_path / "curves.svg"
    times.write_text(
        "".join(
            f'[[times]]\nlayout = "{layout}"\ncontext = 1024\nsequences = [1, 8, 64, 512]\n'
            f"milliseconds = {milliseconds}\n"
            for layout, milliseconds in (("ep", [12.0, 14, 20, 36]), ("tp", [8.0, 10, 18, 42]))
        )
    )
    options = ("layout", "--model", "qwen3-30b", "--kernels", str(times), "--plot", str(picture))
    output = roost(*options).stdout
    assert re.search(r"crossing of tp and ep: \d+ to \d+ sequences, from tp to ep", output)
    assert "experts-tp" not in output.split("Decode steps")[1].split("Sequences of")[0]
    assert picture.read_text().startswith("<?xml")
    result = roost(*options, "--context", "64")
    assert result.exit_code == 2
    assert "context 64 was not timed, only 1,024 to 1,024" in result.stderr


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--model", "gpt-5"], "'gpt-5' is neither a config.json nor one of qwen3-235b"),
        (["--model", "qwen3-30b", "--hardware", "v100"], "'v100' is not known; use one of h200-nvl"),
        (["--model", "qwen3-30b", "--ranks", "1"], "--ranks must be at least 2, not 1"),
        (["--model", "qwen3-30b", "--ranks", "12"], "--ranks above 8 must be whole nodes of 8 GPUs, not 12"),
        (["--model", "qwen3-30b", "--context", "0"], "--context must be at least 1 token, not 0"),
        (["--model", "qwen3-30b", "--set", "tp"], "--set does not go with --model"),
        (["--model", "qwen3-30b", "--auto", "on"], "--auto does not go with --model"),
        (["--model", __file__], "test_considered.py: is not JSON"),
        (["--model", "qwen3-30b", "engine-0"], "ENGINE does not go with --model"),
        (["--hardware", "h100"], "--hardware belongs to --model"),
        (["--kernels", "vllm"], "--kernels belongs to --model"),
        (["--model", "qwen3-30b", "--kernels", "trt"], "'trt' is neither a file of timings nor one of vllm"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: list[str], complaint: str) -> None:
    result = roost("layout", *options)
    assert result.exit_code == 2
    assert complaint in result.stderr
