"""Hugging Face folders to checkpoints, and back.

    python tools/checkpoint.py import-hf Llama-3.2-1B --save checkpoints/llama
    python tools/checkpoint.py export-hf --load checkpoints/trained Llama-3.2-1B-long --like Llama-3.2-1B

Tensors are read and written one at a time, so a laptop has room for any model that its disk has room for. Nothing in
either folder is run: weights are safetensors, and of checkpoints only what they are made of is unpickled. Tokenizer and
configuration are copied along. Training loads a Hugging Face folder itself as well: docs/huggingface.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere, installed or not

from helixpipe.common.command import run_command
from helixpipe.common.flags import FlagParser

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_DTYPES = ("float64", "float32", "bfloat16", "float16")


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = FlagParser(prog="checkpoint.py", description="Hugging Face folders to checkpoints, and back.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=FlagParser)
    importing = commands.add_parser("import-hf", help="a Hugging Face folder to a checkpoint")
    importing.add_argument("folder", type=Path, metavar="FOLDER", help="with config.json and safetensors files")
    importing.add_argument("--save", type=Path, required=True, metavar="DIR", help="a new or empty folder")
    exporting = commands.add_parser("export-hf", help="a checkpoint to a Hugging Face folder")
    exporting.add_argument("folder", type=Path, metavar="FOLDER", help="a new or empty folder")
    exporting.add_argument("--load", type=Path, required=True, metavar="DIR", help="what --save of training wrote")
    exporting.add_argument("--ckpt-step", type=int, metavar="N", help="the checkpoint of this iteration")
    exporting.add_argument(
        "--like",
        type=Path,
        metavar="FOLDER",
        help="take tokenizer, configuration and division into files from this Hugging Face folder (default: what was "
        "imported into --load)",
    )
    exporting.add_argument(
        "--trust-checkpoint",
        action="store_true",
        help="read also what no checkpoint of this program has, which can run code of whoever wrote it",
    )
    exporting.add_argument("--dtype", choices=_DTYPES, help="of the weights (default: as in the checkpoint)")
    exporting.add_argument(
        "--max-shard-size",
        type=_size,
        default="5GB",
        metavar="SIZE",
        help="bytes of a file, such as 500MB, where --like does not say (default: 5GB)",
    )
    return parser.parse_args(words)


def _size(text: str) -> int:
    number, unit = text[:-2], _UNITS.get(text[-2:].upper())
    if unit is None or not number.isdecimal() or int(number) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; give 5GB, say")
    return int(number) * unit


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield the function that reports bytes to a bar on standard error, shown on a terminal only."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(what, total=total)
        yield lambda nbytes: progress.advance(task, nbytes)


def import_hf(arguments: argparse.Namespace) -> None:
    from megatron.pretrain.checkpoint.from_huggingface import import_folder
    from megatron.pretrain.huggingface.folder import Folder

    source = Folder(arguments.folder)
    source.check()
    total = sum(source.entry(name).nbytes for weight in source.weights for name in weight.names)
    with _progress("import", total) as done:
        written = import_folder(source, arguments.save, done)
    print(f"wrote {written}: train with --load {arguments.save} --use-checkpoint-args")


def export_hf(arguments: argparse.Namespace) -> None:
    import torch

    from megatron.pretrain.checkpoint.to_huggingface import Checkpoint, export_folder

    source = Checkpoint(arguments.load, arguments.ckpt_step, arguments.trust_checkpoint)
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    with _progress("export", source.nbytes(dtype)) as done:
        export_folder(source, arguments.folder, arguments.like, arguments.max_shard_size, dtype, done)
    print(f"wrote {arguments.folder} from {source.path}")


def main(words: Sequence[str] | None = None) -> int:
    return run_command("checkpoint.py", lambda: _run(words))


def _run(words: Sequence[str] | None) -> int:
    arguments = parse_arguments(words)
    from helixpipe.model.device import prepare

    prepare()  # imports megatron-core quickly
    (import_hf if arguments.command == "import-hf" else export_hf)(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
