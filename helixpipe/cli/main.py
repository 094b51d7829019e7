"""The `helixpipe` command: simulate, plan and draw pipeline schedules, and train with them.

    helixpipe list
    helixpipe simulate 1f1b -p 4 -m 8
    helixpipe compare -p 4 -m 16
    helixpipe draw 1f1b interleaved-1f1b -o compare.png
    helixpipe check my_schedule.csv
    helixpipe export zbv -p 4 -m 8 --to torch
    helixpipe memory 1f1b --model llama2-7b --seq-length 131072 --hardware h20 --nodes 8 --tensor-parallel 8
    helixpipe plan --model llama2-7b --hardware h100 --gpus 64 --seq-length 32768 --global-batch-size 128
    helixpipe improve seq1f1b -p 4 -m 4 -k 4 --model llama2-7b --seq-length 32768 --hardware a800
    helixpipe playground
    helixpipe profile --model llama2-7b --seq-length 4096 --output profile.json
    helixpipe watch runs/mine
    helixpipe train -p 2 --num-layers 4 --hidden-size 64 ...
    helixpipe dry-run --world-size 1024 --ranks 0,511,1023 -- --num-layers 80 ...

It is handed the catalogue (see `schedules.command`). It never imports torch (`profile` leaves that to the processes it
starts, as do `train` and `dry-run`), and what is slow to import (matplotlib, rich) only where it is used.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from helixpipe.cli.parser import as_typed, parsed, parsers
from helixpipe.common.collector import collector_paused
from helixpipe.common.command import USER_ERROR, run_command
from helixpipe.common.errors import UserError
from helixpipe.common.flags import nearest_name
from helixpipe.planning.catalogue import Catalogue
from helixpipe.program.files import is_file


def main(catalogue: Catalogue, argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. Errors of the user's are one sentence on standard error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["train"], ["dry-run"]):  # their flags are those of another program
        return run_command("helixpipe", lambda: _module(arguments[0]).run(arguments[1:]))
    return run_command("helixpipe", lambda: _run(arguments, catalogue))


@collector_paused()  # one command makes its objects and ends
def _run(arguments: list[str], catalogue: Catalogue) -> int:
    name = arguments[0] if arguments else ""
    parser, commands = parsers(catalogue, only=name)
    if not arguments:
        parser.print_help(sys.stderr)
        return USER_ERROR
    if not name.startswith("-") and name not in commands:
        if name in catalogue or is_file(name):
            raise UserError(f"a command must come before {name}: helixpipe simulate {name}, say.")
        near = nearest_name(name, commands)
        hint = f"did you mean {near}?" if near else f"known are {', '.join(commands)}."
        raise UserError(f"unknown command {name!r}; {hint}")
    if name not in commands and name not in ("-h", "--help", "--version"):
        raise UserError(f"a command must come before {name}: one of {', '.join(commands)}.")
    namespace = parsed(parser, commands, catalogue, arguments)
    with as_typed(namespace):
        _module(name).run(namespace)
    return 0


def _module(command: str) -> Any:
    """Return the module of a command: imported here, so that nobody waits for what other commands need."""
    return import_module(f"helixpipe.cli.command_{command.replace('-', '_')}")
