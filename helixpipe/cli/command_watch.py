"""`helixpipe watch`: the live state of a run, from the file that it writes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from dataclasses import dataclass

from helixpipe.adapt.live import Live, load
from helixpipe.common.flags import dataclass_from_namespace, option


@dataclass(frozen=True)
class WatchOptions:
    """Options of how a run is watched."""

    every: float | None = option(
        None,
        "Seconds from one look to the next, until Ctrl-C (default: 2 in a terminal, else one look).",
        at_least=0.1,
        unit=" s",
    )


def run(namespace: argparse.Namespace) -> None:
    every = dataclass_from_namespace(WatchOptions, namespace).every
    live = load(namespace.folder)
    if namespace.json:
        loss = live.loss if live.loss is not None and math.isfinite(live.loss) else None  # JSON has no NaN
        print(json.dumps(dataclasses.asdict(dataclasses.replace(live, loss=loss))))
    elif every is None and not sys.stdout.isatty():
        print("\n".join(lines(live, time.time())))
    else:
        _follow(namespace.folder, every or 2.0)


def lines(live: Live, now: float) -> list[str]:
    """Return what is shown of a state. now: seconds since 1970."""
    loss = "" if live.loss is None else f", lm loss {live.loss:.6E}"
    shown = [
        f"iteration {live.step} of {live.steps}{loss}, {max(0.0, now - live.updated):.0f} s ago",
        f"step {live.seconds * 1000:.1f} ms of forwards and backwards, bubble {live.bubble:.1%}",
        f"plan: {live.plan}" + (f", since iteration {live.since}" if live.since else ""),
    ]
    if live.slow:
        shown.append(f"slow: a step takes {live.cost:.2f} times as long as at first")
        shown += [f"  {part.name} at {part.speed:.2f} of its speed" for part in live.slow]
    else:
        shown.append("slow: nothing")
    return shown + [f"  {line}" for line in live.lines[-8:]]


def _follow(folder: str, every: float) -> None:
    from rich.live import Live as Screen  # a tenth of a second to import: only terminals wait for it
    from rich.text import Text

    with Screen(refresh_per_second=4) as screen:
        try:
            while True:
                screen.update(Text("\n".join(lines(load(folder), time.time()))))
                time.sleep(every)
        except KeyboardInterrupt:
            return
