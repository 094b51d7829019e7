"""A Hugging Face Llama, cut by PipelineStage, under any schedule that torch's runtime can run:

torchrun --nproc-per-node 2 examples/torch_llama.py zbv
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from transformers import LlamaConfig, LlamaForCausalLM

from helixpipe.torch_pipelining import schedule, stages_of_rank

SCHEDULE = sys.argv[1] if len(sys.argv) > 1 else "zbv"
MICROBATCHES, BATCH, LENGTH, STEPS = 8, 2, 16, 5  # of a step; sequences of a microbatch; tokens of a sequence
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, use_cache=False
)


class Part(torch.nn.Module):
    """One stage of the model: its layers, the embedding in front of the first, norm and head behind the last."""

    def __init__(self, index: int, stages: int):
        super().__init__()
        torch.manual_seed(1)  # every rank draws all weights, and keeps those of its stages
        self.llama, self.first = LlamaForCausalLM(CONFIG), index == 0
        size = CONFIG.num_hidden_layers // stages
        self.llama.model.layers = self.llama.model.layers[index * size : (index + 1) * size]
        if not self.first:
            self.llama.model.embed_tokens = None
        if index < stages - 1:
            self.llama.model.norm = self.llama.lm_head = torch.nn.Identity()

    def forward(self, taken):
        return self.llama(**{"input_ids" if self.first else "inputs_embeds": taken}).logits.clone()  # no view


def loss_fn(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


if __name__ == "__main__":
    dist.init_process_group()
    own = stages_of_rank(SCHEDULE, dist.get_rank(), dist.get_world_size(), MICROBATCHES)
    total = len(own) * dist.get_world_size()
    stages = [PipelineStage(Part(index, total), index, total, torch.device("cpu")) for index in own]
    step = schedule(SCHEDULE, stages, MICROBATCHES, loss_fn).step
    optimizer = torch.optim.AdamW([weight for stage in stages for weight in stage.submod.parameters()], lr=1e-2)
    tokens = (torch.arange(LENGTH + 1) + torch.arange(MICROBATCHES * BATCH)[:, None]) % CONFIG.vocab_size
    for number in range(STEPS):
        losses = []
        inputs = (tokens[:, :-1],) if 0 in own else ()
        step(*inputs, **{"target": tokens[:, 1:], "losses": losses} if total - 1 in own else {})
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            print(f"step {number}: loss {torch.stack(losses).mean():.6f}", flush=True)
    dist.destroy_process_group()
