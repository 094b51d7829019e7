"""`helixpipe check`: whether a schedule of one's own can run."""

from __future__ import annotations

import argparse
import json

from helixpipe.cli.options import ShapeOptions
from helixpipe.cli.programs import program_of_file
from helixpipe.common.flags import dataclass_from_namespace
from helixpipe.draw.style import count
from helixpipe.lowering.lower import lower
from helixpipe.lowering.streams import check_streams
from helixpipe.lowering.streams_text import save_streams
from helixpipe.lowering.validate import untrainable


def run(namespace: argparse.Namespace) -> None:
    size = dataclass_from_namespace(ShapeOptions, namespace)
    lowered = lower(program_of_file(namespace.file, size, size.layers))
    check_streams(lowered)
    if namespace.save_streams is not None:
        save_streams(lowered, namespace.save_streams)
    program = lowered.program
    counts = {
        "ranks": program.num_ranks,
        "microbatches": program.num_microbatches,
        "stages": len(program.stages),
        "chunks": program.num_chunks,
        "ops": len(lowered.graph.ops),
        "messages": len(lowered.messages),
    }
    if namespace.json:
        facts = {"forward_only": program.forward_only, "trainable": untrainable(program) is None}
        print(json.dumps({"schedule": program.schedule, **counts, **facts}))
        return
    one = {"microbatches": "microbatch"}  # the others lose their s
    parts = [count(number, one.get(many, many[:-1]), many) for many, number in counts.items()]
    print(f"{namespace.file} can run: {', '.join(parts)}{', forward only' if program.forward_only else ''}.")
    if (reason := untrainable(program)) is not None:
        print(f"Training refuses it: {reason}")
