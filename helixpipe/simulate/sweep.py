"""Memory of a rank, from the lifetimes of its buffers: the one derivation of who holds what when.

A buffer lives from the instruction that makes it to the one after which nobody needs it, in the order of the rank's
stream. While an op runs:

- the activation that F takes in is from then on part of what F saves;
- what F saves, what is recomputed, keys and values and sums of weight gradients are there from its start, beside its
  workspace;
- what I leaves to W grows as what was saved for I goes;
- the activation or gradient that an op gives is there when it has ended, and by then the gradient that it took in is
  gone, and with it what was recomputed inside, and keys and values that have had their last op;
- what B saved goes when the op has returned (FREE); in a pair, where F fills what B frees, when both have, and what F
  saves is part of the workspace until then.

A message is received into memory that is taken at its RECV, and what is sent is gone at its SEND. Activations,
gradients, keys and values come into parts of one block, the receive pool (`runtime.receive_buffers`). A part is in use
until what came is gone: of what an F takes until what it saved is, of what an I takes until what it leaves to W is. The
block stays, as large as all parts in use at once, and so lies beside whatever else there is (`Peak.received`). What is
offloaded is in the host's memory from the START of its copy out to the WAIT for its copy in, on the device until the
WAIT of the one and from the START of the other. Weights are whole from the START of their gather to the end of the last
op that needs them; the gradients that an op makes of them from its start to the WAIT for their scatter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType

from helixpipe.compiled import core
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.compiled import buffer_sizes
from helixpipe.lowering.graph import Graph
from helixpipe.lowering.project import Action, LoweredProgram
from helixpipe.program.tasks import BUFFER_KINDS
from helixpipe.program.transfer import TRANSFER_KINDS, Transfer

CATEGORIES = ("activations", "messages", "workspace", "weights", "gradients")
ACTIVATIONS, MESSAGES, WORKSPACE, WEIGHTS, GRADIENTS = range(len(CATEGORIES))

CATEGORY_OF = MappingProxyType(
    {
        "activation": MESSAGES,
        "gradient": MESSAGES,
        "sums": MESSAGES,
        "turn": MESSAGES,
        "saved": ACTIVATIONS,
        "recomputed": ACTIVATIONS,
        "deferred": ACTIVATIONS,
        "offloaded": ACTIVATIONS,
        "fetched": ACTIVATIONS,
        "keys_values": ACTIVATIONS,
        "kv_gradients": ACTIVATIONS,
        "weights": WEIGHTS,
        "weight_gradients": GRADIENTS,
        "gathered": WEIGHTS,
        "made_gradients": GRADIENTS,
    }
)
POOLED = frozenset({"activation", "gradient", "keys_values", "kv_gradients"})
"""Messages, by their kind, that come into the receive pool; those of weights have memory of their own."""
GIVEN = frozenset({"activation", "gradient", "sums", "deferred"})
"""What an op makes and others take: there when it has ended."""
TAKEN = frozenset({"gradient", "sums", "keys_values", "kv_gradients", "gathered"})
"""What is gone when the last op that takes it has ended."""


@dataclass(frozen=True)
class Peak:
    """The most memory of a rank, in the costs' unit, weights and optimizer of its own not included.

    activations: the most that units, keys and values keep at any time. most: what there is of each of `CATEGORIES` when
    all together are most, what the receive pool has beyond what is in use then among messages. host: the most there is
    in the host's memory. received: the receive pool, which stays when the step has ended.
    """

    activations: float
    most: dict[str, float]
    host: float = 0.0
    received: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.most.values())


def peaks(lowered: LoweredProgram, bound: BoundCosts) -> list[Peak]:
    """Return the most memory of every rank; found once while it is asked for with the same costs. bound: to the lowered
    program."""
    return lowered.derive("peaks", bound.costs, lambda: _peaks(lowered, bound))


def _peaks(lowered: LoweredProgram, costs: BoundCosts) -> list[Peak]:
    module, kinds = core(), BUFFER_KINDS
    if lowered.compiled is None or module is None:
        return [sweep(lowered, costs, rank) for rank in range(lowered.program.num_ranks)]
    categories = module.Categories(
        len(CATEGORIES),
        ACTIVATIONS,
        MESSAGES,
        WORKSPACE,
        [CATEGORY_OF.get(kind, -1) for kind in kinds],
        [kind in GIVEN for kind in kinds],
        [kind in TAKEN for kind in kinds],
        [kind in POOLED for kind in TRANSFER_KINDS],
    )
    return [
        Peak(activations, dict(zip(CATEGORIES, most, strict=True)), host, received)
        for activations, most, host, received in lowered.compiled.sweep(categories, *buffer_sizes(lowered.graph, costs))
    ]


def sweep(lowered: LoweredProgram, costs: BoundCosts, rank: int) -> Peak:
    """Go through one rank's instructions."""
    state = Sweep(lowered.graph, costs, rank)
    state.go_through(lowered)
    return state.peak


