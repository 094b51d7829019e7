"""Where sequences are cut: chunks that take equally long, aligned, for any costs; the best number of chunks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.common.errors import UserError
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import MODELS, Layout
from helixpipe.lowering.lower import lower
from helixpipe.planning.order import chunk_lengths
from helixpipe.planning.order.chunk_lengths import (
    CHUNK_COUNTS,
    FEW_COUNTS,
    average_lengths,
    balanced_lengths,
    best_chunks,
    chunk_counts,
    chunk_times,
    default_alignment,
    short_chunks,
)
from helixpipe.planning.order.chunk_options import MOST_BALANCED, ChunkOptions
from helixpipe.program.costs import Work
from helixpipe.program.program import Program
from helixpipe.program.stages import even_stages
from helixpipe.simulate.simulator import simulate
from schedules import Shape, build

A100 = HARDWARE["a100-80"]
LONG = PieceTimes({"qkv": 1, "attn": 10, "mlp": 2})
WHOLE = even_stages(2, 1)


def model_costs(seq_length: int, tensor_parallel: int = 1, name: str = "seq1f1b-2.7b") -> ModelCosts:
    return ModelCosts(MODELS[name], A100, Layout(tensor_parallel, tensor_parallel > 1), seq_length)


# --------------------------------------------------------------------------------------------------- balanced lengths


@settings(max_examples=200)
@given(tokens=st.integers(4, 40), k=st.integers(1, 4), alignment=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_no_aligned_cut_has_a_shorter_longest_chunk(tokens: int, k: int, alignment: int, seed: int) -> None:
    if tokens < k * alignment:
        return
    rng = Random(seed)
    costs = PieceTimes({"qkv": rng.random(), "attn": rng.choice((0, 10 * rng.random())), "head": rng.random()})
    lengths = balanced_lengths(costs, WHOLE, tokens, k, alignment)
    assert len(lengths) == k and sum(lengths) == tokens and min(lengths) >= 1
    assert all(length % alignment == 0 for length in lengths[:-1])
    every = combinations(range(alignment, tokens, alignment), k - 1)
    cuts = [tuple(b - a for a, b in pairwise((0, *inner, tokens))) for inner in every]
    best = min(max(chunk_times(costs, WHOLE, cut)) for cut in cuts)
    assert max(chunk_times(costs, WHOLE, lengths)) <= best * (1 + 1e-9)


@pytest.mark.parametrize("name", ["seq1f1b-2.7b", "llama3-8b"])
@pytest.mark.parametrize("k", [2, 3, 4, 8, 16])
def test_chunks_of_a_model_take_equally_long(name: str, k: int) -> None:
    costs, stages = model_costs(32768, name=name), even_stages(MODELS[name].layers, 1)
    lengths = balanced_lengths(costs, stages, 32768, k)
    times = chunk_times(costs, stages, lengths)
    assert max(times) <= min(times) * 1.003
    assert list(lengths) == sorted(lengths, reverse=True)
    aligned = balanced_lengths(costs, stages, 32768, k, 64)
    assert sum(aligned) == 32768 and all(length % 64 == 0 for length in aligned)
    assert all(abs(a - b) <= 128 for a, b in zip(aligned, lengths, strict=True))
    equal = chunk_times(costs, stages, average_lengths(32768, k, 64))
    assert max(times) <= max(chunk_times(costs, stages, aligned)) < 0.87 * max(equal)


def test_what_grows_with_the_prefix_decides() -> None:
    assert balanced_lengths(PieceTimes({"mlp": 1.0}), WHOLE, 120, 4) == (30, 30, 30, 30)
    assert balanced_lengths(PieceTimes({"attn": 1.0}), WHOLE, 1000, 4) == (500, 207, 159, 134)  # sqrt(i/4) of the way
    assert balanced_lengths(PieceTimes({}), WHOLE, 10, 4) == average_lengths(10, 4)
    assert balanced_lengths(LONG, WHOLE, 7, 1) == (7,)
    assert balanced_lengths(LONG, WHOLE, 7, 7) == (1,) * 7


@pytest.mark.parametrize("seq_length", [1000, 1001, 4095, 4097])
def test_lengths_that_nothing_divides(seq_length: int) -> None:
    for k in (3, 7):
        for alignment in (1, 8, 64):
            for lengths in (
                balanced_lengths(LONG, WHOLE, seq_length, k, alignment),
                average_lengths(seq_length, k, alignment),
            ):
                assert sum(lengths) == seq_length and len(lengths) == k and min(lengths) >= 1
                assert all(length % alignment == 0 for length in lengths[:-1])


@dataclass(frozen=True)
class Flops(PieceTimes):
    """The authors' rule: FLOPs(i) = 2 n_i P + 2 L n_i (n_1 + ... + n_i) d."""

    parameters: float = 2.65e9
    layers: int = 32
    hidden: int = 2560

    stages: int = 4

    def op_time(self, work: Work) -> float:
        ((tokens, earlier, _),) = work.extents
        flops = 2 * tokens * self.parameters + 2 * self.layers * tokens * (earlier + tokens) * self.hidden
        return flops / self.stages


