"""Records who has used which memory, and what it was before: torch's caching allocator and its pinned memory.

A block belongs to the stream it was allocated in, its home. When its tensors are gone it is given out again at once, to
an allocation of the same stream, whatever other streams still do with it; unless `record_stream` was called: then once
these have got there. So who uses new memory must know of all that was still going on in any memory that its home had
given back by then: which block it gets is not looked at.

Pinned memory belongs to no stream. torch waits for its own copies before it gives such memory out again, not for what
others do with it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.runtime.happens_before.clocks import Actor, World, place

Access = tuple[int, str]
"""(step of the actor, what it does)."""


@dataclass(eq=False)
class Flight:
    """Something without a place in any stream, as gloo's threads: it goes on until somebody has waited for it."""

    what: str
    write: bool


@dataclass(eq=False)
class Memory:
    """One storage. left: what was going on in its home's memory when it was allocated there, by actor. greeted: the
    actors that were found to know all of `left`."""

    home: Actor | None
    born: int
    left: dict[int, Access]
    reads: dict[int, Access] = field(default_factory=dict)
    writes: dict[int, Access] = field(default_factory=dict)
    recorded: list[Actor] = field(default_factory=list)
    greeted: set[int] = field(default_factory=set)
    flights: list[Flight] = field(default_factory=list)


class Memories:
    """All memory that is in use, by storage, and what is left of the rest. freed: how much has been let go of."""

    def __init__(self, world: World):
        self.world = world
        self.freed = 0
        self._known: dict[int, tuple[Memory, weakref.ref[Any]]] = {}
        self._left: dict[int, dict[int, Access]] = {}
        self._told: set[tuple[int, Access]] = set()
        self._parts: dict[int, range] = {}  # where the storages lie that are in memory taken for many messages

    def of(self, storage: torch.UntypedStorage) -> Memory:
        """Return what is known of a storage; it is new, and of the current stream, if nothing is."""
        found = self._known.get(storage._cdata)
        return self.allocated(storage) if found is None else found[0]

    def received(self, storage: torch.UntypedStorage) -> None:
        """A message is about to come into a storage. If nothing is known of it, it is a part of memory that was taken
        for many messages: then it is as new, and no other is in these bytes."""
        with self.world.lock:
            if storage._cdata in self._known:
                return
            own = range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
            if any(max(own.start, part.start) < min(own.stop, part.stop) for part in self._parts.values()):
                self.world.report("memory is received into that something still refers to")
            self._parts[storage._cdata] = own
            self.allocated(storage)

    def allocated(self, storage: torch.UntypedStorage, pinned: bool = False) -> Memory:
        with self.world.lock:
            home = None if pinned else self.world.stream
            left: dict[int, Access] = {}
            if home is not None:
                home.hear(self.world.thread)
                left = self._left.get(home.number, left)
                if left:  # who knows this step of the home knows what the home knows
                    left = {other: each for other, each in left.items() if not home.knows(other, each[0])}
                    self._left[home.number] = left
            memory = Memory(home, home.time if home is not None else 0, left)
            key = storage._cdata
            self._known[key] = memory, weakref.ref(storage, lambda _: self.let_go(key, "that has gone"))
            return memory

    def let_go(self, key: int, how: str) -> None:
        """Memory goes back to its home."""
        with self.world.lock:
            found = self._known.pop(key, None)
            self._parts.pop(key, None)
            if found is None:
                return
            memory, world = found[0], self.world
            self.freed += 1
            for flight in memory.flights:
                world.report(f"memory {how} is still used: {flight.what}")
            home, uses = memory.home, []
            for word, table in (("read", memory.reads), ("write", memory.writes)):
                uses += [(word, *each) for each in table.items() if home is not None and each[0] != home.number]
            if home is None or not uses:
                return
            left = dict(self._left.get(home.number, {}))
            clocks = [
                world.thread.known,  # the allocator's lock tells it to who allocates next
                world.others,  # such a thread may have let go of it before
                *(stream.known for stream in memory.recorded),
            ]
            for word, other, (time, what) in uses:
                if all(clock.get(other, 0) < time for clock in clocks) and time > left.get(other, (0, ""))[0]:
                    left[other] = time, f"the {word} by {what} of memory of {home.name} {how}"
            self._left[home.number] = left

    def access(self, actor: Actor, memory: Memory, write: bool, what: str) -> None:
        """The actor's present step reads or writes."""
        world, number, known = self.world, actor.number, actor.known
        word = f"the {'write' if write else 'read'} by {what}"
        for other, (time, before) in memory.writes.items():
            if other != number and known.get(other, 0) < time:
                world.missing(actor, word, other, f"the write by {before}")
        if write:
            for other, (time, before) in memory.reads.items():
                if other != number and known.get(other, 0) < time:
                    world.missing(actor, word, other, f"the read by {before}")
        for flight in memory.flights:
            if write or flight.write:
                world.report(f"{word} in {actor.name} while nobody has waited for the end of {flight.what}")
        if number not in memory.greeted:
            memory.greeted.add(number)
            self._greet(actor, memory, word)
        if actor is not world.compute:
            what += place()
        (memory.writes if write else memory.reads)[number] = actor.time, what

    def _greet(self, actor: Actor, memory: Memory, word: str) -> None:
        """The first use by an actor: what was there before must be over."""
        home = memory.home
        if home is not None and not actor.knows(home.number, memory.born):
            self.world.missing(actor, word, home.number, "what was there before")
        self._check(actor, memory.left, f"{word} of memory given out again")

    def _check(self, actor: Actor, left: dict[int, Access], word: str) -> None:
        """Report what an actor does not know of; each once, since all memory may be what is given out again."""
        for other, access in left.items():
            if not actor.knows(other, access[0]) and (other, access) not in self._told:
                self._told.add((other, access))
                self.world.missing(actor, word, other, access[1])

    def settle(self) -> None:
        """As if the compute stream now used all that it could be given."""
        compute = self.world.compute
        compute.learn(self.world.thread.known)
        self._check(compute, self._left.get(compute.number, {}), "whatever is allocated next")
