"""Binding to the NUMA node of a GPU, on a made-up /sys."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from helixpipe.runtime.numa import bind_to_device, cores

GPU = torch.device("cuda", 3)
PROPERTIES = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x1B, pci_device_id=2)


@pytest.fixture
def affinity(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Cores on which the process may run: 0 to 7 of what the machine has, and what it changes them to."""
    own = set(range(8))

    def change(pid: int, chosen: set[int]) -> None:
        assert pid == 0
        own.clear()
        own.update(chosen)

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(own))
    monkeypatch.setattr(os, "sched_setaffinity", change)
    return own


def machine(root: Path, node: str, *lists: str) -> Path:
    place = root / "bus/pci/devices/0001:1b:02.0"
    place.mkdir(parents=True)
    (place / "numa_node").write_text(f"{node}\n")
    for number, cpulist in enumerate(lists):
        folder = root / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpulist}\n")
    return root


def test_a_process_runs_on_the_cores_near_its_gpu(tmp_path: Path, affinity: set[int]) -> None:
    root = machine(tmp_path, "1", "0-1,4-5", "2-3,6,9-12")
    assert bind_to_device(GPU, root, PROPERTIES) is None
    assert affinity == {2, 3, 6}


def test_a_machine_with_one_node_need_not_name_it(tmp_path: Path, affinity: set[int]) -> None:
    assert bind_to_device(GPU, machine(tmp_path, "-1", "0-15"), PROPERTIES) is None
    assert affinity == set(range(8))


@pytest.mark.parametrize(
    ("node", "lists", "reason"),
    [
        ("-1", ("0-3", "4-7"), "the system does not say on which node the GPU at 0001:1b:02.0 is"),
        ("1", ("0-3", "8-15"), "it may not run on the cores of the GPU's node 1"),
        ("2", ("0-3", "4-7"), "No such file"),
        ("one", ("0-3",), "invalid literal"),
        ("0", ("",), "invalid literal"),
    ],
)
def test_where_it_cannot_be_it_is_said_in_one_line(
    tmp_path: Path, affinity: set[int], node: str, lists: tuple[str, ...], reason: str
) -> None:
    line = bind_to_device(GPU, machine(tmp_path, node, *lists), PROPERTIES)
    assert line is not None and line.startswith("this process is not bound to the NUMA node of its GPU: ")
    assert reason in line and "\n" not in line
    assert affinity == set(range(8))


def test_systems_without_gpu_files_or_permission(
    tmp_path: Path, affinity: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "there is no GPU" in str(bind_to_device(torch.device("cpu"), tmp_path))
    assert "No such file" in str(bind_to_device(GPU, tmp_path, PROPERTIES))

    def refuse(pid: int, chosen: set[int]) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    root = machine(tmp_path, "0", "0-3")
    assert "Operation not permitted" in str(bind_to_device(GPU, root, PROPERTIES))
    monkeypatch.delattr(os, "sched_setaffinity")
    assert "sched_setaffinity" in str(bind_to_device(GPU, root, PROPERTIES))


def test_lists_of_cores(tmp_path: Path) -> None:
    path = tmp_path / "cpulist"
    path.write_text("0-2,7,10-11\n")
    assert cores(path) == {0, 1, 2, 7, 10, 11}
