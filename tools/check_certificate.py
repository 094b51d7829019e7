"""Checks certificates of `helixpipe simulate --certify FILE` (docs/certificates.md): check_certificate.py FILE ..."""

import json
import sys
from collections import defaultdict, namedtuple
from graphlib import TopologicalSorter
from itertools import accumulate, groupby, pairwise, product

FORMAT, NEAR = "helixpipe certificate 2", 1e-9  # NEAR: the part of a figure that is rounding
GROUPED = dict.fromkeys(("head_input", "head_sums", "head_gradient"), "collective")
BOUND = dict.fromkeys("FBIWR", "compute") | GROUPED | dict.fromkeys(("activation", "gradient"), "link")
Task = namedtuple("Task", "kind stage microbatch chunk resource time start end alone")


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
    pairs = []

    def through(kind, unit, firsts, thens):
        ranks = range(len(text["limits"])) if kind in GROUPED else (rank(firsts[0]), rank(thens[0]))
        if kind not in GROUPED and ranks[0] == ranks[1]:
            return pairs.append((firsts[0], thens[0]))
        n = number.get((kind, *unit), -1)
        need(n >= 0 and tasks[n].resource[1:] == tuple(ranks), f"there is no {kind} of {unit} between its ranks")
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
    need({n for ops in [*own.values(), *pairs] for n in ops} == {*number.values()}, "a task is of no unit")
    for stage, row in product(text["attention"], text["rows"]):  # keys and values, where one rank has all of a row
        chain = [(stage, *place) for place in row]
        if len({rank(own[unit][0]) for unit in chain}) == 1:
            pairs += [*pairwise(own[u][0] for u in chain), *pairwise(back[u] for u in chain[::-1] if training)]
    return pairs


def bound_of(text, tasks, pairs):
    """What every order takes at least, by the reason that the certificate gives."""
    bound, held, alike = text["bound"], text["held"], defaultdict(list)
    step, horizon, slack = bound.get("step"), bound.get("horizon"), NEAR * text["makespan"]
    times = {n: round(task.time / step) if step else task.time for n, task in enumerate(tasks) if task.kind in BOUND}
    need(not step or all(abs(time * step - tasks[n].time) <= slack for n, time in times.items()), "no such time step")
    like = [repr(task._replace(microbatch=0, start=0, end=0)) for task in tasks]
    work = [(tasks[n].microbatch, like[n]) for n in times]
    work += [(tasks[first].microbatch, like[first] + like[last] + repr(size)) for _, first, last, *size in held]
    likeness = {number: [what for _, what in own] for number, own in groupby(sorted(work), lambda each: each[0])}
    apart = any(tasks[a].microbatch != tasks[b].microbatch for a, b in [*pairs, *(each[1:3] for each in held)])
    for n in sorted(times, key=lambda n: tasks[n].microbatch):  # alike, with nothing between them, they may take turns
        alike[n if apart else repr(likeness[tasks[n].microbatch]), like[n]].append(n)
    waited, waiting = (dict[int, list[int]]((n, []) for n in times) for _ in range(2))
    for first, then in [*pairs, *(pair for each in alike.values() for pair in pairwise(each))]:
        waited[then].append(first)
        waiting[first].append(then)
    order = list(TopologicalSorter(waited).static_order())

    def longest(order, before, source=None, times=times, least=None):
        heads = dict[int, float]()  # the longest chain before each task; with a source, of those after its start alone
        for n in order:
            if (since := [heads[first] + times[first] for first in before[n] if first in heads]) or source in (None, n):
                heads[n] = max([*since, least[n] if least else 0])
        return heads

    lone = longest(order, waited, times=times if step else [task.alone for task in tasks])
    first = min((lone[n] for n in times if tasks[n].kind in "BI"), default=0)  # until then no forward runs beside it
    heads, tails = longest(order, waited, least={n: min(lone[n], first) for n in times}), longest(order[::-1], waiting)
    if bound["kind"] == "work":
        on, head, tail = (bound["resource"][0], *bound["resource"][1]), bound["head"] - slack, bound["tail"] - slack
        done = [n for n in times if tasks[n].resource == on and heads[n] >= head and tails[n] >= tail]
        first = min((heads[n] for n in times if tasks[n].resource == on and tasks[n].kind in "BI"), default=0)
        free, rate = max(first - head, 0), max(bound["rate"], 0)  # forwards that come first count their share of time
        spared = sum(max(times[n] - rate * tasks[n].alone, 0) for n in done if tasks[n].kind in "FR") + rate * free
        return head + free + sum(times[n] for n in done) - spared + tail + 2 * slack if done else 0.0
    if bound["kind"] == "memory":
        held = [each for each in held if each[0] == bound["resource"][1][0]]
        chains = [longest(order, waited, f)[end] + times[end] - times[f] * ended for _, f, end, _, ended in held]
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
    spans, slack, (*_, starts, ends, _) = defaultdict(list), NEAR * makespan, map(list, zip(*tasks, strict=True))
    need(text["format"] == FORMAT, f"its format is not {FORMAT}")
    need(abs(max(task.end for task in tasks) - makespan) <= slack, "the makespan is another")
    for n, (*name, resource, time, start, end, alone) in enumerate(tasks):
        need(start >= 0 and 0 <= time <= min(alone, end - start + slack), f"{name} is shorter than it costs")
        spans[resource].append((start, end, n))
    for own in spans.values():
        for (start, end, n), (then, until, other) in pairwise([*sorted(own), (2 * makespan + 1, 0, -1)]):
            need(end <= then + slack, "two things at a time")
            if end - start < tasks[n].alone - slack:  # the parts of a pair both wait for what either waits for
                need(tasks[n].kind + tasks[other].kind in ("FB", "FI") and then <= end + slack, "alone it takes longer")
                starts[other], ends[n] = start, until
    need(all(ends[first] <= starts[then] + slack for first, then in pairs), "a task comes before its needs")
    for rank, limit in enumerate(text["limits"]):
        changes = [(tasks[f][7 if ended else 6], size) for on, f, _, size, ended in text["held"] if on == rank]
        changes += [(tasks[end].end, -size) for on, _, end, size, _ in text["held"] if on == rank]
        need(max([0, *accumulate(size for _, size in sorted(changes))]) <= limit * (1 + NEAR), "it holds too much")
    need(value <= min(bound_of(text, tasks, pairs), makespan) * (1 + NEAR), "the bound is not proven")
    return f"valid: it takes {makespan:.6g}, and no order less than {value:.6g}"


if __name__ == "__main__":
    for path in sys.argv[1:]:
        try:
            with open(path, encoding="utf-8") as file:
                print(f"{path}: {check(json.load(file))}")
        except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
            sys.exit(f"{path}: REJECTED: {error}")
