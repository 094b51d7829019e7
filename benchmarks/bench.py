"""`make bench`: speed and memory of the engine beside megatron-core's and torch's, on this machine's CPU, p = 2.

    python benchmarks/bench.py [--pairs 15] [--json out.json]

Same weights, same data, same process: each round runs one step under every engine in turn, so that what else the
machine does hits all alike. What is compared is forward and backward of one step (no optimizer), tokens per second of
our 1f1b over the other's, median over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SIZES = {  # name: (layers, hidden, heads, groups, ffn, sequence, micro batch, microbatches)
    "small": (4, 128, 4, 2, 344, 128, 1, 8),
    "wide": (4, 512, 8, 4, 1376, 128, 1, 8),
    "long": (4, 256, 8, 2, 688, 1024, 1, 4),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--pairs", type=int, default=15, help="rounds that count (at least 5)")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    arguments = parser.parse_args()
    if arguments.pairs < 5:
        parser.error("--pairs must be at least 5")
    results = {}
    for name in arguments.sizes:
        results[name] = launch(SIZES[name], arguments.pairs)
        report(name, SIZES[name], results[name])
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def launch(size: tuple[int, ...], pairs: int) -> dict:
    """Run one size on two ranks, one thread each."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "result.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += [str(HERE / "engines.py"), str(output), str(pairs), *map(str, size)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
        subprocess.run(command, check=True, env=environment)
        return json.loads(output.read_text(encoding="utf-8"))


def report(name: str, size: tuple[int, ...], result: dict) -> None:
    layers, hidden, heads, groups, ffn, sequence, micro, microbatches = size
    print(
        f"\n{name}: Llama style, {layers} layers, hidden {hidden}, {heads} heads, {groups} groups, ffn {ffn}, "
        f"{sequence} tokens, micro batch {micro}, {microbatches} microbatches, p = 2"
    )
    print(f"  {'engine':<44} {'tokens/s':>10} {'ours over it':>13} {'quartiles':>15} {'peak saved MB by rank':>23}")
    for engine, row in result["engines"].items():
        peaks = " ".join(f"{peak / 1e6:.1f}" for peak in row["peak_bytes"])
        ratio = f"{row['ratio']:.3f}" if row["ratio"] is not None else ""
        spread = f"{row['quartiles'][0]:.3f}–{row['quartiles'][1]:.3f}" if row["ratio"] is not None else ""
        print(f"  {engine:<44} {row['tokens_per_second']:>10.0f} {ratio:>13} {spread:>15} {peaks:>23}")
    print(f"  largest relative difference of any gradient between engines: {result['gradient_difference']:.1e}")
    print(f"  {'peak saved activations':<44} {'simulated MB':>24} {'measured MB':>24} {'measured/simulated':>20}")
    for schedule, row in result["memory"].items():
        simulated, measured = (" ".join(f"{x / 1e6:.2f}" for x in row[key]) for key in ("simulated", "measured"))
        ratio = " ".join(f"{m / s:.3f}" for m, s in zip(row["measured"], row["simulated"], strict=True))
        print(f"  {schedule:<44} {simulated:>24} {measured:>24} {ratio:>20}")


if __name__ == "__main__":
    main()
