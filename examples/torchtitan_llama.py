"""torchtitan's Llama 3 debug model under a schedule of the catalogue, built by torchtitan's own pipeline code:

helixpipe export zbv -p 2 -m 8 --to torch --output zbv
torchrun --nproc-per-node 2 examples/torchtitan_llama.py zbv.compute_only.csv

torchtitan's trainer reads the same file by --parallelism.pipeline_parallel_schedule_csv. The trainer of its release
0.3.0 needs CUDA and a nightly torch, so this is its part that runs on a CPU: model, stages, schedule from the file.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import pipeline_parallel
from torchtitan.models.common import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

from helixpipe.torch_pipelining import relower

FILE = sys.argv[1] if len(sys.argv) > 1 else ""  # without a file, torchtitan's own schedule of that name
MICROBATCHES, LENGTH, STEPS = 8, 32, 3


def loss_fn(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()), None


if __name__ == "__main__":
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    parallelism = ParallelismConfig(
        pipeline_parallel_degree=mesh.size(),
        pipeline_parallel_schedule="ZBVZeroBubble",  # which stages a rank has: here a V
        pipeline_parallel_schedule_csv=FILE,
        pipeline_parallel_microbatch_size=1,
    )
    torch.manual_seed(1)
    config = model_registry("debugmodel", attn_backend="flex").model
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # its others have no backward on a CPU
    model = config.build()
    model.init_states()
    parts = pipeline_parallel._generate_llm_fqn_per_model_part(2 * mesh.size(), len(config.layers))
    stages, models = pipeline_parallel._pipeline_module_split(
        model, mesh, parallelism.pipeline_parallel_schedule, torch.device("cpu"), parts
    )
    schedule = pipeline_parallel._build_pipeline_schedule(
        parallelism=parallelism, local_batch_size=MICROBATCHES, stages=stages, loss_fn=loss_fn
    )
    if FILE:
        relower(schedule)  # the file has the ops; their order of communication from here on is ours
    optimizer = torch.optim.AdamW([weight for part in models for weight in part.parameters()], lr=1e-3)
    tokens = (torch.arange(LENGTH + 1) + torch.arange(MICROBATCHES)[:, None]) % config.vocab_size
    for number in range(STEPS):
        losses = []
        inputs = (tokens[:, :-1],) if stages[0].is_first else ()
        last = {"target": tokens[:, 1:], "losses": losses} if stages[-1].is_last else {}
        schedule.step(*inputs, **last)
        for part in models:
            for weight in part.parameters():
                weight.grad /= MICROBATCHES  # torchtitan's own loss is a sum over all tokens, divided by their number
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            print(f"step {number}: loss {torch.stack(losses).mean():.6f}", flush=True)
    dist.destroy_process_group()
