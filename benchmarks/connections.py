"""Sockets and requests to the job's store, counted on 2 to 8 ranks over gloo and calculated for thousands over NCCL.

    make bench-connections ARGS="[--output docs/cluster.md] [--json out.json]"

pretrain_gpt.py trains a tiny model under each of `LAYOUTS`, once to count sockets and once to count requests (a process
that counts requests keeps connections that it else closes). From runs of 2 and 4 ranks follows by which axes each
process group grows; those of 8 ranks must then come out exactly. A process has, over gloo, n - 1 sockets and makes
2n + 1 requests for each group of n ranks.

Over NCCL the groups are the same but for those of `GLOO`, which stay, and connect through the store with one request a
rank and communicator (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp), were all of them used. The sockets of NCCL
itself are not counted. Its process group looks into the store once a second (TORCH_NCCL_COORD_CHECK_MILSEC).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

from benchmarks import connection_ranks
from benchmarks.report import Figures, Outcome, Page, markdown
from helixpipe.watch.watchdog import STORE_REQUESTS
from megatron.pretrain.checkpoint.host_network import TREE

MODEL = (
    "--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 8 --lr 1e-2 --num-workers 0 --eval-iters 0 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 100 --distributed-backend gloo"
)


class Layout(NamedTuple):
    """Sizes of the axes."""

    tp: int
    pp: int
    dp: int

    @property
    def ranks(self) -> int:
        return prod(self)

    @property
    def flags(self) -> str:
        schedule = "--pipeline-schedule 1f1b" if self.pp > 1 else ""
        sizes = f"--tensor-model-parallel-size {self.tp} --pipeline-model-parallel-size {self.pp}"
        return f"{MODEL} {sizes} {schedule}"


LAYOUTS = tuple(
    Layout(*sizes)
    for sizes in (
        *((2, 1, 1), (1, 2, 1), (1, 1, 2)),
        *((2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1)),
        *((2, 2, 2), (1, 8, 1)),
    )
)
FITTED = 4
"""Ranks of the largest runs from which formulas follow; larger ones check them."""

LARGE = (Layout(8, 16, 8), Layout(8, 16, 128))

ENDS = 2
"""The most ranks of a group of two: those that hold tied weights, first and last of a pipeline."""

GLOO = {"--variable-seq-lengths": (("tp", "pp"), ("dp",))}
"""Groups that are gloo's under NCCL, by the flag that makes them and the axes of their ranks: a pipeline and the ranks
that plan (megatron/pretrain/plan/plan_stream.py)."""

SNAPSHOTS = "--in-memory-checkpoint-interval"
NEAR = TREE + 2
"""Connections that this flag adds to a process, at most, over gloo at any time: those of a tree of all ranks, and to
the two ranks that it exchanges snapshots with (megatron/pretrain/checkpoint/host_network.py)."""

REPLICAS = Layout(1, 1, 8)
"""The run in which they are counted: each rank's neighbours are others than those in the tree."""

STARTING = ("groups", "data", "watchdog")
"""Kinds of requests that are made when a run starts, and no more."""

CHANNEL_ENDS = 4
"""Communicators of two ranks that an inner rank of a pipeline with neighbours has: to and from each."""


@dataclass(frozen=True)
class Options(Figures, Page):
    pass


def run(options: Options) -> Outcome:
    counted = count(LAYOUTS)
    laws = fit({layout: ranks for layout, ranks in counted.items() if layout.ranks <= FITTED})
    checks = {layout: differences(laws, layout, ranks) for layout, ranks in counted.items() if layout.ranks > FITTED}
    added = of_snapshots()
    table = report(laws)
    said = [
        f"{layout}: {'; '.join(wrong) or 'sockets and requests as calculated'}; "
        f"{polls_a_second(counted[layout]):.2f} requests of the watchdog a second and rank"
        for layout, wrong in checks.items()
    ]
    said.append(
        f"{REPLICAS}: {SNAPSHOTS} adds {min(added)} to {max(added)} sockets to a process, at most {NEAR} anywhere"
    )
    figures = [{"layout": layout._asdict(), "ranks": ranks} for layout, ranks in counted.items()]
    status = int(any(checks.values()) or max(added) > NEAR)
    return Outcome("\n".join([*table, "", *said]), tables={"connections": table}, figures=figures, status=status)


