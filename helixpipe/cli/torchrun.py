"""The command that trains a model of the presets as it was planned."""

from __future__ import annotations

from helixpipe.costs.attention_kernels import CUDNN, UNFUSED
from helixpipe.costs.hardware import GIB, find_hardware
from helixpipe.costs.models import OFF, ModelShape
from helixpipe.costs.training_flags import model_flags
from helixpipe.costs.verdict import tensor_limit
from helixpipe.planning.search.documents import bounds_of
from helixpipe.planning.search.flags import documents_flags, limit_in_gib, setting_flags, sizes_flags
from helixpipe.planning.search.space import Candidate, Question

_BACKENDS = {UNFUSED: "unfused", CUDNN: "fused"}
"""Training's words for kernels of attention that it does not choose by itself."""


def _data_flags(model: ModelShape) -> list[str]:
    """Return flags for mock tokens of the model's vocabulary, whose last is the end of a document."""
    return ["--mock-data", "--tokenizer-type NullTokenizer", f"--vocab-size {max(1, model.vocab - 1)}"]


def torchrun_command(question: Question, candidate: Candidate) -> str:
    """Return a command for each node, with a line for each group of flags."""
    hardware, host = question.hardware, question.hardware.host_memory
    nodes = question.gpus // hardware.gpus_per_node
    several = " --node-rank $NODE_RANK --master-addr $MASTER_ADDR" if nodes > 1 else ""
    schedule = question.catalogue[candidate.setting.schedule]
    division = bounds_of(question).division(candidate.sizes, candidate.setting)
    on_host, layout = question.adam_on_host, question.layout
    backend = _BACKENDS.get(layout.attention_kernel)
    limits = [
        *[f"--optimizer-cpu-offload --optimizer-offload-fraction {on_host:g}"] * bool(on_host),
        f"--hardware {hardware.name}",
        *[f"--memory-limit {limit_in_gib(question.limit)}"]
        * (question.limit != tensor_limit(find_hardware(hardware.name).memory)),
        *[f"--host-memory {host / GIB:g}"] * (host != find_hardware(hardware.name).host_memory),
    ]
    training = [
        *documents_flags(question),
        *[f"--cuda-graphs {layout.cuda_graphs}"] * (layout.cuda_graphs != OFF),
        *[f"--attention-backend {backend}"] * (backend is not None),
        f"--micro-batch-size {layout.micro_batch_size}",
        f"--global-batch-size {question.sequences}",
        "--train-iters 10",
        "--lr 1e-4",
        "--bf16",
    ]
    lines = [
        f"torchrun --nproc-per-node {hardware.gpus_per_node} --nnodes {nodes}{several} pretrain_gpt.py",
        " ".join([*model_flags(question.model), *_data_flags(question.model)]),
        " ".join(sizes_flags(question, candidate.sizes)),
        " ".join([*setting_flags(schedule, candidate.setting, division, question.model.further), *limits]),
        " ".join(training),
    ]
    return " \\\n    ".join(lines)
