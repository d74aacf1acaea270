"""The wheel holds what running needs, and nothing else."""

import shutil
import zipfile
from pathlib import Path

import pytest

import hatch_build
from deploy.sections import DEMO_CHECKPOINT

wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling (extra dev) builds the wheel")

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = {f"{folder}/{hatch_build.LIBRARY}" for folder in hatch_build.KERNELS}
ELSEWHERE = ("engine_adapter/vllm/plugin/", "engine_adapter/sglang/launcher/")
PACKAGES = ("fleet", "bus", "tracker", "router", "migration", "engine_adapter", "client", "deploy")
BOARDS = {"deploy/dashboards/loop.json", "deploy/dashboards/router.json"}
DASHBOARD = {
    str(path.relative_to(ROOT)) for path in (ROOT / "router/dashboard/static").rglob("*") if path.is_file()
}
PRICES = {"migration/hardware/published_prices.json"}
DEMO_MODEL = {
    f"deploy/demo_model/checkpoint/{name}"
    for name in (
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    )
}


@pytest.fixture(scope="module")
def files() -> set[str]:
    """Return the paths in the wheel, as the build back end chooses them."""
    builder = wheel.WheelBuilder(str(ROOT))
    return {file.distribution_path for file in builder.recurse_included_files()}


def test_the_wheel_holds_boards_the_dashboard_the_demo_model_and_marks_of_typed_packages(
    files: set[str],
) -> None:
    data = {file for file in files if not file.endswith((".py", ".so"))}
    assert len(DASHBOARD) > 10
    assert data == BOARDS | DASHBOARD | DEMO_MODEL | PRICES | {f"{package}/py.typed" for package in PACKAGES}
    assert f"{DEMO_CHECKPOINT.relative_to(ROOT)}/model.safetensors" in files


@pytest.mark.slow
def test_a_built_wheel_holds_the_compiled_loops_and_is_for_its_platform(tmp_path: Path) -> None:
    """Build from a copy of what the containers build from."""
    source = tmp_path / "source"
    for name in (*PACKAGES, "pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        source.mkdir(exist_ok=True)
        copy(ROOT / name, source / name)
    for library in LIBRARIES:
        (source / library).unlink(missing_ok=True)
    builder = wheel.WheelBuilder(str(source))
    (built,) = builder.build(directory=str(tmp_path), versions=["standard"])
    assert Path(built).name.startswith("roost-0.1.0-cp311-abi3-linux_")
    with zipfile.ZipFile(built) as archive:
        assert set(archive.namelist()) >= LIBRARIES


def test_without_a_compiler_the_reason_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    reason = hatch_build.compile_kernels(tmp_path)
    assert reason is not None
    assert "no-such-compiler" in reason


def test_the_wheel_holds_every_module(files: set[str]) -> None:
    modules = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    elsewhere = {module for module in modules if module.startswith(ELSEWHERE)}
    assert len(elsewhere) > 1, "what runs in the environments of vLLM and SGLang"
    assert {file for file in files if file.endswith(".py")} == modules - elsewhere
