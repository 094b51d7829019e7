"""Runs a benchmark by its name.

    python -m benchmarks NAME [flags]     or     make bench-NAME ARGS="flags"
    python -m benchmarks                  the list

A benchmark is a module with a dataclass `Options`, whose fields are its flags, and a function `run`, which takes such
options and returns an `Outcome`. Its docstring is what --help says. Add a module and its line in `BENCHMARKS`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from helixpipe.common.command import run_command
from helixpipe.common.errors import UserError
from helixpipe.common.flags import FlagParser, add_dataclass_arguments, dataclass_from_namespace, nearest_name


class Benchmark(NamedTuple):
    module: str
    help: str


BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType(
    {
        "engines": Benchmark("benchmarks.bench", "speed and memory beside megatron-core's and torch's engines"),
        "predict": Benchmark("benchmarks.predict", "steps as simulated from a profile and as measured (docs/costs.md)"),
        "steps": Benchmark("benchmarks.steps", "training steps with and without a flush between them"),
        "host": Benchmark("benchmarks.host_time", "what the executor itself takes for each instruction, and a layer"),
        "gpu": Benchmark("benchmarks.gpu", "tests, profiles, predictions and training on a GPU, into a folder"),
        "network": Benchmark("netlab.network", "pipelines and FSDP2 over slow links between two hosts (root)"),
        "choosing": Benchmark("benchmarks.choosing", "the table of docs/choosing.md, simulated"),
        "plans": Benchmark("benchmarks.plans", "the worked example of docs/planning.md, written anew"),
        "plan-search": Benchmark(
            "benchmarks.plan_search", "the search of `plan` beside trying everything, simulated (docs/planning.md)"
        ),
        "reproduce": Benchmark(
            "benchmarks.reproduce", "published figures beside predicted ones (docs/reproduction.md)"
        ),
        "memory-table": Benchmark(
            "benchmarks.memory_table",
            "what ranks allocate on a fake CUDA device, and the prediction (docs/dry_run.md)",
        ),
    }
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status. Without a name it lists the benchmarks, with --targets as targets of make."""
    name, *words = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name.startswith("-"):
        return run_command("benchmarks", partial(_list, "bench-" if name == "--targets" else ""))
    return run_command(f"benchmarks {name}", partial(_run, name, words))


def _list(prefix: str) -> int:
    """A line for each benchmark, its name after the prefix."""
    width = max(map(len, BENCHMARKS)) + len(prefix) + 2
    for name, each in BENCHMARKS.items():
        print(f"{prefix + name:<{width}}{each.help}")
    return 0


def _run(name: str, words: Sequence[str]) -> int:
    module, options = options_of(name, words)
    return module.run(options).deliver(options)


def options_of(name: str, words: Sequence[str]) -> tuple[Any, Any]:
    """Return a benchmark's module and its options as typed. Raises UserError for a name or flags that there are not."""
    if name not in BENCHMARKS:
        near = nearest_name(name, BENCHMARKS)
        hint = f"did you mean {near!r}? " if near else ""
        raise UserError(f"benchmark {name!r} is unknown: {hint}known are {', '.join(BENCHMARKS)}.")
    module = importlib.import_module(BENCHMARKS[name].module)
    parser = FlagParser(
        prog=f"python -m benchmarks {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options]",
    )
    add_dataclass_arguments(parser, module.Options)
    return module, dataclass_from_namespace(module.Options, parser.parse(words))
