"""Drawings of timelines: picture, page, trace."""

from __future__ import annotations

import itertools
import json
import os
import struct
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helixpipe.common.errors import UserError
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.draw import labels as labels_module
from helixpipe.draw import picture as picture_module
from helixpipe.draw.formats import chrome_trace, draw
from helixpipe.draw.picture import picture
from helixpipe.draw.style import KIND_STYLES, scale_note
from helixpipe.lowering.lower import lower
from helixpipe.program.program import Op
from helixpipe.program.timeline import OpEvent, Timeline, idle_shares
from helixpipe.simulate.simulator import simulate
from schedules import Shape, build
from schedules import command as cli


def timeline(name: str = "1f1b", ranks: int = 4, microbatches: int = 8, message: float = 0.0) -> Timeline:
    costs = PieceTimes({"qkv": 1, "attn": 3, "mlp": 2}, message=message)
    return simulate(lower(build(name, Shape(ranks, microbatches, 2 * ranks)), costs), costs).timeline


def measured(simulated: Timeline, title: str = "1f1b, measured") -> Timeline:
    """As training would record it: seconds, a little late, without messages."""
    ops = [OpEvent(rank, op, start / 1e3 + 1e-3, end / 1e3 + 1e-3) for rank, op, start, end in simulated.ops]
    return Timeline(title, simulated.num_ranks, ops, (), "s")


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and data.endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def texts(figure: Any) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


# -------------------------------------------------------------------------------------------------------------- picture


def test_png_by_default(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["draw", "1f1b"]) == 0
    assert capsys.readouterr().out == "wrote 1f1b.png\n"
    assert os.listdir(tmp_path) == ["1f1b.png"]
    one = png_size(tmp_path / "1f1b.png")
    assert one[0] > 1500 and 250 < one[1] < 700
    timeline().save("run.json")
    assert cli.main(["draw", "1f1b", "interleaved-1f1b", "-v", "2", "--measured", "run.json", "-o", "all.png"]) == 0
    assert png_size(tmp_path / "all.png")[1] > 2 * one[1]


def test_every_box_has_its_microbatch_and_every_rank_its_bubble() -> None:
    shown = Counter(texts(picture([timeline()])))
    assert all(shown[str(microbatch)] == 2 * 4 for microbatch in range(8))
    assert shown["27.3 %"] == 4
    chunked = Timeline("x", 1, [OpEvent(0, Op("F", 0, 5, chunk), chunk, chunk + 1.0) for chunk in (0, 1)])
    assert {"5.0", "5.1"} <= set(texts(picture([chunked])))


def labels(figure: Any) -> list[tuple[str, int, float]]:
    """Return what is drawn in boxes as outlines, all that are alike at once: text, row and time."""
    return [
        (each.get_gid().removeprefix("label "), round(float(y)), float(x))
        for each in figure.axes[0].collections
        if (each.get_gid() or "").startswith("label ")
        for x, y in each.get_offsets()
    ]


def test_large_programs_have_their_labels_too() -> None:
    """The picture grows until there is room for them; each is where its op is."""
    large = timeline(ranks=32, microbatches=64)
    figure = picture([large])
    assert len(texts(figure)) < 100  # so many one by one would take long
    width, height = figure.get_size_inches()
    assert 14 < width < 60 and height < 10
    wanted = {(str(e.op.microbatch), e.rank, round((e.start + e.end) / 2, 6)) for e in large.ops}
    drawn = {(text, row, round(time, 6)) for text, row, time in labels(figure)}
    assert drawn <= wanted and len(drawn) > 0.97 * len(large.ops)


def test_more_boxes_than_can_be_looked_at_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels_module, "MOST", 100)
    monkeypatch.setattr(picture_module, "MOST", 100)
    figure = picture([timeline(ranks=8, microbatches=16)])
    assert not labels(figure) and len(texts(figure)) < 20
    assert figure.get_size_inches()[0] == 14


