"""Work that goes on beside training, one at a time, in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """One piece of work in a thread, started by the constructor.

    A thread and not a process: writing holds Python's lock only between tensors, and a thread shares the memory, ends
    with its process however that ends, and needs no torch of its own.
    """

    def __init__(self, work: Callable[[], None], name: str):
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the work has ended. Raises what the work raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # the thread that waits has it
            self._error = error
