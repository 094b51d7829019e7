"""Reports on the check of the links, in lines that name the slow ones."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from helixpipe.draw.style import count
from tools.links import BETWEEN, WITHIN, Link, RankLocation

# --------------------------------------------------------------------------------------------------------------- report


def slow_links(links: Sequence[Link], places: Sequence[RankLocation], share: float) -> dict[Link, float]:
    """Return links that carry less than `share` of the median of their kind, with the share they carry. Links within
    nodes and between nodes are two kinds; the median of an even number is the faster of the two in the middle.
    """
    slow: dict[Link, float] = {}
    for group in _by_kind(links, places).values():
        median = statistics.median_high([link.bandwidth for link in group])
        slow |= {link: link.bandwidth / median for link in group if link.bandwidth < share * median}
    return slow


def slowest_between_nodes(links: Sequence[Link], places: Sequence[RankLocation]) -> float | None:
    """Return the bytes a second of the slowest link that works; None if all ranks are on one node."""
    return min((link.bandwidth for link in _by_kind(links, places).get(BETWEEN, ())), default=None)


def report(links: Sequence[Link], places: Sequence[RankLocation], share: float) -> list[str]:
    """Return lines about each kind of link, then one for each that is slow or dead."""
    lines = []
    for kind, group in _by_kind(links, places).items():
        speeds = [link.bandwidth for link in group]
        slowest = max(group, key=lambda link: link.latency)
        lines.append(
            f"  {kind}: {count(len(group), 'link')}, median {_speed(statistics.median_high(speeds))}, "
            f"{_speed(min(speeds))} to {_speed(max(speeds))}; latency {_microseconds(group)} us, at most "
            f"{slowest.latency * 1e6:.0f} ({_ends(slowest, places, '<->')})"
        )
    for link, part in slow_links(links, places, share).items():
        lines.append(f"  SLOW {_ends(link, places)}: {_speed(link.bandwidth)}, {part:.2f} of the median")
    lines += [f"  DEAD {_ends(link, places)}: {link.failure}" for link in links if link.failure]
    return lines


def _by_kind(links: Sequence[Link], places: Sequence[RankLocation]) -> dict[str, list[Link]]:
    kinds: dict[str, list[Link]] = {}
    for link in links:
        if not link.failure:
            same = places[link.source].node == places[link.target].node
            kinds.setdefault(WITHIN if same else BETWEEN, []).append(link)
    return kinds


def _ends(link: Link, places: Sequence[RankLocation], arrow: str = "->") -> str:
    ends = (f"{places[rank]} (rank {rank})" for rank in (link.source, link.target))
    return f" {arrow} ".join(ends)


def _speed(bytes_per_second: float) -> str:
    bits = 8 * bytes_per_second
    return f"{bits / 1e9:.3g} Gb/s" if bits >= 1e8 else f"{bits / 1e6:.3g} Mb/s"


def _microseconds(links: Sequence[Link]) -> str:
    return f"{statistics.median(link.latency for link in links) * 1e6:.0f}"