@pytest.mark.parametrize("width", [600, 1600, 4000])
def test_a_width_that_a_screen_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Whatever room its numbers would need: a measured op may be as short as it likes."""
    monkeypatch.chdir(tmp_path)
    short = timeline(ranks=2, microbatches=16)
    ops = [event._replace(end=event.start + 0.01) for event in short.ops]
    replace(short, ops=ops).save("run.json")
    words = ["draw", "seq1f1b", "-p", "2", "-m", "16", "-k", "4", "--measured", "run.json", "--output", "x.png"]
    assert cli.main(words) == 0 and png_size(tmp_path / "x.png")[0] > 4000
    assert cli.main([*words, "--width", str(width)]) == 0 and png_size(tmp_path / "x.png")[0] == width


def test_time_scales() -> None:
    """One unit: one scale, so that lengths compare; otherwise each fills the width, and the picture says so."""
    first, second = timeline(), timeline("interleaved-1f1b")
    same = picture([first, second])
    assert [axes.get_xlim() for axes in same.axes] == [(0, 396), (0, 396)]
    assert [axes.get_title("left")[:17] for axes in same.axes] == ["1f1b: 4 ranks, 8 ", "interleaved-1f1b:"]
    assert "all on the same time scale" in same.texts[0].get_text()
    run = measured(first)
    own = picture([first, run])
    assert [axes.get_xlim()[1] for axes in own.axes] == [396, pytest.approx(397)]
    assert own.axes[1].get_xlabel() == "time (ms)"
    assert "lengths do not compare" in own.texts[0].get_text()
    assert scale_note([first]) == "" and scale_note([first, second, run]).startswith("lengths compare only")


def test_text_of_users_is_not_markup(tmp_path: Path) -> None:
    """A title with dollars is no formula (matplotlib would fail on it)."""
    odd = replace(timeline(ranks=2, microbatches=2), title=r"$\frac{$ <b>.csv")
    draw([odd], tmp_path / "x.png")
    assert png_size(tmp_path / "x.png")


@pytest.mark.parametrize(("suffix", "start"), [(".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_vector_formats(tmp_path: Path, suffix: str, start: bytes) -> None:
    draw([timeline(ranks=2, microbatches=2)], tmp_path / f"x{suffix}")
    assert (tmp_path / f"x{suffix}").read_bytes().startswith(start)


def test_degenerate_timelines(tmp_path: Path) -> None:
    nothing = Timeline("no time", 2, [OpEvent(0, Op("F", 0, 0), 0.0, 0.0)])
    for suffix in (".png", ".html", ".json"):
        draw([nothing], tmp_path / f"x{suffix}")
    assert idle_shares(nothing.busy(), nothing.makespan) == [0.0, 0.0]
    with pytest.raises(UserError, match="no timeline"):
        draw([], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_colours_differ_in_lightness() -> None:
    def lightness(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        luminance = sum(w * c**2.2 for w, c in zip((0.2126, 0.7152, 0.0722), channels, strict=True))
        return 116 * luminance ** (1 / 3) - 16

    levels = sorted(lightness(style.colour) for style in KIND_STYLES.values())
    assert min(b - a for a, b in itertools.pairwise(levels)) > 8


def test_a_device_is_written_in_place_and_a_link_stays(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    draw([timeline()], tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink() and json.loads((tmp_path / "real.json").read_text())
    os.mkfifo(tmp_path / "pipe.json")
    reader = os.open(tmp_path / "pipe.json", os.O_RDONLY | os.O_NONBLOCK)
    draw([timeline(ranks=1, microbatches=1, name="none")], tmp_path / "pipe.json")
    assert json.loads(os.read(reader, 1 << 16)) and not (tmp_path / "pipe.json").is_file()
    os.close(reader)


# ---------------------------------------------------------------------------------------------------------------- trace


def test_trace(tmp_path: Path) -> None:
    simulated = timeline(message=1.0)
    draw([simulated, measured(simulated)], tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    complete = [e for e in events if e["ph"] == "X"]
    assert Counter(e["pid"] for e in complete) == {0: 64, 1: 64}
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in complete)
    first = next(e for e in complete if e["pid"] == 1)
    assert (first["name"], first["ts"], first["dur"]) == ("0F0", pytest.approx(1000), pytest.approx(12000))
    assert first["args"] == {"kind": "forward", "stage": 0, "microbatch": 0, "chunk": 0}

    named = [(e["name"], e["pid"], e["args"]["name"]) for e in events if e["ph"] == "M" and "name" in e["args"]]
    assert ("process_name", 1, "1f1b, measured") in named
    assert sum(name == "thread_name" for name, _, _ in named) == 8

    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(starts) == 48 and starts.keys() == ends.keys()
    for flow in starts:
        assert starts[flow]["ts"] < ends[flow]["ts"] and starts[flow]["tid"] != ends[flow]["tid"]
        for end in (starts[flow], ends[flow]):  # inside exactly one op, to which a viewer ties it
            inside = [
                e for e in complete
                if (e["pid"], e["tid"]) == (end["pid"], end["tid"]) and e["ts"] < end["ts"] < e["ts"] + e["dur"]
            ]  # fmt: skip
            assert len(inside) == 1


def test_trace_without_the_ops_of_a_message() -> None:
    """A measurement may lack a rank; its messages are left out, not half drawn."""
    whole = timeline()
    part = replace(whole, ops=[event for event in whole.ops if event.rank != 1])
    events = chrome_trace([part])["traceEvents"]
    assert sum(e["ph"] == "s" for e in events) == sum(e["ph"] == "f" for e in events) == 16
