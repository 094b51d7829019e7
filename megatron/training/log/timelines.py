"""What a recorded step leaves behind: the measured timeline as JSON, and a picture of the simulated one above it."""

from __future__ import annotations

from helixpipe.common.errors import UserError
from helixpipe.draw.formats import draw
from helixpipe.program.timeline import Timeline
from megatron.training.config import Config
from megatron.training.process.output import say
from megatron.training.process.parallel import Parallel


def write_timelines(config: Config, parallel: Parallel, timelines: tuple[Timeline, Timeline]) -> None:
    """Write (simulated, measured) where --record-timeline and --timeline-png say, from the first rank of all."""
    if (parallel.pp_rank, parallel.tp_rank, parallel.dp_rank) != (0, 0, 0):
        return
    simulated, measured = timelines
    try:
        _write(config, simulated, measured)
    except (OSError, UserError) as error:
        say(f"WARNING: the timeline was not written: {error}")


def _write(config: Config, simulated: Timeline, measured: Timeline) -> None:
    if config.logging.record_timeline:
        measured.save(config.logging.record_timeline)
    if config.logging.timeline_png:
        draw([simulated, measured], config.logging.timeline_png)
        say(f"timeline drawn to {config.logging.timeline_png}")
