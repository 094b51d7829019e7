"""Runs on the ranks of test_drawn_steps.py: steps over documents of given lengths, beside plain megatron-core."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from megatron.core import parallel_state

from helixpipe.model import Microbatch
from megatron.pretrain import pretrain
from megatron.pretrain.checkpoint.state import TrainingProgress
from megatron.pretrain.config import Config, core
from megatron.pretrain.data import document_splits
from megatron.pretrain.data.datasets import Datasets
from megatron.pretrain.data.document_order import DocumentAddress
from megatron.pretrain.data.documents import DocumentStream, DocumentTokens, StepDocuments
from megatron.pretrain.data.tokenizer import build_tokenizer
from megatron.pretrain.step.microbatches import BatchSchedule, run_length
from tests.model.common import in_float64, reference_forward, set_parallel, with_global_experts, worst
from tests.training.document_steps import make_feed
from tests.training.steps import VOCABULARY, Figures, Run, make_trainer, of_runs, plain_model

Steps = tuple[tuple[int, ...], ...]
"""The tokens of each document of each step."""

BALANCED = "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.3"
"""Experts are to be used alike over each row: one document, unless several are packed into it."""


class GivenStream(DocumentStream):
    """Steps of documents of these lengths, whatever the flags say of how many there are; tokens are drawn."""

    def __init__(self, steps: Steps):
        self.steps = steps

    def lengths(self, step: int) -> tuple[int, ...]:
        return self.steps[step]

    def step(self, step: int) -> StepDocuments:
        lengths = self.steps[step]
        return StepDocuments(step, tuple(DocumentAddress(0, number) for number in range(len(lengths))), lengths, 0)

    def read(self, step: StepDocuments, number: int) -> DocumentTokens:
        return document(step.step, number, step.lengths[number])

    def forget(self, step: int) -> None:
        """All of it is known."""


def document(step: int, number: int, length: int) -> DocumentTokens:
    """Its first label counts, so that each document has a loss; of the others some do."""
    rng = numpy.random.default_rng((step, number))
    tokens = rng.integers(0, VOCABULARY - 1, length + 1)
    mask = (rng.random(length) > 0.3).astype(numpy.float32)
    mask[0] = 1
    return DocumentTokens(tokens[:-1], tokens[1:], mask)


class GivenOrder:
    """The same documents one after another, for samples with padding behind them. All steps have as many."""

    def __init__(self, steps: Steps):
        self.steps, self.documents = steps, tuple(chain.from_iterable(steps))

    def places(self, index: int, count: int) -> list[tuple[int, int]]:
        return list(enumerate(self.documents))[index : index + count]

    def read(self, order: GivenOrder, place: int, length: int, eod: int | None) -> DocumentTokens:
        return document(*divmod(place, len(self.steps[0])), length)


@contextmanager
def given_feed(trainer: Any, config: Config, steps: Steps) -> Iterator[Any]:
    """Yield the feed of a run: its rows of documents, or its padded samples."""
    with pytest.MonkeyPatch.context() as patch:
        if config.data.variable_seq_lengths:
            orders = document_splits.Orders(object(), object(), None)
            patch.setattr(document_splits, "build_orders", lambda options, tokenizer: orders)
            patch.setattr(document_splits, "build_stream", lambda *order, **begin: GivenStream(steps))
            yield make_feed(trainer, TrainingProgress())
            return
        order, schedule = GivenOrder(steps), BatchSchedule.from_config(config)
        own = document_splits.PaddedDocuments(order, len(order.documents), config.model.seq_length or 0, None)
        patch.setattr(document_splits, "read_document", order.read)
        patch.setattr(pretrain, "build_datasets", lambda *asked, **more: Datasets(own, own, None))
        length = run_length(config, schedule)
        tokenizer = build_tokenizer(tokenizer_type="NullTokenizer", vocab_size=config.data.vocab_size)
        yield pretrain._sample_feed(
            config, trainer.parallel, trainer.pipeline, tokenizer, schedule, length, TrainingProgress()
        )


class Found(NamedTuple):
    """Of one step of a run on one rank: the largest error of a weight's gradient with its name, and of the losses, in
    training and in an evaluation of the same documents; and a digest of what the pipeline ran."""

    gradient: tuple[float, str]
    loss: float
    evaluation: float
    ran: str


@in_float64()
def found_by_runs(rank: int, world_size: int, runs: Sequence[Run], plain_flags: str, steps: Steps) -> list[list[Found]]:
    """Of every run and step."""
    set_parallel()
    plain = {}
    for kind in sorted({kind_of(run) for run in runs}):
        config = Run(kind[0], f"{plain_flags} {kind[1]}", batch=world_size).config(rank, world_size)
        plain[kind] = [reference(config, number, lengths) for number, lengths in enumerate(steps)]

    def found_by(run: Run) -> list[Found]:
        try:
            return found_by_run(run.config(rank, world_size), steps, plain[kind_of(run)])
        except Exception as error:
            raise AssertionError(f"{run}, documents of {steps} tokens") from error

    return of_runs(runs, found_by)


def kind_of(run: Run) -> tuple[str, str]:
    """Return the style of a run's model, and its flags of balancing losses."""
    return run.style, BALANCED if BALANCED in run.flags else ""


