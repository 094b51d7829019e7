"""`helixpipe simulate`: time, bubble and memory of a schedule, or of several in a table."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from helixpipe.cli.certification import CertifyOptions
from helixpipe.cli.chunks import chunk_warning
from helixpipe.cli.documents import BatchReport, DocumentBatch, batch_of
from helixpipe.cli.model import ModelOnCluster
from helixpipe.cli.model_report import report, step_text
from helixpipe.cli.options import CostOptions, SimulateOptions
from helixpipe.cli.profile import profile_costs, simulation_json, simulation_text
from helixpipe.cli.programs import chunk_flags, make_simulations, plan_of
from helixpipe.cli.side_by_side import compare, one_size
from helixpipe.common.errors import UserError
from helixpipe.common.files import try_file
from helixpipe.common.flags import dataclass_from_namespace
from helixpipe.costs.hardware import GIB
from helixpipe.costs.profile_costs import ProfileCosts
from helixpipe.draw.text import (
    chunk_shares,
    chunk_times,
    chunks_text,
    copies_text,
    drawn_in_text,
    sharing_text,
    summary,
)
from helixpipe.lowering.lower import lowered_valid
from helixpipe.planning.catalogue import Catalogue
from helixpipe.planning.documents.lengths import LengthOptions, documents_of
from helixpipe.program.files import is_file, save_program
from helixpipe.program.text import format_rows
from helixpipe.simulate.simulator import Simulation, simulate

if TYPE_CHECKING:
    from helixpipe.certify.certificate import Certificate


def run(namespace: argparse.Namespace) -> None:
    options = dataclass_from_namespace(SimulateOptions, namespace)
    catalogue: Catalogue = namespace.catalogue
    names = namespace.schedules or [catalogue.default()]
    schedules = {name: None if is_file(name) else catalogue.find(name) for name in names}
    one = one_size(namespace)
    if one is None or len(schedules) > 1:
        one_only = {
            "--order": options.order,
            "--save-program": options.save_program is not None,
            "--certify": dataclass_from_namespace(CertifyOptions, namespace).certify is not None,
        }
        for flag, given in one_only.items():
            if given:
                raise UserError(f"{flag} is for one schedule of one size; simulate that alone.")
        compare(schedules, namespace, options.one_queue)
    else:
        one.schedule = next(iter(schedules))
        _simulate(one, options)


def _simulate(namespace: argparse.Namespace, options: SimulateOptions) -> None:
    """Print the whole report of one schedule at one size."""
    if options.save_program is not None:
        try_file("--save-program", options.save_program)
    dataclass_from_namespace(CertifyOptions, namespace).try_file()
    measured = profile_costs(namespace)
    plan = plan_of([namespace.schedule], namespace)
    (simulation,) = make_simulations([namespace.schedule], namespace, plan or measured, options.one_queue)
    documents = documents_of(dataclass_from_namespace(LengthOptions, namespace))
    batch = None if documents is None else batch_of(documents, plan)
    late = _without_early_recomputation(namespace, plan or measured, simulation, options.one_queue)
    if options.save_program is not None:
        save_program(simulation.lowered.program, options.save_program)
    certificate = _certificate(namespace, plan, measured, simulation)
    if namespace.json:
        result = _json(simulation, plan, measured, late, options, namespace.profile, batch)
        print(json.dumps(result if certificate is None else result | {"certified": certificate.figures()}))
        return
    _print(simulation, plan, measured, late, options, batch)
    if certificate is not None:
        print(f"\n{certificate.text()}")


def _certificate(
    namespace: argparse.Namespace, plan: ModelOnCluster | None, measured: ProfileCosts | None, simulation: Simulation
) -> Certificate | None:
    """Return the certificate that --certify asks for."""
    options = dataclass_from_namespace(CertifyOptions, namespace)
    if options.certify is None:
        return None
    limit = dataclass_from_namespace(CostOptions, namespace).memory_limit
    if plan is not None:
        limit = plan.limit
    elif measured is not None and limit is not None:
        limit *= GIB
    return options.certificate(simulation, limit)


def _json(
    simulation: Simulation,
    plan: ModelOnCluster | None,
    measured: ProfileCosts | None,
    late: Simulation | None,
    options: SimulateOptions,
    profile: str,
    batch: DocumentBatch | None,
) -> dict[str, Any]:
    """Return the report as JSON. late: see `_without_early_recomputation`. profile: the file of the measurements."""
    result: dict[str, Any] = simulation.to_json(order=options.order)
    program = simulation.lowered.program
    if options.one_queue:
        result["makespan_many_queues"] = simulate(simulation.lowered, simulation.costs).makespan
    if late is not None:
        result["makespan_recomputing_late"] = late.makespan
    if (shares := chunk_shares(simulation)) is not None:
        tokens = program.chunk_lengths
        result |= {"chunk_shares": shares} if tokens is None else {"chunk_lengths": tokens}
        result["chunk_times"] = chunk_times(simulation)
    if batch is not None:
        result["documents"] = BatchReport(batch, simulation).to_json()
    if plan is not None:
        result |= {"unit": "s", "step": report(simulation, plan).to_json()}
    if measured is not None:
        result |= simulation_json(measured, profile)
    return result


def _print(
    simulation: Simulation,
    plan: ModelOnCluster | None,
    measured: ProfileCosts | None,
    late: Simulation | None,
    options: SimulateOptions,
    batch: DocumentBatch | None,
) -> None:
    program = simulation.lowered.program
    if measured is not None:
        print(simulation_text(simulation, measured))
    else:
        print(summary(simulation) if plan is None else step_text(report(simulation, plan)))
    if options.one_queue:
        many = simulate(simulation.lowered, simulation.costs).makespan
        longer = simulation.makespan / many - 1 if many else 0.0
        print(f"One hardware queue: {100 * longer:.1f} % longer than with one for each stream ({many:.6g}).")
    documents = None if batch is None else BatchReport(batch, simulation).text()
    for text in (documents, copies_text(simulation), sharing_text(simulation), chunks_text(simulation)):
        if text is not None:
            print(f"\n{text}")
    if plan is not None and batch is None and (warning := chunk_warning(plan, program)) is not None:
        print(warning)
    if late is not None:
        saved = 1 - simulation.makespan / late.makespan if late.makespan else 0.0
        without = f"--no-recompute-early: {late.makespan:.6g}"
        if plan is not None:
            without += f", {max(late.device_needs) / GIB:.1f} GiB"
        print(f"Recomputing in idle time saves {100 * saved:.1f} % ({without}).")
    drawing = drawn_in_text(simulation, shutil.get_terminal_size((100, 24)).columns)
    if drawing is not None:
        print(f"\n{drawing}")
    if options.order:
        print()
        for row in format_rows(program):
            print(",".join(row))


def _without_early_recomputation(
    namespace: argparse.Namespace, given: ModelOnCluster | ProfileCosts | None, simulation: Simulation, one_queue: bool
) -> Simulation | None:
    """Return the step if everything were recomputed inside the backwards; None if that is so, or nothing is.

    R ops are all that --no-recompute-early leaves out, and no schedule of the catalogue places any itself; but it may
    choose another number of chunks, where that is left to it.
    """
    program, costs = simulation.lowered.program, simulation.costs
    late = tuple(tuple(op for op in ops if op.kind != "R") for ops in program.ranks)
    if late == program.ranks or namespace.lengths is not None or is_file(namespace.schedule):
        return None
    if chunk_flags(namespace, [namespace.schedule]).auto:
        without = argparse.Namespace(**{**vars(namespace), "recompute_early": False})
        (simulation,) = make_simulations([namespace.schedule], without, given, one_queue)
        return simulation
    later = replace(program, ranks=late)
    blocking = namespace.p2p == "blocking"
    return simulate(lowered_valid(later, costs), costs, one_queue=one_queue, blocking=blocking)
