"""A headless Chromium that tests drive: its DevTools protocol over a pipe, so nothing listens anywhere."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars"),
    *("--remote-debugging-pipe", "--disable-background-networking", "--force-color-profile=srgb"),
)

PATIENCE = 120.0
"""Seconds that a page is given for anything."""


def installed() -> str | None:
    """The browser there is. `tools/browser.sh` installs one."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Browser:
    """One page of a browser. errors: what went wrong in it."""

    def __init__(self, send: int, receive: int):
        self._send, self._receive = send, receive
        self._buffer, self._number, self._session = b"", 0, ""
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol. Raises AssertionError if the browser refuses it."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._send, data) :]
        while (answer := self._read()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer["error"]
        result: dict[str, Any] = answer["result"]
        return result

    def close(self) -> None:
        self._session = ""
        self.call("Browser.close")

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            more = os.read(self._receive, 1 << 16)
            assert more, "the browser has ended"
            self._buffer += more
        line, self._buffer = self._buffer.split(b"\0", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(event["params"]["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.errors.append(event["params"]["entry"]["text"])

    def open(self, page: Path | str, width: int = 1200, height: int = 800, dark: bool = False) -> None:
        """Show a file or an address, and wait until its page says that it is ready."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.resize(width, height)
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        self.wait("document.body && (document.body.dataset.ready || !document.getElementById('failed')?.hidden)")
        self.settle()

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )  # fmt: skip

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page; of a promise, what it holds."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, json.dumps(result["exceptionDetails"])
        return result["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until it holds; the browser's own timers ask, so a slow machine only takes longer. A broken page never says
        so: it fails after `PATIENCE` seconds."""
        holds = self.evaluate(
            f"new Promise(done => {{ const end = Date.now() + {1000 * PATIENCE}; const ask = () => ({condition}) ? "
            "done(true) : Date.now() > end ? done(false) : setTimeout(ask, 20); ask(); })"
        )
        assert holds, (condition, self.errors)

    def settle(self) -> None:
        """Until what was asked for has been drawn."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    def click(self, x: float, y: float) -> None:
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            buttons = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {}
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **buttons)
        self.settle()

    def drag(self, x: float, y: float, to: float) -> None:
        """Sideways."""
        self.call("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, button="left", clickCount=1)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=(x + to) / 2, y=y, button="left", buttons=1)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=to, y=y, button="left", buttons=1)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", x=to, y=y, button="left", clickCount=1)
        self.settle()

    def wheel(self, x: float, y: float, by: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=by)
        self.settle()

    def click_on(self, selector: str) -> None:
        """The middle of an element, which is scrolled into view first."""
        quoted = json.dumps(selector)
        self.evaluate(f"document.querySelector({quoted}).scrollIntoView({{block: 'center', behavior: 'instant'}})")
        self.settle()
        box = self.evaluate(f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])"
                            f"(document.querySelector({quoted}).getBoundingClientRect())")  # fmt: skip
        self.click(*box)

    def key(self, key: str, shift: bool = False) -> None:
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        code = {"ArrowRight": 39, "ArrowLeft": 37, "ArrowUp": 38, "ArrowDown": 40, "Enter": 13, "Tab": 9}.get(key, 0)
        common = {"key": key, "modifiers": 8 if shift else 0, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)
        self.settle()

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)
        self.settle()

    def screenshot(self, whole: bool = False) -> bytes:
        """A PNG, of the whole page or of what is in sight."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(found["data"])


@contextmanager
def browser() -> Iterator[Browser]:
    """One process, which ends with the context."""
    program = installed()
    assert program is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        ends = [*os.pipe(), *os.pipe()]
        # Away from 3 and 4, which the shell redirects.
        read_commands, send, receive, write_answers = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
        for end in ends:
            os.close(end)
        line = f'exec "$@" 3<&{read_commands} 4>&{write_answers}'
        arguments = ["bash", "-c", line, "bash", program, *FLAGS, f"--user-data-dir={home}/profile", "about:blank"]
        with subprocess.Popen(
            arguments, pass_fds=(read_commands, write_answers), env=os.environ | {"HOME": home},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        ) as process:  # fmt: skip
            os.close(read_commands)
            os.close(write_answers)
            try:
                page = Browser(send, receive)
                yield page
                page.close()
                process.wait(60)
            finally:
                process.kill()
                os.close(send)
                os.close(receive)
