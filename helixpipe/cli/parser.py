"""The flags of the `helixpipe` command and its subcommands.

What only some commands need is imported where their flags are added: a command does not wait for the others' modules.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from helixpipe import __version__
from helixpipe.cli.certification import CertifyOptions
from helixpipe.cli.documents import BatchOptions
from helixpipe.cli.model import ModelOptions
from helixpipe.cli.options import CostOptions, OutputOptions, ShapeOptions, SimulateOptions
from helixpipe.cli.side_by_side import SizeOptions
from helixpipe.common.errors import UserError
from helixpipe.common.flags import FlagParser, add_dataclass_arguments, unknown_argument
from helixpipe.planning.catalogue import Catalogue
from helixpipe.planning.division import DivisionOptions
from helixpipe.planning.documents.lengths import LengthOptions
from helixpipe.planning.documents.tuning import PackingOptions
from helixpipe.planning.memory.offload import OffloadOptions
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.planning.order.chunk_options import ChunkOptions
from helixpipe.planning.vocabulary.choice import VocabularyOptions
from helixpipe.program.timeline import BUBBLE

_PROGRAM = "SCHEDULE|FILE"

_TRAINING = {
    "--pipeline-model-parallel-size": "ranks pipeline_parallel",
    "--tensor-model-parallel-size": "tensor_parallel",
    "--context-parallel-size": "context_parallel",
    "--expert-model-parallel-size": "expert_parallel",
    "--expert-tensor-parallel-size": "expert_tensor_parallel",
    "--num-virtual-stages-per-pipeline-rank": "virtual_stages",
    "--num-layers-per-virtual-pipeline-stage": "virtual_stages",
}
"""Flags of training that the command spells otherwise, and its fields, of which a subcommand has one."""

_BUBBLE = f"{BUBBLE[0].upper()}{BUBBLE[1:]}."

_PROBLEM: tuple[tuple[type, str], ...] = (
    (DivisionOptions, "layers of pipeline stages"),
    (ChunkOptions, "chunks"),
    (LengthOptions, "documents of all lengths"),
    (BatchOptions, "documents of all lengths"),
    (PackingOptions, "documents of all lengths"),
    (CostOptions, "costs"),
    (ModelOptions, "model and hardware"),
    (RecomputeOptions, "recomputation"),
    (OffloadOptions, "offloading"),
    (VocabularyOptions, "vocabulary"),
)
"""The options of the problem for `simulate`, `memory` and `draw`, and their headings."""


_SIZE = ("ranks", "microbatches", "chunks", "virtual_stages")
_TIMES = ("layers", "piece_times", "message_time", "profile")
_MODEL = ("model", "hardware", "seq_length", "global_batch_size", "nodes", "tensor_parallel")
_MODEL_SIZES = ("hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "swiglu", "vocab_size")
_MEASURING = ("processes", "threads", "repeats", "hardware")
_USUAL = (*_SIZE, *_TIMES, *_MODEL, "memory_limit", "recompute_granularity")
"""Fields whose flags --help shows of a command that is told of a problem; --help-all shows all."""


def parsers(catalogue: Catalogue, only: str | None = None) -> tuple[FlagParser, dict[str, FlagParser]]:
    """Return the command's parser and those of its subcommands by name.

    only: the one subcommand whose flags are added; of the others there are name and help then.
    """
    parser = FlagParser(
        prog="helixpipe", description="Simulate, plan and draw pipeline schedules, and train with them."
    )
    parser.add_argument("--version", action="version", version=f"helixpipe {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", parser_class=FlagParser)
    commands: dict[str, FlagParser] = {}
    for each in _COMMANDS:
        commands[each.name] = command = subparsers.add_parser(
            each.name,
            common=each.common,
            help=each.help,
            description=each.description,
            add_help=each.add_flags is not None,
        )
        if each.add_flags is not None and only in (None, each.name):
            each.add_flags(command, catalogue)
    return parser, commands


def parsed(
    parser: FlagParser, commands: Mapping[str, FlagParser], catalogue: Catalogue, arguments: Sequence[str]
) -> argparse.Namespace:
    """Return what the arguments, a subcommand first, say. parser, commands: of `parsers`. Raises UserError for what the
    subcommand does not take."""
    name = arguments[0]
    namespace, unknown = parser.parse_known_args(arguments)
    if unknown and unknown[0].startswith("-"):
        raise UserError(unknown_argument(unknown[0], commands[name].option_strings()))
    if unknown:
        counts = [action.nargs for action in commands[name].positionals()]
        takes = "all schedules or files together" if {"*", "+"} & set(counts) else "one schedule or file"
        raise UserError(f"{name} takes {takes if counts else 'flags only'}; {unknown[0]!r} is one too many.")
    namespace.catalogue = catalogue
    namespace.given = commands[name].given(arguments)
    namespace.spelled = partial(commands[name].respelled, others=_TRAINING)
    return namespace


@contextmanager
def as_typed(namespace: argparse.Namespace) -> Iterator[None]:
    """Name the flags of a refusal as they were typed. namespace: of `parsed`."""
    try:
        yield
    except UserError as error:
        error.args = (namespace.spelled(str(error)),)
        raise


def _problem(parser: FlagParser, catalogue: Catalogue) -> None:
    """Add the flags of a size and a problem, and those of all schedules."""
    add_dataclass_arguments(parser, ShapeOptions, title="size")
    for group, title in _PROBLEM:
        add_dataclass_arguments(parser, group, title=title)
    _of_schedules(parser, catalogue)


def _of_schedules(parser: FlagParser, catalogue: Catalogue) -> None:
    for schedule in catalogue.values():
        if dataclasses.fields(schedule.options):
            add_dataclass_arguments(parser, schedule.options, title=f"options of {schedule.name}")


def _output(parser: FlagParser) -> None:
    add_dataclass_arguments(parser, OutputOptions, title="output")


def _one_program(parser: FlagParser, catalogue: Catalogue) -> None:
    default = catalogue.default()
    text = f"a name from `helixpipe list`, or a .json or .csv file (default {default})"
    parser.add_argument("schedule", nargs="?", default=default, metavar=_PROGRAM, help=text)


def _simulate(parser: FlagParser, catalogue: Catalogue) -> None:
    parser.add_argument(
        "schedules",
        nargs="*",
        metavar=_PROGRAM,
        help="names from `helixpipe list`, or .json and .csv files; several for a table (default "
        f"{catalogue.default()})",
    )
    add_dataclass_arguments(parser, SizeOptions, title="size")
    _problem(parser, catalogue)
    _output(parser)
    add_dataclass_arguments(parser, SimulateOptions, title="output of simulate")
    add_dataclass_arguments(parser, CertifyOptions, title="certificate")


def _memory(parser: FlagParser, catalogue: Catalogue) -> None:
    _one_program(parser, catalogue)
    _problem(parser, catalogue)
    _output(parser)


def _draw(parser: FlagParser, catalogue: Catalogue) -> None:
    from helixpipe.cli.command_draw import DrawOptions

    parser.add_argument(
        "schedules",
        nargs="+",
        metavar=_PROGRAM,
        help="names from `helixpipe list`, or .json and .csv files; several to compare",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE",
        help="where to; its suffix chooses the format: .png, .svg, .pdf, .html (zoom, pan, hover) or .json "
        "(Chrome trace for ui.perfetto.dev) (default: SCHEDULE.png)",
    )  # fmt: skip
    parser.add_argument(
        "--measured", action="append", default=[], metavar="RUN.json",
        help="a timeline recorded in training, drawn below the simulated ones; may be repeated",
    )  # fmt: skip
    _problem(parser, catalogue)
    _output(parser)
    add_dataclass_arguments(parser, DrawOptions, title="output of draw")


def _check(parser: FlagParser, catalogue: Catalogue) -> None:
    parser.add_argument(
        "file",
        metavar="FILE",
        help=".csv: a row a rank, an op a cell: 2F5, or 2F5.1 for a chunk; .json: see --save-program",
    )
    parser.add_argument(
        "--save-streams",
        metavar="FILE.json",
        help="write every rank's instructions, which tools/check_program.py certifies against a .json program",
    )
    add_dataclass_arguments(parser, ShapeOptions, title="size")
    _output(parser)


def _export(parser: FlagParser, catalogue: Catalogue) -> None:
    from helixpipe.cli.command_export import ExportOptions

    _one_program(parser, catalogue)
    add_dataclass_arguments(parser, ExportOptions, title="output")
    _problem(parser, catalogue)


def _plan(parser: FlagParser, catalogue: Catalogue) -> None:
    from helixpipe.cli.command_plan import PlanOptions
    from helixpipe.planning.search.goodput import GoodputOptions

    add_dataclass_arguments(parser, PlanOptions, title="what to plan")
    add_dataclass_arguments(parser, LengthOptions, title="documents of all lengths")
    add_dataclass_arguments(parser, ModelOptions, title="model and hardware")
    add_dataclass_arguments(parser, VocabularyOptions, title="vocabulary")
    add_dataclass_arguments(parser, GoodputOptions, title="checkpoints and failures")
    _of_schedules(parser, catalogue)
    _output(parser)
    add_dataclass_arguments(parser, CertifyOptions, title="certificate")


def _improve(parser: FlagParser, catalogue: Catalogue) -> None:
    from helixpipe.cli.command_improve import ImproveOptions

    _one_program(parser, catalogue)
    add_dataclass_arguments(parser, ImproveOptions, title="search")
    _problem(parser, catalogue)
    _output(parser)


def _compare(parser: FlagParser, catalogue: Catalogue) -> None:
    parser.add_argument(
        "schedules", nargs="*", metavar=_PROGRAM, help="names from `helixpipe list`, or files (default: all there are)"
    )
    add_dataclass_arguments(parser, SizeOptions, title="sizes")
    _problem(parser, catalogue)
    _output(parser)


def _profile(parser: FlagParser, catalogue: Catalogue) -> None:
    from helixpipe.cli.profile_options import ProfileOptions

    add_dataclass_arguments(parser, ProfileOptions, title="what to measure")
    _output(parser)


def _playground(parser: FlagParser, catalogue: Catalogue) -> None:
    from helixpipe.cli.playground_options import PlaygroundOptions

    add_dataclass_arguments(parser, PlaygroundOptions, title="playground")


def _watch(parser: FlagParser, catalogue: Catalogue) -> None:
    from helixpipe.cli.command_watch import WatchOptions

    parser.add_argument("folder", metavar="RUN_DIR", help="the folder the run was given as --save or --watch-dir")
    add_dataclass_arguments(parser, WatchOptions, title="how")
    _output(parser)


@dataclass(frozen=True)
class _Subcommand:
    """A subcommand. add_flags: adds its flags; None: they are those of the training program. common: see FlagParser."""

    name: str
    add_flags: Callable[[FlagParser, Catalogue], None] | None
    help: str
    description: str
    common: tuple[str, ...] = ()


_COMMANDS = (
    _Subcommand("list", lambda parser, _: _output(parser), "the schedules there are", "List the schedules there are."),
    _Subcommand(
        "simulate",
        _simulate,
        "time, bubble and memory of a schedule, or of several in a table",
        "Run a schedule on paper: time, bubble, memory, messages; of several schedules or sizes (-k 1,2,4) one table. "
        f"{_BUBBLE}",
        (*_USUAL, "save_program", "json"),
    ),
    _Subcommand(
        "memory",
        _memory,
        "bytes a rank that a model needs under a schedule",
        "Memory of each GPU by kind, for a model on named hardware, and whether it fits.",
        (*_SIZE, "layers", *_MODEL, "recompute_granularity", "json"),
    ),
    _Subcommand(
        "draw",
        _draw,
        "a picture of schedules and of measured runs",
        f"Draw schedules, simulated, and measured runs below them. Timelines of one unit share a scale. {_BUBBLE}",
        (*_USUAL, "output", "measured", "width"),
    ),
    _Subcommand(
        "check",
        _check,
        "whether a schedule of one's own can run",
        "Check a schedule file as every launch does: complete, in order, no deadlock. Exit code 2 if not.",
    ),
    _Subcommand(
        "plan",
        _plan,
        "how to run a model on so many GPUs, and the commands that do",
        "Find sizes, schedule, its options and what to do for memory by predicted step time, and print the commands "
        f"that train so. {_BUBBLE}",
        (
            *_MODEL,
            "gpus",
            "schedule",
            "pipeline_parallel",
            "network",
            "top",
            "commands",
            "explain",
            "pareto",
            "time_limit",
            "json",
        ),
    ),
    _Subcommand(
        "export",
        _export,
        "a schedule as files for torch.distributed.pipelining and torchtitan",
        "Write a schedule's order of ops, and that with sends and receives, as another runtime's files.",
        (*_USUAL, "to", "output"),
    ),
    _Subcommand(
        "profile",
        _profile,
        "measure a model's costs on this machine",
        "Time every piece of a model, and messages, on this machine; simulate and draw take the file.",
        ("model", "num_layers", *_MODEL_SIZES, "seq_length", "micro_batch_size", "dtype", *_MEASURING, "output"),
    ),
    _Subcommand(
        "watch",
        _watch,
        "the live state of a run: steps, bubble, what is slow",
        "Show the state that a training run writes every few steps: steps, bubble, slow ranks and links.",
    ),
    _Subcommand(
        "train",
        None,
        "train a model on this host, one rank a GPU",
        "Start pretrain_gpt.py on each rank of this host: helixpipe train -p 2 [--ranks N] [its flags].",
    ),
    _Subcommand(
        "dry-run",
        None,
        "run ranks of a training job on GPUs that compute nothing: would it start, what does it allocate and send",
        "Run ranks of a job on the CPU: helixpipe dry-run --world-size N [--ranks R,R] -- [its flags].",
    ),
    _Subcommand(
        "compare",
        _compare,
        "schedules side by side",
        f"Simulate schedules of one size, all of the catalogue by default: time, bubble, memory, fit. {_BUBBLE}",
        (*_USUAL, "json"),
    ),
    _Subcommand(
        "improve",
        _improve,
        "search for a faster program than a schedule's own",
        "Change the order of a schedule's ops, split backwards, cut sequences, place stages otherwise: whatever makes "
        "the simulated step shorter within the memory there is. Without a limit that is what the schedule needs "
        f"itself. Ctrl-C prints the best so far. {_BUBBLE}",
        (*_USUAL, "evaluations", "save_program"),
    ),
    _Subcommand(
        "playground",
        _playground,
        "try schedules in a browser",
        "Serve a page on this machine that simulates schedules in the browser, draws them, compares two and lets the "
        "order of their ops be changed; nothing is sent anywhere.",
    ),
)
"""In the order of --help."""
