"""`make reproduce`: its form of cells, what it makes of their errors, and what it says of those it cannot predict."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import run
from benchmarks.predicted_cells import (
    Predicted,
    arguments,
    hardware_of,
    kernel_of,
    overhead_of,
    predict,
    prepare,
    travels,
    without_flush,
)
from benchmarks.published_cells import Cell, Published, load
from benchmarks.reproduce import CELLS, speed_of, table_of
from benchmarks.reproduction_page import Line, Table, mean_error, page, picture
from helixpipe.common.errors import UserError
from helixpipe.costs.models import AUTOGRAD, FUSED, IN_PLACE
from helixpipe.costs.verdict import FRAGMENTATION, MemoryVerdict

FLAGS = {
    "num-layers": 4,
    "hidden-size": 512,
    "num-attention-heads": 4,
    "seq-length": 2048,
    "micro-batch-size": 1,
    "global-batch-size": 4,
    "pipeline-model-parallel-size": 2,
}
CELL = Cell("one", "Seq1F1B 1", "2k", "1f1b", "a100-80", 2, FLAGS, Published(10000.0, 5.0), calibrate=True)


def written(folder: Path, *cells: object) -> Path:
    path = folder / "cells.json"
    path.write_text(json.dumps(cells), encoding="utf-8")
    return path


def content(**changes: object) -> dict[str, object]:
    cell = {**vars(CELL), "flags": dict(FLAGS), "published": vars(CELL.published)}
    return {**cell, **changes}


def test_the_repositorys_cells_are_read() -> None:
    cells = load(CELLS)
    assert {cell.hardware for cell in cells} == {"a100-80", "a800", "h20", "h100"}
    assert {"fsdp", "weipipe", "helix", "seq1f1b-interleaved"} <= {cell.schedule for cell in cells}
    assert all(any(cell.calibrate for cell in cells if cell.table == name) for name in ("Seq1F1B 2.7B, 8 A100",))


@pytest.mark.parametrize(
    ("cell", "sentence"),
    [
        (content(gpus=0), "cell 1 (one): gpus must be a whole number from 1 on, not 0"),
        (content(runtime="theirs"), "runtime 'theirs' is unknown; known are ours and megatron"),
        (content(network_gbits_per_node=-1), "network_gbits_per_node must be a number above 0, not -1"),
        (content(flags=[]), "flags must be an object of flags and values"),
        (content(published={"over_best": "many"}), "published over_best must be a number, not 'many'"),
        (content(attention_kernel="fa9"), "attention_kernel 'fa9' is unknown; known are unfused, fa1, fa2, fa3, cudnn"),
        (content(op_overhead="some"), "op_overhead must be seconds, from 0 on, or fit, not 'some'"),
        (content(published={"memory_gib": -1}), "published memory_gib must be a number, not -1"),
        (content(hardware=None), "'hardware' is missing"),
        ({"id": "x"}, "(x): 'table' is missing"),
        ("text", "cell 1 must be an object, not str"),
    ],
)
def test_what_is_not_a_cell_is_refused_by_name(tmp_path: Path, cell: object, sentence: str) -> None:
    with pytest.raises(UserError) as raised:
        load(written(tmp_path, cell))
    assert sentence in str(raised.value)


def test_fields_beside_those_have_no_effect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (cell,) = load(written(tmp_path, content(source="table 3")))
    assert cell.id == "one" and "source has no effect" in capsys.readouterr().err


def test_what_is_null_is_left_out_and_so_are_cells_of_another_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nulls = {"gpus_per_node": None, "pcie": None, "runtime": None, "network_gbits_per_node": None, "calibrate": None}
    published = {"tokens_per_second_per_gpu": 0, "memory_gib": None, "oom": True}
    odd = content(schedule="1F1B-I", published=published, table=4, **nulls)
    (cell,) = load(written(tmp_path, odd, content(runtime="theirs")))
    assert (cell.gpus_per_node, cell.runtime, cell.pcie, cell.schedule, cell.table) == (8, "ours", False, "1f1b-i", "4")
    assert cell.published == Published(oom=True) and not cell.calibrate
    assert "left out: " in (told := capsys.readouterr().err) and "cell 2 (one): runtime 'theirs'" in told
    table = table_of(cell.table, [cell], map)
    assert "out of memory" in page([table]) and "0 of 1 |" in page([table])


def test_a_network_is_its_own_and_an_ethernets_in_both_directions_less() -> None:
    """TCP leaves 94 % of 10 Gb/s, both directions 70 % of that; other networks reach what all reach."""
    wide = hardware_of(replace(CELL, network_gbits_per_node=800))
    assert wide.network == 100e9 and wide.adapters == 4
    ring = hardware_of(replace(CELL, schedule="weipipe", runtime="megatron", network_gbits_per_node=10))
    pipeline = hardware_of(replace(CELL, runtime="megatron", network_gbits_per_node=10))
    assert ring.network * ring.efficiency.network == pytest.approx(0.94 * 1.25e9)
    assert pipeline.network / ring.network == pytest.approx(0.7)
    assert hardware_of(replace(CELL, pcie=True)).nvlink == 16e9  # two GPUs behind a switch
    assert hardware_of(replace(CELL, pcie=True, gpus_per_node=1)).nvlink == 32e9


def test_what_papers_leave_out_is_told_unless_flags_say_otherwise() -> None:
    words = arguments(replace(CELL, schedule="1f1b-i", flags={**FLAGS, "tensor-model-parallel-size": 2}))
    assert {"--sequence-parallel", "--untie-embeddings-and-output-weights", "interleaved-1f1b"} <= set(words)
    plain = arguments(replace(CELL, table="WeiPipe", schedule="weipipe", flags={**FLAGS, "vocab-size": 8}))
    assert plain[plain.index("--vocab-size") + 1] == "8" and "--no-weipipe-eager" in plain and "--swiglu" in plain
    assert "--recompute-granularity" not in arguments(replace(CELL, table="WeiPipe", schedule="zb1"))
    assert travels(replace(CELL, runtime="megatron")) and not travels(CELL)


def test_megatrons_runtime_is_slower() -> None:
    ours, theirs = predict(CELL), predict(replace(CELL, runtime="megatron", attention_kernel="fa2"))
    assert theirs.tokens_per_gpu < 0.95 * ours.tokens_per_gpu and ours.fits
    assert theirs.memory < ours.memory  # values of their own


MEGATRON = replace(CELL, table="Megatron", runtime="megatron")


def test_what_kernel_of_attention_a_cell_has() -> None:
    """Its own, or what its paper and engine had: unfused in Megatron-LM on A100s, up to where that could be run."""

    def of(cell: Cell = MEGATRON, /, **flags: object) -> str:
        return kernel_of(replace(cell, flags={**FLAGS, **flags}))

    assert of() == "unfused" and of(replace(MEGATRON, attention_kernel="fa1")) == "fa1"
    assert of(**{"seq-length": 4096}) == "unfused" and of(**{"seq-length": 4097}) == "fa2"
    assert of(**{"use-flash-attn": True}) == "fa2" and of(CELL) == "fa2"
    assert of(replace(MEGATRON, hardware="h100")) == "fa2"
    assert of(replace(CELL, table="MPT with FSDP")) == "fa1"
    assert "--use-flash-attn" not in arguments(replace(MEGATRON, flags={**FLAGS, "use-flash-attn": True}))


def test_what_is_known_of_engines_with_fully_sharded_weights() -> None:
    """torch's, MPT's loss, and one whose ranks do nothing beside their collectives. A model of plain PyTorch has
    torch's loss under every engine."""
    flags = {**FLAGS, "pipeline-model-parallel-size": 1}
    cell = replace(CELL, table="x", schedule="fsdp", flags=flags)
    torchs, mpts = prepare(cell).costs, prepare(replace(cell, table="MPT with FSDP")).costs
    theirs = prepare(replace(cell, runtime="megatron")).costs
    assert [costs.float32_weights for costs in (torchs, theirs)] == [True, False]
    plain = prepare(replace(cell, table="WeiPipe", runtime="megatron")).costs
    losses = [costs.layout.loss for costs in (torchs, mpts, theirs, plain)]
    assert losses == [AUTOGRAD, FUSED, IN_PLACE, AUTOGRAD]
    assert all(costs.layout.stops_recomputing and costs.layout.batch_first for costs in (torchs, mpts))
    assert not theirs.layout.stops_recomputing and theirs.hardware.interference == 0 < torchs.hardware.interference
    assert not prepare(CELL).costs.float32_weights


