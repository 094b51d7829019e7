"""What each process of `helixpipe profile` runs: the times of pieces, of whole units, of copies and of messages.

    python -m helixpipe.profile.profiler TASK.json RESULT.json     (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set)

The conditions are those of a training step. Weights lie in megatron-core's DistributedDataParallel, so a backward adds
to its float32 buffers. Pieces run one after another as in a step, which decides what the caches hold. As many
processes as asked measure the same at the same time, since the ranks of a machine share its memory's bandwidth.

A piece is timed alone, with a graph of its own. Whole units, run by the executor, say what that leaves out: a further
layer of a unit decides how the times of a layer's pieces are scaled, and what remains is the overhead of an op.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from helixpipe.costs.models import Layout, ModelShape
from helixpipe.costs.profile_costs import ChunkTimes, Profile
from helixpipe.lowering.lower import lower
from helixpipe.lowering.project import Action, Instruction, LoweredProgram
from helixpipe.model import GPTOptions, Microbatch, PipelineModel, UnitContext
from helixpipe.model.backends import Machine, fuses_rope, fuses_weight_gradients, transport_name
from helixpipe.model.device import device
from helixpipe.profile.copy_times import measure_copies
from helixpipe.profile.machine import clock_name, machine, needs_wall_clock
from helixpipe.profile.message_times import measure_messages
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import LAYER_PIECES, PIECE_KINDS, Piece, Stage, model_pieces
from helixpipe.program.workload import uniform
from helixpipe.runtime.executor import Executor, Step
from helixpipe.runtime.recording import Clock
from helixpipe.runtime.transport import Alone
from helixpipe.watch.position import Position

SHORT, LONG = 1, 3
"""Layers of the two whole units that are timed."""

MICROBATCHES = 4
WARM_UP = 2


@dataclass(frozen=True)
class Task:
    """What to measure. processes: how many measure at the same time; None: 2, or 1 where there is one GPU. repeats:
    rounds that count. threads: a process. chunk_size, loss_chunk_size: tokens of a slice of the MLP, of head and loss;
    0: whole."""

    model: ModelShape
    seq_length: int
    micro_batch_size: int
    dtype: str
    processes: int | None
    threads: int
    repeats: int
    chunk_size: int = 0
    loss_chunk_size: int = 0

    @classmethod
    def load(cls, path: str) -> Task:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls(**{**content, "model": ModelShape(**content["model"])})


def main() -> None:
    """Rank 0 writes the profile; every rank measures messages, the first `task.processes` the rest."""
    task = Task.load(sys.argv[1])
    torch.set_num_threads(task.threads)
    gpus = torch.cuda.device_count()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if gpus:
        torch.cuda.set_device(rank % gpus)
    dist.init_process_group("nccl" if gpus >= world_size else "gloo", timeout=timedelta(hours=12))
    initialize_parallel_state(world_size)
    processes = task.processes or (1 if gpus == 1 else 2)
    measuring = dist.new_group(list(range(processes)))
    measurement = Measurement(task, measuring) if rank < processes else None
    pieces, overhead = measurement.run() if measurement is not None else ({}, {})
    copies = measure_copies(measuring) if measurement is not None else None
    dist.barrier()
    messages = measure_messages(rank, processes)
    if measurement is not None and rank == 0:
        element_bytes = _DTYPES[task.dtype].itemsize
        micro, slices = task.micro_batch_size, (task.chunk_size, task.loss_chunk_size)
        layout = Layout(1, False, micro, element_bytes, bool(gpus), *slices)
        Profile(
            model=task.model,
            layout=layout,
            dtype=task.dtype,
            seq_length=task.seq_length,
            chunks=(ChunkTimes(task.seq_length, 0, pieces, overhead),),
            messages=messages,
            copies=copies,
            torch=torch.__version__,
            machine=machine(),
            assumed={
                "processes": processes,
                "threads": task.threads,
                "repeats": task.repeats,
                "clock": clock_name(bool(gpus), needs_wall_clock(task.threads, processes)),
                "gradients": "added to float32 buffers",
                "dropout": 0.0,
                "kernels": measurement.kernels(transport_name(dist.get_backend(), bool(gpus))),
            },
        ).save(sys.argv[2])
    dist.barrier()
    dist.destroy_process_group()


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def initialize_parallel_state(world_size: int) -> None:
    """megatron-core's groups of one pipeline over all ranks."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=world_size,
        create_gloo_process_groups=False,
        get_embedding_ranks=lambda ranks, *_: ranks[:1],  # pipeline_model sums tied copies itself
        get_position_embedding_ranks=lambda ranks, *_: ranks[:1],
    )
    model_parallel_cuda_manual_seed(1)


