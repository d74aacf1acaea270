"""The resident size of this process, compared with the kernel's own sum over its mappings."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engine_adapter import resident_memory as module
from engine_adapter.resident_memory import ResidentMemory, resident_memory
from engine_adapter.transfer.mapped_memory import mapped

MIB = 1 << 20
SLACK = 4 * MIB
"""the kernel counts pages per core, and adds the counts up from time to time"""


def summed(field: str) -> int:
    """Sum a field of /proc/self/smaps_rollup, in bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def test_the_total_is_the_sum_over_all_mappings_and_its_parts_are_within_it() -> None:
    found = resident_memory()
    assert found.total == pytest.approx(summed("Rss"), abs=SLACK)
    assert found.private == pytest.approx(summed("Anonymous"), abs=2 * SLACK)
    assert found.shared >= 0
    assert found.files > 0


def test_cells_count_as_shared_and_arrays_as_private() -> None:
    before = resident_memory()
    descriptor, cells = mapped("cells", 64 * MIB)
    os.close(descriptor)
    with_cells = resident_memory()
    assert with_cells.shared - before.shared == pytest.approx(64 * MIB, abs=SLACK)
    array = np.ones(64 * MIB, np.uint8)
    after = resident_memory()
    assert after.private - with_cells.private == pytest.approx(64 * MIB, abs=SLACK)
    assert after.shared - with_cells.shared == pytest.approx(0, abs=SLACK)
    assert len(cells) == len(array)


def test_a_mapped_file_counts_once_it_was_read(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(32 * MIB))
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as content:
        before = resident_memory()
        assert int(np.frombuffer(content, np.uint8).sum()) == 0
        assert resident_memory().files - before.files == pytest.approx(32 * MIB, abs=SLACK)


def test_nothing_is_known_where_the_system_states_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STATUS", tmp_path / "none")
    assert resident_memory() == ResidentMemory(0, 0, 0)
    (tmp_path / "none").write_text("Name:\tpython\nVmRSS:\t    12 kB\n")
    assert resident_memory() == ResidentMemory(12 * 1024, 0, 0)


def test_reading_it_loads_no_library() -> None:
    """It is read in processes of engines without weights, too."""
    code = "import sys, engine_adapter.resident_memory; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
