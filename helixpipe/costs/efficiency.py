"""Derives the share of its hardware's peaks that a machine reaches from a file of `helixpipe profile`.

Two readings of the same times. `reached` divides: FLOPs, as executed, by seconds and peak, all that a piece does beside
its matrix products included. `fitted` asks which shares of the peaks the costs of `model_costs` must assume
to take as long as was measured; that is what `Efficiency` means, and so what carries over to other models and sizes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from helixpipe.common.errors import UserError
from helixpipe.costs.hardware import Hardware, find_device
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import Chunk
from helixpipe.costs.piece_kinds import flops
from helixpipe.costs.profile_costs import Profile
from helixpipe.program.stages import role_of

_PIECES: Mapping[str, tuple[str, ...]] = {"memory": ("norm",), "attention": ("attn",), "matmul": ("qkv", "proj", "mlp")}
"""The roles of the pieces whose times, forward and backward, tell each share. Memory first: it has a part in the
others' times."""

_LEAST = 1e-6


def reached(profile: Profile, hardware: Hardware) -> dict[str, dict[str, float]]:
    """Share of the hardware's peak FLOP/s, by kind of piece and op kind (F, I, W, B), where there are FLOPs."""
    (times, *_) = profile.chunks
    chunk = Chunk(times.tokens, times.earlier)
    shares: dict[str, dict[str, float]] = {}
    for piece in profile.model.kinds:
        for kind in "FIWB":
            work, seconds = flops(profile.model, profile.layout, piece, kind, chunk), times.pieces[piece][kind]
            if work > 0 and seconds > 0:
                shares.setdefault(piece, {})[kind] = work / seconds / hardware.flops
    return shares


def fitted(profile: Profile, hardware: Hardware, given: Collection[str] = ()) -> Hardware:
    """The hardware with the shares of matrix products, attention and memory under which its costs equal the profile's
    times; those named in `given` stay. A share is at most 1, also where the measured times are shorter than that."""
    for name in _PIECES:
        if name not in given:
            hardware = _fit(profile, hardware, name)
    return hardware


def hardware_as_measured(path: str | Path, hardware: Hardware, given: Collection[str]) -> Hardware:
    """`fitted` for a file of --efficiency-from. Raises UserError for one of another type or known to be of other
    hardware."""
    profile = Profile.load(path, flag="--efficiency-from")
    if profile.dtype != "bfloat16":
        raise UserError(
            f"--efficiency-from: {path} was measured in {profile.dtype}, and --model counts bfloat16; measure with "
            "--dtype bfloat16."
        )
    device = find_device(str(profile.machine.get("device")))
    if device is not None and device.name != hardware.name:
        raise UserError(f"--efficiency-from: {path} was measured on {device.name}, not on --hardware {hardware.name}.")
    return fitted(profile, hardware, given)


def _fit(profile: Profile, hardware: Hardware, name: str) -> Hardware:
    (times, *_) = profile.chunks
    chunk = Chunk(times.tokens, times.earlier)
    pieces = [piece for piece in profile.model.kinds if role_of(piece) in _PIECES[name]]
    measured = sum(times.pieces[piece][kind] for piece in pieces for kind in "FB")

    def assume(share: float) -> Hardware:
        return replace(hardware, efficiency=replace(hardware.efficiency, **{name: share}))

    def seconds(share: float) -> float:
        costs = ModelCosts(profile.model, assume(share), profile.layout, profile.seq_length)
        return sum(costs.piece_time(piece, kind, chunk) for piece in pieces for kind in "FB")

    if seconds(1.0) >= measured:
        return assume(1.0)
    low, high = _LEAST, 1.0  # the larger the share, the shorter the time
    while high / low > 1 + 1e-9:
        middle = math.sqrt(low * high)
        if seconds(middle) > measured:
            low = middle
        else:
            high = middle
    return assume(high)