@pytest.mark.parametrize("k", [2, 4, 8])
def test_the_authors_rule(k: int) -> None:
    """With their FLOPs for costs, our lengths solve their equations; with the cost model's times ours are better."""
    costs, stages = Flops(), even_stages(32, 4)
    theirs = balanced_lengths(costs, stages, 32768, k)
    linear, square = 2 * costs.parameters, 2 * costs.layers * costs.hidden
    prefix, share = 0.0, chunk_times(costs, stages, theirs)[0] / 2  # F and B each take as long here
    for length in theirs:  # n (2P + 2Ld (prefix + n)) = share
        b = linear + square * prefix
        exact = (-b + (b * b + 4 * square * share) ** 0.5) / (2 * square)
        assert length == pytest.approx(exact, rel=2e-3)
        prefix += exact
    timed, whole = model_costs(32768), even_stages(32, 1)
    ours = balanced_lengths(timed, whole, 32768, k)
    assert max(chunk_times(timed, whole, ours)) < max(chunk_times(timed, whole, theirs))


def test_balanced_chunks_shorten_the_step() -> None:
    costs, stages = model_costs(32768), even_stages(32, 1)
    steps = []
    for lengths in (balanced_lengths(costs, stages, 32768, 4, 64), average_lengths(32768, 4, 64)):
        program = build("seq1f1b", Shape(8, 16, 32, 4, chunk_lengths=lengths, costs=costs))
        steps.append(simulate(lower(program, costs), costs).makespan)
    assert steps[0] < 0.85 * steps[1]


# ------------------------------------------------------------------------------------------------ lengths and alignment


def test_average_lengths() -> None:
    assert average_lengths(12, 4) == (3, 3, 3, 3)
    assert average_lengths(14, 4) == (4, 4, 3, 3)
    assert average_lengths(1024, 3, 64) == (384, 320, 320)
    assert average_lengths(1000, 3, 64) == (320, 320, 360)
    for seq_length in range(64, 400, 7):
        for k in (1, 2, 3, 5):
            for alignment in (1, 4, 12):
                lengths = average_lengths(seq_length, k, alignment)
                assert sum(lengths) == seq_length and max(lengths) - min(lengths) <= alignment


def test_default_alignment() -> None:
    assert default_alignment(4096, 4) == 64
    assert default_alignment(4096, 4, 8) == 64
    assert default_alignment(4096, 4, 3) == 192
    assert default_alignment(192, 4, 2) == 2
    assert default_alignment(256, 4, 2) == 64


@pytest.mark.parametrize("cut", [average_lengths, lambda *size: balanced_lengths(LONG, WHOLE, *size)])
def test_too_few_tokens_are_refused(cut: object) -> None:
    assert callable(cut)
    with pytest.raises(UserError, match=r"^--seq-length 100 is too short for 4 chunks of 32 tokens .* at most 3 such"):
        cut(100, 4, 32)


