"""Programs in files: JSON without loss, and CSV as torch.distributed.pipelining has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from helixpipe.common.errors import ProgramError, ScheduleError
from helixpipe.common.files import whole_file
from helixpipe.program.json_text import from_json, to_json
from helixpipe.program.program import Program
from helixpipe.program.text import from_csv, to_csv


def is_file(name: str | Path) -> bool:
    """Whether what is given for a schedule is a file, not a name of the catalogue: by its ending."""
    return Path(name).suffix in (".csv", ".json")


def says_all(name: str | Path) -> bool:
    """Whether a file says all there is to say of a program, layers and recomputation among it."""
    return Path(name).suffix == ".json"


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Around whatever may find a fault in the program of a file: the sentence of the error names the file. path: empty
    for a program of no file."""
    try:
        yield
    except (ProgramError, ScheduleError) as error:
        if Path(path).name not in str(error):
            error.args = (f"{path}: {error}",)
        raise


def load_program(path: str | Path, num_layers: int | None = None) -> Program:
    """Read a program. num_layers: of a CSV file, which does not say; see `from_csv`. Raises ProgramError,
    ScheduleError."""
    with naming(path):
        program = from_json(path) if says_all(path) else from_csv(path, num_layers)
    return replace(program, source=str(path))


def save_program(program: Program, path: str | Path) -> None:
    """Write a program, all or nothing. Raises ProgramError for a file of another kind and for what a CSV file cannot
    hold, UserError where the file cannot be written."""
    if not is_file(path):
        raise ProgramError(f"a program is written to a file whose name ends in .json or .csv, not to {path}.")
    with naming(path), whole_file(path) as temporary:
        (to_json if says_all(path) else to_csv)(program, temporary)
