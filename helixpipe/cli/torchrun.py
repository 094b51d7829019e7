"""The command that trains a model of the presets as it was planned. No torch here."""

from __future__ import annotations

from helixpipe.costs.hardware import GIB, find_hardware
from helixpipe.costs.models import ModelShape
from helixpipe.planning.solver import Solution


def model_flags(model: ModelShape) -> list[str]:
    """Training's flags for a model, of one word or two each; made-up tokens of its vocabulary."""
    flags = [
        f"--num-layers {model.layers}",
        f"--hidden-size {model.hidden}",
        f"--ffn-hidden-size {model.ffn}",
        f"--num-attention-heads {model.heads}",
    ]
    if model.groups != model.heads:
        flags += ["--group-query-attention", f"--num-query-groups {model.groups}"]
    flags += [
        f"--seq-length {model.seq_length}",
        f"--max-position-embeddings {model.seq_length}",
        f"--position-embedding-type {model.positions}",
        f"--normalization {model.norm}",
    ]
    for flag, given in (
        ("--swiglu", model.gated),
        ("--disable-bias-linear", not model.bias),
        ("--untie-embeddings-and-output-weights", not model.tied),
    ):
        flags += [flag] * given
    return [
        *flags,
        "--attention-dropout 0",
        "--hidden-dropout 0",
        "--mock-data",
        "--tokenizer-type NullTokenizer",
        f"--vocab-size {model.vocab}",
    ]


def torchrun_command(solution: Solution, schedule: str, options: list[str], sequences: int, offloads: bool) -> str:
    """A command for each node, a line a group of flags. options: flags of the schedule. offloads: whether it offloads
    unless told otherwise."""
    costs, layout, offload = solution.costs, solution.costs.layout, solution.choice.offload
    gpus = layout.tensor_parallel * solution.ranks * costs.data_parallel
    host = costs.hardware.host_memory
    nodes = gpus // costs.hardware.gpus_per_node
    several = " --node-rank $NODE_RANK --master-addr $MASTER_ADDR" if nodes > 1 else ""
    parallel = [
        f"--tensor-model-parallel-size {layout.tensor_parallel}",
        *["--sequence-parallel"] * layout.sequence_parallel,
        f"--pipeline-model-parallel-size {solution.ranks}",
        *["--use-distributed-optimizer"] * costs.distributed_optimizer,
        f"--pipeline-schedule {schedule}",
        *options,
        *[f"--pipe-sp-splits {solution.chunks}"] * (solution.chunks > 1),
        *[solution.choice.flags] * bool(solution.choice.flags),
        *[f"--offload-activations {offload.offload_activations}"] * (offloads or offload.auto),
        *["--no-recompute-early"] * (solution.choice.recompute.granularity is not None and not solution.early),
        *[f"--chunk-size {layout.mlp_chunk}"] * bool(layout.mlp_chunk),
        *[f"--loss-chunk-size {layout.loss_chunk}"] * bool(layout.loss_chunk),
        *[f"--optimizer-cpu-offload --optimizer-offload-fraction {costs.adam_on_host:g}"] * bool(costs.adam_on_host),
        f"--hardware {costs.hardware.name}",
        *[f"--host-memory {host / GIB:g}"] * (host != find_hardware(costs.hardware.name).host_memory),
    ]
    training = [
        f"--micro-batch-size {layout.micro_batch_size}",
        f"--global-batch-size {sequences}",
        "--train-iters 10",
        "--lr 1e-4",
        "--bf16",
    ]
    lines = [
        f"torchrun --nproc-per-node {costs.hardware.gpus_per_node} --nnodes {nodes}{several} pretrain_gpt.py",
        " ".join(model_flags(costs.model)),
        " ".join(parallel),
        " ".join(training),
    ]
    return " \\\n    ".join(lines)
