"""What running a rank on the fake device has shown."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from helixpipe.costs.verdict import MemoryVerdict
from helixpipe.fake_cuda.sequences import TOGETHER, Calls
from helixpipe.simulate.memory import RankMemory


@dataclass
class StepCount:
    """What a training step did. peak, allocated: bytes of the GPU, at most and when it ended; allocations: how many,
    message_allocations: of them those to receive activations and gradients, which took message_bytes at most at once;
    calls: what the process groups were asked for; waits: times that the host waited for the GPU unexpectedly, by a
    description."""

    peak: int
    allocated: int
    allocations: int
    message_allocations: int
    message_bytes: int
    calls: Calls
    waits: Counter[str] = field(default_factory=Counter)

    def traffic(self) -> Counter[tuple[str, str]]:
        """Return elements sent, received or exchanged, by kind of call and dtype."""
        elements: Counter[tuple[str, str]] = Counter()
        for call in self.calls.calls:
            if call.kind not in TOGETHER:
                elements[call.kind, call.dtype] += sum(call.numbers)
        return elements

    def counts(self) -> Counter[tuple[str, str]]:
        """Return the number of calls by their kind and dtype."""
        return Counter((call.kind, call.dtype) for call in self.calls.calls if call.kind not in TOGETHER)


@dataclass
class RankReport:
    """A rank's steps.

    Attributes:
        before: bytes allocated when the first step began.
        start: what the groups were asked for before the first step.
        predicted: memory of the rank at its peak by the cost model; None where costs are measured.
        gpu: bytes of the GPU that the device stands for; infinite if unknown.
        verdict: whether the step fits by prediction, over all ranks; None where no flag says what a GPU has.
    """

    rank: int
    pipeline_rank: int = 0
    before: int = 0
    start: Calls | None = None
    steps: list[StepCount] = field(default_factory=list)
    predicted: RankMemory | None = None
    gpu: float = inf
    verdict: MemoryVerdict | None = None
    seconds: float = 0.0

    def calls(self) -> Calls:
        """Return all calls of the rank, from its start on."""
        parts = [part for part in (self.start, *(step.calls for step in self.steps)) if part is not None]
        groups = parts[-1].groups if parts else {}
        return Calls(self.rank, groups, [call for part in parts for call in part.calls])

    def figures(self) -> dict[str, Any]:
        """Return the last step's figures, for JSON. Sizes are bytes, of messages and collectives elements."""
        last = self.steps[-1]
        counts, elements = last.counts(), last.traffic()
        return {
            "rank": self.rank,
            "pipeline_rank": self.pipeline_rank,
            "allocated_before_steps": self.before,
            "allocated": last.allocated,
            "peak": last.peak,
            "allocations": last.allocations,
            "message_allocations": last.message_allocations,
            "message_bytes": last.message_bytes,
            "predicted": None if self.predicted is None else {**asdict(self.predicted), "total": self.predicted.total},
            "fits": None if self.verdict is None else self.verdict.fits,
            "calls": [
                {"kind": kind, "dtype": dtype, "number": counts[kind, dtype], "elements": elements[kind, dtype]}
                for kind, dtype in sorted(counts)
            ],
            "unexpected_waits": dict(last.waits),
            "seconds": self.seconds,
        }

    def save(self, path: Path) -> None:
        path.write_bytes(pickle.dumps(self))

    @classmethod
    def load(cls, path: Path) -> RankReport | None:
        """Return a report that this project has saved; None if there is none."""
        if not path.exists() or not path.stat().st_size:
            return None
        report: RankReport = pickle.loads(path.read_bytes())
        return report
