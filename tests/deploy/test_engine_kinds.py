"""Which engines are started here: embedded or simulated, by flag or by settings, and never half of each."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from deploy.cli.app import app
from deploy.configuration_loader import ConfigError
from deploy.launch_spec import LaunchSpec
from deploy.local.fleet import EngineLauncher, FleetFiles
from deploy.run_directory import RunDirectory
from deploy.sections import WorkerConfig, engine_ranks, read_settings, served_model


def settings(tmp_path: Path, text: str):
    file = tmp_path / "roost.toml"
    file.write_text(text)
    return read_settings(file, {}, tmp_path)


def test_the_kind_of_engine_decides_whose_ranks_and_model_are_meant(tmp_path: Path) -> None:
    embedded = settings(tmp_path, '[simulated]\nranks = 8\nshape = "deepseek-v3"\n')
    assert (engine_ranks(embedded), served_model(embedded)) == (2, "roost-demo")
    simulated = settings(
        tmp_path, '[worker]\nengine = "simulated"\n[simulated]\nranks = 8\nshape = "deepseek-v3"\n'
    )
    assert (engine_ranks(simulated), served_model(simulated)) == (8, "deepseek-v3")


def test_an_unknown_kind_is_refused_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"roost\.toml:2: worker\.engine"):
        settings(tmp_path, '[worker]\nengine = "imaginary"\n')


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ("up", "--model-shape", "demo"),
            "--model-shape belongs to --engine simulated, and these engines are embedded",
        ),
        (
            ("up", "--engine", "simulated", "--model", "."),
            "--model belongs to --engine embedded, and these engines are simulated",
        ),
        (
            ("up", "--engine", "simulated", "--model-shape", "gpt-5"),
            "shape must be one of deepseek-v3, qwen3-235b, demo, not 'gpt-5' (shape from --model-shape)",
        ),
        (
            ("up", "--engine", "simulated", "--ranks", "99"),
            "ranks must be 1 to 32, the experts of a layer, not 99",
        ),
        (
            ("worker", "--engine", "simulated", "--ranks", "99"),
            "ranks must be 1 to 32, the experts of a layer, not 99",
        ),
        (
            ("worker", "--engine", "openai", "--url", "http://x", "--model-shape", "demo"),
            "--model-shape belongs to --engine simulated",
        ),
        (("worker", "--engine", "simulated", "--url", "http://x"), "--url belongs to --engine openai"),
    ],
)
def test_what_belongs_to_another_kind_of_engine_is_refused(
    arguments: tuple[str, ...], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2
    assert complaint in result.stderr


async def test_a_simulated_engine_is_one_process_with_all_sockets(tmp_path: Path) -> None:
    launcher = EngineLauncher(
        "sim",
        3,
        WorkerConfig(engine="simulated"),
        FleetFiles(RunDirectory(tmp_path), tmp_path / "roost.toml", {}),
    )
    incarnation = await launcher.launch()
    try:
        (command,) = incarnation.commands
        order = msgspec.json.decode(command.arguments[-1], type=LaunchSpec)
        assert command.name == "sim"
        assert (order.part, len(order.descriptors), command.keep) == ("simulated", 3, order.descriptors)
        assert order.rank is not None
        assert len(set(order.rank.urls)) == 3
        ready = asyncio.ensure_future(incarnation.ready())
        (Path(order.rank.meet) / "joined-0").touch()
        await asyncio.wait_for(ready, 5)
    finally:
        incarnation.started()
