"""Lower bounds on a step's makespan from the windows of its tasks (see `problem`), the largest with its reason.

- `work`: of a resource (a rank, a link, a group, a copy engine) all tasks that cannot start before a time and are
  followed by at least some other time: these two and their work. The preemptive schedule of one machine with heads and
  tails takes exactly the largest of these (Jackson 1955; Carlier, "The one-machine sequencing problem", EJOR 1982).
  Of a rank also all its work, with the time before its first backward, in which forwards gain nothing by pairs.
- `memory`: Little's law. What is held on a rank, each buffer by the least time it is held, is at most the rank's limit
  times the time in which it can be held.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from helixpipe.certify.pairs import BACKWARDS
from helixpipe.certify.problem import OrderingProblem, TimedTask, Windows
from helixpipe.program.tasks import Resource


@dataclass(frozen=True)
class Bound:
    """value: in the costs' unit of time. kind: see the module, and `time_steps`. resource: what it is about. data: what
    else a checker needs to compute it."""

    value: float
    kind: str
    resource: Resource | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """What the bound rests on."""
        resource = self.resource
        if self.kind == "steps":
            return "a linear program over time steps"
        if resource is None:
            return "the longest chain of ops and messages"
        if self.kind == "memory":
            return f"what rank {resource.ranks[0]} holds in the memory there is"
        ranks = (" -> " if resource.kind == "link" else ", ").join(map(str, resource.ranks))
        what = {"compute": f"the work of rank {ranks}", "link": f"the messages of link {ranks}"}
        text = what.get(resource.kind, f"the transfers of {resource.kind} {ranks}")
        alone = ", forwards before its first backward alone" if self.data["rate"] < 1 else ""
        return f"{text}, {self.data['head']:.4g} before and {self.data['tail']:.4g} after it{alone}"


def largest(problem: OrderingProblem, windows: Windows) -> Bound:
    """Return the largest of all bounds; of equal ones that of ranks' work before others."""
    nothing = Bound(0.0, "work", Resource("compute", (0,)), {"head": 0.0, "tail": 0.0, "rate": 1.0})
    found = [*_work(problem, windows), *_first_forwards(problem, windows), *_memory(problem, windows), nothing]
    return max(found, key=lambda bound: bound.value)


def _work(problem: OrderingProblem, windows: Windows) -> Iterator[Bound]:
    """Return the bound of each resource."""
    own: dict[Resource, list[tuple[float, float, float]]] = defaultdict(list)
    for task, head, tail in zip(problem.tasks, windows.heads, windows.tails, strict=True):
        if task.time:
            own[task.resource].append((head, tail, task.time))
    for resource, tasks in own.items():
        value, head, tail = one_machine(tasks)
        yield Bound(value, "work", resource, {"head": head, "tail": tail, "rate": 1.0})


def _first_forwards(problem: OrderingProblem, windows: Windows) -> Iterator[Bound]:
    """Return the bound of all that a rank does, for ranks whose first backward waits.

    Until that can start, a rank runs forwards (and recomputes) alone, at most as much as this time holds; of these the
    share of time counts that they least take in pairs, and the rest of the time is idle or gains nothing. The
    most that they count is a knapsack's, by linear programming; rate: its dual variable, with which no order's is more.
    """
    own: dict[Resource, list[int]] = defaultdict(list)
    for number, task in enumerate(problem.tasks):
        if task.resource.kind == "compute":
            own[task.resource].append(number)
    for resource, numbers in own.items():
        backward = min((windows.heads[n] for n in numbers if problem.tasks[n].kind in BACKWARDS), default=0.0)
        head, tail = (min(ends[n] for n in numbers) for ends in (windows.heads, windows.tails))
        if head < backward:
            value, rate = _with_first_alone([problem.tasks[n] for n in numbers], backward - head)
            yield Bound(head + value + tail, "work", resource, {"head": head, "tail": tail, "rate": rate})


def _with_first_alone(tasks: Sequence[TimedTask], free: float) -> tuple[float, float]:
    """Return the least time that a rank takes with these tasks where no backward starts within the time `free`, and
    the rate."""
    early = [task for task in tasks if task.kind in "FR" and task.alone]
    rate, left = 0.0, free
    for task in sorted(early, key=lambda task: task.time / task.alone, reverse=True):
        left -= task.alone
        if left <= 0:
            rate = task.time / task.alone
            break
    spared = sum(max(task.time - rate * task.alone, 0.0) for task in early) + rate * free
    return free + sum(task.time for task in tasks) - spared, rate


def one_machine(tasks: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Return the largest sum of a head, a tail, and the times of all tasks with heads and tails as large, and this head
    and tail. tasks: head, tail and time of each; at least one."""
    levels = sorted({tail for _, tail, _ in tasks})
    leaves = 1 << (len(levels) - 1).bit_length()
    # A tree over the levels: of each node the times below it, and the largest of level and times from there to its end.
    times, sums, at = [0.0] * (2 * leaves), [-inf] * (2 * leaves), [0] * (2 * leaves)
    best = (0.0, 0.0, 0.0)
    ordered = sorted(tasks, key=lambda task: -task[0])
    for number, (head, tail, time) in enumerate(ordered):
        level = bisect_left(levels, tail)
        node = leaves + level
        times[node] += time
        sums[node], at[node] = levels[level] + times[node], level
        while node := node // 2:
            left, right = 2 * node, 2 * node + 1
            times[node] = times[left] + times[right]
            lower = sums[left] + times[right]
            sums[node], at[node] = (lower, at[left]) if lower >= sums[right] else (sums[right], at[right])
        if number + 1 == len(ordered) or ordered[number + 1][0] < head:
            best = max(best, (head + sums[1], head, levels[at[1]]))
    return best


def _memory(problem: OrderingProblem, windows: Windows) -> Iterator[Bound]:
    """Return the bound of each rank that holds anything."""
    lengths = least_held(problem, windows)
    for rank, limit in enumerate(problem.limits):
        own = [number for number, held in enumerate(problem.held) if held.rank == rank]
        if not own or limit in (0.0, inf):
            continue
        firsts, lasts = ([getattr(problem.held[each], end) for each in own] for end in ("first", "last"))
        head, tail = min(windows.heads[each] for each in firsts), min(windows.tails[each] for each in lasts)
        filled = sum(problem.held[each].size * lengths[each] for each in own) / limit
        yield Bound(head + filled + tail, "memory", Resource("compute", (rank,)))


def least_held(problem: OrderingProblem, windows: Windows) -> list[float]:
    """Return the least time that each buffer is held: the longest chain of its microbatch from its first op to its
    last."""
    tasks = problem.tasks
    own: dict[int, list[int]] = defaultdict(list)
    for task in windows.order:
        own[tasks[task].unit.microbatch].append(task)
    place = {task: number for chain in own.values() for number, task in enumerate(chain)}
    lengths = []
    for held in problem.held:
        there = {held.first: 0.0 if held.after else tasks[held.first].time}  # since the buffer is held
        for task in own[tasks[held.first].unit.microbatch][place[held.first] + 1 :]:
            since = [there[first] for first in problem.before[task] if first in there]
            if since:
                there[task] = max(since) + tasks[task].time
            if task == held.last:
                break
        lengths.append(there.get(held.last, tasks[held.last].time))
    return lengths
