"""NCCL's transport on a simulated device, one rank by itself: which stream waits for what, and what memory it takes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from helixpipe.runtime import nccl
from helixpipe.runtime.nccl import NcclTransport
from tests.runtime.happens_before.cuda import Simulation
from tests.runtime.happens_before.nccl import Communicators, Nowhere

SHAPES = [torch.Size((2, 3))]
GROUPS: Any = [SimpleNamespace(rank=lambda: 1, size=lambda: 4) for _ in range(3)]


class Simulated(NamedTuple):
    transport: NcclTransport
    simulation: Simulation

    def knowing(self, source: int) -> set[str]:
        """The streams that know all that the communicator with a rank has done."""
        actors = {actor.name: actor for actor in self.simulation.world.actors}
        (name,) = (name for name in actors if name.startswith(f"communicator of ranks [{source}, "))
        known = actors[name]
        of_transport: Any = self.transport
        sending, passing = of_transport._sending, of_transport._passing
        streams = {"compute": self.simulation.world.compute, "sending": sending.actor, "passing": passing.actor}
        return {name for name, stream in streams.items() if stream.knows(known.number, known.time)}


@pytest.fixture
def simulated() -> Iterator[Simulated]:
    simulation = Simulation()
    communicators = Communicators(simulation, Nowhere())
    directions = mock.patch.object(nccl, "direction_groups", lambda *_: tuple(GROUPS[:2]))
    with communicators.replaced(), simulation.replaced(), directions:
        yield Simulated(NcclTransport(GROUPS[2], torch.device("cuda", 0), channels=()), simulation)


def unseen(simulated: Simulated) -> Any:
    """The host does not see a send done that it asks for."""
    return mock.patch.object(simulated.simulation.world.random, "random", lambda: 0.0)


def test_what_is_passed_on_is_waited_for_where_nothing_else_is_held_up(simulated: Simulated) -> None:
    """Weights may come much later than what this rank computes and sends meanwhile."""
    receipt = simulated.transport.receive(SHAPES, torch.float32, 0, 0)
    simulated.transport.pass_on(receipt, 2, 1)
    assert simulated.knowing(0) == {"passing"}
    with unseen(simulated):
        simulated.transport.send([torch.ones(2)], 2, 2)
    assert simulated.knowing(0) == {"passing"}
    receipt.wait()
    assert simulated.knowing(0) == {"passing", "compute"}


def test_what_is_passed_on_stays_until_it_has_left(simulated: Simulated) -> None:
    """Though its receipt is gone: the next message does not come into its memory."""
    transport = simulated.transport
    with unseen(simulated):
        places = set()
        for number in range(3):
            receipt = transport.receive(SHAPES, torch.float32, 0, number)
            places.add(receipt.buffers[0].data_ptr())
            transport.pass_on(receipt, 2, number)
            del receipt
    assert len(places) == 3
    transport.finish()
    assert transport.receive(SHAPES, torch.float32, 0, 3).buffers[0].data_ptr() in places
    assert not simulated.simulation.world.findings


def test_messages_of_a_step_come_into_the_memory_of_those_before(simulated: Simulated) -> None:
    """Of fewer tokens, and so more of them, too."""
    transport = simulated.transport
    steps = []
    for tokens, messages in ((256, 2), (128, 4), (256, 2)):
        shape = torch.Size((tokens, 1, 3))
        held = [transport.receive([shape], torch.float32, 0, number) for number in range(messages)]
        steps.append([receipt.wait()[0].data_ptr() for receipt in held])
        del held
        transport.finish()
        assert transport._received.reserved == 2 * 256 * 3 * 4
    assert len(set(steps[0])) == 2 and len(set(steps[1])) == 4 and set(steps[2]) < set(steps[1])
    transport.close()
    assert transport._received.reserved == 0
