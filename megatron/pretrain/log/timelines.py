"""Writes a recorded step's files: the measured timeline as JSON, and a picture of it below the simulated one."""

from __future__ import annotations

from helixpipe.common.errors import UserError
from helixpipe.common.output import say
from helixpipe.draw.formats import draw
from helixpipe.program.timeline import Timeline
from megatron.pretrain.config import Config
from megatron.pretrain.log.recorded import RecordedStep
from megatron.pretrain.process.parallel import Parallel


def write_timelines(config: Config, parallel: Parallel, step: RecordedStep) -> None:
    """Print which share of the time of copies to the host was hidden, and write the timelines to --record-timeline and
    --timeline-png. Only the first rank on all axes does so.
    """
    if (parallel.pp_rank, parallel.tp_rank, parallel.cp_rank, parallel.dp_rank) != (0, 0, 0, 0):
        return
    if step.hidden is not None and step.simulated_hidden is not None:
        say(
            f"copies to the host and back: {step.hidden:.1%} of their time hidden behind ops "
            f"(simulated from the step's own times: {step.simulated_hidden:.1%})"
        )
    try:
        _write(config, step.simulated, step.measured)
    except (OSError, UserError) as error:
        say(f"WARNING: the timeline was not written: {error}")


def _write(config: Config, simulated: Timeline, measured: Timeline) -> None:
    if config.logging.record_timeline:
        measured.save(config.logging.record_timeline)
    if config.logging.timeline_png:
        draw([simulated, measured], config.logging.timeline_png)
        say(f"timeline drawn to {config.logging.timeline_png}")
