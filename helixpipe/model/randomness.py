"""Random numbers that depend on what is computed, never on when or where: initial weights and dropout.

Initial weights are drawn from (seed, name of the part), so every schedule and partition starts from the same model; so
does every tensor-parallel size with `use_cpu_initialization`: megatron-core then draws the whole weight and slices it.
Dropout is drawn from (seed, step, microbatch, layer, piece, chunk): a schedule does not change it and a recomputation
repeats it. Tensor-parallel ranks share the draw where they hold the same values and draw apart where they do not;
context-parallel ranks, which have different rows or heads of everything, always draw apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from helixpipe.model.device import device
from helixpipe.model.options import Microbatch, RunPiece, State, UnitContext
from helixpipe.program.stages import PIECE_KINDS, Piece


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from the parts, the same in every process; a change of any part changes all of it."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def initial_weights(seed: int, part: str, tp_rank: int) -> Iterator[None]:
    """Draw the weights made inside from (seed, part); the generators are left as they were.

    Weights that megatron-core makes on the GPU, slice by slice, are drawn from its random state tracker: there
    (seed, part, tp_rank) decides, so that slices differ.
    """
    part_seed = derive_seed(seed, "weights", part)
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.cuda.manual_seed(derive_seed(part_seed, tp_rank))
        if "model-parallel-rng" in states:
            tracker.set_states({**states, "model-parallel-rng": torch.cuda.get_rng_state()})
        # not torch.manual_seed: where a device has not been used yet, that formats a traceback for it at every call
        torch.default_generator.manual_seed(part_seed)
        torch.cuda.manual_seed(part_seed)
        try:
            yield
        finally:
            tracker.set_states(states)


class DropoutSeeds:
    """Seeds the default generator of the device before a piece draws its dropout masks.

    Nothing is saved or restored: every draw of the model is preceded by its own seed.
    """

    def __init__(self, seed: int, tp_rank: int, cp_rank: int | None = None):
        """cp_rank: None where one rank has all rows."""
        self._seed = seed
        self._tp_rank = tp_rank
        self._context = () if cp_rank is None else (cp_rank,)
        target = device()
        on_cpu = target.type == "cpu"
        self._generator = torch.default_generator if on_cpu else torch.cuda.default_generators[target.index]

    def begin(self, piece: Piece, context: UnitContext, split: bool, half: int | None = None) -> None:
        """Seed for `piece` of the unit; `split`: tensor-parallel ranks hold different parts of what is dropped. half:
        of the unit's tokens, where these run in halves."""
        self._generator.manual_seed(
            derive_seed(
                self._seed,
                context.step,
                context.microbatch,
                piece.layer,
                PIECE_KINDS.index(piece.role),
                context.chunk,
                self._tp_rank if split else -1,
                *self._context,
                *(() if half is None else ("half", half)),
            )
        )

    def run(
        self,
        piece: Piece,
        split: bool,
        call: RunPiece,
        state: State,
        batch: Microbatch,
        context: UnitContext,
    ) -> State:
        """What `call` gives of a piece that drops something, after seeding in training."""
        if context.training:
            self.begin(piece, context, split)
        return call(state, batch, context)
