"""Programs in files: JSON without loss, and CSV as torch.distributed.pipelining has it. No torch here."""

from __future__ import annotations

from pathlib import Path

from helixpipe.common.errors import ProgramError
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


def load_program(path: str | Path, num_layers: int | None = None) -> Program:
    """Read a program. num_layers: of a CSV file, which does not say; see `from_csv`. Raises ProgramError,
    ScheduleError."""
    return from_json(path) if says_all(path) else from_csv(path, num_layers)


def save_program(program: Program, path: str | Path) -> None:
    """Write a program, all or nothing. Raises ProgramError for a file of another kind and for what a CSV file cannot
    hold, UserError where the file cannot be written."""
    if not is_file(path):
        raise ProgramError(f"a program is written to a file whose name ends in .json or .csv, not to {path}.")
    with whole_file(path) as temporary:
        (to_json if says_all(path) else to_csv)(program, temporary)
