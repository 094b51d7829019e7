"""Finds bits that are not what they should be: `--check-every`.

In every step, with the numbers that are summed over all ranks at its end anyway:

- *in memory*: weights and the optimizer's state must be the same right before an update as when the step began;
- *in messages*: what a pipeline rank received must have the digest of what was sent.

Every N steps, before the step, over data-parallel replicas:

- *weights* must be equal;
- *computed*: all replicas run the same microbatch of one of them, by the same program. What each makes for others, its
  loss and its weights' gradients must be equal to the bit, and so must what the step itself makes of that microbatch. A
  rank without a replica runs it twice.

The host waits for nothing of this but every N steps. Where something differs all ranks learn so with the outcome of the
step, tell each other what they know, and end with one sentence that names the rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from helixpipe.common.errors import CorruptionError
from helixpipe.lowering.lower import lower
from helixpipe.lowering.project import LoweredProgram
from helixpipe.model import Microbatch, PipelineModel
from helixpipe.program.alone import alone
from helixpipe.program.program import Program
from helixpipe.runtime.executor import Executor
from helixpipe.runtime.step import Step
from helixpipe.runtime.weights import WholeWeights
from megatron.pretrain.config import Config
from megatron.pretrain.extension import RunParts, StepAhead, StepOutcome, TrainerExtension
from megatron.pretrain.resilience.digests import PRIME, Made, StepDigests, digests
from megatron.pretrain.resilience.findings import CheckedValue, RankFindings, ReceivedDigest, sentence


class CorruptionCheck(TrainerExtension):
    """The checks of one rank."""

    numbers = 3

    def __init__(self, config: Config):
        super().__init__(config)
        self._every = config.adapt.check_every
        self._checked = 0  # the last iteration whose comparison found nothing
        self._messages: StepDigests | None = None
        self._comparison: _Comparison | None = None
        self._executor: Executor | None = None

    @classmethod
    def wanted(cls, config: Config) -> bool:
        return config.adapt.check_every > 0

    def programs(self, program: Program) -> Iterable[Program]:
        """Return the programs of one microbatch alone: where weights travel, it may get them from other ranks."""
        return (alone(program, microbatch) for microbatch in range(len(program.workload)))

    def set_up(self, parts: RunParts) -> None:
        from megatron.core import parallel_state

        self._parallel, self._pipeline, self._state = parts.parallel, parts.pipeline, parts.state
        self._replicas = parallel_state.get_data_parallel_group()
        self._with_state = not self.config.training.optimizer_cpu_offload  # else it is not on the device
        self._weights = dict(parts.state.model.named_parameters())
        place = parts.parallel
        self._own = RankFindings(place.name, place.dp_rank, (place.pp_rank, place.tp_rank, place.cp_rank))

    def needs_outcome(self, iteration: int) -> bool:
        return self._due(iteration + 1)

    def _due(self, iteration: int) -> bool:
        """Whether replicas are compared before the step of an iteration, once the one before is finished."""
        return iteration % self._every == 0

    def ahead(self, step: StepAhead) -> None:
        if self._due(step.iteration):
            self._compare(step)

    def weights_ready(self) -> None:
        """Note what is in memory."""
        self._resting = dict(self._at_rest())
        self._first = digests(self._resting.values())

    def observer(self, lowered: LoweredProgram) -> StepDigests:
        """Return what takes the digests of a step's messages."""
        if self._messages is None or self._messages.graph is not lowered.graph:
            self._messages = StepDigests(lowered.graph)
        return self._messages

    def _compare(self, step: StepAhead) -> None:
        """Compare replicas before a step. Leaves gradients as nobody wants them. Collective over all ranks."""
        number, parallel = step.iteration // self._every, self._parallel
        replica = number % parallel.dp_size
        microbatch = number // parallel.dp_size % len(step.microbatches)
        batch = self._of_replica(step.microbatches[microbatch], replica)
        root = step.root_gradient(batch)

        def compute() -> _Computed:
            self._state.weights.zero_gradients()
            one, made = self._run_alone(step, microbatch, replica, batch, root)
            weights = self._weights.values()
            return _Computed(one, made, digests(weights), digests(map(_gradient, weights)))

        first = compute()
        rows = [torch.empty_like(first.row) for _ in range(parallel.dp_size)]
        dist.all_gather(rows, first.row, group=self._replicas)
        second = compute() if parallel.dp_size == 1 else None
        differs = torch.stack([(row != first.row).any() for row in rows]).any()
        differs |= second is not None and (second.row != first.row).any()
        anywhere = differs.to(torch.int32)
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
        if anywhere and second is None:  # who makes something else when it tries again is to blame
            second = compute()
        self._state.model.further_losses.forget()
        mine = replica == parallel.dp_rank
        self._comparison = _Comparison(self._state.model, first, second, bool(anywhere), microbatch if mine else None)

    def figures(self) -> Tensor:
        """Return the numbers of a step that are to be summed over all ranks, after its last op and before its update:
        float64. It keeps what `settle` may need."""
        now, messages, compared = digests(self._resting.values()), self._messages, self._comparison
        assert messages is not None
        balance, device = messages.balance(), self._parallel.device
        if compared is not None:
            compared.take(messages)
        self._kept = (list(self._resting), self._first, now), messages.sent, messages.received, compared
        self._comparison = None
        other = torch.tensor(0.0, device=device) if compared is None else compared.differs(device)
        none = torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack([(now != self._first).any().double(), none if balance is None else balance, other.double()])

    def outcome(self, outcome: StepOutcome) -> None:
        """Go on where a step's numbers say that all is well. Raises CorruptionError, on all ranks alike, where
        something differs."""
        iteration, (changed, balance, other) = outcome.iteration, outcome.sums
        if not changed and not balance % PRIME and not other:
            if self._kept[3] is not None:
                self._checked = iteration
            return
        every: list[Any] = [None] * self._parallel.world_size
        dist.all_gather_object(every, self._findings())
        raise CorruptionError(sentence(every, iteration, self._checked))

    # ------------------------------------------------------------------------------------------------------- details

    def _run_alone(
        self, step: StepAhead, microbatch: int, replica: int, batch: Microbatch, root_gradient: Tensor
    ) -> tuple[LoweredProgram, StepDigests]:
        """Run forward and backward of one microbatch of a replica's step and no other, by the same program on all
        replicas. Gradients are added to this rank's own, and summed over no other. Returns the program, and the digests
        of what this rank made.
        """
        pipeline, training = self._pipeline, self.config.training
        if self._executor is None:
            own = pipeline.attached
            self._executor = pipeline.executor(own.model, WholeWeights(), own.offloader)
        one = lower(alone(step.lowered.program, microbatch), pipeline.plans.costs)
        made = StepDigests(one.graph)
        self._executor.run(
            one,
            Step(
                iteration=step.iteration,
                microbatch_number=lambda _: pipeline.number(microbatch, replica),
                batch=lambda _: batch,
                root_gradient=lambda _: root_gradient,
                micro_batch_size=training.micro_batch_size or 0,
                seq_length=self.config.model.seq_length or 0,
                observers=(made,),
            ),
        )
        return one, made

    def _at_rest(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what nobody writes from one update to the next, by name."""
        yield from self._weights.items()
        names = {id(weight): name for name, weight in self._weights.items()}
        every = self._state.optimizer.chained_optimizers if self._with_state else ()
        optimizers = [each.optimizer for each in every if not each.is_stub_optimizer]
        updated = ((each, weight) for each in optimizers for group in each.param_groups for weight in group["params"])
        for number, (optimizer, weight) in enumerate(updated):
            name = names.get(id(weight), f"the optimizer's weight {number}")
            if id(weight) not in names:
                yield name, weight
            for part, value in optimizer.state.get(weight, {}).items():
                if isinstance(value, Tensor) and value.dim() and value.device == self._parallel.device:
                    yield f"{part} of {name}", value

    def _of_replica(self, batch: Microbatch, replica: int) -> Microbatch:
        """Return the microbatch of a replica in the place of this one's."""
        if self._parallel.dp_size == 1 or not batch.tokens.numel():
            return batch
        source, tensors = dist.get_global_rank(self._replicas, replica), {}
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            if (own := getattr(batch, name)) is not None:
                tensors[name] = own.clone(memory_format=torch.contiguous_format)
                dist.broadcast(tensors[name], source, group=self._replicas)
        return replace(batch, **tensors)

    def _findings(self) -> RankFindings:
        (names, first, now), sent, received, compared = self._kept
        changed = [name for name, same in zip(names, (first == now).tolist(), strict=True) if not same]
        messages = self._messages
        assert messages is not None
        found = replace(
            self._own,
            changed=tuple(changed),
            sent=tuple((message.number, int(value)) for message, value in sent),
            received=tuple(
                ReceivedDigest(messages.root(message).number, int(value), str(message)) for message, value in received
            ),
        )
        if compared is None:
            return found
        return replace(
            found, entries=compared.entries, row=tuple(compared.first.row.tolist()), unsteady=compared.unsteady
        )


class _Computed:
    """What one rank has made of a microbatch alone. row: digests of its weights, of what it made for others and of the
    loss, of its weights' gradients: int64, one after another."""

    def __init__(self, lowered: LoweredProgram, step: StepDigests, weights: Tensor, gradients: Tensor):
        self.lowered, self.step = lowered, step
        self.made = step.made(0)
        made = [torch.stack(list(self.made.values()))] if self.made else []
        self.row = torch.cat([weights, *made, gradients])


class _Comparison:
    """One comparison on one rank. first, second: what it has computed, the second time only where something differs
    anywhere (`anywhere`) or there is no replica. own: the number of the microbatch in the rank's own step, None where
    it is a replica's."""

    def __init__(
        self, model: PipelineModel, first: _Computed, second: _Computed | None, anywhere: bool, own: int | None
    ):
        self.first, self._model, self._second, self._anywhere, self._own = first, model, second, anywhere, own
        self._otherwise: list[tuple[Made, Tensor]] = []

    def take(self, step: StepDigests) -> None:
        """Compare with what the step itself has made of the microbatch."""
        if self._own is not None:
            made = step.made(self._own)
            self._otherwise = [(each, made[each] != value) for each, value in self.first.made.items()]

    def differs(self, device: torch.device) -> Tensor:
        """Return whether anything differs: a scalar."""
        flags = [torch.tensor(self._anywhere, device=device), *(differs for _, differs in self._otherwise)]
        return torch.stack(flags).any()

    @property
    def unsteady(self) -> tuple[CheckedValue, ...]:
        """What this rank has not made alike twice."""
        found = {each for each, differs in self._otherwise if differs}
        entries = [entry for made, entry in zip(self.first.made, self._of_made(), strict=True) if made in found]
        if self._second is not None:
            differs = (self._second.row != self.first.row).tolist()
            entries += [entry for entry, other in zip(self.entries, differs, strict=True) if other]
        return tuple(entries)

    @property
    def entries(self) -> tuple[CheckedValue, ...]:
        """Say what each number of a row is the digest of, and when it is made."""
        graph, places = self.first.step.graph, self._places
        weights = [name for name, _ in self._model.named_parameters()]
        last = {
            piece: task
            for task, op in sorted(enumerate(graph.ops), key=lambda each: places[each[0]])
            if op.kind in "BW"
            for piece in graph.program.stages[op.stage].pieces
        }
        gradients = (
            CheckedValue(places.get(last.get(self._model.piece_of(name), -1), 0), f"the gradient of {name}")
            for name in weights
        )
        return (*(CheckedValue(-1, name) for name in weights), *self._of_made(), *gradients)

    def _of_made(self) -> list[CheckedValue]:
        graph, places = self.first.step.graph, self._places
        sent = {Made(each.kind, each.unit, each.target): graph.task(each) for each in graph.messages}
        forwards = {op.unit: task for task, op in enumerate(graph.ops) if op.kind == "F"}
        return [CheckedValue(places[sent.get(each, forwards.get(each.unit, 0))], str(each)) for each in self.first.made]

    @property
    def _places(self) -> dict[int, int]:
        return {task: place for place, task in enumerate(self.first.lowered.order)}


def _gradient(weight: torch.nn.Parameter) -> Tensor:
    gradient = getattr(weight, "main_grad", None)
    if gradient is None:
        gradient = weight.grad
    return weight.new_zeros(0) if gradient is None else gradient
