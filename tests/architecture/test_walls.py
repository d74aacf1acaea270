"""The walls that import-linter cannot state: whitelists, drawers, and names."""

import ast
import pkgutil
import re
import sys
import tomllib
from collections import Counter, defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("fleet", "bus", "tracker", "router", "migration", "engine_adapter", "client", "deploy")
ELSEWHERE = (ROOT / "engine_adapter/vllm/plugin", ROOT / "engine_adapter/sglang/launcher")
DRAWERS = {"utils", "util", "common", "helpers", "core", "shared", "manager", "misc"}
MOST_FILES = 25
FLEET_THIRD_PARTY = {"numpy", "msgspec", "xxhash"}
FLEET_FORBIDDEN = {
    "asyncio",
    "time",
    "random",
    "os",
    "logging",
    "threading",
    "socket",
    "pathlib",
    "subprocess",
    "datetime",
}


def python_files(*folders: str) -> list[Path]:
    """Without what runs in processes of vLLM and SGLang and imports nothing of Roost: its tests see to its walls."""
    files = {path for folder in folders for path in (ROOT / folder).rglob("*.py")}
    return sorted(path for path in files if not any(path.is_relative_to(folder) for folder in ELSEWHERE))


def imported_modules(path: Path) -> set[str]:
    """Dotted names a file imports, wherever in the file; `from a import b` counts as a.b and a."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def test_every_fleet_module_is_imported_by_at_least_two_parts() -> None:
    users: dict[str, set[str]] = defaultdict(set)
    for part in PACKAGES:
        for path in python_files(part):
            for name in imported_modules(path):
                users[name].add(part)
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in python_files("fleet")
        if path.stem not in ("__init__", "messages")
    ]
    lonely = {module: sorted(users[module]) for module in modules if len(users[module]) < 2}
    assert not lonely, f"fleet is no drawer; move these to their only user: {lonely}"


def test_fleet_imports_only_its_three_libraries_and_pure_standard_modules() -> None:
    for path in python_files("fleet"):
        tops = {name.split(".")[0] for name in imported_modules(path)}
        foreign = {
            top
            for top in tops
            if top not in sys.stdlib_module_names and top not in FLEET_THIRD_PARTY | {"fleet"}
        }
        assert not foreign, f"{path.name} imports {foreign}"
        assert not tops & FLEET_FORBIDDEN, f"{path.name} imports {tops & FLEET_FORBIDDEN}"


def test_the_product_never_imports_transformers() -> None:
    for path in python_files(*PACKAGES):
        assert "transformers" not in {name.split(".")[0] for name in imported_modules(path)}, path


def test_nixl_is_loaded_by_its_one_door() -> None:
    """By name, so import-linter does not see it."""
    doors = [
        path.relative_to(ROOT)
        for path in python_files(*PACKAGES)
        if '"nixl_cu12"' in path.read_text() or imported_modules(path) & {"nixl", "nixl_cu12"}
    ]
    assert doors == [Path("engine_adapter/transfer/nixl_loader.py")]


def test_only_the_composition_root_reads_the_environment() -> None:
    for path in python_files(*PACKAGES[:-1]):
        names = {
            node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
        }
        assert not names & {"environ", "getenv"}, f"{path} reads the environment; pass the value from deploy"


@pytest.mark.parametrize("folder", ["benchmarks", "deploy"])
def test_no_script_bears_a_standard_library_name(folder: str) -> None:
    clashes = [path.name for path in (ROOT / folder).rglob("*.py") if path.stem in sys.stdlib_module_names]
    assert not clashes, f"these would shadow the standard library when run as scripts: {clashes}"


def test_no_module_is_a_drawer() -> None:
    shared_memory = ROOT / "engine_adapter/transfer/shared_memory.py"  # named after the thing itself
    named = [
        path
        for path in python_files(*PACKAGES, "benchmarks")
        if path.stem in DRAWERS or set(path.parent.parts) & DRAWERS
    ]
    assert named in ([], [shared_memory])


def test_no_folder_holds_more_than_a_shelf_of_files() -> None:
    counts = Counter(
        path.parent.relative_to(ROOT) for path in python_files(*PACKAGES, "tests", "benchmarks", "docs")
    )
    heaps = {str(folder): count for folder, count in counts.items() if count > MOST_FILES}
    assert not heaps, f"split these folders, so that none holds more than {MOST_FILES} Python files: {heaps}"


def test_tests_lie_in_the_rooms_of_what_they_test() -> None:
    rooms = {
        path.parent.relative_to(ROOT / "tests")
        for path in python_files(*(f"tests/{part}" for part in PACKAGES))
    }
    strange = [str(room) for room in rooms if not (ROOT / room).is_dir()]
    assert not strange, f"no folder of the product has these names: {strange}"


def test_a_class_name_means_one_thing_in_the_product() -> None:
    where: dict[str, list[str]] = defaultdict(list)
    for path in python_files(*PACKAGES):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(str(path.relative_to(ROOT)))
    ambiguous = {name: files for name, files in where.items() if len(files) > 1}
    assert not ambiguous, f"rename all but one of each: {ambiguous}"


def test_new_names_in_the_table_of_renamed_things_exist() -> None:
    for line in (ROOT / "docs/renamed.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 3:
            pkgutil.resolve_name(f"{cells[0].strip('`')}:{cells[2].strip('`')}")
        elif line.startswith("| `"):
            for name in re.findall(r"`([\w.]+)`", cells[1]):
                assert find_spec(name) is not None, line


def test_every_room_has_its_line_in_the_architecture() -> None:
    told = (ROOT / "docs/architecture.md").read_text()
    rooms = {
        path.parent
        for path in python_files(*PACKAGES[1:])
        if path.name == "__init__.py" and path.parents[2] == ROOT
    }
    missing = sorted(str(room.relative_to(ROOT)) for room in rooms if f"| `{room.name}/`" not in told)
    assert not missing, f"docs/architecture.md says nothing of these rooms: {missing}"


def test_tests_are_no_packages() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_the_wheel_carries_the_seven_product_packages_only() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert sorted(wheel["packages"]) == sorted(PACKAGES)
