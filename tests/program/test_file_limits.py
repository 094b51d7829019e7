"""Program files of a few kilobytes that come to more than there is memory for are refused, whatever they repeat."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from helixpipe.common.errors import ProgramError
from helixpipe.program import file_limits
from helixpipe.program.files import load_program

ONE = {
    "format": "helixpipe program",
    "version": 1,
    "schedule": "mine",
    "stages": [{"pieces": "embed layers 0-3 head"}],
    "workload": {"microbatches": 1, "chunks": 1},
    "ranks": ["0F0 0B0"],
}
MANY = "layers 0-999"
"""5000 pieces: two of them are as many as the tests allow."""

REPEATED: dict[str, dict[str, Any]] = {
    "stages": {"stages": [{"pieces": MANY}] * 300},
    "one stage": {"stages": [{"pieces": " ".join([MANY] * 300)}]},
    "single pieces": {"stages": [{"pieces": "attn[7] " * 15_000 + "head"}]},
    "recomputation": {"stages": [{"pieces": "embed head", "recompute": [MANY] * 300}]},
    "activations of units": {"activations": [{"units": f"0F{i}", "recompute": [MANY]} for i in range(300)]},
    "offloaded": {"activations": [{"units": "0F0", "offload": [{"pieces": MANY, "share": 1}] * 300}]},
    "units": {"activations": [{"units": " ".join(f"0F{i}" for i in range(15_000))}]},
    "ops of a rank": {"ranks": [" ".join(f"0F{i}" for i in range(15_000))]},
    "ops of ranks": {"ranks": [" ".join(f"0F{i}" for i in range(50))] * 300},
    "slices": {"workload": {"microbatches": [[" ".join(f"{i}[0:1]" for i in range(50))]] * 300}},
}


def refused(path: Path) -> str:
    """The sentence; what was held at once while the file was read stays small."""
    tracemalloc.start()
    try:
        with pytest.raises(ProgramError) as caught:
            load_program(path)
        assert tracemalloc.get_traced_memory()[1] < 8e6
    finally:
        tracemalloc.stop()
    return str(caught.value)


@pytest.mark.parametrize("name", REPEATED)
def test_what_a_file_comes_to_is_counted_over_all_its_lines(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_limits, "MAX_PARTS", 10_000)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**ONE, **REPEATED[name]}))
    assert refused(path) == (
        "mine.json comes to more than 10,000 ops, pieces and slices, the most that a program file may have."
    )


def test_a_table_of_ops_likewise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_limits, "MAX_PARTS", 10_000)
    path = tmp_path / "mine.csv"
    path.write_text("\n".join([",".join(f"0F{i}" for i in range(50))] * 300))
    assert refused(path).startswith("mine.csv comes to more than 10,000 ops, pieces and slices")


def test_as_many_as_there_may_be_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_limits, "MAX_PARTS", 22 + 2)
    for name, text in (("mine.json", json.dumps(ONE)), ("mine.csv", ",".join(f"0F{i},0B{i}" for i in range(12)))):
        (tmp_path / name).write_text(text)
        assert load_program(tmp_path / name).num_ranks == 1


@pytest.mark.thorough
def test_three_hundred_stages_of_all_the_layers_there_may_be(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**ONE, "stages": [{"pieces": "layers 0-99998"}] * 300}))
    with pytest.raises(ProgramError, match=r"mine\.json comes to more than 2,000,000 ops, pieces and slices"):
        load_program(path)


@pytest.mark.parametrize("name", ["mine.json", "mine.csv"])
def test_a_file_is_not_read_beyond_its_longest(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_limits, "MAX_BYTES", 1 << 20)
    path = tmp_path / name
    with path.open("wb") as file:
        file.truncate(1 << 26)
    assert refused(path) == f"{name} is longer than 1 MiB, the most that a program file may have."
