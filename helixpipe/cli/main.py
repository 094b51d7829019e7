"""The `helixpipe` command: look at pipeline schedules without running them.

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

import argparse
import sys
from collections.abc import Callable, Sequence
from types import MappingProxyType

from helixpipe.cli import (
    command_check,
    command_compare,
    command_draw,
    command_dry_run,
    command_export,
    command_improve,
    command_list,
    command_memory,
    command_plan,
    command_playground,
    command_profile,
    command_simulate,
    command_train,
    command_watch,
)
from helixpipe.cli.parser import parsed, parsers
from helixpipe.common.collector import collector_paused
from helixpipe.common.command import USER_ERROR, run_command
from helixpipe.common.errors import UserError
from helixpipe.common.flags import nearest_name
from helixpipe.planning.catalogue import Catalogue


def main(catalogue: Catalogue, argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. Errors of the user's are one sentence on standard error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["train"]:  # its flags are those of another program, as are those of dry-run
        return run_command("helixpipe", lambda: command_train.run(arguments[1:]))
    if arguments[:1] == ["dry-run"]:
        return run_command("helixpipe", lambda: command_dry_run.run(arguments[1:]))
    return run_command("helixpipe", lambda: _run(arguments, catalogue))


@collector_paused()  # one command makes its objects and ends
def _run(arguments: list[str], catalogue: Catalogue) -> int:
    parser, commands = parsers(catalogue)
    name = arguments[0] if arguments else ""
    if not arguments:
        parser.print_help(sys.stderr)
        return USER_ERROR
    if not name.startswith("-") and name not in commands:
        near = nearest_name(name, commands)
        hint = f"did you mean {near}?" if near else f"known are {', '.join(commands)}."
        raise UserError(f"unknown command {name!r}; {hint}")
    if name not in commands and name not in ("-h", "--help", "--version"):
        raise UserError(f"a command must come before {name}: one of {', '.join(commands)}.")
    namespace = parsed(parser, commands, catalogue, arguments)
    _COMMANDS[name](namespace)
    return 0


_COMMANDS: MappingProxyType[str, Callable[[argparse.Namespace], None]] = MappingProxyType(
    {
        "list": command_list.run,
        "simulate": command_simulate.run,
        "memory": command_memory.run,
        "draw": command_draw.run,
        "check": command_check.run,
        "export": command_export.run,
        "plan": command_plan.run,
        "improve": command_improve.run,
        "compare": command_compare.run,
        "profile": command_profile.run,
        "playground": command_playground.run,
        "watch": command_watch.run,
    }
)
