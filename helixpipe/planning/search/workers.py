"""Trials on several cores: processes that make them, and the same without any."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, NamedTuple, Protocol

from helixpipe.common.errors import UserError
from helixpipe.planning.search.documents import trials_of
from helixpipe.planning.search.space import Candidate, Question
from helixpipe.planning.search.terms import Terms, terms_of
from helixpipe.planning.search.trial import Trial, Trials


class TrialRequest(NamedTuple):
    """A candidate to try. slowest: a step that takes longer is of no use. kind: from few microbatches, with all of
    them, or where the time of its step goes."""

    candidate: Candidate
    slowest: float = inf
    kind: Literal["quick", "whole", "terms"] = "quick"


class Crew(Protocol):
    """The interface of what makes trials."""

    def run(self, jobs: Sequence[TrialRequest]) -> list[Any]:
        """Return the result of each job, in their order: a `Trial` or `Terms`."""
        ...

    def close(self) -> None: ...


def made(trials: Trials, job: TrialRequest) -> Trial | Terms:
    """Return the result of a job."""
    if job.kind == "terms":
        return terms_of(trials, job.candidate)
    return trials.whole(job.candidate) if job.kind == "whole" else trials.quick(job.candidate, job.slowest)


class SerialCrew:
    """Trials made here, one after the other."""

    def __init__(self, question: Question):
        self._trials = trials_of(question)

    def run(self, jobs: Sequence[TrialRequest]) -> list[Any]:
        return [made(self._trials, job) for job in jobs]

    def close(self) -> None:
        pass


class Processes:
    """Trials made by `count` processes, each of which takes the next job when it has done one.

    Which of them makes a trial changes nothing of it. They leave an interrupt to the one that started them.
    """

    def __init__(self, question: Question, count: int):
        methods = multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("fork" if "fork" in methods else "spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            # What a fork inherits of the others' pipes it closes, or they would not notice that their user has ended.
            others = [*self._pipes, ours] if context.get_start_method() == "fork" else []
            process = context.Process(target=_serve, args=(question, theirs, others), daemon=True)  # type: ignore[attr-defined]
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, jobs: Sequence[TrialRequest]) -> list[Any]:
        """Run the jobs in the processes. Raises UserError if one has died."""
        results: dict[int, Any] = {}
        left = list(reversed(range(len(jobs))))
        working: dict[Connection, int] = {}
        for pipe in self._pipes:
            self._next(pipe, jobs, left, working)
        while working:
            ready: list[Any] = wait(list(working))
            for pipe in ready:
                with _alive():
                    results[working.pop(pipe)] = pipe.recv()
                self._next(pipe, jobs, left, working)
        return [results[number] for number in range(len(jobs))]

    def _next(
        self, pipe: Connection, jobs: Sequence[TrialRequest], left: list[int], working: dict[Connection, int]
    ) -> None:
        if left:
            number = left.pop()
            working[pipe] = number
            with _alive():
                pipe.send(jobs[number])

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
            process.join()


@contextmanager
def _alive() -> Iterator[None]:
    """Around what is said to a process, or by it."""
    try:
        yield
    except (EOFError, OSError):
        raise UserError(
            "a process of the search has ended before it was done, as where the memory is full: try fewer --jobs."
        ) from None


def _serve(question: Question, pipe: Connection, inherited: Sequence[Connection]) -> None:
    """Serve jobs until the other end of the pipe closes."""
    for each in inherited:
        each.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    trials = trials_of(question)
    while True:
        try:
            job = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            result = made(trials, job)
        except MemoryError:  # whoever asked says so
            return
        pipe.send(result)