def reference(config: Config, step: int, lengths: Sequence[int]) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients by name and mean loss of a step: each document by itself, in one process."""
    transformer = replace(core.transformer_config(config), params_dtype=torch.float64)
    transformer.tensor_model_parallel_size = transformer.pipeline_model_parallel_size = 1
    model = plain_model(config, transformer)
    total = counted = torch.zeros((), dtype=torch.float64)
    for number, length in enumerate(lengths):
        tokens, labels, mask = (torch.from_numpy(each)[None] for each in document(step, number, length))
        batch = Microbatch(tokens, labels, mask)
        total = total + torch.sum(reference_forward(model, batch, labels).double() * mask)
        counted = counted + mask.sum()
    total.backward()
    sums = {name: weight.grad for name, weight in model.named_parameters()}
    return {name: own / counted for name, own in sums.items() if own is not None}, (total / counted).item()


def found_by_run(config: Config, steps: Steps, plain: Sequence[tuple[dict[str, torch.Tensor], float]]) -> list[Found]:
    """The weights stay as they are: the learning rate is next to nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "params_dtype", lambda config: torch.float64)
        trainer = make_trainer(config)
    trainer.log = figures = Figures(0)  # type: ignore[assignment]
    with given_feed(trainer, config, steps) as trainer.feed:
        return found_by_trainer(trainer, figures, steps, plain)


def found_by_trainer(
    trainer: Any, figures: Figures, steps: Steps, plain: Sequence[tuple[dict[str, torch.Tensor], float]]
) -> list[Found]:
    errors: list[tuple[float, str]] = []
    ran: list[str] = []
    weights, train, reduce = trainer.state.weights, trainer.feed.train, trainer.state.weights.reduce

    def noted(progress: TrainingProgress) -> Any:
        work = train(progress)
        workload = work.lowered.program.workload
        ran.append(hashlib.sha256(repr(workload).encode()).hexdigest())
        return work

    def compared(tokens: torch.Tensor | None) -> None:
        reduce(tokens)
        expected = plain[len(errors)][0]
        own = own_gradients(trainer)
        errors.append(worst(own, {name: expected[name] for name in own}) if own else (0.0, ""))

    trainer.feed.train = noted
    weights.reduce = compared
    evaluated = []
    for _ in steps:
        trainer._iteration(record=False)
        work = trainer.feed.evaluation("valid")
        loss_sum, _ = trainer.pipeline.run(0, work.lowered, work.microbatches, no_gradient, training=False)
        total, tokens = trainer._totals(loss_sum, work).tolist()
        evaluated.append(total / tokens)
    if trainer._unfinished is not None:
        trainer._finish_step()
    trainer.feed.close()
    trainer.pipeline.close()
    rows = zip(errors, figures.losses, evaluated, ran, [loss for _, loss in plain], strict=True)
    return [Found(error, abs(loss / own - 1), abs(valid / own - 1), what) for error, loss, valid, what, own in rows]


def own_gradients(trainer: Any) -> dict[str, torch.Tensor]:
    """Of this rank's weights, whole, by the names that a plain model has for them."""
    model, sharded = trainer.state.model, trainer.state.sharded
    copies = {id(copy): key for key, copy in model.replicated_parameters().items()}
    names = {id(weight): copies.get(id(weight), name) for name, weight in model.named_parameters()}
    if sharded is None:
        own = {names[id(weight)]: weight.main_grad.clone() for weight in model.parameters()}
        local = (model.config.num_moe_experts or 0) // model.config.expert_model_parallel_size
        return with_global_experts(own, parallel_state.get_expert_model_parallel_rank() * local)
    whole = (zip(unit.weights, unit.views(unit.all_parts(unit.total)), strict=True) for unit in sharded.units)
    return {names.get(name, name): gradient.clone() for unit in whole for name, gradient in unit}


def no_gradient(microbatch: int) -> torch.Tensor:
    raise AssertionError("an evaluation has no backward")
