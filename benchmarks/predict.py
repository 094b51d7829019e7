"""`make bench-predict`: step time and memory as `helixpipe simulate` predicts them from a profile, and as measured.

    python benchmarks/predict.py [--steps 20] [--cases 128 512 1024] [--profiles DIR] [--json out.json]

For each case, `helixpipe profile` measures the model on this machine, the simulator predicts steps under several
schedules, and the ranks run them, the schedules in turn, so that what else the machine does hits all alike. A step is
forward and backward (no optimizer). Memory is the most that was kept for a backward at once on each rank, by the
simulator and by saved-tensor hooks. On the CPU a rank has one thread. On GPUs it has one of its own, with NCCL, where
there are enough of them, else the ranks share them over gloo. Where ranks share, a step takes at least all their ops
together over what computes them, and where that is more than the simulator says, that is the prediction.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STYLE = "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope"
STYLE += " --untie-embeddings-and-output-weights"
SMALL = "--hidden-size 256 --num-attention-heads 8 --num-query-groups 2 --ffn-hidden-size 688 --vocab-size 512"
CATALOGUE = {"1f1b": None, "interleaved-1f1b": 2, "zb1p": None, "gpipe": None}
"""Schedules with their virtual stages."""
OF_FOUR = {"1f1b": None, "zb1p": None, "helix": None}


@dataclass(frozen=True)
class Case:
    """One model, and who runs it."""

    layers: int
    sequence: int
    micro: int
    microbatches: int
    model: str = SMALL
    ranks: int = 2
    schedules: Mapping[str, int | None] = field(default_factory=lambda: CATALOGUE)
    dtype: str = "float32"

    def flags(self) -> list[str]:
        """Of `helixpipe profile`."""
        sizes = f"--num-layers {self.layers} --seq-length {self.sequence} --micro-batch-size {self.micro}"
        return f"{self.model} {STYLE} {sizes} --dtype {self.dtype}".split()


def on_gpus(sequence: int, hidden: int, ffn: int) -> Case:
    """Four ranks without tensor parallelism, in bfloat16; heads of 128 channels."""
    sizes = f"--hidden-size {hidden} --num-attention-heads {hidden // 128} --ffn-hidden-size {ffn} --vocab-size 8192"
    return Case(4, sequence, 1, 8, sizes, 4, OF_FOUR, "bfloat16")


CASES = {
    "128": Case(4, 128, 2, 8),
    "512": Case(4, 512, 1, 8),
    "1024": Case(4, 1024, 1, 4),
    "tiny": Case(4, 32, 1, 8, ranks=4, schedules=OF_FOUR),
    "gpu-8k": on_gpus(8 << 10, 4096, 11008),
    "gpu-32k": on_gpus(32 << 10, 2048, 5504),
    "gpu-128k": on_gpus(128 << 10, 512, 1376),
}
"""The longer a sequence of the cases for GPUs, the narrower the model, so that four ranks fit on one of 80 GB."""
DEFAULT = ("128", "512", "1024")

WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--steps", type=int, default=20, help="steps of each schedule that count (at least 5)")
    parser.add_argument("--cases", nargs="+", default=DEFAULT, choices=CASES)
    parser.add_argument("--profiles", type=Path, metavar="DIR", help="keep the profiles there")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    arguments = parser.parse_args()
    if arguments.steps < 5:
        parser.error("--steps must be at least 5")
    results = {}
    for name in arguments.cases:
        results[name] = run_case(name, arguments.steps, arguments.profiles)
        report(name, results[name])
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def run_case(name: str, steps: int, profiles: Path | None) -> dict[str, Any]:
    """Profile, then ranks that predict and measure."""
    case = CASES[name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
    with tempfile.TemporaryDirectory() as folder:
        profile, output = (profiles or Path(folder)) / f"profile-{name}.json", Path(folder, "result.json")
        command = [sys.executable, "-m", "schedules.command", "profile", "--output", str(profile), *case.flags()]
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks)]
        command += [str(HERE / "predict.py"), "--rank", name, str(profile), str(output), str(steps)]
        subprocess.run(command, check=True, env=environment)
        return json.loads(output.read_text(encoding="utf-8"))


def report(name: str, result: dict[str, Any]) -> None:
    """Ratios are measured over predicted. least: of the fastest step, which says more where others use the machine.
    busy: processor time of each rank's computing thread over the predicted time of its ops."""
    case = CASES[name]
    print(f"\n{name}: {case.layers} layers, {case.model}, {case.sequence} tokens, {case.dtype}")
    print(f"  micro batch {case.micro}, {case.microbatches} microbatches, p = {case.ranks}")
    print(
        f"  {'schedule':<18} {'predicted s':>11} {'measured s':>11} {'ratio':>6} {'least':>6} {'quartiles':>13}", end=""
    )
    print(f" {'busy':>11}  {'predicted MB':>14} {'measured MB':>14} {'ratios':>13}")
    for schedule, row in result.items():
        predicted, measured = row["predicted"], statistics.median(row["seconds"])
        low, high = (seconds / predicted for seconds in statistics.quantiles(row["seconds"], n=4)[::2])
        busy = [statistics.median(times) for times in zip(*row["busy"], strict=True)]
        simulated, kept = (" ".join(f"{x / 1e6:.2f}" for x in row[key]) for key in ("predicted_bytes", "bytes"))
        print(f"  {schedule:<18} {predicted:>11.4f} {measured:>11.4f} {measured / predicted:>6.3f}", end="")
        print(f" {min(row['seconds']) / predicted:>6.3f}", end="")
        print(f" {f'{low:.3f}–{high:.3f}':>13} {_ratios(busy, row['predicted_busy'], 2):>11}", end="")
        print(f"  {simulated:>14} {kept:>14} {_ratios(row['bytes'], row['predicted_bytes'], 3):>13}")


