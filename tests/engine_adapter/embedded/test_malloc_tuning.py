"""Memory that a step frees stays with the process, so that the next step finds its pages mapped."""

import platform
import resource
import subprocess
import sys

import pytest

TOUCH = """
import resource, sys, numpy
from engine_adapter.embedded.malloc_tuning import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def touch():
    kept = [numpy.ones(1 << 20, numpy.uint8) for _ in range(16)]
touch(); touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10): touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode):
    return int(
        subprocess.run([sys.executable, "-c", TOUCH, mode], check=True, capture_output=True, text=True).stdout
    )


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_memory_that_was_freed_is_used_again_without_page_faults():
    pages = 10 * 16 * (1 << 20) // resource.getpagesize()
    assert faults("keep") < pages / 100 < pages / 10 < faults("return")
