"""Adds the dependencies that follow from streams to the graph: which task waits for which because of its place.

By default every stream of a device (its compute, each direction to another rank, each group) has a hardware queue of
its own. With one queue (`CUDA_DEVICE_MAX_CONNECTIONS=1`) a device starts work in the order it was issued in: what
cannot start yet holds up all that follows.
"""

from __future__ import annotations

from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.compiled import times_of_streams
from helixpipe.lowering.graph import Graph
from helixpipe.lowering.order import TaskTimes, list_schedule
from helixpipe.lowering.project import Action, LoweredProgram
from helixpipe.program.costs import Costs
from helixpipe.program.tasks import Resource
from helixpipe.program.transfer import TRANSFER_KINDS, Waited

Waits = dict[int, list[int]]
"""For a task those that wait for it, beside those of the graph."""


def transfer_orders(lowered: LoweredProgram) -> dict[Resource, list[int]]:
    """The messages of each link, the copies of each copy engine, and the collectives of each group, in order; without
    groups that are in none that anything in a step waits for."""
    first, (resource, table) = lowered.graph.num_ops, lowered.graph.resources()
    orders: list[list[int]] = [[] for _ in table]
    for task in lowered.order:
        if task >= first:
            orders[resource[task]].append(task)
    ordered = {each: orders[number] for number, each in enumerate(table) if each.kind != "compute"}
    waited = {
        each: [task for task in tasks if TRANSFER_KINDS[lowered.graph.transfer(task).kind].waited is not Waited.STEP]
        for each, tasks in ordered.items()
    }
    return {each: tasks for each, tasks in ordered.items() if waited[each]}


def stream_waits(lowered: LoweredProgram) -> Waits:
    """Return the waits that follow from streams, with a hardware queue for each stream: the op after a WAIT waits for
    the transfer, also where it does not read what that brings. A rank adds up weight gradients before it computes on,
    and may use the memory of what has left it."""
    waits: Waits = {}
    graph = lowered.graph
    unread = _unread(graph)
    if not unread:
        return waits
    for stream in lowered.streams:
        waited: list[int] = []
        for action, _, _, task in stream:
            if action is Action.WAIT and task in unread:
                waited.append(task)
            elif action is Action.RUN and waited:
                for before in waited:
                    waits.setdefault(before, []).append(task)
                waited = []
    return waits


def _unread(graph: Graph) -> set[int]:
    """The transfers that are waited for and bring nothing that an op reads."""
    never = (Waited.USERS, Waited.STEP)
    tasks = {graph.task(each) for each in graph.transfers if TRANSFER_KINDS[each.kind].waited not in never}
    return tasks.difference(graph.writer[number] for numbers in graph.reads[: graph.num_ops] for number in numbers)


def times_as_run(lowered: LoweredProgram, costs: Costs) -> TaskTimes:
    """When each task runs with the orders of transfers and the waits that lowering makes, with a queue for each stream;
    found once while it is asked for with the same costs."""

    def run() -> TaskTimes:
        bound = BoundCosts(lowered.program, costs)
        if lowered.compiled is not None:
            return times_of_streams(lowered, bound)
        return list_schedule(lowered.graph, *bound.timers, transfer_orders(lowered), stream_waits(lowered))

    return lowered.derive("as run", costs, run)


def queue_waits(lowered: LoweredProgram) -> Waits:
    """Return the waits that follow from issue order, with one hardware queue a device.

    An op cannot start before the one before it has ended and what is waited for is there; a SEND, a RECV or a
    collective not before the ops that stand before it have ended and its link or group is free, and weights that are
    passed on must have come. Once started, a receive holds up nothing, however long its message takes; that starts when
    both ends have come to it.
    """
    waits: Waits = {}
    num_ops, (resource, _) = lowered.graph.num_ops, lowered.graph.resources()
    for stream in lowered.streams:
        ahead: list[int] = []  # what must have ended before the queue goes on
        before: dict[int, int] = {}  # the last transfer of each link and group
        for action, _, transfer, task in stream:
            if action is Action.WAIT:
                ahead.append(task)
            elif action is Action.RUN:
                for each in ahead:
                    if each >= num_ops:  # the op before is waited for anyway
                        waits.setdefault(each, []).append(task)
                ahead = [task]
            elif action is not Action.FREE:
                if resource[task] in before:
                    ahead.append(before[resource[task]])
                before[resource[task]] = task
                if transfer is not None and transfer.follows >= 0 and TRANSFER_KINDS[transfer.kind].passed_on:
                    ahead += [num_ops + transfer.follows] * (action is Action.SEND)
                for each in ahead:
                    waits.setdefault(each, []).append(task)
    return waits