def _ratios(measured: list[float], predicted: list[float], digits: int) -> str:
    return " ".join(f"{m / p:.{digits}f}" for m, p in zip(measured, predicted, strict=True))


# ------------------------------------------------------------------------------------------------ what each rank runs


def run_rank(name: str, profile_path: str, output: str, steps: int) -> None:
    """Rank 0 writes, for each schedule, predicted and measured seconds and bytes."""
    import torch
    import torch.distributed as dist

    from benchmarks.kept import peak_kept
    from helixpipe.costs.profile_costs import Profile, ProfileCosts
    from helixpipe.lowering.lower import lower
    from helixpipe.model import Microbatch
    from helixpipe.model.device import device
    from helixpipe.profile.subject import Task, build_model, initialize_parallel_state
    from helixpipe.runtime.executor import Executor, Step
    from helixpipe.runtime.transport import make_transport
    from helixpipe.simulate.simulator import simulate
    from schedules import Shape, build

    case = CASES[name]
    microbatches, ranks, gpus = case.microbatches, case.ranks, torch.cuda.device_count()
    torch.set_num_threads(1)
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % gpus)
    dist.init_process_group("nccl" if gpus >= ranks else "gloo")
    initialize_parallel_state(ranks)
    rank = dist.get_rank()
    profile = Profile.load(profile_path)
    costs, model_shape, micro = ProfileCosts(profile), profile.model, profile.layout.micro_batch_size
    task = Task(model_shape, profile.seq_length, micro, profile.dtype, processes=ranks, threads=1, repeats=1)
    data_shape = (microbatches, micro, profile.seq_length)
    generator = torch.Generator().manual_seed(1)
    drawn = (torch.randint(0, model_shape.vocab, data_shape, generator=generator) for _ in range(2))
    tokens, labels = (each.to(device()) for each in drawn)
    mask = torch.ones(data_shape[1:], device=device())
    scale = torch.tensor(1.0 / (micro * profile.seq_length * microbatches), device=device())
    step = Step(
        iteration=0,
        microbatch_number=lambda index: index,
        batch=lambda index: Microbatch(tokens[index], labels[index], mask),
        root_gradient=lambda index: scale,
        micro_batch_size=micro,
        seq_length=profile.seq_length,
    )
    assert dist.group.WORLD is not None
    transport = make_transport(dist.group.WORLD, device())
    computing = min(gpus or os.cpu_count() or 1, ranks)
    engines, rows = {}, {}
    for name, virtual in case.schedules.items():
        program = build(name, Shape(ranks, microbatches, model_shape.layers, virtual_stages=virtual, costs=costs))
        lowered = lower(program, costs)
        simulation = simulate(lowered, costs)
        model, ddp = build_model(task, model_shape.layers, program.pieces_of_rank(rank))
        engines[name] = (Executor(rank, model, transport), lowered, ddp)
        rows[name] = {
            "predicted": max(simulation.makespan, sum(simulation.busy) / computing),
            "predicted_busy": simulation.busy,
            "predicted_bytes": simulation.peak_activation,
            "seconds": [],
            "busy": [],
        }

    def timed(name: str) -> tuple[float, list[float]]:
        """Seconds of a step over all ranks, from a common start to the last end, and each rank's processor time."""
        executor, lowered, ddp = engines[name]
        ddp.zero_grad_buffer()
        dist.barrier()
        start, computed = time.perf_counter(), time.thread_time()
        executor.run(lowered, step)
        if gpus:
            torch.cuda.synchronize()
        every: list[Any] = [None] * ranks
        dist.all_gather_object(every, (time.perf_counter() - start, time.thread_time() - computed))
        return max(one[0] for one in every), [one[1] for one in every]

    for number in range(WARM_UP + steps):
        for name in list(engines) if number % 2 == 0 else reversed(list(engines)):
            seconds, busy = timed(name)
            if number >= WARM_UP:
                rows[name]["seconds"].append(seconds)
                rows[name]["busy"].append(busy)
    for name, (executor, lowered, _) in engines.items():
        every: list[Any] = [None] * ranks
        run = partial(executor.run, lowered, step)
        kept = peak_kept(run, executor.model.parameters(), partial(getattr, executor.borrowed, "copies"))
        dist.all_gather_object(every, kept)
        rows[name]["bytes"] = every
    if rank == 0:
        Path(output).write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    transport.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
    else:
        main()
