"""Identity of the machine on which steps were measured."""

import os
import platform
from pathlib import Path

import torch
import xxhash

_CPU_INFO = Path("/proc/cpuinfo")


def processor(cpu_info: str) -> str:
    """Return the model of the first processor in the text of /proc/cpuinfo. Empty if it names none."""
    for line in cpu_info.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return ""


def hardware_digest(ranks: int, dtype: str) -> str:
    """Return a digest, 16 hexadecimal digits, of what decides step times beside the model: processor, cores,
    ranks, dtype and version of torch. Times of engines with different digests are not comparable."""
    known = processor(_CPU_INFO.read_text(errors="replace")) if _CPU_INFO.exists() else ""
    about = (known or platform.machine(), os.cpu_count(), ranks, dtype, torch.__version__)
    return xxhash.xxh3_64_hexdigest(repr(about).encode())
