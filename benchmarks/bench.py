"""`make bench`: speed and memory of the engine beside megatron-core's and torch's, on this machine's CPU, p = 2.

    python benchmarks/bench.py [--rows zero-bubble] [--sizes wide long] [--pairs 15] [--json out.json]

Rows:
  empty         our 1f1b beside the same two with a model that computes next to nothing: what an F and a B cost the
                engine, messages included
  1f1b          our 1f1b beside megatron-core's 1F1B and torch's Schedule1F1B
  zero-bubble   our zbv, zb1p and zb-interleaved, found from measured times, beside torch's ScheduleZBVZeroBubble
                and ScheduleInterleavedZeroBubble; and torch's orders under our engine
  memory        peak activations of our schedules, as the cost model has them and as measured
  seq1f1b       our seq1f1b, seq1f1b-zb and seq1f1b-interleaved beside our 1f1b and megatron-core's 1F1B: one long
                sequence in chunks that take equally long here, and in equally long ones
  helix         our helix, with each of its cuts, beside our 1f1b and zb1p and megatron-core's 1F1B: long sequences, so
                that most is attention; more than (m+p-1)/m over 1f1b is not to be had

Same weights, same data, same kernels, same process: each round runs one step under every engine in turn, so that what
else the machine does hits all alike. What is compared is forward and backward of one step (no optimizer): tokens per
second of ours over the other's, median over rounds. All gradients are compared too. Of ours a step is also predicted:
its program simulated with what its ops took just before. `kept` is what is kept for the backward at most.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from helixpipe.common.child import python_command

HERE = Path(__file__).resolve().parent
SIZES = {  # name: (layers, hidden, heads, groups, ffn, sequence, micro batch, microbatches)
    "empty": (2, 16, 1, 1, 16, 16, 1, 64),
    "small": (4, 128, 4, 2, 344, 128, 1, 8),
    "wide": (4, 512, 8, 4, 1376, 128, 1, 8),
    "long": (4, 256, 8, 2, 688, 1024, 1, 4),
    "longer": (4, 256, 8, 2, 688, 3072, 1, 2),
    "deep": (6, 192, 6, 2, 512, 2304, 1, 4),
}
ROWS = {  # name: sizes
    "empty": ("empty",),
    "1f1b": ("small", "wide", "long"),
    "zero-bubble": ("small", "wide", "long"),
    "memory": ("small", "wide", "long"),
    "seq1f1b": ("longer",),
    "helix": ("deep",),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [options]"
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        default=list(ROWS),
        choices=ROWS,
        metavar="ROWS",
        help=f"some of {', '.join(ROWS)} (default: all)",
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        choices=SIZES,
        metavar="SIZE",
        help=f"some of {', '.join(SIZES)} (default: those made for the rows)",
    )
    parser.add_argument("--pairs", type=int, default=15, help="rounds that count, at least 5 (default: 15)")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    arguments = parser.parse_args()
    if arguments.pairs < 5:
        parser.error("--pairs must be at least 5")
    results = {}
    for name in arguments.sizes or SIZES:
        rows = [row for row in arguments.rows if arguments.sizes or name in ROWS[row]]
        if rows:
            results[name] = launch(SIZES[name], arguments.pairs, rows)
            report(name, SIZES[name], results[name])
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def launch(size: tuple[int, ...], pairs: int, rows: Sequence[str]) -> dict:
    """Run one size on two ranks, one thread each."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "result.json")
        command = python_command("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        command += [str(HERE / "measure.py"), str(output), str(pairs), ",".join(rows), *map(str, size)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
        subprocess.run(command, check=True, env=environment)
        return json.loads(output.read_text(encoding="utf-8"))


def report(name: str, size: tuple[int, ...], result: dict) -> None:
    layers, hidden, heads, groups, ffn, sequence, micro, microbatches = size
    print(
        f"\n{name}: Llama style, {layers} layers, hidden {hidden}, {heads} heads, {groups} groups, ffn {ffn}, "
        f"{sequence} tokens, micro batch {micro}, {microbatches} microbatches, p = 2"
    )
    for rows in result:
        if rows == "memory":
            report_memory(result[rows])
        elif rows == "empty":
            report_empty(result[rows], microbatches)
        else:
            report_speed(rows, result[rows])


def report_speed(rows: str, result: dict) -> None:
    first = next(iter(result["engines"]))
    print(f"\n  {rows:<46} {'tokens/s':>10} {'peak MB by rank':>23} {'gradients differ':>18}")
    for engine, row in result["engines"].items():
        peaks = " ".join(f"{peak / 1e6:.1f}" for peak in row["peak_bytes"])
        difference = "" if engine == first else f"{row['gradient_difference']:.1e}"
        print(f"  {engine:<46} {row['tokens_per_second']:>10.0f} {peaks:>23} {difference:>18}")
    report_ours({name: row for name, row in result["engines"].items() if row["ours"]})
    report_ratios(result["ratios"])


def report_ratios(ratios: Sequence[dict]) -> None:
    print(f"  {'speed of ... over ...':<88} {'ratio':>7} {'quartiles':>14} {'predicted':>10}")
    for row in ratios:
        spread = f"{row['quartiles'][0]:.3f}–{row['quartiles'][1]:.3f}"
        predicted = f"{row['predicted']:.3f}" if "predicted" in row else ""
        print(f"  {row['ours']:<41} {row['over']:<46} {row['ratio']:>7.3f} {spread:>14} {predicted:>10}")


def report_empty(result: dict, microbatches: int) -> None:
    print(f"\n  {'empty model':<46} {'us for each F and B':>20}")
    for engine, row in result["engines"].items():
        print(f"  {engine:<46} {1e6 * statistics.median(row['seconds']) / microbatches:>20.0f}")
    report_ratios(result["ratios"])


def report_ours(engines: dict) -> None:
    """What was predicted of our engines beside what was measured; what is kept also over what the first keeps."""
    first, base = next((name, row["ours"]) for name, row in engines.items())
    print(f"  {'':<46} {'seconds a step':>18} {'':>28} {f'kept over {first}':>25}")
    print(
        f"  {'':<46} {'measured':>8} {'predicted':>9} {'kept MB by rank':>15} {'keys, values':>12} "
        f"{'measured':>13} {'predicted':>11}"
    )
    for name, row in engines.items():
        own = row["ours"]
        kept, store = (" ".join(f"{x / 1e6:.1f}" for x in own[key]) for key in ("kept_bytes", "keys_values_bytes"))
        shares = [
            " ".join(f"{value / most:.3f}" for value, most in zip(own[key], base[key], strict=True))
            for key in ("kept_bytes", "kept_layers")
        ]
        print(
            f"  {name:<46} {statistics.median(row['seconds']):>8.3f} {own['predicted_seconds']:>9.3f} {kept:>15} "
            f"{store:>12} {shares[0]:>13} {shares[1]:>11}"
        )
    for name, row in engines.items():
        if row["ours"]["chunk_lengths"]:
            lengths = " ".join(map(str, row["ours"]["chunk_lengths"]))
            times = " ".join(f"{seconds:.3f}" for seconds in row["ours"]["chunk_seconds"])
            print(f"  {name:<46} chunks of {lengths} tokens take {times} s")


def report_memory(result: dict) -> None:
    print(f"\n  {'peak activations':<46} {'simulated MB':>16} {'measured MB':>16} {'measured/simulated':>20}")
    for schedule, row in result.items():
        simulated, measured = (" ".join(f"{x / 1e6:.2f}" for x in row[key]) for key in ("simulated", "measured"))
        ratio = " ".join(f"{m / s:.3f}" for m, s in zip(row["measured"], row["simulated"], strict=True))
        print(f"  {schedule:<46} {simulated:>16} {measured:>16} {ratio:>20}")


if __name__ == "__main__":
    main()
