"""Steps over whole documents, each under a plan of its own that was made while earlier steps trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron.pretrain.checkpoint.state import TrainingProgress
from megatron.pretrain.data.documents import DocumentStream
from megatron.pretrain.data.rows import RowReader
from megatron.pretrain.feed.work import StepWork
from megatron.pretrain.plan.documents import StepPlan, StepRequest
from megatron.pretrain.plan.plan_stream import PlanStream, Taken

TRAIN = "train"


class DocumentFeed:
    """The feed of steps of documents. streams: of the documents of each split that has some (`train`, `valid`, `test`).
    read: makes the reader of a stream's rows. plans: makes the stream of plans; it is told what to call with each that
    arrives. ahead: steps that are planned before they are needed. steps: of training, where it ends. scheduled_samples:
    see `StepWork`; None: the documents. flops: of a document of so many tokens, forward and backward. evaluations: how
    many validations there have been, of eval_iters steps each.
    """

    def __init__(
        self,
        streams: Mapping[str, DocumentStream],
        read: Callable[[DocumentStream], RowReader],
        plans: Callable[[Callable[[StepPlan], None]], PlanStream],
        *,
        ahead: int,
        steps: int,
        dp_rank: int,
        scheduled_samples: int | None,
        flops: Callable[[int], float],
        eval_iters: int,
        evaluations: int = 0,
    ):
        self._streams = dict(streams)
        self._readers = {split: read(stream) for split, stream in streams.items()}
        self._ahead, self._steps, self._dp_rank, self._eval_iters = ahead, steps, dp_rank, eval_iters
        self._scheduled, self._flops = scheduled_samples, flops
        self._announced: dict[str, int] = {"valid": evaluations * eval_iters, "test": 0}
        self._next = dict(self._announced)
        self.has_valid, self.has_test = ("valid" in streams and eval_iters > 0, "test" in streams and eval_iters > 0)
        self._planned = self._waited = 0.0
        self._first: int | None = None
        self.plans = plans(self._arrived)

    def train(self, progress: TrainingProgress) -> StepWork:
        step = progress.iteration
        self._first = step if self._first is None else self._first
        last = min(step + self._ahead, self._steps - 1)
        for number in range(self._announced.get(TRAIN, step), last + 1):
            self.plans.announce(self._request(TRAIN, number))
            self._announced[TRAIN] = number + 1
        return self._work(TRAIN, step)

    def evaluation(self, split: str) -> StepWork:
        step = self._next[split]
        self._next[split] = step + 1
        if step == self._announced[split]:
            self._announced[split] += self._eval_iters
            for number in range(step, self._announced[split]):
                self.plans.announce(self._request(split, number))
        return self._work(split, step)

    def close(self) -> None:
        self.plans.close()
        for reader in self._readers.values():
            reader.close()

    def _request(self, split: str, step: int) -> StepRequest:
        return StepRequest(split, step, self._streams[split].lengths(step), self._dp_rank, quick=split != TRAIN)

    def _arrived(self, plan: StepPlan) -> None:
        """Start reading the rows of a plan that has arrived. Runs in the thread that receives plans."""
        self._readers[plan.request.split].ask(plan.request.step, plan.lowered.program.workload, plan.numbers)

    def _work(self, split: str, step: int) -> StepWork:
        request = self._request(split, step)
        taken = self.plans.take(request)
        lengths = request.lengths
        work = StepWork(
            self._readers[split].take(step),
            taken.plan.lowered,
            samples=len(lengths),
            scheduled_samples=len(lengths) if self._scheduled is None else self._scheduled,
            tokens=sum(lengths),
            flops=sum(map(self._flops, lengths)),
            figures=self._figures(taken) if split == TRAIN else {},
        )
        self._streams[split].forget(step)
        return work

    def _figures(self, taken: Taken) -> dict[str, float]:
        report = taken.plan.report
        if taken.plan.request.step != self._first:  # there is nothing to hide the first one behind
            self._planned += report.seconds
            self._waited += min(taken.waited, report.seconds)
        return {
            "tokens": report.tokens,
            "chunks": report.chunks,
            "chunk time spread": report.spread_of_time,
            "chunk token spread": report.spread_of_tokens,
            "planned bubble": report.bubble,
            "planned step (s)": report.predicted,
            "planning time (s)": report.seconds,
            "planning hidden": 1 - self._waited / self._planned if self._planned else 1.0,
            "late plan": float(taken.late),
        }
