"""Channels of a program are found from its ops as its graph has them."""

from __future__ import annotations

from collections import Counter

import pytest

from helixpipe.common.errors import ScheduleError
from helixpipe.lowering.channels import busiest_ends
from helixpipe.lowering.lower import lower
from helixpipe.planning.catalogue import Shape
from schedules import CATALOGUE


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_busiest_rank(name: str) -> None:
    for ranks, microbatches, chunks in ((1, 2, 1), (3, 6, 1), (4, 1, 3), (4, 8, 3), (6, 12, 1)):
        shape = Shape(ranks=ranks, layers=4 * ranks, microbatches=microbatches, chunks=chunks)
        try:
            program = CATALOGUE.build(name, shape)
        except ScheduleError:  # not every schedule takes every shape
            continue
        channels = {(message.source, message.target) for message in lower(program).graph.messages}
        ends = Counter(rank for channel in channels for rank in channel)
        assert busiest_ends(program) == max(ends.values(), default=0)