def test_short_chunks() -> None:
    assert short_chunks(32768, 16, 1, A100) is None
    assert short_chunks(1024, 1, 1, A100) is None
    sentence = short_chunks(32768, 17, 1, A100)
    assert sentence is not None and sentence.startswith("17 chunks of 1928 tokens of a microbatch are too short")
    assert short_chunks(32768, 17, 2, A100) is None
    assert chunk_counts(32768, 1, A100) == FEW_COUNTS == (1, 2, 3, 4, 6, 8, 12, 16)
    assert chunk_counts(160 * 2048, 1, A100) == CHUNK_COUNTS and CHUNK_COUNTS[-1] == 160
    assert chunk_counts(8192, 1, A100) == (1, 2, 3, 4)
    assert chunk_counts(1024, 1, A100) == (1,)


# -------------------------------------------------------------------------------------------- the best number of chunks


def make(chunks: int) -> Program:
    return build("seq1f1b", Shape(4, 4, 4, chunks, costs=LONG))


def test_the_best_number_of_chunks() -> None:
    steps = {k: simulate(lower(make(k), LONG), LONG) for k in FEW_COUNTS}
    fastest = min(steps, key=lambda k: steps[k].makespan)
    assert best_chunks(make, LONG).num_chunks == fastest > 1
    fitting = {k: step for k, step in steps.items() if max(step.peak_activation) <= 2}
    assert 1 not in fitting
    chosen = best_chunks(make, LONG, lambda step: max(step.peak_activation) <= 2)
    assert chosen.num_chunks == min(fitting, key=lambda k: fitting[k].makespan)
    free = PieceTimes({})
    assert best_chunks(make, free).num_chunks == 1  # of equally fast ones the fewest
    with pytest.raises(UserError, match=r"^--pipe-sp-splits auto: with none of 1, 2, 3 chunks the step fits"):
        best_chunks(make, LONG, lambda step: False, (3, 1, 2))


def test_many_chunks_are_tried_while_they_pay() -> None:
    tried: list[int] = []

    def few(chunks: int) -> Program:
        return build("seq1f1b", Shape(2, 1, 2, chunks, costs=LONG))

    def watched(chunks: int) -> Program:
        tried.append(chunks)
        return few(chunks)

    assert best_chunks(watched, LONG, counts=CHUNK_COUNTS).num_chunks == 160 == tried[-1]  # nothing speaks against more
    tried.clear()
    dear = PieceTimes(LONG.forward, message=0.2)
    steps = {k: simulate(lower(few(k), dear), dear).makespan for k in CHUNK_COUNTS}
    best = best_chunks(watched, dear, counts=CHUNK_COUNTS).num_chunks
    assert best == min(steps, key=lambda k: steps[k])
    assert 16 < best < 64 and tried == [k for k in CHUNK_COUNTS if k <= CHUNK_COUNTS[CHUNK_COUNTS.index(best) + 2]]
    with pytest.raises(UserError, match=r"with none of 1, 2, .*, 128, 160 chunks the step fits"):
        best_chunks(few, dear, lambda step: False, CHUNK_COUNTS)


def test_the_search_for_a_number_of_chunks_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_lengths, "OPS_TRIED", 32 * (1 + 2 + 3 + 4 + 6 + 8 + 12 + 16 + 24) + 32 * 31)
    assert best_chunks(make, LONG, counts=CHUNK_COUNTS).num_chunks == 24  # 32 ops a chunk
    monkeypatch.setattr(chunk_lengths, "OPS_TRIED", 0)
    assert best_chunks(make, LONG, counts=CHUNK_COUNTS).num_chunks == 16


def test_cutting_asks_little_of_the_costs() -> None:
    asked = []

    class Watched(PieceTimes):
        def op_time(self, work: Work) -> float:
            asked.append(work)
            return super().op_time(work)

    lengths = balanced_lengths(Watched(LONG.forward), WHOLE, 1 << 20, 160, 64)
    assert len(lengths) == 160 and len(asked) < 2 * 160 * 60  # halving alone needs 13 questions a cut and pass