def test_what_an_op_takes_beside_its_kernels() -> None:
    wide = replace(CELL, runtime="megatron", gpus_per_node=1)
    assert [overhead_of(cell) for cell in (CELL, MEGATRON, wide)] == [0.0, 0.5e-3, 11e-3]
    assert overhead_of(replace(wide, op_overhead=3e-3)) == 3e-3 and overhead_of(replace(wide, op_overhead="fit")) == 0.0
    assert overhead_of(replace(MEGATRON, schedule="zb1p")) == 0.5e-3
    assert overhead_of(replace(MEGATRON, schedule="fsdp")) == 0.0


def test_an_overhead_is_found_only_where_cells_ask_for_it() -> None:
    told = replace(MEGATRON, published=Published(predict(replace(MEGATRON, op_overhead=4e-3)).tokens_per_gpu))
    asking, other = replace(told, op_overhead="fit"), replace(told, id="other")
    table = table_of("t", [asking, other], map)
    assert table.lines[0].cell.op_overhead == pytest.approx(4e-3, rel=0.01)
    assert table.lines[0].error == pytest.approx(0.0, abs=1e-3)
    assert table.lines[1].cell.op_overhead is None and abs(table.lines[1].error or 0) > 0.01


def test_megatrons_engine_recomputes_inside_the_backward() -> None:
    cell = replace(MEGATRON, flags={**FLAGS, "recompute-granularity": "full"})
    assert "--no-recompute-early" in arguments(cell) and "--no-recompute-early" not in arguments(MEGATRON)
    assert "--no-recompute-early" not in arguments(replace(cell, runtime="ours"))


