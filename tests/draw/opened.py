"""A page in a browser, and what a person does with it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.image import imread

from tests.draw.chromium import Browser


class Opened:
    """A page that is shown, and what a person does with it."""

    def __init__(self, chromium: Browser, path: Path, page: str, **looks: Any):
        self.browser = chromium
        path.write_text(page, encoding="utf-8")
        chromium.errors.clear()
        chromium.open(path, **looks)
        assert chromium.errors == [] and self.text("#failed") == ""

    def text(self, selector: str) -> str:
        return str(self.browser.evaluate(f"document.querySelector('{selector}')?.textContent ?? 'nothing'"))

    def place(self, cell: str, panel: int = 0) -> tuple[float, float]:
        """The middle of an op, in the window."""
        x, y = self.browser.evaluate(
            f"(() => {{ const panel = page.panels[{panel}], box = boxOf(panel, panel.byCell.get('{cell}'));"
            "const at = panel.canvas.getBoundingClientRect();"
            "return [at.left + box.x + box.wide / 2, at.top + box.y + box.tall / 2]; })()"
        )
        return x, y

    def edges(self, cell: str, panel: int = 0) -> tuple[float, float]:
        """Where an op begins and ends, in the window."""
        x, _ = self.place(cell, panel)
        wide = self.browser.evaluate(f"boxOf(page.panels[{panel}], page.panels[{panel}].byCell.get('{cell}')).wide")
        return x - wide / 2, x + wide / 2

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, right, bottom of an element in the window."""
        left, top, right, bottom = self.browser.evaluate(
            f"(({{left, top, right, bottom}}) => [left, top, right, bottom])"
            f"(document.querySelector('{selector}').getBoundingClientRect())"
        )
        return left, top, right, bottom

    def shows(self, selector: str) -> bool:
        """Whether an element is there to be seen."""
        return bool(self.browser.evaluate(f"document.querySelector('{selector}').checkVisibility()"))

    def focused(self) -> str:
        """The id of what has the focus, or its tag."""
        return str(self.browser.evaluate("document.activeElement.id || document.activeElement.tagName"))

    def picture(self) -> np.ndarray:
        """Return what is in sight: rows, columns, and red, green and blue from 0 to 255."""
        shown = imread(io.BytesIO(self.browser.screenshot()), format="png")
        return np.asarray(np.round(shown[:, :, :3] * 255), dtype=int)

    def colour(self, x: float, y: float) -> str:
        red, green, blue = self.picture()[round(y), round(x)]
        return f"#{red:02x}{green:02x}{blue:02x}"

    def view(self) -> list[float]:
        found: list[float] = self.browser.evaluate("[page.panels[0].view.from, page.panels[0].view.to]")
        return found
