"""Do torchtitan's GraphPP, which runs stages as traced graphs, and our schedules fit? Run by tools/torchtitan.sh:

torchrun --nproc-per-node 2 examples/torchtitan_graph_pp.py zbv

GraphPP registers what runs F, B, I, W and FSDP's actions on a runtime schedule of torch's, and leaves order and
communication to that; here it is one of `helixpipe.torch_pipelining.schedule`. The gradients must be those of
PipelineStages to the bit.
"""

import importlib.machinery
import sys
from typing import Any
from unittest.mock import MagicMock

for name in ("datasets", "datasets.distributed", "torch.utils.tensorboard"):  # its trainer reads data and writes logs
    sys.modules[name] = MagicMock(__spec__=importlib.machinery.ModuleSpec(name, None))

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig
from torchtitan.experiments.graph_trainer.graph_pp.graph_builder import GraphTrainerStageGraphProvider
from torchtitan.experiments.graph_trainer.graph_pp.runner import register_graph_pp_schedule
from torchtitan.experiments.graph_trainer.graph_pp.stage import GraphPipelineStage

from helixpipe.torch_pipelining import schedule, stages_of_rank

MICROBATCHES, WIDTH = 4, 8


def loss_fn(output, target, **unused):
    return ((output - target) ** 2).mean()


def gradients(name, graphs):
    """Of this rank's stages after one step."""
    own = stages_of_rank(name, dist.get_rank(), dist.get_world_size(), MICROBATCHES)
    count, device, stages = len(own) * dist.get_world_size(), torch.device("cpu"), []
    for index in own:
        torch.manual_seed(index)
        module = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())
        place: dict[str, Any] = {"stage_index": index, "num_stages": count, "device": device}
        stages.append((GraphPipelineStage if graphs else PipelineStage)(module, **place))
    made = runtime = schedule(name, stages, MICROBATCHES, loss_fn, scale_grads=False)
    if graphs:
        config = GraphTrainerCompileConfig(enable=True, mode="aot_fx_trace", enable_passes=False)
        provider = GraphTrainerStageGraphProvider(loss_fn, config, None, None)
        runtime = register_graph_pp_schedule(made, graph_provider=provider)
    torch.manual_seed(count)
    inputs, target = torch.randn(2, 2 * MICROBATCHES, WIDTH)
    last = {"target": target, "losses": []} if any(stage.is_last for stage in stages) else {}
    runtime.step(*([inputs] if any(stage.is_first for stage in stages) else []), return_outputs=False, **last)
    return [weight.grad for stage in stages for weight in stage.submod.parameters()]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        pairs = list(zip(gradients(name, False), gradients(name, True), strict=True))
        equal = len(pairs) >= 4 and all(torch.equal(one, other) and one.any() for one, other in pairs)
        print(f"{name} on rank {dist.get_rank()}: {len(pairs)} gradients {'equal' if equal else 'DIFFER'}", flush=True)
        if not equal:
            sys.exit(1)
    dist.destroy_process_group()