def test_zero_bubbles_engine_neither_waits_nor_flushes() -> None:
    cell = replace(MEGATRON, schedule="zb2p", gpus=4, flags={**FLAGS, "pipeline-model-parallel-size": 4})
    assert not travels(cell) and without_flush(cell) and not without_flush(replace(cell, runtime="ours"))
    kept = replace(prepare(cell), cell=replace(cell, schedule="gpipe", runtime="ours"))
    assert prepare(cell).at(1.0).tokens_per_gpu > 1.02 * kept.at(1.0).tokens_per_gpu


def test_a_speed_at_its_limit_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    impossible = replace(CELL, published=Published(1e9))
    assert prepare(impossible).fitting_speed() == 2.0
    assert "no speed from 0.1 to 2 gives what was published" in capsys.readouterr().err


def test_fsdp_of_megatron_waits_for_what_it_gathers() -> None:
    """It gathers, computes and scatters in turn, so that a network half as fast is felt in full."""
    flags = {**FLAGS, "pipeline-model-parallel-size": 1, "global-batch-size": 2}
    cell = replace(CELL, schedule="fsdp", runtime="megatron", flags=flags, gpus_per_node=1)
    slow, middle, fast = (
        1 / predict(replace(cell, network_gbits_per_node=rate)).tokens_per_gpu for rate in (50, 100, 200)
    )
    assert slow > middle and (slow - middle) / (middle - fast) == pytest.approx(2, rel=0.01)


