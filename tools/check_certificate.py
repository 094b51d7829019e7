"""Checks certificates of `helixpipe simulate --certify FILE`: python tools/check_certificate.py FILE.json ...

With the costs that it states a certificate must show a whole program, each op once; a timeline in which all comes after
what it needs, one thing at a time on each rank, link and group, in the memory; and a bound (docs/certificates.md)."""

import json
import sys
from collections import defaultdict, namedtuple
from graphlib import TopologicalSorter
from itertools import groupby, pairwise, product

NEAR = 1e-9  # the part of a figure that is rounding
GROUPED = dict.fromkeys(("head_input", "head_sums", "head_gradient"), "collective")
BOUND = dict.fromkeys("FBIWR", "compute") | GROUPED | dict.fromkeys(("activation", "gradient"), "link")
Task = namedtuple("Task", "kind stage microbatch chunk resource time start end")


def need(holds, why):
    if not holds:
        raise ValueError(why)


def dependencies(text, tasks):
    """All (first, then) that hold in every order of a whole program; across ranks by transfers, which there must be."""
    number = {task[:4]: n for n, task in enumerate(tasks) if task.resource[0] == BOUND.get(task.kind)}
    need(len(number) == sum(task.kind in BOUND for task in tasks), "a task is there twice, or is on another resource")
    training, parts = not text["forward_only"], range(text["stages"] - text["parts"], text["stages"])
    back, rank = {key[1:]: n for key, n in number.items() if key[0] in "BI"}, lambda n: tasks[n].resource[1]
    places = [(m, c) for m, chunks in enumerate(text["chunks"]) for c in range(chunks)]
    units = [(stage, *place) for stage in range(text["stages"]) for place in places]
    own = {unit: [number[key] for key in ((kind, *unit) for kind in "FRBIW") if key in number] for unit in units}
    used, pairs = {n for ops in own.values() for n in ops}, []

    def through(kind, unit, firsts, thens):
        ranks = range(len(text["limits"])) if kind in GROUPED else (rank(firsts[0]), rank(thens[0]))
        if kind not in GROUPED and ranks[0] == ranks[1]:
            return pairs.append((firsts[0], thens[0]))
        n = number.get((kind, *unit), -1)
        need(n >= 0 and tasks[n].resource[1:] == tuple(ranks), f"there is no {kind} of {unit} between its ranks")
        used.add(n)
        return pairs.extend([(first, n) for first in firsts] + [(n, then) for then in thens])

    for unit, ops in own.items():
        kinds, before = "".join(tasks[n].kind for n in ops), (unit[0] - 1, *unit[1:])
        need(kinds in (("FB", "FRB", "FIW", "FRIW") if training else ("F",)) and len({*map(rank, ops)}) == 1, kinds)
        pairs += pairwise(ops)
        if unit[0] and unit[0] not in parts:
            through("activation", unit, own[before][:1], ops[:1])
            through("gradient", before, [back[unit]], [back[before]]) if training else None
    for place in places if parts else ():
        last, heads = (parts[0] - 1, *place), [(part, *place) for part in parts]
        forwards, backs = [own[unit][0] for unit in heads], [back[unit] for unit in heads if training]
        through("head_input", heads[0], own[last][:1], forwards)
        through("head_sums", heads[0], forwards, backs)
        through("head_gradient", last, backs, [back[last]]) if training else None
    need(used == set(number.values()), "a task is of no unit, or a transfer brings nothing")
    for stage, row in product(text["attention"], text["rows"]):  # keys and values, where one rank has all of a row
        chain = [(stage, *place) for place in row]
        if len({rank(own[unit][0]) for unit in chain}) == 1:
            pairs += pairwise([own[unit][0] for unit in chain])
            pairs += pairwise([back[unit] for unit in reversed(chain)] if training else ())
    return pairs


