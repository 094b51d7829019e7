"""`torch.distributed` over groups that move nothing: its own functions run, on backends that write down what comes.

Numbers are not sent, but Python objects are wanted: other ranks' are what `Others` makes of this rank's own.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

Others = Callable[[Any, int], Any]
"""From the object that this rank gives and another rank of the job to the object which that rank would give."""


@dataclass
class MadeGroups:
    """The process groups that a rank has made: its own, by name, and all of a description, whoever is in them."""

    own: dict[str, tuple[int, ...]] = field(default_factory=dict)
    described: dict[str, list[tuple[int, ...]]] = field(default_factory=lambda: defaultdict(list))

    def beside(self, ranks: tuple[int, ...], rank: int) -> tuple[int, ...] | None:
        """Return the group that has a rank, among those described as the one of these ranks is; None if none is."""
        kinds = (alike for alike in self.described.values() if ranks in alike)
        return next((group for alike in kinds for group in alike if rank in group), None)


def replace_groups(fake: Any, rank: int, world_size: int, others: Others) -> MadeGroups:
    """Make torch.distributed's NCCL and gloo groups those of the fake device, in this process and for good. Returns
    where the groups that are made from now on can be looked up.

    fake: the compiled module. others: what other ranks give where Python objects are gathered.
    """
    made = MadeGroups()
    package: Any = dist
    c10d: Any = dist.distributed_c10d
    store = package.HashStore()

    class ProcessGroupNCCL(fake.Group):
        Options = fake.Options

        def __init__(self, store: Any, rank: int, size: int, options: Any):
            super().__init__(store, rank, size, options, True)

    class ProcessGroupGloo(fake.Group):
        def __init__(self, store: Any, rank: int, size: int, timeout: Any):
            super().__init__(store, rank, size, fake.Options(), False)

    def rendezvous(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
        yield store, rank, world_size

    def all_gather_object(objects: list[Any], value: Any, group: Any = None) -> None:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        objects[:] = [value if each == rank else others(value, each) for each in ranks]

    def gather_object(value: Any, objects: list[Any] | None = None, dst: int = 0, group: Any = None) -> None:
        if objects is not None:
            all_gather_object(objects, value, group)

    def broadcast_object_list(objects: list[Any], *args: Any, **kwargs: Any) -> None:
        """The objects stay those of this rank."""

    new_group, init_process_group = dist.new_group, dist.init_process_group

    def note(group: Any, ranks: Any, description: str) -> None:
        members = tuple(range(world_size)) if ranks is None else tuple(ranks)
        made.described[description].append(members)
        if rank in members:
            made.own[c10d._world.pg_names[group]] = members

    def noted_new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        group = new_group(ranks, *args, **kwargs)
        note(group, ranks, kwargs.get("group_desc") or "")
        return group

    def noted_init(*args: Any, **kwargs: Any) -> None:
        init_process_group(*args, **kwargs)
        note(dist.group.WORLD, None, "")

    functions = {
        "all_gather_object": all_gather_object,
        "gather_object": gather_object,
        "broadcast_object_list": broadcast_object_list,
        "is_nccl_available": lambda: True,
        "new_group": noted_new_group,
        "init_process_group": noted_init,
    }
    for module in (package, c10d):
        module.ProcessGroupNCCL, module.ProcessGroupGloo = ProcessGroupNCCL, ProcessGroupGloo
        for name, function in functions.items():
            setattr(module, name, function)
    handlers: Any = sys.modules["torch.distributed.rendezvous"]
    handlers._rendezvous_handlers["env"] = rendezvous
    return made
