"""Costs measured on a machine by `helixpipe profile`: its file, and the `Costs` read from it.

An op takes the sum of its pieces' measured times, what an op costs beside them, and what its messages cost the rank; a
message takes a latency and its bytes at a bandwidth. Bytes are counted, not measured (`piece_bytes`, exact
for these pieces).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from helixpipe.common.errors import UserError
from helixpipe.common.files import whole_file
from helixpipe.common.json_values import parse_json
from helixpipe.common.ranges import MOST_TOKENS
from helixpipe.costs.counted_bytes import CountsBytes
from helixpipe.costs.hardware import find_device
from helixpipe.costs.measured_chunks import MeasuredChunk, MeasuredChunks
from helixpipe.costs.models import Chunk, Layout, ModelShape
from helixpipe.costs.piece_bytes import PieceBytes
from helixpipe.costs.sizes import GRADIENT_BYTES
from helixpipe.program.costs import Load, Work
from helixpipe.program.program import OP_KINDS
from helixpipe.program.stages import HEAD_NORM, HEAD_PART, Piece
from helixpipe.program.transfer import TRANSFER_KINDS

VERSION = 2
"""Of the file's format. In version 1 a chunk has no number of documents, and there is one chunk: still read."""


@dataclass(frozen=True)
class MessageTimes:
    """A message of n bytes takes latency + n / bandwidth seconds over `backend`, and keeps its ranks from computing.

    send, receive: for how many seconds it does, as (of any message, of each byte); they are not in the latency.
    """

    latency: float
    bandwidth: float
    backend: str
    send: tuple[float, float] = (0.0, 0.0)
    receive: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class CopyTimes:
    """A copy of n bytes from the device to its host (out) or back (inward) takes latency + n / bandwidth seconds.

    out, inward: bytes a second, as (alone, with the other direction in use). own: seconds of each byte, out and inward,
    for which a core that computes copies instead.
    """

    latency: float
    out: tuple[float, float]
    inward: tuple[float, float]
    own: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class WeightTimes:
    """The time that weights that travel take of a rank, beside sending and receiving them: for packing those of a stage
    and adding sums of gradients that have come to its own, as (once, of each byte)."""

    pack: tuple[float, float] = (0.0, 0.0)
    add: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Profile:
    """Times that `helixpipe profile` measured, and of what.

    machine, assumed: for people; what was measured on and under which conditions. torch: its version. copies: None in
    files of before they were measured; what these lack otherwise is taken to be nothing. expert_loads: of each measured
    layer with experts, the tokens of each, for `--moe-load`.
    """

    model: ModelShape
    layout: Layout
    dtype: str
    seq_length: int
    chunks: tuple[MeasuredChunk, ...]
    messages: MessageTimes
    torch: str = ""
    machine: Mapping[str, Any] = field(default_factory=dict)
    assumed: Mapping[str, Any] = field(default_factory=dict)
    copies: CopyTimes | None = None
    weights: WeightTimes = WeightTimes()
    expert_loads: tuple[tuple[float, ...], ...] = ()

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all. Raises UserError when it cannot be written."""
        with whole_file(path) as temporary:
            temporary.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    def to_json(self) -> dict[str, Any]:
        """Return what the file holds."""
        return {"format": _FORMAT, "version": VERSION, **dataclasses.asdict(self)}

    @classmethod
    def load(cls, path: str | Path, flag: str = "--profile") -> Profile:
        """Read a file that `save` wrote. Raises UserError, which names the flag that gave it, for any other."""
        try:
            content = parse_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{flag}: cannot read {path}: {error.strerror or error}.") from None
        except ValueError:  # of JSON or of UTF-8
            raise UserError(f"{flag}: {path} is not JSON; `helixpipe profile` writes such files.") from None
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise UserError(f"{flag}: {path} was not written by `helixpipe profile`.")
        if content.get("version") not in range(1, VERSION + 1):
            raise UserError(
                f"{flag}: {path} has version {content.get('version')} of the format and this program reads versions 1 "
                f"to {VERSION}; measure again with `helixpipe profile`."
            )
        try:
            profile = cls(
                model=ModelShape.from_json(**content["model"]),
                layout=Layout(**content["layout"]),
                chunks=tuple(MeasuredChunk(**chunk) for chunk in content["chunks"]),
                messages=_message_times(**content["messages"]),
                copies=_copy_times(content.get("copies")),
                weights=_weight_times(**content.get("weights", {})),
                expert_loads=tuple(tuple(map(float, layer)) for layer in content.get("expert_loads", ())),
                **{name: content[name] for name in ("dtype", "seq_length", "torch", "machine", "assumed")},
            )
            profile._check()
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UserError(f"{flag}: {path} is damaged ({_reason(error)}); measure again.") from None
        return profile

    def _check(self) -> None:
        """Raise ValueError, KeyError or TypeError unless every time is there, a number, and not negative."""
        _check_fields("model", self.model)
        _check_fields("layout", self.layout)
        _check_fields("", self, only=("dtype", "seq_length", "torch"))
        for number, layer in enumerate(self.expert_loads):
            _check_numbers({f"expert_loads[{number}][{expert}]": tokens for expert, tokens in enumerate(layer)})
        for name in ("machine", "assumed"):
            if not isinstance(getattr(self, name), dict):
                raise ValueError(f"{name} is no object")
        if not self.chunks:
            raise ValueError("it has no chunk")
        for chunk in self.chunks:
            if not (chunk.tokens >= chunk.documents >= 1 and chunk.earlier >= 0):
                raise ValueError(
                    f"a chunk has {chunk.tokens} tokens after {chunk.earlier}, {chunk.documents} documents"
                )
            for kind in OP_KINDS:
                times = {f"{piece} {kind}": chunk.pieces[piece][kind] for piece in self.model.kinds}
                _check_numbers({**times, f"overhead {kind}": chunk.overhead[kind]})
            odd = set(chunk.pieces).difference(self.model.kinds) or set(chunk.overhead).difference(OP_KINDS)
            odd = odd or {kind for times in chunk.pieces.values() for kind in set(times).difference(OP_KINDS)}
            if odd:
                raise ValueError(f"a chunk has times of {min(odd)!r}")
        messages = self.messages
        _check_numbers({"latency": messages.latency, "bandwidth": messages.bandwidth})
        for name, (once, per_byte) in (("send", messages.send), ("receive", messages.receive)):
            _check_numbers({name: once, f"{name} a byte": per_byte})
        if messages.bandwidth == 0:
            raise ValueError(f"bandwidth is {messages.bandwidth}")
        for name, (once, per_byte) in (("packing", self.weights.pack), ("adding", self.weights.add)):
            _check_numbers({f"{name} weights": once, f"{name} weights, a byte": per_byte})
        if self.copies is not None:
            bandwidths = (*self.copies.out, *self.copies.inward)
            numbers = {f"bandwidth {number} of copies": value for number, value in enumerate(bandwidths)}
            numbers |= {f"own time {number} of copies": value for number, value in enumerate(self.copies.own)}
            _check_numbers({"latency of copies": self.copies.latency, **numbers})
            if 0 in bandwidths:
                raise ValueError("a bandwidth of copies is 0")


_FORMAT = "helixpipe profile"
_MOST = 1e30
"""Of a time or a bandwidth: what is calculated with it stays a number."""


@dataclass(frozen=True)
class ProfileCosts(CountsBytes):
    """`Costs` in seconds and bytes of the model and machine of a profile. sharded: data-parallel ranks that have parts
    of weights, gradients and optimizer state. fused_adam: see `ModelCosts`."""

    profile: Profile
    fp32_kv_gradients: bool = False
    sharded: int = 1
    fused_adam: bool | None = None

    def op_time(self, work: Work) -> float:
        chunk = self.chunk(work.extents, work.whole)
        times = self._measured.times(chunk)
        pieces = sum(self._piece_time(times, piece, work.kind) for piece in work.pieces)
        if work.alone and self.profile.layout.loss_chunk and any(piece.kind == "head" for piece in work.pieces):
            pieces += times.pieces["head"]["B"] / 3  # of its three products the one that a training step's F leaves out
        return pieces + times.overhead[work.kind] + self.exchange_time(work, chunk)

    def _piece_time(self, times: MeasuredChunk, piece: Piece, op: str) -> float:
        """Of a head that is divided, measured whole: its norm takes what a layer's does, a part its share of the rest.
        Over slices the head computes all in its backward, of three products, and a part makes its logits in F too."""
        if piece.kind not in (HEAD_NORM, HEAD_PART):
            return times.pieces[piece.kind][op]
        norm, head = times.pieces["norm"], times.pieces["head"]
        if piece.kind == HEAD_NORM:
            return norm[op]
        if self.profile.layout.loss_chunk and op in "FR":
            return max(head["B"] - norm["B"], 0.0) / 3 / piece.shares
        return max(head[op] - norm[op], 0.0) / piece.shares

    def exchange_time(self, work: Work, chunk: Chunk) -> float:
        """Return what sending and receiving the op's messages takes of its rank's time."""
        messages = self.profile.messages
        ends = ((work.receives, messages.receive), (work.sends, messages.send))
        return sum(
            once + per_byte * self.bytes.message(after, chunk) for after, (once, per_byte) in ends if after is not None
        )

    def transfer_time(self, load: Load) -> float:
        """Of a collective over links like those of the messages that were measured. Of a copy as measured; of a file
        that does not say, that of the hardware it was measured on. Raises UserError where that is not known either."""
        row, messages, nbytes = TRANSFER_KINDS[load.kind], self.profile.messages, self.size(load.contents)
        resource = row.resource
        if resource == "link":
            return messages.latency + nbytes / messages.bandwidth
        if resource == "collective":
            passed = nbytes * (1 if row.entire else (load.members - 1) / load.members)
            return messages.latency * (load.members - 1) + passed / messages.bandwidth
        copies = self._copies
        return copies.latency + nbytes / (copies.inward if resource == "copy_in" else copies.out)[1]

    def handling_time(self, load: Load, sends: bool) -> float:
        """As an op's messages, and what weights take beside; of a copy as measured; of a collective nothing was."""
        resource, nbytes = TRANSFER_KINDS[load.kind].resource, self.size(load.contents)
        if resource == "collective":
            return 0.0
        if resource != "link":
            return self._copies.own[resource == "copy_in"] * nbytes
        messages = self.profile.messages
        lines = [messages.send if sends else messages.receive]
        if load.kind == "weights" and sends:
            lines.append(self.profile.weights.pack)
        elif load.kind == "weight_gradients" and not sends:
            lines.append(self.profile.weights.add)
        return sum(once + per_byte * nbytes for once, per_byte in lines)

    @cached_property
    def _copies(self) -> CopyTimes:
        if self.profile.copies is not None:
            return self.profile.copies
        device = self.profile.machine.get("device")
        hardware = find_device(str(device))
        if hardware is None:
            raise UserError(
                "the file of `helixpipe profile` says nothing of copies between device and host, nor is anything known "
                f"of {device}; measure again."
            )
        both_ways = (hardware.host_bandwidth(both=False), hardware.host_bandwidth(both=True))
        return CopyTimes(hardware.latency, both_ways, both_ways)

    def static_memory(self, pieces: Sequence[Piece]) -> float:
        """Weights, their gradients and Adam's state on a rank of these pieces, or its part of them."""
        element = self.profile.layout.element_bytes
        moments_and_copy = 8 + (4 if element < 4 else 0)  # weights in float32 are their own copy
        return self.bytes.parameters(pieces) * (element + GRADIENT_BYTES + moments_and_copy) / self.sharded

    def static_host_memory(self, pieces: Sequence[Piece]) -> float:
        return 0.0

    def update_memory(self, pieces: Sequence[Piece]) -> float:
        """See `ModelCosts`; on a CPU torch updates one weight after another."""
        on_cpu = find_device(str(self.profile.machine.get("device"))) is None
        fused = self.profile.layout.fused_kernels if self.fused_adam is None else self.fused_adam
        return 0.0 if on_cpu or fused else 4 * self.bytes.parameters(pieces) / self.sharded

    @cached_property
    def bytes(self) -> PieceBytes:
        return PieceBytes(self.profile.model, self.profile.layout)

    def _sequence(self) -> tuple[int, bool]:
        return self.profile.seq_length, self.fp32_kv_gradients

    @cached_property
    def _measured(self) -> MeasuredChunks:
        return MeasuredChunks(self.profile.chunks, self.profile.model.window)


