"""`helixpipe memory`: bytes a rank that a model needs under a schedule."""

from __future__ import annotations

import argparse
import json

from helixpipe.cli.model_report import memory_text, report
from helixpipe.cli.programs import found_chunks, make_simulations, plan_of
from helixpipe.common.errors import UserError


def run(namespace: argparse.Namespace) -> None:
    if namespace.profile is not None:
        raise UserError("memory takes --model and not --profile; simulate --profile prints the bytes of each rank.")
    plan = plan_of([namespace.schedule], namespace)
    if plan is None:
        raise UserError("memory needs --model, and counts the bytes of that model.")
    (simulation,) = make_simulations([namespace.schedule], namespace, plan)
    step = report(simulation, plan)
    if namespace.json:
        print(json.dumps(step.memory_json()))
        return
    print("\n".join([*found_chunks(namespace, [simulation]), memory_text(step)]))
