"""Certify a lowered program by rules written anew: python tools/check_program.py program.json streams.json

The files are those of `helixpipe check program.json --save-streams streams.json`; nothing of helixpipe is imported.
Ranks run with messages that nothing buffers and hosts that stop at each, so the streams are projections of one order if
all end. Units have their ops once, in the program's order; what an op or a transfer takes is there, made on its rank or
brought by what was waited for; what is kept between ops is what is stated.
"""

import json
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

LINKS = ("activation", "gradient", "keys_values", "kv_gradients", "weights", "weight_gradients")


def demand(condition, fault):
    if not condition:
        raise ValueError(fault)


def parsed(cell):
    found = re.findall(r"^(\d+)([FBIWR])(\d+)(?:\.(\d+))?$", cell)
    demand(found, f"{cell!r} is no op")
    return found[0][1], *(int(found[0][place] or 0) for place in (0, 2, 3))


def chunks_before(workload):
    """For each (microbatch, chunk) those with earlier slices of its documents."""
    rows, count = workload["microbatches"], workload.get("chunks") or len(workload.get("lengths", ()))
    if isinstance(rows, int):  # each is one document
        rows = [[f"{number}[{chunk}:" for chunk in range(count)] for number in range(rows)]
    units = [(m, c) for m, row in enumerate(rows) for c in range(len(row))]
    at = {(m, c): {d: int(place) for d, place in re.findall(r"(\d+)\[(\d+):", rows[m][c])} for m, c in units}
    return {own: [e for e in units if any(at[e].get(d, here) < here for d, here in at[own].items())] for own in units}


