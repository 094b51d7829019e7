"""Workloads, and activations by unit, that cannot be: one sentence that names what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helixpipe.common.errors import ProgramError
from helixpipe.lowering.validate import untrainable, validate
from helixpipe.program.program import Op, Program, Unit
from helixpipe.program.stages import Activations, Piece
from helixpipe.program.workload import Slice, Workload
from schedules import Shape, build


def placed(*microbatches: str, proportional: bool = False) -> Workload:
    """`0:0+5 1:0+3 | 1:3+8` is a microbatch of two chunks; the first has two slices, document:start+length."""

    def part(word: str) -> Slice:
        document, _, rest = word.partition(":")
        start, _, length = rest.partition("+")
        return Slice(int(document), int(start), int(length))

    cut = (microbatch.split("|") if microbatch else [] for microbatch in microbatches)
    return Workload(tuple(tuple(tuple(map(part, c.split())) for c in chunks) for chunks in cut), proportional)


def program(workload: Workload, ranks: int = 1) -> Program:
    """gpipe's forwards and backwards of these chunks, all of a microbatch on rank microbatch mod ranks."""
    (stage,) = build("none", Shape(1, 1, 1)).stages
    units = list(workload.units())
    order = [Op("F", 0, *unit) for unit in units] + [Op("B", 0, *unit) for unit in reversed(units)]
    rows = tuple(tuple(op for op in order if op.microbatch % ranks == rank) for rank in range(ranks))
    return Program("test", (replace(stage, placement="replicated"),), rows, workload)


@pytest.mark.parametrize(
    "workload",
    [
        placed("0:0+5|0:5+3", "1:0+8"),
        placed("0:0+5 1:0+3", "1:3+8 2:0+1"),
        placed("1:0+1", "0:0+7"),
        placed("0:0+1|0:1+1", "1:0+1", proportional=True),
        placed("0:0+1|0:1+2", "1:0+2|1:2+1", proportional=True),
    ],
)
def test_documents_that_are_whole(workload: Workload) -> None:
    validate(program(workload))


WRONG = [
    (placed("0:0+5", ""), "microbatch 1 has no chunks."),
    (placed("0:0+5|", "1:0+5"), "chunk 1 of microbatch 0 has no slice of any document."),
    (
        placed("0:0+5|0:4+3"),
        "tokens 0 to 4 of document 0 (microbatch 0, chunk 0) and tokens 4 to 6 of document 0 (microbatch 0, chunk 1) "
        "overlap.",
    ),
    (
        placed("0:0+5", "0:0+5"),
        "tokens 0 to 4 of document 0 (microbatch 0, chunk 0) and tokens 0 to 4 of document 0 (microbatch 1, chunk 0) "
        "overlap.",
    ),
    (
        placed("0:5+1|0:0+5"),
        "token 5 of document 0 (microbatch 0, chunk 0) must come after tokens 0 to 4 of document 0 (microbatch 0, "
        "chunk 1), whose keys and values are needed.",
    ),
    (placed("0:0+5|0:6+3"), "no chunk has token 5 of document 0."),
    (placed("0:0+5 1:2+3"), "no chunk has tokens 0 to 1 of document 1."),
    (placed("0:0+5", "2:0+3"), "document 1 is missing: the workload names document 2."),
    (placed("999999999:0+5"), "document 0 is missing: the workload names document 999999999."),
    (
        placed("0:0+0"),
        "Slice(document=0, start=0, length=0) in chunk 0 of microbatch 0 is no slice: it needs a document and a first "
        "token from 0 on, and a length of 1 or more.",
    ),
    (
        placed("-1:0+1"),
        "Slice(document=-1, start=0, length=1) in chunk 0 of microbatch 0 is no slice: it needs a document and a "
        "first token from 0 on, and a length of 1 or more.",
    ),
    (
        placed("0:0+1 1:0+1", proportional=True),
        "microbatch 0 has several documents, so the lengths must be in tokens.",
    ),
]


@pytest.mark.parametrize(("workload", "sentence"), WRONG, ids=[sentence for _, sentence in WRONG])
def test_documents_that_are_not(workload: Workload, sentence: str) -> None:
    with pytest.raises(ProgramError) as caught:
        validate(program(workload))
    assert str(caught.value) == sentence


def test_keys_and_values_do_not_move() -> None:
    """A document may go on in the next microbatch, on the same rank."""
    shared = placed("0:0+5 1:0+3", "2:0+8", "1:3+5")
    validate(program(shared, ranks=2))
    with pytest.raises(ProgramError) as caught:
        validate(program(shared, ranks=3))
    assert str(caught.value) == (
        "the keys and values of document 1, which is in microbatches 0 and 2, in stage 0 stay on one rank, but 0F0 is "
        "on rank 0 and 0F2 on rank 2."
    )


