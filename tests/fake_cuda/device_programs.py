"""Small programs on the fake device, each of which says what came of it: run in a process of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any


def outcomes() -> dict[str, Any]:
    """Run each program; returns its result, or the message of its error, by its name."""
    from helixpipe.fake_cuda.device import install

    device = install(memory=1 << 30)
    device.join(2, 4, lambda value, rank: value)
    import torch
    import torch.distributed as dist
    from megatron.core.transformer import TransformerConfig

    from helixpipe.model.attention.kernels import make_attend
    from helixpipe.model.attention.log_sums import FlashOnCUDA
    from helixpipe.model.backends import TORCH_FLASH
    from tests.model.log_sum_cases import CASES, LogSumCase

    dist.init_process_group("nccl")
    torch.cuda.set_device(2)
    fake = device.module
    x, y = torch.zeros(4, 8, device="cuda"), torch.zeros(4, 8, device="cuda")

    def waits(program: Callable[[], object]) -> list[str]:
        device.take_waits()
        program()
        return sorted(wait.what for wait in device.take_waits())

    def bytes_of(program: Callable[[], object]) -> list[int]:
        fake.reset_peak()
        before = fake.allocated()
        kept = program()
        held, peak = fake.allocated() - before, fake.peak() - before
        del kept
        return [held, peak, fake.allocated() - before]

    def timed() -> bool:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        end.record()
        return 0.0 <= start.elapsed_time(end) < 1e6

    def resized() -> Any:
        tensor = torch.empty(1 << 10, device="cuda")
        tensor.untyped_storage().resize_(0)
        return tensor

    def storage_taken() -> list[int]:
        saved = torch.zeros(6, 8, device="cuda", dtype=torch.bfloat16)
        return list(torch.empty(0, dtype=torch.uint8, device="cuda").set_(saved.untyped_storage()).shape)

    def trained() -> list[Any]:
        layer = torch.nn.Linear(8, 16, device="cuda", dtype=torch.bfloat16)
        layer(torch.zeros(4, 8, device="cuda", dtype=torch.bfloat16)).sum().backward()
        gradient = layer.weight.grad
        assert gradient is not None
        return [str(gradient.device), str(gradient.dtype), list(gradient.shape)]

    def log_sums(case: LogSumCase) -> list[Any]:
        query, keys, values, gradient = case.tensors("cuda")
        kernel = FlashOnCUDA()
        output, log_sum = kernel.forward(query, keys, values, case.causal, case.scale, case.reach)
        given = (gradient, query, keys, values, output, log_sum)
        shares = kernel.backward(*given, case.causal, case.scale, case.reach)
        return [list(each.shape) for each in (output, log_sum, *shares)]

    def on_stream() -> list[bool]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            inside = torch.cuda.current_stream() == stream
        return [inside, torch.cuda.current_stream() == stream]

    def attended(**arguments: Any) -> list[int]:
        query = torch.zeros(1, 4, 64, 32, device="cuda", dtype=torch.bfloat16)
        return list(torch.nn.functional.scaled_dot_product_attention(query, query, query, **arguments).shape)

    def attended_by_chunk() -> list[int]:
        """A mask of torch's would take 32 TiB of the host's memory."""
        query, keys = (torch.zeros(n, 1, 1, 8, device="cuda", dtype=torch.bfloat16) for n in (1 << 20, 1 << 22))
        leaves = [each.requires_grad_() for each in (query, keys, keys.clone())]
        attend = make_attend(TORCH_FLASH, TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1))
        attend(leaves[0], leaves[1], leaves[2], 1.0, 0.0).sum().backward()
        return [each.grad.numel() for each in leaves if each.grad is not None]

    def asked(program: Callable[[], object]) -> list[str]:
        device.take_calls()
        program()
        calls = device.take_calls().calls
        return [f"{call}: {call.sent}, {call.received}" if call.sent else str(call) for call in calls]

    pinned, pageable = torch.zeros(8, pin_memory=True), torch.zeros(8)
    programs: dict[str, Callable[[], Any]] = {
        "device": lambda: [str(x.device), x.is_cuda, torch.cuda.current_device(), x.type()],
        "host operand": lambda: x + torch.ones(8),
        "host scalar": lambda: str((x + torch.tensor(2.0)).device),
        "host scalar in a list": lambda: torch.stack([x[0, 0], torch.tensor(2.0)]),
        "wrong shape": lambda: x + torch.ones(7, device="cuda"),
        "wrong dtype": lambda: x @ torch.zeros(8, 4, device="cuda", dtype=torch.bfloat16),
        "wrong sizes": lambda: x @ torch.zeros(4, 8, device="cuda"),
        "copy of another size": lambda: x.copy_(torch.zeros(3, device="cuda")),
        "other device": lambda: x + torch.zeros(8, device="cuda:1"),
        "storage": lambda: torch.empty(0, dtype=torch.uint8, device="cuda").set_(x.untyped_storage()).numel(),
        "time between events": timed,
        "view": lambda: x.view(8, 4).data_ptr() == x.data_ptr(),
        "view of a transposed": lambda: x.t().view(-1),
        "training": trained,
        "memory": lambda: bytes_of(lambda: torch.empty(1000, device="cuda")),
        "memory of a view": lambda: bytes_of(lambda: x.t()[2:]),
        "memory of a sum": lambda: bytes_of(lambda: x + x + x),
        "memory again": lambda: bytes_of(lambda: x + x + x),
        "memory resized": lambda: bytes_of(resized),
        "memory of one kernel": lambda: bytes_of(lambda: torch.compile(lambda: (x + x + x) * x)()),
        "memory after one kernel": lambda: bytes_of(lambda: x + x),
        "whole storage": storage_taken,
        "too much memory": lambda: torch.empty(1 << 28, device="cuda"),
        "number": lambda: waits(lambda: x.sum().item()),
        "branch": lambda: waits(lambda: bool(x.sum() > 0)),
        "list": lambda: waits(x.tolist),
        "copy from locked memory": lambda: waits(lambda: pinned.to("cuda", non_blocking=True)),
        "copy from pageable memory": lambda: waits(lambda: pageable.to("cuda", non_blocking=True)),
        "waiting copy": lambda: waits(lambda: pinned.to("cuda")),
        "copy to locked memory": lambda: waits(lambda: pinned.copy_(x[0], non_blocking=True)),
        "synchronize": lambda: waits(torch.cuda.synchronize),
        "no wait": lambda: waits(lambda: x.relu_().sum(dim=0)),
        "streams": on_stream,
        "attention": lambda: attended(is_causal=True),
        "attention of a chunk": attended_by_chunk,
        "random state": lambda: list(torch.cuda.get_rng_state().shape),
        "sum": lambda: asked(lambda: dist.all_reduce(x)),
        "sum of the host's": lambda: dist.all_reduce(torch.zeros(4)),
        "sum of a transposed": lambda: dist.all_reduce(x.t()),
        "gather of another size": lambda: dist.all_gather_into_tensor(torch.zeros(9, device="cuda"), x),
        "gather of another dtype": lambda: dist.all_gather_into_tensor(torch.zeros(16, 8, device="cuda").half(), x),
        "scatter of another size": lambda: dist.reduce_scatter_tensor(torch.zeros(9, device="cuda"), x),
        "exchange of rows that do not divide": lambda: dist.all_to_all_single(x[:3].clone(), x[:3].clone()),
        "exchange of splits": lambda: asked(lambda: dist.all_to_all_single(y, x, [1, 0, 3, 0], [4, 0, 0, 0])),
        "exchange of splits of too few rows": lambda: dist.all_to_all_single(y, x, [1, 0, 3, 0], [3, 0, 0, 0]),
        "unequal gather": lambda: asked(lambda: dist.all_gather([x, x[:2], x[:0], x], x)),
        "unequal scatter": lambda: asked(lambda: dist.reduce_scatter(y, [x, x[:2], x[:0], x])),
        "message": lambda: asked(lambda: dist.isend(x, 3)),
        "message of a part": lambda: dist.isend(x[:, :2], 3),
        "message of another device": lambda: dist.isend(torch.zeros(4, device="cuda:1"), 3),
        "messages together": lambda: asked(
            lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 3), dist.P2POp(dist.irecv, x, 1)])
        ),
    }
    programs.update((f"log-sums {case}", partial(log_sums, case)) for case in CASES)
    result = {}
    for name, program in programs.items():
        try:
            result[name] = program()
            json.dumps(result[name])
        except Exception as error:
            result[name] = f"{type(error).__name__}: {error}"
    return result


def main() -> None:
    print("outcomes " + json.dumps(outcomes()))
