"""GPUs that are considered, and the links between them, each rate with its source. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_NVIDIA = "NVIDIA aiconfigurator-core 0.12.0"
_NCCL = f"{_NVIDIA}, NCCL 2.29.2, all-to-all of 537 MB per GPU, 8 GPUs"


NODE_GPUS = 8
"""GPUs that one NVLink switch joins"""


@dataclass(frozen=True, slots=True)
class LinkRate:
    """Speed of a link for one GPU, in one direction."""

    name: str
    bytes_per_second: float | None
    """None: no published figure"""
    source: str
    is_floor: bool = True
    """False: measured, so that software is included"""
    is_within_node: bool = False
    """NVLink: it joins the GPUs of a node only"""

    def seconds(self, moved: float) -> float | None:
        """Return the time to receive these bytes on every GPU at once; None: unknown."""
        return None if self.bytes_per_second is None else moved / self.bytes_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A node of GPUs joined by NVLink through a switch."""

    name: str
    title: str
    memory: float
    """bytes of a GPU"""
    nvlink: float
    """line rate of a GPU in one direction, bytes per second"""
    nccl: float | None
    """measured, 8 GPUs, bytes per second; None: no published figure"""
    source: str


_MACHINES = (
    Machine(
        name="h200-nvl",
        title="H200 SXM, 8 on an NVLink switch (not the H200 NVL card)",
        memory=141e9,
        nvlink=450e9,
        nccl=7 / 8 * 2 * 2**28 / 1.5099e-3,
        source=f"{_NVIDIA}, h200_sxm",
    ),
    Machine(
        name="h100",
        title="H100 SXM 80 GB, 8 on an NVLink switch",
        memory=80e9,
        nvlink=450e9,
        nccl=7 / 8 * 2 * 2**28 / 1.4904e-3,
        source=f"{_NVIDIA}, h100_sxm",
    ),
    Machine(
        name="b200",
        title="B200 SXM, 8 on an NVLink switch",
        memory=180e9,
        nvlink=900e9,
        nccl=None,
        source=f"{_NVIDIA}, b200_sxm",
    ),
    Machine(
        name="a100",
        title="A100 SXM 80 GB, 8 on an NVLink switch",
        memory=80e9,
        nvlink=300e9,
        nccl=None,
        source=f"{_NVIDIA}, a100_sxm",
    ),
)
MACHINES: Mapping[str, Machine] = {one.name: one for one in _MACHINES}
_GIGABIT = 1e9 / 8


def links(machine: Machine, ranks: int) -> Iterator[LinkRate]:
    """Yield the links over which all bytes of a switch may go. A network adapter of a node is shared by the
    node's GPUs."""
    in_node = min(ranks, NODE_GPUS)
    yield LinkRate("NVLink, line rate", machine.nvlink, machine.source, is_within_node=True)
    yield LinkRate("NVLink, measured with NCCL", machine.nccl, _NCCL, is_floor=False, is_within_node=True)
    for name, gigabits, sharing in (
        ("InfiniBand, one 400G port per GPU", 400, 1),
        ("InfiniBand, one 400G port per node", 400, in_node),
        ("TCP, 100G per node", 100, in_node),
        ("TCP, 25G per node", 25, in_node),
    ):
        shared = f" for {sharing} GPUs" if sharing > 1 else ""
        yield LinkRate(name, gigabits * _GIGABIT / sharing, f"line rate, {gigabits} Gbit/s{shared}")


def machine_named(name: str) -> Machine:
    """Return a machine. ValueError names those that are known."""
    if name not in MACHINES:
        raise ValueError(f"hardware {name!r} is not known; use one of {', '.join(MACHINES)}")
    return MACHINES[name]