def count(layouts: Sequence[Layout]) -> dict[Layout, list[dict[str, Any]]]:
    """Return what each rank of each layout counted: requests, and sockets in another run of the same."""
    runs = [
        {"ranks": layout.ranks, "flags": layout.flags, "requests": requests}
        for layout in layouts
        for requests in (True, False)
    ]
    with tempfile.TemporaryDirectory() as folder:
        counted = connection_ranks.run(folder, runs)
    pairs = zip(counted[::2], counted[1::2], strict=True)
    return {
        layout: [{**own, "sockets": other["sockets"]} for own, other in zip(*both, strict=True)]
        for layout, both in zip(layouts, pairs, strict=True)
    }


def of_snapshots() -> list[int]:
    """Return how many sockets more each rank has with snapshots in memory, in a run of 8 replicas."""
    flags = REPLICAS.flags
    runs = [{"ranks": REPLICAS.ranks, "flags": f"{flags}{more}", "requests": False} for more in ("", f" {SNAPSHOTS} 1")]
    with tempfile.TemporaryDirectory() as folder:
        without, having = connection_ranks.run(folder, runs)
    return [own["sockets"]["others"] - less["sockets"]["others"] for own, less in zip(having, without, strict=True)]


# ------------------------------------------------------------------------------------------------------------ formulas


class Axes(NamedTuple):
    """A group has the product of these axes' sizes, or at most so many ranks."""

    names: tuple[str, ...]
    most: int | None = None

    def size(self, layout: Layout) -> int:
        size = prod(getattr(layout, name) for name in self.names)
        return size if self.most is None else min(size, self.most)


class Laws(NamedTuple):
    """groups: of rank 0, by name. store: connections of a rank to the store. served: those of the store's process for
    each. data: requests of each rank, and more of all together. watchdog: requests of each rank when it begins."""

    groups: Mapping[str, Axes]
    store: Mapping[bool, int]
    data: tuple[int, int]
    watchdog: int

    def sizes(self, layout: Layout) -> list[int]:
        """Of rank 0's groups of several ranks."""
        return [size for each in self.groups.values() if (size := each.size(layout)) > 1]


def fit(counted: Mapping[Layout, Sequence[Mapping[str, Any]]]) -> Laws:
    """Return the formulas that runs follow. Raises ValueError where they follow none."""
    sizes: dict[str, dict[Layout, int]] = {}
    for layout, ranks in counted.items():
        for name, size in ranks[0]["groups"]:
            sizes.setdefault(name, {})[layout] = size
    groups = {name: _axes(name, {each: own.get(each, 1) for each in counted}) for name, own in sizes.items()}
    store = {layout.pp > 1: ranks[0]["sockets"]["store"] for layout, ranks in counted.items()}
    totals = {layout.ranks: _total(ranks, "data") for layout, ranks in counted.items()}
    (few, fewer), (many, more) = min(totals.items()), max(totals.items())
    each = (more - fewer) // (many - few)
    watchdog = next(iter(counted.values()))[0]["start"]["watchdog"]
    return Laws(groups, store, (each, fewer - each * few), watchdog)


def _axes(name: str, sizes: Mapping[Layout, int]) -> Axes:
    names = Layout._fields
    subsets = [each for length in range(len(names) + 1) for each in combinations(names, length)]
    for most in (None, ENDS):
        for subset in subsets:
            axes = Axes(subset, most)
            if all(axes.size(layout) == size for layout, size in sizes.items()):
                return axes
    raise ValueError(f"the sizes of {name} follow from no axes: {dict(sizes)}")


