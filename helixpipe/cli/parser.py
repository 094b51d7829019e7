"""The flags of the `helixpipe` command and its subcommands."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from helixpipe import __version__
from helixpipe.cli.certification import CertifyOptions
from helixpipe.cli.command_draw import DrawOptions
from helixpipe.cli.command_export import ExportOptions
from helixpipe.cli.command_improve import ImproveOptions
from helixpipe.cli.command_plan import PlanOptions
from helixpipe.cli.command_watch import WatchOptions
from helixpipe.cli.documents import BatchOptions
from helixpipe.cli.model import ModelOptions
from helixpipe.cli.options import CostOptions, OutputOptions, ShapeOptions, SimulateOptions
from helixpipe.cli.playground_options import PlaygroundOptions
from helixpipe.cli.profile_options import ProfileOptions
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
from helixpipe.planning.search.goodput import GoodputOptions
from helixpipe.planning.vocabulary.choice import VocabularyOptions
from helixpipe.program.timeline import BUBBLE

_PROGRAM = "SCHEDULE|FILE"

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


_OF_TRAINING = (
    (
        "train",
        "train a model on this host, one rank a GPU",
        "Start pretrain_gpt.py on each rank of this host: helixpipe train -p 2 [--ranks N] [its flags].",
    ),
    (
        "dry-run",
        "run ranks of a training job on GPUs that compute nothing: would it start, what does it allocate and send",
        "Run ranks of a job on the CPU: helixpipe dry-run --world-size N [--ranks R,R] -- [its flags].",
    ),
)
"""Commands whose flags are those of the training program: name, help, description."""


def parsers(catalogue: Catalogue) -> tuple[FlagParser, dict[str, FlagParser]]:
    """Return the command's parser and those of its subcommands by name."""
    default = catalogue.default()
    parser = FlagParser(prog="helixpipe", description="Look at pipeline schedules without running them.")
    parser.add_argument("--version", action="version", version=f"helixpipe {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", parser_class=FlagParser)

    listing = subparsers.add_parser("list", help="the schedules there are", description="List the schedules there are.")

    simulating = subparsers.add_parser(
        "simulate",
        common=(*_USUAL, "save_program", "json"),
        help="time, bubble and memory of a schedule, or of several in a table",
        description="Run a schedule on paper: time, bubble, memory, messages; of several schedules or sizes (-k 1,2,4) "
        f"one table. {_BUBBLE}",
    )
    simulating.add_argument(
        "schedules",
        nargs="*",
        metavar=_PROGRAM,
        help=f"names from `helixpipe list`, or .json and .csv files; several for a table (default {default})",
    )
    add_dataclass_arguments(simulating, SizeOptions, title="size")

    weighing = _weighing(subparsers, default)
    drawing = _drawing(subparsers)
    checking = subparsers.add_parser(
        "check",
        help="whether a schedule of one's own can run",
        description="Check a schedule file as every launch does: complete, in order, no deadlock. Exit code 2 if not.",
    )
    checking.add_argument(
        "file",
        metavar="FILE",
        help=".csv: a row a rank, an op a cell: 2F5, or 2F5.1 for a chunk; .json: see --save-program",
    )
    checking.add_argument(
        "--save-streams",
        metavar="FILE.json",
        help="write every rank's instructions, which tools/check_program.py certifies against a .json program",
    )

    planning, exporting = _planning(subparsers), _exporting(subparsers, default)
    profiling = subparsers.add_parser(
        "profile",
        common=("model", "num_layers", *_MODEL_SIZES, "seq_length", "micro_batch_size", "dtype", *_MEASURING, "output"),
        help="measure a model's costs on this machine",
        description="Time every piece of a model, and messages, on this machine; simulate and draw take the file.",
    )
    add_dataclass_arguments(profiling, ProfileOptions, title="what to measure")

    watching = _watching(subparsers)
    training, trying = (_of_training(subparsers, *words) for words in _OF_TRAINING)
    comparing, improving = _comparing(subparsers), _improving(subparsers, default)
    for command in (simulating, weighing, drawing, checking, comparing, improving, exporting):
        add_dataclass_arguments(command, ShapeOptions, title="size")
    for command in (simulating, weighing, drawing, comparing, improving, exporting):
        for group, title in _PROBLEM:
            add_dataclass_arguments(command, group, title=title)
    for command in (simulating, weighing, drawing, planning, comparing, improving, exporting):
        for schedule in catalogue.values():
            if dataclasses.fields(schedule.options):
                add_dataclass_arguments(command, schedule.options, title=f"options of {schedule.name}")
    outputs = (listing, simulating, weighing, drawing, checking, planning, profiling, comparing, improving, watching)
    for command in outputs:
        add_dataclass_arguments(command, OutputOptions, title="output")
    add_dataclass_arguments(simulating, SimulateOptions, title="output of simulate")
    for command in (simulating, planning):
        add_dataclass_arguments(command, CertifyOptions, title="certificate")
    add_dataclass_arguments(drawing, DrawOptions, title="output of draw")
    commands = {"list": listing, "simulate": simulating, "memory": weighing, "draw": drawing, "check": checking}
    commands |= {"plan": planning, "improve": improving, "export": exporting}
    commands |= {"playground": _playing(subparsers)}
    commands |= {"watch": watching}
    return parser, {**commands, "profile": profiling, "compare": comparing, "train": training, "dry-run": trying}


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
        raise UserError(f"{name} takes one schedule or file; {unknown[0]!r} is one too many.")
    namespace.catalogue = catalogue
    namespace.given = commands[name].given(arguments)
    return namespace


