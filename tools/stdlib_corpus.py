"""Write the Python standard library's own source files as JSON lines: real text that every machine has.

    python tools/stdlib_corpus.py --output data/stdlib.jsonl --max-megabytes 8

One document a file, so the lengths are as skewed as real documents are. The order is fixed but mixes the library's
parts (by a hash of each file's path), so that any beginning of it, and a validation split cut from its end, is a fair
sample. Tests and third-party packages are left out. Beside the output, `OUTPUT.stats.json` keeps the unigram entropy of
the bytes: the loss of a model that knows only how frequent each byte is, which training must fall clearly below.
"""

from __future__ import annotations

import collections
import hashlib
import json
import math
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere, installed or not

from helixpipe.common.command import run_command
from helixpipe.common.errors import UserError
from helixpipe.common.flags import FlagParser

LEFT_OUT = {"__pycache__", "dist-packages", "ensurepip", "idle_test", "idlelib", "site-packages", "test", "tests"}


def documents(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (path relative to root, text) of every .py file, in the order of the hashes of the paths."""
    paths = [path for path in root.rglob("*.py") if path.is_file() and not path.is_symlink()]
    names = [path.relative_to(root) for path in paths]
    kept = [name.as_posix() for name in names if not LEFT_OUT.intersection(name.parts)]
    for name in sorted(kept, key=lambda name: hashlib.sha256(name.encode()).hexdigest()):
        try:
            text = (root / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):  # a few files show other encodings on purpose
            continue
        if text:
            yield name, text


def unigram_entropy(counts: collections.Counter[int]) -> float:
    """Entropy of the distribution that the counts describe, in nats a symbol."""
    total = sum(counts.values())
    return -sum(count / total * math.log(count / total) for count in counts.values())


def write_corpus(output: Path, root: Path, max_megabytes: float | None = None) -> dict[str, float]:
    """Write `output` and its `.stats.json`; return the statistics. Ends before the document that passes the limit."""
    limit = math.inf if max_megabytes is None else max_megabytes * 1e6
    counts: collections.Counter[int] = collections.Counter()
    lengths: list[int] = []
    written = 0
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(temporary, "w", encoding="utf-8") as stream:
            for name, text in documents(root):
                data = text.encode()
                written += len(data)
                if written > limit:
                    break
                stream.write(json.dumps({"text": text, "path": name}) + "\n")
                counts.update(data)
                lengths.append(len(data))
        if not lengths:
            raise UserError(f"{root} has no source files within --max-megabytes {max_megabytes}.")
        nats = unigram_entropy(counts)
        stats = {
            "documents": len(lengths),
            "bytes": sum(lengths),
            "shortest": min(lengths),
            "median": sorted(lengths)[len(lengths) // 2],
            "longest": max(lengths),
            "unigram_entropy_nats": nats,
            "unigram_entropy_bits": nats / math.log(2),
        }
        output.with_name(output.name + ".stats.json").write_text(json.dumps(stats, indent=1) + "\n")
        os.replace(temporary, output)
    finally:
        temporary.unlink(missing_ok=True)
    return stats


def main() -> int:
    return run_command("stdlib_corpus.py", _run)


def _run() -> int:
    parser = FlagParser(
        description="Write the Python standard library's source files as JSON lines, one document a file."
    )
    parser.add_argument("--output", required=True, type=Path, help="JSON lines file to write")
    parser.add_argument("--max-megabytes", type=float, help="stop before the text exceeds this many million bytes")
    arguments = parser.parse_args()
    stats = write_corpus(arguments.output, Path(sysconfig.get_path("stdlib")), arguments.max_megabytes)
    print(
        f"{arguments.output}: {stats['documents']} documents, {stats['bytes']} bytes "
        f"(shortest {stats['shortest']}, median {stats['median']}, longest {stats['longest']}), unigram entropy "
        f"{stats['unigram_entropy_nats']:.4f} nats a token = {stats['unigram_entropy_bits']:.4f} bits a byte"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
