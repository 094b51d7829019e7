"""A process runs on the cores that are near its GPU, so that what it copies does not cross the link between processors.

A page of memory lies on the NUMA node of the core that first touches it (the kernel's default policy, "first touch");
a page-locked one is touched when it is allocated. So it is enough to say where a process may run, before its first
page-locked page; no policy for memory is needed. Threads inherit it from the one that starts them. `torchrun
--numa-binding=node` does the same, and leaves nothing to do here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def bind_to_device(device: torch.device, root: Path = Path("/sys"), properties: Any = None) -> str | None:
    """Let the calling thread, and those it starts from now on, run on the cores of the GPU's NUMA node alone.

    root: where the kernel shows devices. properties: the GPU's, if not torch's. Returns None, or one line that says why
    the thread runs where it did: without a GPU, in a container that hides the files or the cores, on other systems.
    """
    if device.type != "cuda":
        return _left("there is no GPU")
    properties = properties or torch.cuda.get_device_properties(device)
    try:
        node = numa_node(pci_address(properties), root)
        near = cores(root / f"devices/system/node/node{node}/cpulist")
        allowed = os.sched_getaffinity(0)
        if not near & allowed:
            return _left(f"it may not run on the cores of the GPU's node {node}")
        os.sched_setaffinity(0, near & allowed)
    except (OSError, ValueError, AttributeError) as error:
        return _left(str(error))
    return None


def pci_address(properties: Any) -> str:
    """Return `0000:1b:00.0`, as the kernel writes it."""
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def numa_node(address: str, root: Path) -> int:
    """Return the NUMA node of a PCI device. A machine with one node may say -1. Raises OSError or ValueError."""
    node = int((root / f"bus/pci/devices/{address}/numa_node").read_text())
    if node >= 0:
        return node
    if len([*(root / "devices/system/node").glob("node[0-9]*")]) == 1:
        return 0
    raise ValueError(f"the system does not say on which node the GPU at {address} is")


def cores(cpulist: Path) -> set[int]:
    """Return the cores of a list like `0-27,56-83`. Raises OSError or ValueError."""
    numbers: set[int] = set()
    for part in cpulist.read_text().strip().split(","):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def _left(reason: str) -> str:
    return f"this process is not bound to the NUMA node of its GPU: {reason}."