def test_slow_messages_are_weighed() -> None:
    slow = PieceTimes(LONG.forward, message=200.0)
    assert best_chunks(make, slow).num_chunks < best_chunks(make, LONG).num_chunks


# --------------------------------------------------------------------------------------------------------------- flags


def test_what_the_flags_ask_for() -> None:
    assert ChunkOptions().count() is None
    assert ChunkOptions().count(3) == 3
    assert ChunkOptions("4").count() == ChunkOptions("4").count(4) == 4
    assert ChunkOptions("auto").count() is None and ChunkOptions("auto").auto
    assert ChunkOptions(chunk_lengths="5, 3,2").count() == 3
    for options, chunks, said in [
        (ChunkOptions("4"), 3, "the flags disagree: --chunks 3 chunks and --pipe-sp-splits 4 chunks."),
        (ChunkOptions("2", chunk_lengths="4,4,4"), None, "--pipe-sp-splits 2 chunks and --chunk-lengths 3 chunks."),
        (ChunkOptions("auto"), 3, "--pipe-sp-splits auto finds the number of chunks; leave --chunks out."),
        (ChunkOptions("two"), None, "--pipe-sp-splits two must be a whole number, at least 1, or auto."),
        (ChunkOptions("0"), None, "--pipe-sp-splits 0 must be a whole number, at least 1, or auto."),
        (ChunkOptions(chunk_lengths="4,,4"), None, "must be numbers of tokens with commas between"),
        (ChunkOptions(chunk_lengths="4,0"), None, "must be numbers of tokens with commas between"),
        (ChunkOptions(pipe_sp_strategy="average"), None, "--pipe-sp-strategy needs --pipe-sp-splits of 2 or more"),
        (ChunkOptions("1", chunk_alignment=8), None, "--chunk-alignment needs --pipe-sp-splits of 2 or more"),
        (ChunkOptions(chunk_lengths="4,4", chunk_alignment=8), None, "has nothing to decide beside --chunk-lengths"),
    ]:
        with pytest.raises(UserError) as caught:
            options.count(chunks)
        assert said in str(caught.value)


def test_what_the_flags_come_to() -> None:
    costs = model_costs(8192, 2)
    balanced = ChunkOptions().resolve(4, costs, 32, 8192, 2)
    assert balanced == balanced_lengths(costs, even_stages(32, 1), 8192, 4, 64)
    assert ChunkOptions(pipe_sp_strategy="average").resolve(4, costs, 32, 8192, 2) == (2048,) * 4
    fine = ChunkOptions(chunk_alignment=2).resolve(4, costs, 32, 8192, 2)
    assert fine is not None and fine != balanced and all(length % 2 == 0 for length in fine)
    assert ChunkOptions().resolve(1, costs, 32, 8192, 2) is None
    assert ChunkOptions().resolve(MOST_BALANCED + 1, LONG, 8) is None
    shares = ChunkOptions().resolve(4, LONG, 8)
    assert shares is not None and shares[0] > shares[3]
    assert ChunkOptions(pipe_sp_strategy="uniform_comp").resolve(4, LONG, 8) == shares
    given_ones = ChunkOptions(chunk_lengths="4096,2048,2048")
    assert given_ones.resolve(3, costs, 32, 8192, 2) == given_ones.resolve(3, LONG, 8) == (4096, 2048, 2048)
    for options, chunks, said in [
        (given_ones, 2, "--chunk-lengths 4096,2048,2048 are 3 chunks, not 2."),
        (ChunkOptions(chunk_lengths="4096,2048"), 2, "add up to 6144 tokens, but the sequence has 8192."),
        (ChunkOptions(chunk_lengths="4095,4097"), 2, "must be multiples of the tensor-parallel size 2."),
        (ChunkOptions(chunk_alignment=3), 2, "--chunk-alignment 3 must be a multiple of the tensor-parallel size 2."),
        (ChunkOptions(chunk_alignment=0), 2, "--chunk-alignment 0 must be at least 1."),
    ]:
        with pytest.raises(UserError) as caught:
            options.resolve(chunks, costs, 32, 8192, 2)
        assert str(caught.value).endswith(said)
