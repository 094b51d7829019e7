"""Lowering: a program with every receive, wait, send and free made explicit.

The program is list-scheduled once; ops by the time they end, messages and collectives by the time they start, form one
linear order that extends the dependencies and every rank's own order. Each rank's stream is the projection of that one
order: a message appears at its place in the streams of both its ends. So a RECV stands before the op that runs while
its message travels, and a stream that does everything at its place, a RECV too, still overlaps them.

Theorem. Streams projected from one linear order cannot deadlock, even when messages are unbuffered rendezvous (a send
ends only when its receive runs), when collectives end only when all their members have entered them, and when each rank
has a single queue for all it does, which runs in the order issued. So does every other resource (a link, a copy engine,
a group) whose tasks run in the order of the list.
Proof. Take the earliest task of the order that has not finished. Everything before it has. Whoever takes part in it (an
op its rank, a message both ends, a collective all members) has finished all that precedes it in its stream, so it is
issued and at the head of every queue and resource it stands in; and all that it waits for is earlier in the order, what
it passes on and whose memory it takes among them, so finished: it runs. So there is never an earliest task that is
stuck. (Tested with random programs, on machines that do everything in the least helpful order.)

A pair of ops that run at the same time (`Program.pairs`) stands in one place of the order and is one task in the proof:
what either waits for is earlier, what waits for either is later. The two RUNs stand next to each other in the stream.

Weights in parts (`Program.sharded`). Pipelines that share weights out run one program, so a gather or a scatter stands
at the same place of the list of each, and the proof holds for all their lists merged place by place.

Weights that travel. The handlers of an executor need no more than the instruction and three tables of the graph, all by
message (`Transfer.number`), so copies of one stage on a rank are never mixed up:

- RUN of an op in `Graph.weights_of` runs with the copy that message brought, any other with the rank's own parameters;
  of an op in `Graph.sum_of` the weight gradient is added to that message's sum (zero before its first op), any other's
  to the rank's own parameters.
- `weights`: RECV takes a place and receives into it; WAIT comes right before the first op that runs with the copy; FREE
  of the message gives the place back. SEND sends the rank's own parameters, or, if it `follows` a message, what that
  message brings: its RECV is earlier in the stream, but its WAIT need not be, so the transport starts the transfer when
  that one is complete. A copy that is passed on may still be on its way out at its FREE; the transport keeps its memory
  until then.
- `weight_gradients`: right before a SEND that `follows` a message comes the WAIT for that message, whose payload is
  added to the sum; SEND sends the sum and drops it. A WAIT for one that nothing follows is the stage's owner's, which
  adds the payload to its own parameters' gradients.

Receives keep their place, and none may be posted before the ops that stand before it. On a GPU a receive is a kernel
that holds some of the device's multiprocessors until its message is there, and where streams share a hardware queue
(`CUDA_DEVICE_MAX_CONNECTIONS`) one that has to wait for the receive before it holds up ops: posted early, receives can
keep back what their own senders wait for.
"""

from __future__ import annotations

from helixpipe.common.collector import collector_paused
from helixpipe.costs.by_hand import unit_costs
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.build import graph_of
from helixpipe.lowering.compiled import earliest_times, lowered_of
from helixpipe.lowering.order import TaskTimes, side_by_side
from helixpipe.lowering.places import without_holds
from helixpipe.lowering.project import LoweredProgram, project
from helixpipe.lowering.validate import check_ends, validate
from helixpipe.program.costs import Costs
from helixpipe.program.files import naming
from helixpipe.program.program import Program


@collector_paused()
def lower(program: Program, costs: Costs | None = None) -> LoweredProgram:
    """Validate and lower a program. Every rank computes the same result from the same arguments.

    costs: decide the order of messages relative to ops; unit costs when None. Raises ProgramError, which names the file
    of a program that has one, when the program is not valid.
    """
    with naming(program.source):
        validate(program, ends=False)
        return lowered_valid(program, costs or unit_costs())


def lowered_valid(program: Program, costs: Costs) -> LoweredProgram:
    """Lower a program that `validate` has been through, or that is known to have no fault; once while it is asked for
    with the same costs. Raises ProgramError when its ops wait for each other in a circle."""
    return program.derive("lowered", costs, lambda: _lowered(program, costs))


def scheduled(program: Program, costs: Costs) -> TaskTimes:
    """When each task of a program's graph runs if all run as early as they can; found once, as `lowered_valid`."""
    graph = graph_of(program)
    return program.derive("times", costs, lambda: earliest_times(graph, BoundCosts(graph.program, costs)))


def _lowered(program: Program, costs: Costs) -> LoweredProgram:
    graph, times = graph_of(program), scheduled(program, costs)
    del program.derived["times"]  # once there is the order nobody asks for them
    if times.num_ended < graph.num_tasks:
        check_ends(graph, times.order)
    compiled = lowered_of(graph, times)
    if compiled is not None:
        return compiled
    times = side_by_side(graph, without_holds(graph, times))
    projected, openings = project(graph, times)
    return LoweredProgram(graph.program, graph, tuple(times.order), tuple(map(tuple, projected)), openings)
