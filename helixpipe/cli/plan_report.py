"""Reports the plans that `helixpipe plan` has found."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any

from helixpipe.certify.certificate import Certificate
from helixpipe.cli.torchrun import torchrun_command
from helixpipe.common.flags import words_of
from helixpipe.costs.hardware import GIB, GIGA
from helixpipe.costs.models import Layout
from helixpipe.costs.piece_bytes import PieceBytes
from helixpipe.costs.verdict import MemoryVerdict
from helixpipe.draw.table import table
from helixpipe.planning.search.bounds import Bounds
from helixpipe.planning.search.documents import bounds_of
from helixpipe.planning.search.goodput import LARGE, Goodput, GoodputOptions, goodput_of
from helixpipe.planning.search.outcome import SearchResult, TriedCandidate
from helixpipe.planning.search.space import ParallelSizes, Question, Saving, Setting
from helixpipe.planning.search.terms import AtSize, Terms, compared, taking_over

HEADERS = (
    "", "TP", "CP", "PP", "DP", "schedule", "saving", "step, s", "tokens/s/GPU", "MFU", "bubble", "GiB", "bound by",
)  # fmt: skip


ALIKE = 0.002
"""Difference of two steps, as a share, that the cost model cannot tell."""


@dataclass(frozen=True)
class SearchReport:
    """The result of a search. terms: of each of the best, none if the search was interrupted. scan: of
    smaller sizes. certificate: of the first.
    """

    question: Question
    outcome: SearchResult
    terms: Sequence[Terms]
    scan: Sequence[AtSize]
    failures: GoodputOptions = field(default_factory=GoodputOptions)
    certificate: Certificate | None = None

    @cached_property
    def goodput(self) -> Goodput | None:
        """What checkpoints and failures leave of the time; None for fewer GPUs than that matters for."""
        question = self.question
        if question.gpus < LARGE:
            return None
        weights = PieceBytes(question.model, Layout()).parameters(question.model.pieces)
        nodes = question.gpus // question.hardware.gpus_per_node
        return goodput_of(self.failures, weights, question.gpus, nodes)

    @property
    def drawn(self) -> list[TriedCandidate]:
        """Trials that ended with a step time."""
        return [each for each in self.outcome.every if not each.trial.bound]

    @cached_property
    def _bounds(self) -> Bounds:
        return bounds_of(self.question)

    def tokens_per_gpu(self, tried: TriedCandidate) -> float:
        """Return the tokens a second of each GPU."""
        question = self.question
        tokens = sum(question.documents) or question.sequences * question.model.seq_length
        return tokens / (tried.trial.step * question.gpus)

    def utilization(self, tried: TriedCandidate) -> float:
        """Return the model FLOPs utilization (MFU), 0 to 1."""
        flops = self._bounds.flops(tried.candidate.sizes)
        return flops / (tried.trial.step * self.question.gpus * self.question.hardware.flops)

    def command(self, tried: TriedCandidate) -> str:
        return torchrun_command(self.question, tried.candidate)

    def text(self, explain: bool, front: Sequence[TriedCandidate], all_commands: bool) -> str:
        """Setup, table, the command of the best, or those of all; what explains them where that is asked for."""
        question, best = self.question, self.outcome.best
        lines = [
            f"{question.model.name} on {question.gpus} x {question.hardware.title}: "
            + (
                f"{len(question.documents)} documents of {sum(question.documents)} tokens"
                if question.documents
                else f"{question.model.seq_length} tokens a sequence, {question.sequences}"
            )
            + f" a step; {question.limit / GIB:.1f} of {question.hardware.memory / GIB:.4g} GiB a GPU may hold tensors",
            self._network(),
            "",
            "Simulated, not measured:"
            if not self.outcome.interrupted
            else "Interrupted; the best so far, from few microbatches:",
            table(HEADERS, [self._row(number, each) for number, each in enumerate(best, start=1)]),
            *self._legend(),
            *[f"The first {self._verdict(each).sentence}." for each in best[:1]],
            *self._gains(),
            *self._goodput_text(),
            *self._certified(),
        ]
        if explain:
            lines += ["", *self._explanation()]
        if front:
            cells = [
                (
                    f"{each.trial.step:.4g}",
                    f"{each.trial.peak / GIB:.1f}",
                    _sizes(each),
                    _setting(each.candidate.setting),
                    _saving(each.candidate.setting.saving, each.candidate.sizes),
                )
                for each in front
            ]
            lines += [
                "",
                "No other plan beats these in time and memory:",
                table(("step, s", "GiB", "TP CP PP DP", "schedule", "saving"), cells),
            ]
        for number, each in enumerate(best if all_commands else best[:1], start=1):
            lines += ["", f"{number}. {self.command(each)}"]
        if len(best) > 1 and not all_commands:
            lines += ["", "--commands prints those of the others, too."]
        return "\n".join(lines)

    def _verdict(self, tried: TriedCandidate) -> MemoryVerdict:
        question, trial = self.question, tried.trial
        hardware = question.hardware
        host = hardware.host_memory / hardware.gpus_per_node
        return MemoryVerdict(trial.peak, trial.cached, hardware.memory, question.limit, trial.host, host)

    def _row(self, number: int, tried: TriedCandidate) -> tuple[str, ...]:
        sizes, setting, trial = tried.candidate.sizes, tried.candidate.setting, tried.trial
        return (
            f"{number}.",
            str(sizes.tensor),
            f"{sizes.context}{' a2a' if sizes.context > 1 and sizes.cp_comm_type == 'a2a' else ''}",
            str(sizes.ranks),
            f"{sizes.data}{_experts(sizes)}",
            _setting(setting),
            _saving(setting.saving, sizes),
            "≤" * self._open(tried) + f"{trial.step:.4g}" + "~" * (not trial.whole),
            f"{self.tokens_per_gpu(tried):.1f}",
            f"{100 * self.utilization(tried):.1f} %",
            f"{100 * trial.bubble:.1f} %",
            f"{trial.peak / GIB:.1f}",
            self._bound_by(number - 1),
        )

    def _open(self, tried: TriedCandidate) -> bool:
        """Whether the search ended before it had tried all that promises to be better with the same sizes."""
        return tried.candidate.group in self.outcome.open

    def _network(self) -> str:
        """Return the network that was assumed."""
        hardware = self.question.hardware
        if self.question.gpus <= hardware.gpus_per_node:
            return f"one node, {8 * hardware.nvlink / GIGA:.4g} Gb/s between its GPUs"
        several = "s" * (hardware.adapters > 1)
        return (
            f"nodes of {hardware.gpus_per_node} GPUs, {8 * hardware.network / GIGA:.4g} Gb/s a node over "
            f"{hardware.adapters} adapter{several}"
        )

    def _legend(self) -> list[str]:
        """Return what marks in the table mean, and which plans are alike."""
        best = self.outcome.best
        lines = []
        if any(self._open(each) for each in best):
            lines.append("≤: at most; not all settings of these sizes were tried, as a search for them alone would.")
        if not all(each.trial.whole for each in best):
            lines.append("~: extrapolated from steps of fewer microbatches.")
        first = 0
        for last in range(len(best)):
            following = best[last + 1].trial.step if last + 1 < len(best) else inf
            if following > best[first].trial.step * (1 + ALIKE):
                if last > first:
                    lines.append(f"{first + 1}. to {last + 1}. are alike: their steps differ by at most {ALIKE:.1%}.")
                first = last + 1
        return ["", *lines] if lines else []

    def _bound_by(self, index: int) -> str:
        """Return the largest loss, with its share of the step."""
        if index >= len(self.terms):
            return ""
        terms = self.terms[index]
        name, seconds = next(iter(terms.losses.items()))
        return f"{name} {100 * seconds / terms.step:.1f} %"

    def _gains(self) -> list[str]:
        """Return the speed of the first over that of the best of each of Megatron-LM's own schedules."""
        first = self.outcome.best[0].trial.step
        ratios = [
            f"{each.trial.step / first:.2f} x of the best {name} (TP CP PP DP {_sizes(each)})"
            for name, each in self.outcome.plain.items()
        ]
        return ["", f"The first has the speed of {', '.join(ratios)}."] if ratios else []

    def _goodput_text(self) -> list[str]:
        if (goodput := self.goodput) is None:
            return []
        tokens = goodput.share * self.tokens_per_gpu(self.outcome.best[0])
        return [
            "",
            f"Goodput, with checkpoints of {goodput.nbytes / 1e12:.2f} TB ({goodput.checkpoint:.3g} s) every "
            f"{goodput.interval / 60:.3g} minutes and a failure every {goodput.failures / 3600:.3g} hours: "
            f"{100 * goodput.share:.1f} %, so {tokens:.1f} tokens/s/GPU of the first.",
        ]

    def _certified(self) -> list[str]:
        if self.certificate is None:
            return []
        return ["", f"The pipeline of 1. takes {self.certificate.makespan:.6g} s. {self.certificate.text()}"]

    def _explanation(self) -> list[str]:
        counts = self.outcome.counts
        lines = [
            f"{counts.candidates} candidates: {counts.by_time} cannot be among the best by their work alone, "
            f"{counts.by_memory} cannot fit, {counts.refused} are shapes their schedule does not take, {counts.tried} "
            f"were simulated, {counts.left} promised less and were left."
        ]
        if self.terms:
            first = self.terms[0]
            parts = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in first.losses.items() if seconds > 0)
            lines.append(f"1. takes {first.step:.4g} s: computing {first.computing:.4g} s, {parts}.")
        if len(self.terms) > 1:
            lines.append(self._why_second())
        lines += self._taking_over()
        return lines

    def _why_second(self) -> str:
        difference = compared(self.terms[0], self.terms[1])
        parts = ", ".join(f"{name} {seconds:+.3g} s" for name, seconds in difference.terms if abs(seconds) > 1e-6)
        longer = 100 * (self.outcome.best[1].trial.step / self.outcome.best[0].trial.step - 1)
        return f"2. takes {longer:.2g} % longer: {parts or 'nothing to speak of'}."

    def _taking_over(self) -> list[str]:
        """Return the table of the numbers of GPUs at which each loss becomes the largest."""
        if len(self.scan) < 2:
            return []
        names = list(taking_over(self.scan))
        cells = []
        for each in self.scan:
            if each.terms is None or each.candidate is None:
                cells.append((str(each.gpus), "nothing fits", *[""] * (len(names) + 1)))
                continue
            shares = each.terms.losses
            cells.append(
                (
                    str(each.gpus),
                    f"{_sizes_of(each)} {each.candidate.setting.schedule}",
                    f"{each.terms.step:.4g}",
                    *(f"{100 * shares[name] / each.terms.step:.1f} %" for name in names),
                )
            )
        over = taking_over(self.scan)
        told = "; ".join(
            f"{name} from {gpus} GPUs on" if gpus is not None else f"{name} never" for name, gpus in over.items()
        )
        return [
            "",
            "Parts of the step with fewer GPUs and the same batch, each of a short search:",
            table(("GPUs", "TP CP PP DP", "step, s", *names), cells),
            f"The largest loss is: {told}.",
        ]

    # ----------------------------------------------------------------------------------------------------------- JSON

    def to_json(self, front: Sequence[TriedCandidate]) -> dict[str, Any]:
        question, outcome = self.question, self.outcome
        return {
            "simulated": True,
            "unit": "s",
            "model": question.model.name,
            "hardware": question.hardware.name,
            "gpus": question.gpus,
            "seq_length": question.model.seq_length,
            "global_batch_size": question.sequences,
            "memory_limit": round(question.limit),
            "network": {"gbps_a_node": 8 * question.hardware.network / GIGA, "adapters": question.hardware.adapters},
            "interrupted": outcome.interrupted,
            "counts": vars(outcome.counts),
            "plain_step_times": {name: each.trial.step for name, each in outcome.plain.items()},
            **({"certified": self.certificate.figures()} if self.certificate is not None else {}),
            **({"goodput": dataclasses.asdict(self.goodput)} if self.goodput is not None else {}),
            "plans": [self._json(number, each) for number, each in enumerate(outcome.best)],
            **({"pareto": [self._json(len(self.terms), each) for each in front]} if front else {}),
            **(
                {"sizes": [_at_size(each) for each in self.scan], "taking_over": taking_over(self.scan)}
                if self.scan
                else {}
            ),
        }

    def _json(self, index: int, tried: TriedCandidate) -> dict[str, Any]:
        sizes, setting, trial = tried.candidate.sizes, tried.candidate.setting, tried.trial
        return {
            "tensor_parallel": sizes.tensor,
            "context_parallel": sizes.context,
            "cp_comm_type": sizes.cp_comm_type,
            "pipeline_parallel": sizes.ranks,
            "data_parallel": sizes.data,
            **({"expert_parallel": sizes.experts} if sizes.experts > 1 else {}),
            **({"expert_tensor_parallel": sizes.expert_tensor} if sizes.expert_tensor else {}),
            "weights_in_parts": sizes.parts,
            "gathered_once": sizes.gathered_once,
            "microbatches": self.question.microbatches(sizes),
            "schedule": setting.schedule,
            "options": words_of(setting.options),
            "chunks": setting.chunks,
            "virtual_stages": setting.virtual_stages,
            "stage_layers": self._bounds.division(sizes, setting),
            "recompute": setting.saving.recompute,
            **_recomputed_layers(setting.saving),
            "chunk_size": setting.saving.mlp,
            "loss_chunk_size": setting.saving.loss,
            "offload": setting.saving.offload,
            "step_time": trial.step,
            "whole_step_simulated": trial.whole,
            "at_most": self._open(tried),
            "tokens_per_second_per_gpu": self.tokens_per_gpu(tried),
            "mfu": self.utilization(tried),
            "bubble_ratio": trial.bubble,
            "memory": round(trial.peak),
            "memory_reserved": round(self._verdict(tried).reserved),
            "fits": self._verdict(tried).fits,
            **({"terms": self.terms[index]._asdict()} if index < len(self.terms) else {}),
            "command": self.command(tried),
        }