class Sweep:
    """now: of each category. host, host_peak: in the host's memory, now and the most. alive: category and size of each
    buffer that is there. pooled: of them those with parts of the receive pool, and how large these are. received,
    received_most: of the pool in use, now and the most. activations, most: see `Peak`; most without the pool's rest."""

    def __init__(self, graph: Graph, costs: BoundCosts, rank: int):
        self.graph, self.rank, self._beside = graph, rank, -1
        self.size, self.workspace, self.pair_workspace = costs.size, costs.workspace, costs.pair_workspace
        self.now = [0.0] * len(CATEGORIES)
        self.alive: dict[int, tuple[int, float]] = {}
        self.pooled: dict[int, float] = {}
        self.received = self.received_most = self._received_then = 0.0
        self.activations, self.most, self._total = 0.0, list(self.now), 0.0
        self.host = self.host_peak = 0.0

    @property
    def outside(self) -> float:
        """What there is now outside of the receive pool."""
        now = self.now
        return now[0] + now[1] + now[2] + now[3] + now[4] - self.received  # `sum` rounds otherwise from Python 3.12 on

    @property
    def peak(self) -> Peak:
        most = list(self.most)
        most[MESSAGES] += self.received_most - self._received_then
        return Peak(self.activations, dict(zip(CATEGORIES, most, strict=True)), self.host_peak, self.received_most)

    def go_through(self, lowered: LoweredProgram) -> None:
        """Go through all instructions of the rank."""
        for action, _, transfer, task in lowered.streams[self.rank]:
            if action is Action.RUN:
                self.run(task)
            elif transfer is not None:
                self.transfer(action, transfer, task)
            else:  # FREE
                for number in lowered.graph.frees[task]:
                    self.free(number)

    def run(self, task: int) -> None:
        graph, ops = self.graph, self.graph.ops
        if task in graph.pairs:  # it runs with the next
            self._beside = task
            return
        first, self._beside = self._beside, -1
        given = self._begin(first, True) if first >= 0 else []
        given += self._begin(task)
        self.now[WORKSPACE] = self.pair_workspace(ops[first], ops[task]) if first >= 0 else self.workspace(ops[task])
        self.check()
        self.now[WORKSPACE] = 0.0
        part = 0.0
        if ops[task].kind == "I":
            part = self.pooled.get(graph.takes[task], 0.0)
            self._leave_to_w(graph.frees[task], given)
        inside = task in graph.recomputes
        for number in (*(graph.frees[first] if first >= 0 else ()), *graph.frees[task]):
            what = graph.buffers[number].kind
            if what in TAKEN or (inside and what == "recomputed") or first >= 0:
                self.free(number)
        self._keep_part(part, graph.writes[task], ("deferred",))
        for number in given:
            self.take(number)
        self.check()

    def _begin(self, task: int, paired: bool = False) -> list[int]:
        """Take what an op has from its start, and return what is there when it has ended. paired: with what it saves,
        an F in a pair, which is workspace until then."""
        graph, given = self.graph, list[int]()
        if graph.ops[task].kind == "F":
            part = self.pooled.get(graph.takes[task], 0.0)
            self.free(graph.takes[task])
            self._keep_part(part, graph.writes[task], ("saved", "offloaded"))
        for number in graph.writes[task]:
            kind = graph.buffers[number].kind
            if kind in GIVEN or (paired and kind == "saved"):
                given.append(number)
            else:
                self.take(number)
        return given

    def _keep_part(self, part: float, numbers: Iterable[int], kinds: tuple[str, ...]) -> None:
        """What an op has received is from then on in the first of these buffers of its that can hold it."""
        for number in numbers if part else ():
            buffer = self.graph.buffers[number]
            if buffer.kind in kinds and not buffer.host and self.size(buffer) >= part:
                self._receive(number, part)
                break

    def _receive(self, number: int, size: float) -> None:
        self.pooled[number] = size
        self.received += size
        self.received_most = max(self.received_most, self.received)

    def _leave_to_w(self, frees: Iterable[int], given: list[int]) -> None:
        """Replace what was saved for I by what I leaves to W."""
        buffers = self.graph.buffers
        for number in frees:
            if buffers[number].kind in ("saved", "recomputed", "fetched"):
                self.free(number)
        for number in [number for number in given if buffers[number].kind == "deferred"]:
            given.remove(number)
            self.take(number)
        self.check()

    def transfer(self, action: Action, transfer: Transfer, task: int) -> None:
        """Add a transfer: what it brings is there from its START, or RECV; what it takes away until its WAIT, or
        SEND.
        """
        graph, link = self.graph, transfer.resource == "link"
        if action is Action.RECV:
            for number in graph.writes[task]:
                self.take(number, MESSAGES)
                if transfer.kind in POOLED:
                    self._receive(number, self.size(graph.buffers[number]))
            self.check()
        elif action is Action.START:
            for number in graph.writes[task]:
                if graph.buffers[number].rank == self.rank:  # each member of a group has its own
                    self.take(number)
                if number in self.alive:  # on the device
                    self.check()
        elif action is Action.FREE:
            for number in graph.writes[task]:
                self.free(number)
        elif action is Action.SEND or not link:
            for number in graph.frees[task]:
                self.free(number)
        else:
            self._come(transfer, graph.writes[task])

    def _come(self, transfer: Transfer, numbers: Iterable[int]) -> None:
        """A message has been waited for: gradients of weights are added to others, all else stays."""
        for number in numbers:
            category = CATEGORY_OF[self.graph.buffers[number].kind]
            if transfer.kind == "weight_gradients":
                self.free(number)
            elif category != MESSAGES:
                before, size = self.alive[number]
                self.alive[number] = category, size
                self.now[before] -= size
                self.now[category] += size

    def take(self, number: int, category: int = -1) -> None:
        buffer = self.graph.buffers[number]
        size = self.size(buffer)
        if buffer.host:
            self.host += size
            self.host_peak = max(self.host_peak, self.host)
            return
        if category < 0:
            category = CATEGORY_OF[buffer.kind]
        self.alive[number] = category, size
        self.now[category] += size

    def free(self, number: int) -> None:
        """Free a buffer that is held; do nothing for any other."""
        if number in self.alive:
            category, size = self.alive.pop(number)
            self.now[category] -= size
            self.received -= self.pooled.pop(number, 0.0)
        elif number >= 0 and self.graph.buffers[number].host:
            self.host -= self.size(self.graph.buffers[number])

    def check(self) -> None:
        now = self.now
        if now[ACTIVATIONS] > self.activations:
            self.activations = now[ACTIVATIONS]
        total = self.outside
        if total > self._total:
            self._total, self.most, self._received_then = total, list(now), self.received