def test_what_sppo_has_no_room_for_leaves_for_the_host() -> None:
    """And nothing of a step that fits."""
    model = {"num-layers": 32, "hidden-size": 4096, "num-attention-heads": 32, "tensor-model-parallel-size": 8}
    flags = {**FLAGS, **model, "pipe-sp-splits": 8, "global-batch-size": 1}
    short, long = (replace(CELL, schedule="sppo", gpus=16, flags={**flags, "seq-length": 1024 * k}) for k in (64, 384))
    offs = [replace(cell, flags={**cell.flags, "offload-activations": "off"}) for cell in (short, long)]
    assert prepare(short).program == prepare(offs[0]).program
    kept, left = predict(offs[1]), predict(long)
    assert not kept.fits and left.fits and left.tokens_per_gpu < kept.tokens_per_gpu


def test_an_unknown_flag_is_one_sentence_and_the_rest_goes_on(tmp_path: Path) -> None:
    odd = replace(CELL, id="odd", flags={**FLAGS, "hiden-size": 4})
    table = table_of("t", [CELL, odd], map)
    assert table.lines[0].predicted is not None and table.lines[1].predicted is None
    assert "--hiden-size" in table.lines[1].reason
    assert "- `odd` is not predicted: " in page([table]) and picture([table]).count("<circle") == 2
    many = picture([table] * 13)
    assert (many.count("<circle"), many.count('<rect x="'), many.count("<path")) == (12, 12, 2)


def test_speed_is_what_makes_the_calibrated_cells_right() -> None:
    """Though messages between two nodes take what they take, however fast the GPUs are."""
    wide = replace(CELL, gpus_per_node=1, network_gbits_per_node=10)
    told = replace(wide, published=Published(predict(wide, 0.5).tokens_per_gpu))
    assert speed_of([told, replace(CELL, calibrate=False)], map) == pytest.approx(0.5, rel=0.01)
    assert speed_of([replace(CELL, calibrate=False)], map) == 1.0


def test_ratios_and_errors() -> None:
    def line(schedule: str, published: float, predicted: float, oom: bool = False, **more: float) -> Line:
        told = Published(published, 10.0, oom, **more)
        cell = replace(CELL, schedule=schedule, published=told, calibrate=schedule == "1f1b")
        allocated = 8 * 2.0**30
        cached = 10 * 2.0**30 - FRAGMENTATION * allocated
        return Line(cell, Predicted(predicted, MemoryVerdict(allocated, cached, 16 * 2.0**30, 9 * 2.0**30)))

    lines = [line("1f1b", 100, 100), line("seq1f1b", 120, 126), line("helix", 200, 188, True, over_best=1.2)]
    table = Table("t", 0.9, lines)
    assert table.ratio_error(lines[1]) == pytest.approx(0.05)
    assert table.ratio_error(lines[0]) is None
    assert table.over_best(lines[2]) == pytest.approx(188 / 126)
    assert table.memory_error(lines[1]) == pytest.approx(0.0)
    text = page([table])
    assert mean_error([0.1, None, -0.3]) == "20.0 % (2)" and mean_error([None]) == "–"
    assert "| t, GPUs' speed 0.900 | 14.7 % (2) | 5.5 % (2) | 0.0 % (2) | 2 of 3 | 1 of 1 |" in text
    assert table.best_named() == (1, 1)
    assert Table("t", 1.0, [line("1f1b", 100, 130), line("seq1f1b", 120, 126)]).best_named() == (0, 1)
    assert "| all | 14.7 % (4) |" in page([table, table]) and "| 4 of 6 | 2 of 2 |" in page([table, table])
    assert "published 1.20, predicted 1.49 (+24.3 %)" in text


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = written(tmp_path, content()), tmp_path / "page.md"
    output.write_text("<!-- bench: summary -->\n<!-- end -->\n", encoding="utf-8")
    words = ["--cells", str(path), "--output", str(output), "--jobs", "1"]
    assert run.main(["reproduce", *words]) == 0
    assert "| Seq1F1B 1 |" in output.read_text() and "## Seq1F1B 1" in capsys.readouterr().out
    assert output.with_suffix(".svg").read_text().startswith("<svg")
    assert (
        run.main(["reproduce", "--cells", str(tmp_path / "none.json")]) == 2 and "none.json" in capsys.readouterr().err
    )
