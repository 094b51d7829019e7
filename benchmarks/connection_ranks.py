"""Runs pretrain_gpt.py on ranks that count their TCP connections and their requests to the job's store.

python -m benchmarks.connection_ranks RUNS RESULT     (both are files: lists of runs, and of what their ranks counted)

Ranks are forked from a process that has imported all they need. Rank 0 holds the store. Requests are counted where they
are made, in Python and in torch's own code alike: the store that torch.distributed gets is one that counts, and hands
them on. A rank counts when `BEFORE` steps are done, after some more of them, and then some seconds later.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from helixpipe.common.json_values import parse_json

BEFORE, BETWEEN = 2, 3
"""Steps until ranks count for the first time, and until the second."""

SECONDS = 3.0
"""Then they wait, where they count requests, and count again."""

KINDS = {
    "get default_pg/0//watchdog/": "polls",
    "watchdog/": "watchdog",
    "all ranks/": "data",
    "adapt/": "reports",
}
"""Parts of a request, and who makes it: the watchdog, which asks again and again, ranks that build data together, ranks
that report their steps' times. What has none of them connects a group's ranks."""


def run(folder: str | Path, runs: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return for each run what each of its ranks counted. runs: `ranks`, `flags` of pretrain_gpt.py, and whether to
    count `requests`. Raises UserError if one fails."""
    from benchmarks.ranks import run_module

    given, result = Path(folder, "runs.json"), Path(folder, "result.json")
    given.write_text(json.dumps(list(runs)), encoding="utf-8")
    run_module("benchmarks.connection_ranks", str(given), str(result))
    counted: list[list[dict[str, Any]]] = parse_json(result.read_text(encoding="utf-8"))
    return counted


def kind(request: str) -> str:
    """Return who makes a request, given as `METHOD KEY`."""
    return next((name for part, name in KINDS.items() if part in request), "groups")


def main() -> None:
    from megatron.pretrain.pretrain import import_all

    given, result = map(Path, sys.argv[1:])
    import_all()
    counted = []
    for number, each in enumerate(parse_json(given.read_text(encoding="utf-8"))):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        parts = [given.with_name(f"{number}.{rank}.json") for rank in range(each["ranks"])]
        children = [_fork(rank, part, port, each) for rank, part in enumerate(parts)]
        statuses = [os.waitpid(child, 0)[1] for child in children]
        if any(statuses):
            sys.exit(f"a rank failed: {each['flags']}")
        counted.append([parse_json(part.read_text(encoding="utf-8")) for part in parts])
    result.write_text(json.dumps(counted), encoding="utf-8")


def _fork(rank: int, result: Path, port: int, run: Mapping[str, Any]) -> int:
    """Start a rank; returns its process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank))
        os.environ.update(WORLD_SIZE=str(run["ranks"]), LOCAL_WORLD_SIZE=str(run["ranks"]))
        sys.argv = ["pretrain_gpt.py", *run["flags"].split(), "--train-iters", str(BEFORE + BETWEEN + 1)]
        status = _train(result, port, run["requests"])
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def _train(result: Path, port: int, requests: bool) -> int:
    import torch

    from megatron.pretrain import launch
    from megatron.pretrain.train import Trainer

    torch.set_num_threads(1)
    distributed_c10d: Any = torch.distributed.distributed_c10d
    counts = Counter[str]()
    rendezvous, iteration, moments = distributed_c10d.rendezvous, Trainer._iteration, list[Any]()
    store_class = counting_store()

    def counting_rendezvous(*arguments: Any, **named: Any) -> Any:
        for store, rank, size in rendezvous(*arguments, **named):
            yield store_class(store, counts), rank, size

    def counting_iteration(trainer: Trainer, *arguments: Any, **named: Any) -> Any:
        moments.append((time.monotonic(), dict(counts)))
        if len(moments) == BEFORE + BETWEEN + 1:
            time.sleep(SECONDS if requests else 0.0)
            moments.append((time.monotonic(), dict(counts)))
            first, last, (ended, end) = moments[BEFORE], moments[-2], moments[-1]
            groups = distributed_c10d._world.pg_map
            figures = {
                "start": by_kind(first[1]),
                "steps": by_kind(Counter(last[1]) - Counter(first[1])),
                "quiet": by_kind(Counter(end) - Counter(last[1])),
                "seconds": ended - last[0],
                "groups": [(group.group_desc, group.size()) for group in groups],
                "sockets": connections(port),
            }
            result.write_text(json.dumps(figures), encoding="utf-8")
        return iteration(trainer, *arguments, **named)

    if requests:
        distributed_c10d.rendezvous = counting_rendezvous
    Trainer._iteration = counting_iteration  # type: ignore[method-assign,assignment]
    return launch.run(time.monotonic())


def by_kind(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the requests of each kind, of counts by request."""
    total = Counter[str]()
    for request, number in counts.items():
        total[kind(request)] += number
    return dict(total)


def counting_store() -> Callable[[Any, Counter[str]], Any]:
    """Return the class of a store that hands on to another, and counts requests, `METHOD KEY`."""
    import torch.distributed

    dist: Any = torch.distributed
    alive = list[Any]()  # torch's own code does not keep the Python part of a store

    class CountingStore(dist.Store):
        def __init__(self, store: Any, counts: Counter[str]):
            super().__init__()
            self.store, self.counts = store, counts
            alive.append(self)

        def has_extended_api(self) -> bool:
            return True

        def set_timeout(self, timeout: Any) -> None:
            self.store.set_timeout(timeout)

        def clone(self) -> CountingStore:
            return CountingStore(self.store.clone(), self.counts)

    def handed_on(name: str) -> Callable[..., Any]:
        def call(self: Any, key: Any, *arguments: Any) -> Any:
            self.counts[f"{name} {key if isinstance(key, str) else key[0]}"] += 1
            return getattr(self.store, name)(key, *arguments)

        return call

    for name in (
        *("set", "get", "add", "compare_set", "wait", "check", "delete_key", "append", "multi_get", "multi_set"),
        *("queue_push", "queue_pop", "queue_len"),
    ):
        setattr(CountingStore, name, handed_on(name))

    return CountingStore


def connections(port: int) -> dict[str, int]:
    """Return this process's established TCP connections: `store` to the store at that port, `served` those that it
    holds as the store's own process, and `others`."""
    sockets = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.stat(f"/proc/self/fd/{name}")
        except OSError:  # that of the listing itself
            continue
        if stat.S_ISSOCK(status.st_mode):
            sockets.add(status.st_ino)
    counted = Counter(store=0, served=0, others=0)
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            (
                _,
                local,
                remote,
                state,
                *_,
            ) = line.split()
            if state == "01" and int(line.split()[9]) in sockets:
                ends = [int(end.rpartition(":")[2], 16) for end in (local, remote)]
                counted["served" if ends[0] == port else "store" if ends[1] == port else "others"] += 1
    return dict(counted)


if __name__ == "__main__":
    main()
