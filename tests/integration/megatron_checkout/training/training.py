"""Stands for megatron.training.training: how it builds chunks, asks for the function that runs a step, and calls it."""

import torch
from megatron.core import mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.utils import get_model_config
from megatron.training.arguments import get_args, parse_args, set_args, validate_args

from helixpipe.model.device import redirect


def get_model(model_provider_func):
    """Asks of the rank and of the virtual stage apart, which says of a V that the last rank has its end."""
    virtual, group = get_args().virtual_pipeline_model_parallel_size, mpu.get_pipeline_model_parallel_group()
    chunks = []
    for stage in range(virtual or 1):
        ends = {
            "pre_process": is_pp_first_stage(group) and is_vp_first_stage(stage, virtual),
            "post_process": is_pp_last_stage(group) and is_vp_last_stage(stage, virtual),
        }
        chunks.append(model_provider_func(**ends, **({} if virtual is None else {"vp_stage": stage})))
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return [DistributedDataParallel(get_model_config(chunk), settings, chunk) for chunk in chunks]


def train_step(forward_step_func, data_iterator, model, optimizer, config, forward_backward_func, forward_only=False):
    args = get_args()
    with redirect():
        return forward_backward_func(
            forward_step_func=forward_step_func,
            data_iterator=data_iterator,
            model=model,
            num_microbatches=args.global_batch_size // args.micro_batch_size,
            seq_length=12,
            micro_batch_size=args.micro_batch_size,
            decoder_seq_length=None,
            forward_only=forward_only,
            adjust_tensor_shapes_fn=None,
        )


def pretrain(
    train_valid_test_dataset_provider, model_provider, model_type, forward_step_func, args_defaults=None, store=None
):
    set_args(validate_args(parse_args()))
    args = get_args()
    torch.distributed.init_process_group("gloo")
    mpu.initialize_model_parallel(
        1,
        args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(1)
    model = get_model(model_provider)
    config = get_model_config(model[0])
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2), model, use_gloo_process_groups=False)
    config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
    batches, _, _ = train_valid_test_dataset_provider([0, 0, 0])
    forward_backward_func = get_forward_backward_func()
    for iteration in range(args.train_iters + 1):
        data = [iter(batches(args.global_batch_size // args.micro_batch_size, iteration)) for _ in model]
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        validates = iteration == args.train_iters
        function = get_forward_backward_func() if validates else forward_backward_func
        step = (forward_step_func, data, model, optimizer, config, function, validates)
        losses = train_step(*step)
        norm = 0.0 if validates else optimizer.step()[1]
        if mpu.is_pipeline_last_stage(ignore_virtual=True):
            total, tokens = sum(each["lm loss"] for each in losses)
            mean = total / tokens
            print(f"iteration {iteration} | lm loss: {mean:.6f} | grad norm: {norm:.5f}", flush=True)
    torch.distributed.destroy_process_group()