class Check:
    """have: of each rank the ops that ran there, as (kind, stage, microbatch, chunk), and what transfers brought."""

    def __init__(self, program, streams):
        self.stages, self.forward_only = program["stages"], program.get("forward_only", False)
        self.before = chunks_before(program["workload"])
        self.ops = [list(map(parsed, line.split())) for line in program["ranks"]]
        self.streams = [[each.split(" ") for each in line.split(", ") if each] for line in streams["ranks"]]
        self.transfers, self.kept, ranks = streams["transfers"], streams["kept"], range(len(self.ops))
        demand(len(self.streams) == len(self.kept) == len(ranks), "the files have different numbers of ranks")
        self.home = {op: rank for rank in ranks for op in self.ops[rank]}
        self.parts = [stage for stage, each in enumerate(self.stages) if "head.part" in each["pieces"]]
        self.chain = len(self.stages) - len(self.parts)
        self.at, self.ran, self.moved, self.needed_by = [0 for _ in ranks], [0 for _ in ranks], set(), defaultdict(list)
        self.have: list[set] = [set() for _ in ranks]
        for number, each in enumerate(self.transfers):
            if each["kind"] != "weight_gradients" and each["consumer"]:
                token = "came" if each["kind"] == "gather" else "waited"
                self.needed_by[parsed(each["consumer"])].append((token, number))
        self.ends = self.barriers([list(map(parsed, line.split())) for line in program.get("turns", [])])

    def barriers(self, turns):
        """Return the ops that come before each barrier between turns; the next op of each rank needs the barrier."""
        numbers = [number for number, each in enumerate(self.transfers) if each["kind"] == "turn"]
        demand(len(numbers) == max(0, len(turns) - 1), f"{len(numbers)} barriers lie between {len(turns)} turns")
        reached = dict.fromkeys(range(len(self.ops)), 0)
        for turn, ends in enumerate(turns):
            later = {self.home[op]: self.ops[self.home[op]].index(op) + 1 for op in ends if op in self.home}
            further = ends and all(at > reached[rank] for rank, at in later.items())
            demand(further and len(later) == len(ends), f"turn {turn} cannot end with {ends}")
            reached |= later
            for number in numbers[turn : turn + 1]:
                demand(self.transfers[number]["ranks"] == list(reached), f"barrier {number} is not one of all ranks")
                for op in [op for rank, at in reached.items() for op in self.ops[rank][at : at + 1]]:
                    self.needed_by[op].append(("waited", number))
        left = [op for rank, at in reached.items() for op in self.ops[rank][at:] if turns]
        demand(not left, f"{left[:1]} comes after the last turn")
        return dict(zip(numbers, turns, strict=False))

    def run(self):
        found = Counter(op for ops in self.ops for op in ops)
        units = {(stage, *place) for stage in range(len(self.stages)) for place in self.before}
        demand(max(found.values()) == 1 and {op[1:] for op in found} == units, "an op is there twice or misses")
        for unit in units:
            kinds = "".join(kind for kind in "FBIW" if (kind, *unit) in found)
            demand(kinds in (["F"] if self.forward_only else ["FB", "FIW"]), f"unit {unit} has ops {kinds}")
        while sum(list(map(self.advance, range(len(self.ops))))):
            pass
        for rank, ops in enumerate(self.ops):
            freed = all(op[0] not in "BW" or ("freed", op) in self.have[rank] for op in ops)
            freed = freed and not any(each[0] == "copy" for each in self.have[rank])
            demand(self.head(rank)[0] == "end", f"rank {rank} stops for good at {self.head(rank)}")
            demand(self.ran[rank] == len(ops) and freed, f"rank {rank} does not run or free all its ops")
            demand(self.forward_only or most_kept(ops) == self.kept[rank], f"rank {rank} keeps {most_kept(ops)}")
        for number, each in enumerate(self.transfers):
            waited = each["kind"] not in LINKS or ("waited", number) in self.have[each["ranks"][1]]
            demand(number in self.moved and waited, f"transfer {number} is missing or never waited for")

    def head(self, rank):
        return self.streams[rank][self.at[rank]] if self.at[rank] < len(self.streams[rank]) else ["end", "#-1"]

    def advance(self, rank):
        """Do the next instruction, a transfer with all its ranks; whether that was possible."""
        (action, of), have, ranks = self.head(rank), self.have[rank], [rank]
        if action == "RUN":
            self.op(rank, parsed(of))
        elif action == "WAIT":
            self.wait(rank, int(of[1:]), **self.transfers[int(of[1:])])
        elif action == "FREE":
            token = ("copy", int(of[1:])) if of[0] == "#" else parsed(of)
            demand(token in have and token[0] in ("copy", "B", "W"), f"rank {rank} frees {of} too early")
            demand(("freed", token) not in have, f"rank {rank} frees {of} twice")
            have ^= {token} if of[0] == "#" else {("freed", token)}
        elif action != "end":
            ranks = self.transfers[int(of[1:])]["ranks"]
            heads = [self.head(each) for each in ranks]
            if any(each[1] != of or each[0] == "WAIT" for each in heads):
                return False
            self.transfer(int(of[1:]), [each[0] for each in heads], **self.transfers[int(of[1:])])
        self.at = [at + (each in ranks and action != "end") for each, at in enumerate(self.at)]
        return action != "end"

    def op(self, rank, op):
        kind, stage, have = op[0], op[1], self.have[rank]
        demand(op in self.ops[rank][self.ran[rank] : self.ran[rank] + 1], f"rank {rank} runs {op} out of its turn")
        missing = [token for token in self.needs(rank, op) if token not in have]
        demand(not missing, f"rank {rank} runs {op} without {missing}")
        copies = [self.transfers[each[1]]["unit"][0] for each in have if each[0] == "copy"]
        owned = kind == "W" or self.stages[stage].get("owner", rank) == rank
        demand(owned or stage in copies, f"rank {rank} runs {op} without its weights")
        self.ran[rank] += 1
        have |= {op, ({"F": "KV", "I": "B"}.get(kind, kind), *op[1:])}

    def needs(self, rank, op):
        """What must be there before an op runs."""
        (kind, stage), place, found = op[:2], op[2:], list(self.needed_by[op])
        attends, chain = re.search("layer|attn", self.stages[stage]["pieces"]), self.chain
        if kind == "F":
            found += [("F", min(stage, chain) - 1, *place)] * (stage > 0)
            return found + [("KV", stage, *other) for other in self.before[place] if attends]
        first = {"W": "I", "R": "F"}.get(kind, "R" if ("R", *op[1:]) in self.home else "F")
        found.append((first, *op[1:]))
        if kind in "BI":
            after = [stage + 1] if stage + 1 < chain else self.parts * (stage + 1 == chain)
            later = [other for other, others in self.before.items() if place in others and attends]
            found += [("B", part, *place) for part in after]
            found += [("F", part, *place) for part in self.parts * (stage >= chain)]
            found += [("B", stage, *other) for other in later if self.home["F", stage, other[0], other[1]] == rank]
        return found

    def brings(self, kind, stage, *place):
        before, parts = self.chain - 1, self.parts
        forwards = {"activation": [stage - 1], "head_input": [before], "head_sums": parts}.get(kind, [])
        backwards = {"gradient": [stage + 1], "head_gradient": parts}.get(kind, [])
        return [("F", each, *place) for each in forwards] + [("B", each, *place) for each in backwards]

    def transfer(self, number, actions, kind, ranks, unit, producer, consumer, follows):
        source, stage, have = ranks[0], unit[0], set().union(*(self.have[rank] for rank in ranks))
        demand(actions == (["SEND", "RECV"] if kind in LINKS else ["START"] * len(ranks)), f"ends {actions}")
        made = self.brings(kind, *unit) + [parsed(producer) for _ in range(kind != "weights" and producer is not None)]
        made += [op for op in self.home if op[0] in "BW" and op[1] == stage and kind == "replica_sum"]
        for m, c in [other for other, before in self.before.items() if tuple(unit[1:]) in before]:
            made += [("B", stage, m, c)] * (kind == "kv_gradients" and self.home["F", stage, m, c] == source)
        made += self.ends.get(number, [])
        made += [("waited", follows)] * (kind == "weight_gradients" and follows >= 0)
        made += [("came", follows)] * (kind == "weights" and source != self.stages[stage]["owner"])
        demand(number not in self.moved and have.issuperset(made), f"transfer {number} comes twice or before {made}")
        self.moved.add(number)
        for rank in ranks:
            self.have[rank].add(("came", number))

    def wait(self, rank, number, kind, unit, **_):
        have, more = self.have[rank], {"weights": [("copy", number)], "keys_values": [("KV", *unit)]}.get(kind, [])
        demand(("came", number) in have and ("waited", number) not in have, f"rank {rank} waits for {number} wrongly")
        have |= {("waited", number), *self.brings(kind, *unit), *more}


def most_kept(ops):
    """The most units that wait with what F saved for B or I, and with what I left for W."""
    held, most = Counter[str](), Counter[str]()
    for kind, *_ in ops:
        held.update({"F": ["saved"], "I": ["deferred"]}.get(kind, []))
        most |= held
        held.subtract({"B": ["saved"], "I": ["saved"], "W": ["deferred"]}.get(kind, []))
    return {"saved": most["saved"], "deferred": most["deferred"]}


if __name__ == "__main__":
    try:
        demand(len(sys.argv) == 3, "two files are needed, program.json and streams.json")
        files = [json.loads(Path(path).read_text(encoding="utf-8")) for path in sys.argv[1:]]
        demand("stages" in files[0] and "transfers" in files[1], "the first file must be a program, the second streams")
        Check(*files).run()
    except (LookupError, OSError, TypeError, ValueError) as fault:
        sys.exit(f"{' '.join(sys.argv[1:2]) or 'nothing'} is not certified: {type(fault).__name__}: {fault}")
    print(f"{sys.argv[1]} is certified.")