def gloo_sockets(size: int) -> int:
    """A process's, of a group: one to each other rank."""
    return size - 1


def gloo_requests(size: int) -> int:
    """A process's, to connect a group: its own address, and those of all to be waited for and read."""
    return 2 * size + 1


def _total(ranks: Sequence[Mapping[str, Any]], kind: str, when: str = "start") -> int:
    return sum(int(rank[when].get(kind, 0)) for rank in ranks)


def differences(laws: Laws, layout: Layout, ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return in what a run is not as calculated; rank 0 stands for the sockets and groups of all."""
    first, sizes = ranks[0], laws.sizes(layout)
    alone = len(first["groups"]) - len(sizes)
    store, (each, more) = laws.store[layout.pp > 1], laws.data
    expected = {
        "sockets of groups": (sum(map(gloo_sockets, sizes)), first["sockets"]["others"]),
        "connections to the store": (store * layout.ranks, sum(rank["sockets"]["store"] for rank in ranks)),
        "connections of the store": (store * layout.ranks, first["sockets"]["served"]),
        "requests of groups": (
            sum(map(gloo_requests, [*sizes, *[1] * alone])),
            first["start"]["groups"],
        ),
        "requests for data": (each * layout.ranks + more, _total(ranks, "data")),
        "requests of the watchdog": (laws.watchdog * layout.ranks, _total(ranks, "watchdog")),
        "requests in steps and later": (
            0,
            sum(_total(ranks, kind, when) for kind in STARTING for when in ("steps", "quiet")),
        ),
    }
    return [f"{name} {there}, calculated {own}" for name, (own, there) in expected.items() if own != there]


def polls_a_second(ranks: Sequence[Mapping[str, Any]]) -> float:
    """Return how often a rank's watchdog looked into the store while nothing happened."""
    return _total(ranks, "polls", "quiet") / sum(rank["seconds"] for rank in ranks)


def at_scale(laws: Laws, layout: Layout) -> dict[str, Any]:
    """Return what is calculated of a run over NCCL: sockets of a process and of the store's, requests."""
    store, (each, more) = laws.store[layout.pp > 1], laws.data
    communicators = len(laws.sizes(layout)) + CHANNEL_ENDS
    gloo = {flag: sum(gloo_sockets(Axes(axes).size(layout)) for axes in groups) for flag, groups in GLOO.items()}
    return {
        "process": store,
        "gloo": {flag: store + more for flag, more in gloo.items()} | {SNAPSHOTS: store + NEAR},
        "all gloo": store + sum(map(gloo_sockets, laws.sizes(layout))),
        "store": store * layout.ranks,
        "start": layout.ranks * (communicators + each + laws.watchdog) + more,
        "watchdog": min(layout.ranks, round(STORE_REQUESTS)),
        "torch": layout.ranks,
    }


def report(laws: Laws) -> list[str]:
    """The table."""
    at = [at_scale(laws, layout) for layout in LARGE]
    lines = [
        ("sockets of a process, without NCCL's own", *(each["process"] for each in at)),
        *((f"with `{flag}`", *(each["gloo"][flag] for each in at)) for flag in (*GLOO, SNAPSHOTS)),
        ("of the process with the store", *(each["store"] for each in at)),
        ("requests at start, at most", *(each["start"] for each in at)),
        ("a second: watchdog", *(each["watchdog"] for each in at)),
        ("a second: torch, for NCCL", *(each["torch"] for each in at)),
    ]
    tp, pp, _ = LARGE[0]
    head = (
        f"calculated from a run of 2 to 8 ranks; TP {tp}, PP {pp}, 1f1b",
        *(f"{layout.ranks:,} ranks" for layout in LARGE),
    )
    return markdown(head, [(name, *(f"{value:,}" for value in values)) for name, *values in lines], "lrr")
