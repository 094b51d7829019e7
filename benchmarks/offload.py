"""`make bench-offload`: steps whose activations wait in the host's memory, beside recomputation and beside no limit.

    python benchmarks/offload.py [--rounds 7] [--bandwidth 1.5] [--part 0.6] [--json out.json]

`helixpipe profile` measures the model on this machine. Under each schedule two ranks run a step in three ways: all
activations are kept; every layer is recomputed; and what `--offload-activations auto` chooses under a memory limit that
lies --part of the way from what weights and optimizer take to what the first way needs. Copies are made by the CPU's
engine, no faster than --bandwidth (GB/s in each direction): a link that is emulated, and copies that take the time of
the cores which compute. Steps of all ways follow each other in turn; ratios are medians of steps of one round. A step
is forward and backward, no optimizer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from helixpipe.common.child import python_command

HERE = Path(__file__).resolve().parent
MODEL = "--num-layers 4 --hidden-size 192 --num-attention-heads 4 --ffn-hidden-size 512 --vocab-size 512 --swiglu"
MODEL += " --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
MODEL += " --untie-embeddings-and-output-weights --seq-length 2304 --micro-batch-size 1"
SCHEDULES = {"gpipe": (8, 1), "1f1b": (4, 1), "seq1f1b": (4, 4), "sppo": (1, 8)}
"""With their microbatches and chunks of a sequence."""
WAYS = ("kept", "recomputed", "offloaded")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bandwidth", type=float, default=1.5, help="GB/s that a copy takes at most")
    parser.add_argument("--part", type=float, default=0.6, help="of what is kept without a limit, that may be")
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    arguments = parser.parse_args()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
    with tempfile.TemporaryDirectory() as folder:
        profile, output = Path(folder, "profile.json"), Path(folder, "result.json")
        command = python_command("schedules.command", "profile", "--output", str(profile), *MODEL.split())
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        command = python_command("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        command += [str(HERE / "offload_ranks.py"), str(profile), str(output), str(arguments.rounds)]
        command += [str(arguments.bandwidth * 1e9), str(arguments.part), ",".join(arguments.schedules)]
        subprocess.run(command, check=True, env=environment)
        result = json.loads(output.read_text(encoding="utf-8"))
    report(result, arguments)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def report(result: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Times over the step that keeps all, memory of activations and messages of the fullest rank."""
    print(f"{MODEL}; p = 2, copies at {arguments.bandwidth} GB/s, limit at {arguments.part} of what is kept")
    print(f"{'schedule':<10} {'way':<11} {'predicted':>10} {'measured':>9} {'quartiles':>13} {'MB':>7}", end="")
    print(f" {'moved MB':>9} {'hidden, predicted':>18} {'measured':>9}  recomputed, offloaded")
    for schedule, rows in result.items():
        kept = rows["kept"]
        for way in WAYS:
            row = rows[way]
            ratios = [own / base for own, base in zip(row["seconds"], kept["seconds"], strict=True)]
            low, _, high = statistics.quantiles(ratios, n=4)
            print(f"{schedule:<10} {way:<11} {row['predicted'] / kept['predicted']:>10.3f}", end="")
            print(
                f" {statistics.median(ratios):>9.3f} {f'{low:.3f}–{high:.3f}':>13} {row['bytes'] / 1e6:>7.1f}", end=""
            )
            if way == "offloaded":
                measured = statistics.median(row["hidden"]) if row["hidden"] else 1.0
                print(f" {row['moved'] / 1e6:>9.1f} {row['predicted_hidden']:>18.1%} {measured:>9.1%}", end="")
                print(f"  {row['recomputed']} of {row['layers']} layers, {row['units']} units", end="")
            print()


if __name__ == "__main__":
    main()
