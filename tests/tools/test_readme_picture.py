"""README's picture: what it says is what its script simulates now."""

from __future__ import annotations

from tools.readme_picture import DRAWN, PICTURE, simulated, title


def test_the_picture_is_todays() -> None:
    """Its text is text, so its figures can be read. Schedules stand from the longest step to the shortest."""
    picture = PICTURE.read_text(encoding="utf-8")
    steps = [simulated(*drawn) for drawn in DRAWN]
    for drawn, step in zip(DRAWN, steps, strict=True):
        assert f">{title(*drawn, step)}<" in picture
    assert [step.makespan for step in steps] == sorted((step.makespan for step in steps), reverse=True)
