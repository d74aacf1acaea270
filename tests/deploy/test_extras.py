"""Without the extras, everything but our own engine runs, and what cannot run says which extra it needs."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WITHOUT = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "safetensors", "dynamo", "nixl", "nixl_cu12", "nixl_cu13", "matplotlib", "zmq"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
sys.path_importer_cache.clear()
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {"torch", "safetensors", "zmq", "dynamo"} else found(name, package)
"""


def without_extras(code: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_router_tracker_planner_and_commands_need_no_extra() -> None:
    parts = "router, tracker, planner, static_backend, simulated"
    done = without_extras(
        f"import deploy.cli.app\nfrom deploy.parts import {parts}\nprint(sorted({{'torch', 'safetensors',"
        " 'dynamo'} & set(sys.modules)))"
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_embedded_engine_names_the_extra_that_it_needs() -> None:
    done = without_extras("sys.argv = ['roost', 'up']\nfrom deploy.cli.app import main\nmain()")
    assert done.returncode == 2
    assert "pip install 'roost[engine]', or choose --engine simulated" in " ".join(done.stderr.split())


def test_the_agent_of_an_sglang_names_the_extra_that_it_needs() -> None:
    done = without_extras(
        "sys.argv = ['roost', 'worker', '--engine', 'sglang', '--url', 'http://a']\n"
        "from deploy.cli.app import main\nmain()"
    )
    assert done.returncode == 2
    assert "pip install 'roost[sglang]'" in " ".join(done.stderr.split())


def test_the_agent_of_a_vllm_names_the_extra_that_it_needs() -> None:
    done = without_extras(
        "sys.argv = ['roost', 'worker', '--engine', 'vllm', '--url', 'http://a']\n"
        "from deploy.cli.app import main\nmain()"
    )
    assert done.returncode == 2
    assert "pip install 'roost[vllm]'" in " ".join(done.stderr.split())


def test_a_worker_of_dynamo_names_the_extra_that_it_needs() -> None:
    done = without_extras(
        "sys.argv = ['roost', 'worker', '--engine', 'simulated', '--dynamo', 'dynamo']\n"
        "from deploy.cli.app import main\nmain()"
    )
    assert done.returncode == 2
    assert "pip install 'roost[dynamo]'" in " ".join(done.stderr.split())


def test_a_router_in_dynamo_names_the_extra_that_it_needs() -> None:
    done = without_extras(
        "sys.argv = ['roost', 'router', '--dynamo', 'workers', '--frontend-migration-limit', '0']\n"
        "from deploy.cli.app import main\nmain()"
    )
    assert done.returncode == 2
    assert "pip install 'roost[dynamo]'" in " ".join(done.stderr.split())
