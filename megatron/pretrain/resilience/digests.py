"""Digests of tensors, by which equal bits are known from others, and what messages between ranks carried.

A digest is the sum of a tensor's bits taken as whole numbers of 64 bits, so a flipped bit always changes it, by a power
of two. It is made on the device, in one pass over the memory, and nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from helixpipe.lowering.graph import Graph
from helixpipe.program.program import Unit
from helixpipe.program.transfer import TRANSFER_KINDS, Transfer

PRIME = 4294967291
"""The largest below 2^32. Sums of digests are taken modulo this, so that float64 can add up those of two million ranks
exactly. No power of two is a multiple of it, nor one less 2^64, by which a sum that overflows changes."""

_FACTORS = 1048573
"""A prime: how many factors of messages there are. Of one message there are no more than 2,047 copies."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def digest(tensor: Tensor) -> Tensor:
    """Return the digest of a tensor: int64, a scalar on its device. It depends on the bits, the type and the number of
    elements alone."""
    flat = tensor.detach().reshape(-1)
    size = next(size for size in _WORDS if flat.nbytes % size == 0)
    if flat.storage_offset() * flat.element_size() % size:
        flat = flat.clone()
    return flat.view(_WORDS[size]).sum(dtype=torch.int64)


def digests(tensors: Iterable[Tensor]) -> Tensor:
    """Return the digests of tensors of one device, one after another: int64, [tensors]."""
    return torch.stack([digest(tensor) for tensor in tensors])


class Made(NamedTuple):
    """What a rank has made for others, or for the loss. kind: of the message, or `loss`. target: the rank it went
    to."""

    kind: str
    unit: Unit
    target: int

    def __str__(self) -> str:
        stage, microbatch, chunk = self.unit
        where = f"stage {stage}, microbatch {microbatch}" + (f", chunk {chunk}" if chunk else "")
        known = self.kind in TRANSFER_KINDS
        return f"the {TRANSFER_KINDS[self.kind].label if known else self.kind} {'for' if known else 'of'} {where}"


class StepDigests:
    """The digests of what messages carried in a step on one rank, and of its loss sums. graph: of the step's program.

    Messages that pass on what another one brings count as that one, which its first sender alone has a digest of.
    """

    def __init__(self, graph: Graph):
        self._graph = graph
        self._factors: dict[bool, Tensor] = {}
        self._roots = {message.number: message for message in graph.messages}
        self._copies: dict[int, int] = {}
        for message in graph.messages:
            root = self.root(message).number
            self._copies[root] = self._copies.get(root, 0) + 1
        self.begin_step()

    @property
    def graph(self) -> Graph:
        return self._graph

    def begin_step(self) -> None:
        """Forget the last step."""
        self.sent: list[tuple[Transfer, Tensor]] = []
        self.received: list[tuple[Transfer, Tensor]] = []
        self.losses: list[tuple[Unit, Tensor]] = []

    def root(self, message: Transfer) -> Transfer:
        """Return the message that first carried what this one does."""
        while message.follows >= 0 and TRANSFER_KINDS[message.kind].passed_on:
            message = self._roots[message.follows]
        return message

    def send(self, message: Transfer, tensors: Sequence[Tensor]) -> None:
        self.sent.append((message, digests(tensors).sum()))

    def receive(self, message: Transfer, tensors: Sequence[Tensor]) -> None:
        self.received.append((message, digests(tensors).sum()))

    def take_losses(self, losses: Iterable[tuple[int, int, Tensor]]) -> None:
        """Take the loss sums of a step: microbatch, chunk and value."""
        last = len(self._graph.program.stages) - 1
        self.losses = [(Unit(last, microbatch, chunk), digest(value)) for microbatch, chunk, value in losses]

    def balance(self) -> Tensor | None:
        """Return this rank's part of a sum over all ranks that is 0 modulo `PRIME` where every message brought what was
        sent: float64, a scalar; None where no message came or went. Each message has a factor of its own."""
        parts = []
        for side in (True, False):
            every = self.sent if side else self.received
            if every:
                if side not in self._factors:
                    self._factors[side] = self._weigh([message for message, _ in every], side).to(every[0][1].device)
                values = torch.stack([value for _, value in every]) % PRIME
                parts.append((values * self._factors[side] % PRIME).sum() % PRIME)
        if not parts:
            return None
        return (torch.stack(parts).sum() % PRIME).to(torch.float64)

    def made(self, microbatch: int) -> dict[Made, Tensor]:
        """Return the digests of what this rank made of a microbatch, by what it is but for the microbatch's number."""
        units = [(message.kind, message.unit, message.target, value) for message, value in self.sent]
        units += [("loss", unit, -1, value) for unit, value in self.losses]
        return {
            Made(kind, unit._replace(microbatch=0), target): value
            for kind, unit, target, value in units
            if unit.microbatch == microbatch
        }

    def _weigh(self, messages: Sequence[Transfer], sent: bool) -> Tensor:
        """Return the factors of messages, for those sent times how often they come, for those received negative: int64,
        below 2^31, so that products with digests modulo `PRIME` are below 2^63."""
        factors = []
        for message in messages:
            root = self.root(message).number
            factor = 1 + 7919 * (root + 1) % _FACTORS
            factors.append(factor * self._copies[root] if sent else -factor)
        return torch.tensor(factors, dtype=torch.int64)
