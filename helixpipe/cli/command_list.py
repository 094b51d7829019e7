"""`helixpipe list`: the schedules there are."""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap

from helixpipe.draw.table import table
from helixpipe.planning.catalogue import Schedule
from helixpipe.program.timeline import BUBBLE


def run(namespace: argparse.Namespace) -> None:
    schedules: list[Schedule] = list(namespace.catalogue.values())
    if namespace.json:
        keys = ("name", "paper", "bubble", "memory")
        rows = [{**{key: getattr(s, key) for key in keys}, "options": _option_names(s)} for s in schedules]
        print(json.dumps(rows))
        return
    headers = ("name", "options", "paper", "bubble", "memory")
    print(
        table(
            headers,
            [(s.name, " ".join(_option_names(s)), s.paper, s.bubble, s.memory) for s in schedules],
        )
    )
    print(
        f"\n{textwrap.fill(BUBBLE + ', here as a time.', 100)}\n"
        "F, B = I + W: time of a rank for one microbatch forward, backward (gradients of inputs, of weights);\n"
        "A: attention's part of F.\n"
        "memory: activations that rank r keeps, in microbatches x the rank's layers.\n"
        "All take -k: sequences cut into chunks.\n"
        "p ranks, m microbatches, L layers, v virtual stages, k chunks, g = p/k rounded up;\n"
        "t: time of a message with a rank's weights."
    )


def _option_names(schedule: Schedule) -> list[str]:
    names = ["--" + field.name.replace("_", "-") for field in dataclasses.fields(schedule.options)]
    return ["-v"] * schedule.virtual_stages + names