def _message_times(
    latency: float, bandwidth: float, backend: str, send: Sequence[float], receive: Sequence[float]
) -> MessageTimes:
    (send_once, send_byte), (receive_once, receive_byte) = send, receive
    return MessageTimes(latency, bandwidth, backend, (send_once, send_byte), (receive_once, receive_byte))


def _copy_times(content: Mapping[str, Any] | None) -> CopyTimes | None:
    if content is None:
        return None
    (out_alone, out_both), (in_alone, in_both) = content["out"], content["inward"]
    own_out, own_inward = content.get("own", (0.0, 0.0))
    return CopyTimes(content["latency"], (out_alone, out_both), (in_alone, in_both), (own_out, own_inward))


def _weight_times(pack: Sequence[float] = (0.0, 0.0), add: Sequence[float] = (0.0, 0.0)) -> WeightTimes:
    (pack_once, pack_byte), (add_once, add_byte) = pack, add
    return WeightTimes((pack_once, pack_byte), (add_once, add_byte))


def _check_fields(what: str, described: Any, only: Sequence[str] | None = None) -> None:
    """Raise ValueError for a field of another type than it is declared with, or a size that is none: these are at least
    1, or at least 0 where that is the default."""
    types: dict[str, type] = {"int": int, "bool": bool, "str": str, "float": float}
    types |= {"tuple[int, ...]": tuple, "Others": tuple}
    for each in dataclasses.fields(described):
        value: Any = getattr(described, each.name)
        kind, least = types.get(str(each.type)), 0 if each.default == 0 else 1
        if only is not None and each.name not in only:
            continue
        sized = not isinstance(value, int | float) or isinstance(value, bool) or least <= value <= MOST_TOKENS
        if each.type == "Others":
            listed = isinstance(value, tuple) and all(_is_other(entry) for entry in value)
        else:
            listed = not isinstance(value, tuple) or set(value) <= {0, 1}  # which layers
        if type(value) is not kind or not sized or not listed:
            raise ValueError(f"{what} {each.name} is {value!r}".lstrip())


def _is_other(entry: Any) -> bool:
    """Whether this is an entry of `ModelShape.others`: the name of a field and its value."""
    return isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str) and not isinstance(entry[1], dict)


def _check_numbers(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _MOST:
            raise ValueError(f"{name} is {value!r}")


def _reason(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)
