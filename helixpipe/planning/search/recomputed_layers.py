"""Finds the fewest layers that a plan has to recompute to fit: the first so many of each stage, as Megatron-LM's
`--recompute-method block` has it.

A plan that recomputes in all layers often leaves memory free, and each layer that keeps its activations instead saves
time. The more layers recompute, the less is kept, so the fewest are found by halving.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from helixpipe.planning.search.bounds import Bounds
from helixpipe.planning.search.space import Candidate


def with_fewest_layers(
    candidates: Sequence[Candidate], bounds: Bounds, fit: Callable[[Sequence[Candidate]], Sequence[bool]]
) -> list[Candidate]:
    """Return the candidates with as few layers recomputed as fit, as they do or as a whole, without those that
    recompute nothing, or of which only all layers fit. fit: whether each candidate fits; of all layers that is taken
    for granted.
    """
    recomputing = [each for each in candidates if each.setting.saving.recompute is not None]
    starts = dict.fromkeys(start for each in recomputing for start in (each, mixture(each, 0, "full")))
    enough = {start: layers for start in starts if (layers := most_layers(start, bounds)) > 1}
    too_few = dict.fromkeys(enough, 0)
    most = dict(enough)
    while open_ones := [candidate for candidate in enough if enough[candidate] - too_few[candidate] > 1]:
        middle = {candidate: (too_few[candidate] + enough[candidate]) // 2 for candidate in open_ones}
        mixed = [mixture(candidate, layers) for candidate, layers in middle.items()]
        for (candidate, layers), fits in zip(middle.items(), fit(mixed), strict=True):
            (enough if fits else too_few)[candidate] = layers
    return [mixture(candidate, layers) for candidate, layers in enough.items() if layers < most[candidate]]


def most_layers(candidate: Candidate, bounds: Bounds) -> int:
    """Return the layers of a candidate's longest stage; 0 where its stages are not whole layers."""
    question, sizes, setting = bounds.question, candidate.sizes, candidate.setting
    schedule = question.catalogue[setting.schedule]
    if schedule.own_stages:
        return 0
    stages = sizes.ranks * schedule.stages_of(setting.virtual_stages)
    return max(bounds.division(sizes, setting) or (question.model.layers // stages,))


def mixture(candidate: Candidate, layers: int, granularity: str | None = None) -> Candidate:
    """Return the candidate with so many layers of each stage recomputed, as they are or by another granularity."""
    setting = candidate.setting
    saving = replace(setting.saving, recompute=granularity or setting.saving.recompute, recomputed_layers=layers)
    return replace(candidate, setting=replace(setting, saving=saving))
