"""The seq1f1b rows of bench.py: sequences in chunks of lengths that fit this machine."""

from __future__ import annotations

from itertools import accumulate

import torch

from benchmarks.engines import Engine, OurEngine, Pairs, Problem, found
from benchmarks.other_engines import megatron_core
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.planning.order.chunk_lengths import average_lengths, balanced_lengths
from helixpipe.program.program import Program
from helixpipe.program.stages import even_stages

CHUNK_COUNTS = (2, 4, 8)

ALIGNMENT = 32
"""Tokens that lengths are multiples of, where there are enough: the smallest tile of torch's attention for the CPU."""


def seq1f1b(problem: Problem) -> tuple[dict[str, Engine], Pairs]:
    """Chunks are of lengths that take equally long here, but for one row of equal lengths."""
    costs = fitted(problem)
    stages = even_stages(problem.layers, 1)
    lengths = {k: balanced_lengths(costs, stages, problem.sequence, k, _alignment(problem, k)) for k in CHUNK_COUNTS}
    of_four = {"chunks": 4, "chunk_lengths": lengths[4]}
    every = {
        "ours, 1f1b": OurEngine(problem, problem.program("1f1b")),
        "megatron-core 1F1B, its GPTModel": megatron_core(problem, whole=True),
        **{
            f"ours, seq1f1b k = {k}": OurEngine(problem, problem.program("seq1f1b", chunks=k, chunk_lengths=lengths[k]))
            for k in CHUNK_COUNTS
        },
        "ours, seq1f1b k = 4, equal lengths": OurEngine(problem, equal(problem, 4)),
        "ours, seq1f1b-zb k = 4": OurEngine(problem, found(problem, "seq1f1b-zb", **of_four)),
        "ours, seq1f1b-interleaved k = 4, v = 2": OurEngine(
            problem, problem.program("seq1f1b-interleaved", virtual_stages=2, **of_four)
        ),
    }
    plain, core, *chunked = every
    pairs = [(mine, other) for other in (plain, core) for mine in chunked]
    return every, [(plain, core), *pairs, ("ours, seq1f1b k = 4", "ours, seq1f1b k = 4, equal lengths")]


def equal(problem: Problem, chunks: int) -> Program:
    lengths = average_lengths(problem.sequence, chunks, _alignment(problem, chunks))
    return problem.program("seq1f1b", chunks=chunks, chunk_lengths=lengths)


def fitted(problem: Problem) -> PieceTimes:
    """What n tokens after c earlier ones take here, forward and backward of the whole model: u n + v n (c + n/2) + w,
    fitted to times recorded with equal lengths. w is the same for every chunk, so lengths do not depend on it. Only
    the proportion of the two times is meant."""
    rows, seconds = [], []
    for k in CHUNK_COUNTS:
        program = equal(problem, k)
        costs, lengths = OurEngine(problem, program).op_times(), program.chunk_lengths or ()
        for chunk, (earlier, tokens) in enumerate(zip(accumulate(lengths, initial=0), lengths, strict=False)):
            share = tokens / problem.sequence
            rows.append([share, share * (2 * earlier + tokens) / problem.sequence, 1.0])
            seconds.append(sum(time for (_, _, number), time in costs.times.items() if number == chunk))
    times = torch.tensor(seconds, dtype=torch.float64)
    shares = torch.tensor(rows, dtype=torch.float64)
    # Each equation over its time, so that what is least is the sum of squares of relative errors.
    tokens_time, attention_time, _ = torch.linalg.lstsq(shares / times[:, None], torch.ones_like(times)).solution
    return PieceTimes({"mlp": max(0.0, float(tokens_time)), "attn": max(0.0, float(attention_time))})


def _alignment(problem: Problem, chunks: int) -> int:
    return min(ALIGNMENT, problem.sequence // chunks)
