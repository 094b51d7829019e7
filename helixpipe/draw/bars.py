"""The timeline of a step as coloured bars, for a terminal: a line a rank, the colours of pictures, idle time empty."""

from __future__ import annotations

from collections.abc import Iterator

from helixpipe.draw.style import KIND_STYLES, is_chunked, text_of
from helixpipe.program.timeline import OpEvent, Timeline


def bars(timeline: Timeline, width: int) -> str | None:
    """Return the timeline in `width` columns with escape sequences for colours, which `NO_COLOR` turns off; below, a
    line that says which colour is what. A box has its microbatch's number where there is room for it. None for a step
    that takes no time.
    """
    from rich.console import Console  # a tenth of a second to import: only terminals wait for it
    from rich.text import Text

    if not timeline.makespan:
        return None
    prefix = len(f"rank {timeline.num_ranks - 1} ")
    columns = max(width - prefix, 1)
    by_rank: dict[int, list[OpEvent]] = {rank: [] for rank in range(timeline.num_ranks)}
    for event in timeline.ops:
        by_rank[event.rank].append(event)
    console = Console(width=width)
    with console.capture() as capture:
        for rank, events in by_rank.items():
            line = Text(f"rank {rank}".ljust(prefix))
            for shown, room in _spans(events, columns, timeline.makespan):
                name = "" if shown is None else text_of(shown.op, is_chunked(timeline))
                name = name if len(name) < room else ""
                line.append(name.ljust(room), style="" if shown is None else _style(shown.op.kind))
            console.print(line, no_wrap=True, crop=True)
        kinds = {event.op.kind for event in timeline.ops}
        legend = Text(" " * prefix)
        for kind, style in KIND_STYLES.items():
            if kind in kinds:
                legend.append(f" {kind} ", style=_style(kind)).append(f" {style.name}   ")
        console.print(legend, no_wrap=True, crop=True)
    return capture.get().rstrip("\n")


def _spans(events: list[OpEvent], columns: int, makespan: float) -> Iterator[tuple[OpEvent | None, int]]:
    """Yield each op of a rank, None for idle time, with the columns it has."""
    at = 0
    for event in sorted(events, key=lambda event: event.start):
        first, last = (round(time / makespan * columns) for time in (event.start, event.end))
        yield None, first - at
        yield event, last - first
        at = last
    yield None, columns - at


def _style(kind: str) -> str:
    """Return the colour of a kind behind letters that can be read on it."""
    colour = KIND_STYLES[kind].colour
    light = sum(int(colour[place : place + 2], 16) for place in (1, 3, 5)) > 3 * 128
    return f"{'black' if light else 'white'} on {colour}"