def test_a_document_goes_on_in_the_next_microbatch() -> None:
    """So its backwards come in the reverse order, also where every microbatch is one chunk."""
    good = program(placed("0:0+5", "0:5+3"))
    validate(good)
    wrong = tuple(Op(kind, 0, microbatch) for kind in "FB" for microbatch in (0, 1))
    with pytest.raises(ProgramError, match=r"^rank 0: 0B0 comes before 0B1, which it needs\.$"):
        validate(replace(good, ranks=(wrong,)))


def test_chunks_beyond_those_of_the_microbatch() -> None:
    good = program(placed("0:0+5|0:5+3", "1:0+8"))
    with pytest.raises(ProgramError, match=r"0F1\.1 names chunk 1, but the last of microbatch 1 is 0\.$"):
        validate(replace(good, ranks=((*good.ranks[0], Op("F", 0, 1, 1)),)))


NORM, QKV, ATTN, PROJ, MLP = (Piece(kind, 0) for kind in ("norm", "qkv", "attn", "proj", "mlp"))

ACTIVATIONS = [
    (Unit(2, 0), Activations(), "activations are given for the unit of 2F0, but the program has no such unit."),
    (Unit(0, 2), Activations(), "activations are given for the unit of 0F2, but the program has no such unit."),
    (Unit(0, 0, 1), Activations(), "activations are given for the unit of 0F0.1, but the program has no such unit."),
    (
        Unit(1, 0),
        Activations(((NORM,),)),
        "the unit of 1F0 cannot recompute norm[0]: not a run of its pieces, or out of order.",
    ),
    (
        Unit(0, 0),
        Activations(((NORM, ATTN),)),
        "the unit of 0F0 cannot recompute norm[0] attn[0]: not a run of its pieces, or out of order.",
    ),
    (
        Unit(0, 0),
        Activations((), (((), 1.0),)),
        "the unit of 0F0 cannot offload an empty run: not a run of its pieces, or out of order.",
    ),
    (
        Unit(0, 0),
        Activations((), (((QKV, ATTN), 1.0), ((ATTN, PROJ), 1.0))),
        "the unit of 0F0 cannot offload attn[0] proj[0]: not a run of its pieces, or out of order.",
    ),
    (
        Unit(0, 0),
        Activations(((NORM, QKV),), (((QKV, ATTN), 1.0),), -1),
        "the unit of 0F0 cannot be back -1 ops ahead: 0 is right before the op that needs it.",
    ),
    *(
        (
            Unit(0, 0),
            Activations((), (((MLP,), share),)),
            f"the unit of 0F0 cannot offload a share of {share:g} of mlp[0]: a share is above 0 and at most 1.",
        )
        for share in (0.0, 1.5, -1.0, float("nan"))
    ),
]


@pytest.mark.parametrize(("unit", "own", "sentence"), ACTIVATIONS, ids=[sentence for *_, sentence in ACTIVATIONS])
def test_activations_that_cannot_be(unit: Unit, own: Activations, sentence: str) -> None:
    with pytest.raises(ProgramError) as caught:
        validate(replace(build("1f1b", Shape(2, 2, 2)), activations={unit: own}))
    assert str(caught.value) == sentence


def test_recomputation_by_unit() -> None:
    """An R op needs something to recompute: of its own unit, where the program says so, else of the stage."""
    good = build("1f1b", Shape(2, 2, 2))
    first = tuple(each for op in good.ranks[0] for each in ((op._replace(kind="R"), op) if op.kind == "B" else (op,)))
    own = {Unit(0, 0): Activations(((ATTN,),)), Unit(0, 1): Activations(((MLP,),))}
    explicit = replace(good, ranks=(first, good.ranks[1]), activations=own)
    validate(explicit)
    with pytest.raises(ProgramError, match=r"^0R1 has nothing to do: stage 0 recomputes none of its pieces\.$"):
        validate(replace(explicit, activations={Unit(0, 0): own[Unit(0, 0)]}))
    stage = replace(good.stages[0], recompute=((NORM,),))
    with pytest.raises(ProgramError, match=r"^0R1 has nothing to do: its unit recomputes none of its pieces\.$"):
        validate(replace(explicit, stages=(stage, good.stages[1]), activations={Unit(0, 1): Activations()}))


def test_what_is_not_executed_yet() -> None:
    good = build("1f1b", Shape(2, 2, 2))
    assert untrainable(good) is None
    assert untrainable(replace(good, activations={Unit(0, 1): Activations(((MLP,),))})) is None
    assert untrainable(replace(good, activations={Unit(0, 1): Activations((), (((MLP,), 0.5),))})) is None
    assert untrainable(replace(good, workload=placed("0:0+5 1:0+3", "2:0+8"))) is None
    spanning = untrainable(replace(good, workload=placed("0:0+5 1:0+3", "1:3+8")))
    assert spanning == "schedule 1f1b does not have every document in one piece of one microbatch: not trained."