def bound_of(text, tasks, pairs):
    """What every order takes at least, by the reason that the certificate gives."""
    bound, held, alike = text["bound"], text["held"], defaultdict(list)
    step, horizon, slack = bound.get("step"), bound.get("horizon"), NEAR * text["makespan"]
    times = {n: round(task.time / step) if step else task.time for n, task in enumerate(tasks) if task.kind in BOUND}
    need(not step or all(abs(time * step - tasks[n].time) <= slack for n, time in times.items()), "no such time step")
    # Microbatches that are alike, with nothing between them, may be taken to have each kind of work done in turn.
    like = [repr(task._replace(microbatch=0, start=0, end=0)) for task in tasks]
    work = [(tasks[n].microbatch, like[n]) for n in times]
    work += [(tasks[first].microbatch, like[first] + like[last] + repr(size)) for _, first, last, *size in held]
    likeness = {number: [what for _, what in own] for number, own in groupby(sorted(work), lambda each: each[0])}
    apart = any(tasks[a].microbatch != tasks[b].microbatch for a, b in [*pairs, *(each[1:3] for each in held)])
    for n in sorted(times, key=lambda n: tasks[n].microbatch):
        alike[n if apart else repr(likeness[tasks[n].microbatch]), like[n]].append(n)
    waited, waiting = (dict[int, list[int]]((n, []) for n in times) for _ in range(2))
    for first, then in [*pairs, *(pair for each in alike.values() for pair in pairwise(each))]:
        waited[then].append(first)
        waiting[first].append(then)
    order = list(TopologicalSorter(waited).static_order())

    def longest(order, before, source=None):
        heads = dict[int, float]()  # the longest chain before each task; with a source, of those after its start alone
        for n in order:
            since = [heads[first] + times[first] for first in before[n] if first in heads]
            if since or source in (None, n):
                heads[n] = max(since, default=0)
        return heads

    heads, tails = longest(order, waited), longest(order[::-1], waiting)
    if bound["kind"] == "work":
        on, head, tail = (bound["resource"][0], *bound["resource"][1]), bound["head"] - slack, bound["tail"] - slack
        own = [times[n] for n in times if tasks[n].resource == on and heads[n] >= head and tails[n] >= tail]
        return head + sum(own) + tail + 2 * slack if own else 0.0
    if bound["kind"] == "memory":
        held = [each for each in held if each[0] == bound["resource"][1][0]]
        chains = [longest(order, waited, f)[last] + times[last] - times[f] * ended for _, f, last, _, ended in held]
        filled = sum(each[3] * chain for each, chain in zip(held, chains, strict=True)) / text["limits"][held[0][0]]
        return min(heads[each[1]] for each in held) + filled + min(tails[each[2]] for each in held)
    left, right = {n: [0.0] * (horizon - tails[n] - times[n] - heads[n] + 1) for n in times}, 0.0
    for kind, one, other, time, weight in bound["rows"]:  # a row's left side: starts of a task in a span, by a factor
        if kind == "busy":
            spans = [(n, time - times[n] + 1, time, 1.0) for n in times if tasks[n].resource == tasks[one].resource]
        elif kind == "before" and one != other and other in longest(order, waited, one):
            spans = [(other, 0, time, 1.0), (one, 0, time - times[one], -1.0)]
        else:
            own = [each for each in held if kind == "memory" and each[0] == one]
            spans = [(first, 0, time - times[first] * after, size) for _, first, _, size, after in own]
            spans += [(last, 0, time - times[last], -size) for _, _, last, size, _ in own]
        need(weight >= 0 and spans, "a row that does not hold")
        right += weight * (1.0 if kind == "busy" else 0.0 if kind == "before" else text["limits"][one])
        for n, begin, end, factor in spans:
            for start in range(max(begin, heads[n]), min(end, horizon - tails[n] - times[n]) + 1):
                left[n][start - heads[n]] += weight * factor
    return (horizon + 1) * step if sum(map(min, left.values())) > right + 1e-7 else 0.0


def check(text):
    """Raise ValueError, or another error, for a certificate that does not hold; return what it shows."""
    tasks = [Task._make([*each[:4], (each[4], *each[5]), *each[6:]]) for each in text["tasks"]]
    pairs, makespan, value = dependencies(text, tasks), text["makespan"], text["bound"]["value"]
    spans, slack = defaultdict(list), NEAR * makespan
    need(abs(max(task.end for task in tasks) - makespan) <= slack, "the makespan is another")
    for task in tasks:
        need(
            task.start >= 0 and 0 <= task.time <= task.end - task.start + slack, f"{task[:4]} is shorter than it costs"
        )
        spans[task.resource].append((task.start, task.end))
    need(all(tasks[first].end <= tasks[then].start + slack for first, then in pairs), "a task comes before its needs")
    need(all(a[1] <= b[0] + slack for own in spans.values() for a, b in pairwise(sorted(own))), "two things at a time")
    for rank, limit in enumerate(text["limits"]):
        held, there = [each for each in text["held"] if each[0] == rank], 0.0
        changes = [(tasks[first].end if after else tasks[first].start, size) for _, first, _, size, after in held]
        for _, size in sorted(changes + [(tasks[last].end, -size) for _, _, last, size, _ in held]):
            there += size
            need(there <= limit * (1 + NEAR), f"rank {rank} holds more than it may")
    need(value <= min(bound_of(text, tasks, pairs), makespan) * (1 + NEAR), "the bound is not proven")
    return f"valid: it takes {makespan:.6g}, and no order less than {value:.6g}"


if __name__ == "__main__":
    for path in sys.argv[1:]:
        try:
            with open(path, encoding="utf-8") as file:
                print(f"{path}: {check(json.load(file))}")
        except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
            sys.exit(f"{path}: REJECTED: {error}")
