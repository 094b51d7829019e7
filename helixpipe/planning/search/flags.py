"""Training's flags for what a search has found."""

from __future__ import annotations

from collections.abc import Sequence

from helixpipe.common.flags import words_of
from helixpipe.costs.hardware import GIB
from helixpipe.costs.models import OPTIM_GRADS, OPTIM_GRADS_PARAMS, Layout
from helixpipe.planning.catalogue import Schedule
from helixpipe.planning.division import layout_of
from helixpipe.planning.search.space import ParallelSizes, Question, Setting


def limit_in_gib(limit: float) -> str:
    """Return a memory limit as `--memory-limit` takes it, without loss."""
    gib = limit / GIB
    return text if float(text := f"{gib:g}") == gib else repr(gib)


def sizes_flags(question: Question, sizes: ParallelSizes) -> list[str]:
    """Return the flags that divide the GPUs, each with its values."""
    sequence = question.layout.sequence_parallel and sizes.tensor > 1
    sharing = question.distributed_optimizer or sizes.parts
    return [
        f"--tensor-model-parallel-size {sizes.tensor}",
        *["--sequence-parallel"] * sequence,
        *[f"--context-parallel-size {sizes.context} --cp-comm-type {sizes.cp_comm_type}"] * (sizes.context > 1),
        *_overlap_flag(question.costs(sizes).layout),
        f"--pipeline-model-parallel-size {sizes.ranks}",
        *[f"--expert-model-parallel-size {sizes.experts}"] * (sizes.experts > 1),
        *[f"--expert-tensor-parallel-size {sizes.expert_tensor}"] * (sizes.expert_tensor > 0),
        *["--use-distributed-optimizer"] * sharing,
        *[f"--data-parallel-sharding-strategy {OPTIM_GRADS if sizes.gathered_once else OPTIM_GRADS_PARAMS}"]
        * sizes.parts,
        *words_of(question.vocabulary),
    ]


def _overlap_flag(layout: Layout) -> list[str]:
    return [f"--overlap-tp-comm {layout.overlap_tp_comm}"] * (layout.halves or layout.pairs)


def setting_flags(
    schedule: Schedule, setting: Setting, division: Sequence[int] | None = None, further: int = 0
) -> list[str]:
    """Return the flags of the schedule and all that was chosen for it. division: the layers of each stage, where they
    are not equally many; further: the layers of further tokens, which are then written out as well."""
    saving, stages = setting.saving, setting.virtual_stages
    return [
        f"--pipeline-schedule {setting.schedule}",
        *words_of(setting.options),
        *[f"--num-virtual-stages-per-pipeline-rank {stages}"] * (stages is not None),
        *[f"--pipeline-model-parallel-layout '{layout_of(division or (0,), further)}'"] * (division is not None),
        *[f"--pipe-sp-splits {setting.chunks}"] * (setting.chunks > 1),
        *[f"--recompute-granularity {saving.recompute}"] * (saving.recompute is not None),
        *[f"--recompute-method block --recompute-num-layers {saving.recomputed_layers}"]
        * (saving.recomputed_layers > 0),
        *["--no-recompute-early"] * (saving.recompute is not None and not saving.early),
        *[f"--offload-activations {saving.offload_options.offload_activations}"]
        * (schedule.offloads or saving.offload),
        *[f"--chunk-size {saving.mlp}"] * bool(saving.mlp),
        f"--loss-chunk-size {saving.loss}",
    ]


def documents_flags(question: Question) -> list[str]:
    """Return the flags of steps of documents of all lengths; training chooses step by step how each is packed."""
    return ["--variable-seq-lengths"] * bool(question.documents)