def _watching(subparsers: Any) -> FlagParser:
    """Add the parser of `watch`."""
    parser: FlagParser = subparsers.add_parser(
        "watch",
        help="the live state of a run: steps, bubble, what is slow",
        description="Show the state that a training run writes every few steps: steps, bubble, slow ranks and links.",
    )
    parser.add_argument("folder", metavar="RUN_DIR", help="the folder the run was given as --save or --watch-dir")
    add_dataclass_arguments(parser, WatchOptions, title="how")
    return parser


def _planning(subparsers: Any) -> FlagParser:
    """Add the parser of `plan`, without the options of schedules and its output."""
    parser: FlagParser = subparsers.add_parser(
        "plan",
        common=(
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
        help="how to run a model on so many GPUs, and the commands that do",
        description="Find sizes, schedule, its options and what to do for memory by predicted step time, and print the "
        f"commands that train so. {_BUBBLE}",
    )
    add_dataclass_arguments(parser, PlanOptions, title="what to plan")
    add_dataclass_arguments(parser, LengthOptions, title="documents of all lengths")
    add_dataclass_arguments(parser, ModelOptions, title="model and hardware")
    add_dataclass_arguments(parser, VocabularyOptions, title="vocabulary")
    add_dataclass_arguments(parser, GoodputOptions, title="checkpoints and failures")
    return parser


def _exporting(subparsers: Any, default: str) -> FlagParser:
    """Add the parser of `export`, without the flags shared with other commands."""
    parser: FlagParser = subparsers.add_parser(
        "export",
        common=(*_USUAL, "to", "output"),
        help="a schedule as files for torch.distributed.pipelining and torchtitan",
        description="Write a schedule's order of ops, and that with sends and receives, as another runtime's files.",
    )
    _one_program(parser, default)
    add_dataclass_arguments(parser, ExportOptions, title="output")
    return parser


def _improving(subparsers: Any, default: str) -> FlagParser:
    """Add the parser of `improve`, without the flags shared with other commands."""
    parser: FlagParser = subparsers.add_parser(
        "improve",
        common=(*_USUAL, "evaluations", "save_program"),
        help="search for a faster program than a schedule's own",
        description="Change the order of a schedule's ops, split backwards, cut sequences, place stages otherwise: "
        "whatever makes the simulated step shorter within the memory there is. Without a limit that is what the "
        f"schedule needs itself. Ctrl-C prints the best so far. {_BUBBLE}",
    )
    _one_program(parser, default)
    add_dataclass_arguments(parser, ImproveOptions, title="search")
    return parser


def _playing(subparsers: Any) -> FlagParser:
    """Add the parser of `playground`."""
    parser: FlagParser = subparsers.add_parser(
        "playground",
        help="try schedules in a browser",
        description="Serve a page on this machine that simulates schedules in the browser, draws them, compares two "
        "and lets the order of their ops be changed; nothing is sent anywhere.",
    )
    add_dataclass_arguments(parser, PlaygroundOptions, title="playground")
    return parser


def _one_program(parser: FlagParser, default: str) -> None:
    text = f"a name from `helixpipe list`, or a .json or .csv file (default {default})"
    parser.add_argument("schedule", nargs="?", default=default, metavar=_PROGRAM, help=text)


def _of_training(subparsers: Any, name: str, help: str, description: str) -> FlagParser:
    """Add the parser of a command whose flags are those of the training program, but for a few that it reads itself."""
    parser: FlagParser = subparsers.add_parser(name, help=help, description=description, add_help=False)
    return parser


def _comparing(subparsers: Any) -> FlagParser:
    """Add the parser of `compare`, without the flags shared with other commands."""
    parser: FlagParser = subparsers.add_parser(
        "compare",
        common=(*_USUAL, "json"),
        help="schedules side by side",
        description="Simulate schedules of one size, all of the catalogue by default: time, bubble, memory, fit. "
        f"{_BUBBLE}",
    )
    parser.add_argument(
        "schedules", nargs="*", metavar=_PROGRAM, help="names from `helixpipe list`, or files (default: all there are)"
    )
    add_dataclass_arguments(parser, SizeOptions, title="sizes")
    return parser


def _drawing(subparsers: Any) -> FlagParser:
    """Add the parser of `draw`, without the flags shared with other commands."""
    parser: FlagParser = subparsers.add_parser(
        "draw",
        common=(*_USUAL, "output", "measured", "width"),
        help="a picture of schedules and of measured runs",
        description="Draw schedules, simulated, and measured runs below them. Timelines of one unit share a scale. "
        f"{_BUBBLE}",
    )
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
    return parser


def _weighing(subparsers: Any, default: str) -> FlagParser:
    """Add the parser of `memory`, without the flags shared with other commands."""
    parser: FlagParser = subparsers.add_parser(
        "memory",
        common=(*_SIZE, "layers", *_MODEL, "recompute_granularity", "json"),
        help="bytes a rank that a model needs under a schedule",
        description="Memory of each GPU by kind, for a model on named hardware, and whether it fits.",
    )
    _one_program(parser, default)
    return parser