def pareto_front(outcome: SearchResult) -> list[TriedCandidate]:
    """Return the tried candidates that no other beats in time and memory, the fastest first."""
    front: list[TriedCandidate] = []
    for each in sorted(outcome.every, key=lambda tried: (tried.trial.step, tried.trial.peak)):
        if not each.trial.bound and (not front or each.trial.peak < front[-1].trial.peak):
            front.append(each)
    return front


def _at_size(each: AtSize) -> dict[str, Any]:
    entry: dict[str, Any] = {"gpus": each.gpus, "terms": each.terms._asdict() if each.terms else None}
    if each.candidate is not None:
        entry |= {"schedule": each.candidate.setting.schedule, "sizes": _sizes_of(each)}
    return entry


def _sizes(tried: TriedCandidate) -> str:
    sizes = tried.candidate.sizes
    return f"{sizes.tensor} {sizes.context} {sizes.ranks} {sizes.data}"


def _sizes_of(each: AtSize) -> str:
    assert each.candidate is not None
    sizes = each.candidate.sizes
    return f"{sizes.tensor} {sizes.context} {sizes.ranks} {sizes.data}"


def _setting(setting: Setting) -> str:
    """Return `seq1f1b-interleaved k=4 v=2`, and options that are not the defaults."""
    told = [f"k={setting.chunks}"] * (setting.chunks > 1)
    told += [f"v={setting.virtual_stages}"] * bool(setting.virtual_stages) + ["uneven"] * setting.balanced
    options = [flag.removeprefix("--") for flag in words_of(setting.options) if not flag.startswith("--no-")]
    return " ".join([setting.schedule, *told, *options])


def _recomputed_layers(saving: Saving) -> dict[str, int]:
    return {"recompute_num_layers": saving.recomputed_layers} if saving.recomputed_layers else {}


def _recomputes(saving: Saving) -> str:
    """Return `full`, or `full in 3` where three layers of each stage recompute."""
    some = f" in {saving.recomputed_layers}" * (saving.recomputed_layers > 0)
    return f"{saving.recompute}{some}"


def _saving(saving: Saving, sizes: ParallelSizes) -> str:
    told = {
        _recomputes(saving): saving.recompute is not None,
        "offload": saving.offload,
        "MLP slices": saving.mlp > 0,
        "loss slices": saving.loss > 0,
        "gradients in parts" if sizes.gathered_once else "weights in parts": sizes.parts,
    }
    return ", ".join(name for name, given in told.items() if given) or "-"


def _experts(sizes: ParallelSizes) -> str:
    """Return how experts are shared out, if they are."""
    split = f"/{sizes.expert_tensor}" if sizes.expert_tensor else ""
    return f" ep{sizes.experts}{split}" if sizes.experts > 1 else ""