def build_model(task: Task, num_layers: int, pieces: Sequence[Piece]) -> tuple[PipelineModel, Any]:
    """The pieces with their gradient buffers, as the training program builds them: (model, DistributedDataParallel)."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    shape, dtype, on_gpu = task.model, _DTYPES[task.dtype], torch.cuda.is_available()
    config = TransformerConfig(
        num_layers=num_layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        ffn_hidden_size=shape.ffn,
        normalization=shape.norm,
        gated_linear_unit=shape.gated,
        activation_func=torch.nn.functional.silu if shape.gated else torch.nn.functional.gelu,
        add_bias_linear=shape.bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        pipeline_model_parallel_size=dist.get_world_size(),
        use_cpu_initialization=not on_gpu,
        bias_activation_fusion=on_gpu and (shape.gated or shape.bias),
        bias_dropout_fusion=on_gpu,
        gradient_accumulation_fusion=fuses_weight_gradients(Machine.here()),
        masked_softmax_fusion=False,
        attention_softmax_in_fp32=False,
        cuda_graph_scope=[],
        deallocate_pipeline_outputs=True,
        transformer_impl="local",
    )
    config.apply_rope_fusion = shape.positions == "rope" and fuses_rope(Machine.here())
    gpt = GPTOptions(
        vocab_size=shape.padded_vocab(1),
        max_sequence_length=task.seq_length,
        position_embedding_type=shape.positions,
        share_embeddings_and_output_weights=shape.tied,
        chunk_size=task.chunk_size,
        loss_chunk_size=task.loss_chunk_size,
    )
    model = PipelineModel(config, gpt, pieces)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    return model, ddp


class _Marks(Position):
    """Marks the start of every op; an op lasts until the next begins, so that freeing what it kept is in it."""

    def __init__(self, clock: Clock):
        super().__init__()
        self._clock = clock
        self._stream: Sequence[Instruction] = ()
        self.marks: list[tuple[str, Any]] = []

    def begin(self, lowered: LoweredProgram, pp_rank: int) -> None:
        super().begin(lowered, pp_rank)
        self._stream, self.marks = lowered.streams[pp_rank], []

    def at(self, instruction: int) -> None:
        super().at(instruction)
        op = self._stream[instruction].op if instruction < len(self._stream) else None
        if op is not None and self._stream[instruction].action is Action.RUN:
            self.marks.append((op.kind, self._clock.mark()))

    def end(self) -> None:
        super().end()
        self.marks.append(("", self._clock.mark()))

    def times(self) -> Iterator[tuple[str, float]]:
        """(op kind, seconds) of every op of the step that ran last."""
        for (kind, start), (_, end) in pairwise(self.marks):
            yield kind, self._clock.seconds(start, end)


Samples = dict[tuple[str, str], list[float]]
"""Seconds, by what (a piece kind; `short`, `long` of a whole unit) and op kind."""


class Measurement:
    """Times of every piece and op kind on one rank, while the other ranks of `group` do the same."""

    def __init__(self, task: Task, group: Any):
        self._task, self._group = task, group
        wall = needs_wall_clock(task.threads, dist.get_world_size(group))
        self._clock = Clock(device(), time.perf_counter if wall else time.thread_time)
        self._pieces = model_pieces(LONG)
        self._model, self._ddp = build_model(task, LONG, self._pieces)
        shape = (task.micro_batch_size, task.seq_length)
        tokens, labels = (torch.randint(0, task.model.vocab, shape, device=device()) for _ in range(2))
        self._batch = Microbatch(tokens, labels, torch.ones(shape, device=device()))
        self._context = UnitContext(step=0, microbatch=0, length=task.seq_length)
        self._root = torch.tensor(1.0 / (task.micro_batch_size * task.seq_length), device=device())
        self._step = Step(0, int, lambda index: self._batch, lambda index: self._root, *shape)

    def kernels(self, transport: str) -> str:
        """What the model runs on, as the training program says it."""
        gradients = torch.promote_types(_DTYPES[self._task.dtype], torch.float32)
        return self._model.kernels.line(self._model.config, chunked=False, transport=transport, gradients=gradients)

    def run(self) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
        """(seconds by piece kind and op kind, overhead by op kind)."""
        joint = self._rounds(split=False)
        split = self._rounds(split=True)  # last: from here on linear layers use the function that can put W off
        times, overhead = {}, {}
        for kind, samples in (("F", joint), ("B", joint), ("I", split), ("W", split)):
            times[kind], overhead[kind] = scale_to_whole_units(samples, kind)
        times["R"], overhead["R"] = times["F"], overhead["F"]
        return {piece: {kind: times[kind][piece] for kind in "FIWBR"} for piece in PIECE_KINDS}, overhead

    def _rounds(self, split: bool) -> Samples:
        if split:
            self._model.weight_gradients()
        layers = {"short": SHORT, "long": LONG}
        whole = {name: lower(self._program(number, split)) for name, number in layers.items()}
        marks = _Marks(self._clock)
        executor = Executor(0, self._model, Alone(), position=marks)
        samples: Samples = {}
        for number in range(WARM_UP + self._task.repeats):
            dist.barrier(self._group)
            self._ddp.zero_grad_buffer()
            found = [*self._time_pieces(split)]
            for name, lowered in whole.items():
                executor.run(lowered, self._step)
                found += [((name, kind), seconds) for kind, seconds in marks.times()]
            if number >= WARM_UP:
                for key, seconds in found:
                    samples.setdefault(key, []).append(seconds)
        return samples

    @staticmethod
    def _program(layers: int, split: bool) -> Program:
        """The whole of a model of `layers` on one rank, two microbatches at once in flight: F0 F1 B0 F2 B1 F3 B2 B3."""
        order = [Op("F", 0, 0)]
        for microbatch in range(MICROBATCHES):
            if microbatch + 1 < MICROBATCHES:
                order.append(Op("F", 0, microbatch + 1))
            order += [Op(kind, 0, microbatch) for kind in ("IW" if split else "B")]
        return Program("profile", (Stage(model_pieces(layers)),), (tuple(order),), uniform(MICROBATCHES))

    def _time_pieces(self, split: bool) -> Iterator[tuple[tuple[str, str], float]]:
        """Every piece forward, then every piece backward, each in a graph of its own."""
        clock, marks = self._clock, []
        units: list[tuple[Piece, tuple[Tensor, ...], tuple[Tensor, ...]]] = []
        state: tuple[Tensor, ...] = ()
        for piece in self._pieces:
            inputs = tuple(tensor.detach().requires_grad_() for tensor in state)
            start = clock.mark()
            state = self._model.run((piece,), inputs, self._batch, self._context)
            marks.append(((piece.kind, "F"), start, clock.mark()))
            units.append((piece, inputs, state))
        gradients: tuple[Tensor, ...] = (self._root,)
        store = self._model.weight_gradients() if split else None
        for piece, inputs, outputs in reversed(units):
            start = clock.mark()
            with store.keep(piece) if store is not None else nullcontext():
                gradients = _backward(inputs, outputs, gradients)
            marks.append(((piece.kind, "I" if split else "B"), start, clock.mark()))
        del outputs, inputs, state
        while units and store is not None:
            piece, *_ = units.pop()
            start = clock.mark()
            store.compute(piece)
            marks.append(((piece.kind, "W"), start, clock.mark()))
        for key, start, end in marks:
            yield key, clock.seconds(start, end)


def _backward(
    inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Backward of one piece; a residual that passes through takes its gradient along, at no cost."""
    passed = [next((i for i, tensor in enumerate(inputs) if tensor is output), -1) for output in outputs]
    own = [index for index, source in enumerate(passed) if source < 0]
    Variable._execution_engine.run_backward(
        tuple(outputs[index] for index in own),
        tuple(gradients[index] for index in own),
        False,  # keep_graph
        False,  # create_graph
        (),  # inputs: all leaves
        allow_unreachable=True,
        accumulate_grad=True,
    )
    result = [tensor.grad for tensor in inputs]
    for source, gradient in zip(passed, gradients, strict=True):
        if source >= 0:
            mine = result[source]
            result[source] = gradient if mine is None else mine + gradient
    return tuple(gradient for gradient in result if gradient is not None)


def scale_to_whole_units(samples: Samples, kind: str) -> tuple[dict[str, float], float]:
    """(seconds by piece, overhead of an op): pieces of a layer add up to what a further layer costs a whole unit."""
    alone = {piece: statistics.median(samples[piece, kind]) for piece in PIECE_KINDS}
    short, long = (statistics.median(samples[name, kind]) for name in ("short", "long"))
    layer = (long - short) / (LONG - SHORT)
    together = sum(alone[piece] for piece in LAYER_PIECES)
    scale = layer / together if layer > 0 and together > 0 else 1.0
    scaled = {piece: seconds * (scale if piece in LAYER_PIECES else 1.0) for piece, seconds in alone.items()}
    rest = short - sum(scaled[piece] for piece in PIECE_KINDS) - (SHORT - 1) * layer
    return scaled, max(rest, 0.0)


if __name__ == "__main__":
    gc.freeze()  # neither collections between measurements nor the end of the process need search what was imported
    main()
