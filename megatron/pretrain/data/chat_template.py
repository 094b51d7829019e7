"""A tokenizer's chat template, rendered within limits.

A template is a program of whoever made the tokenizer. The sandbox of `transformers` keeps it from the machine's files,
but not from running for ever or filling the memory. So it runs in a process of its own, where each conversation may
take so many steps, so much processor time and memory, and may become so much text. Steps are counted, which ends loops
in the same place on any machine; the processor's time is there for what takes long in a single step.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

from helixpipe.common.errors import DataError
from megatron.pretrain.process.lifetime import end_with_parent

Conversation = Sequence[Mapping[str, str]]

_TOO_MANY_STEPS = 3
"""Exit status of the process for a template that takes more than its steps."""


@dataclass(frozen=True)
class TemplateLimits:
    """Limits for rendering one conversation. steps: executed lines of the template, and calls. seconds: processor time.
    bytes: memory beyond the program's own. characters: length of the text beyond that of the messages.
    """

    steps: int = 5_000_000
    seconds: int = 60
    bytes: int = 1 << 30
    characters: int = 1 << 24


class ChatTemplate:
    """Renders conversations by `tokenizer.apply_chat_template`, in a process that is started when it is first needed.

    It is forked: the tokenizer is there already, and nothing but the template's Python runs in it.
    """

    def __init__(self, tokenizer: Any, template: str, limits: TemplateLimits | None = None):
        self._tokenizer, self._template, self._limits = tokenizer, template, limits or TemplateLimits()
        self._pipe: Connection | None = None
        file = template_file(tokenizer)
        self._name = f"the chat template of {file}" if file else "the chat template"

    def render(self, messages: Conversation, go_on: bool) -> str:
        """Render the text of a conversation. go_on: with the prompt that the assistant continues.

        Raises DataError, naming the template's file, if it fails or exceeds a limit.
        """
        if self._pipe is None:
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send((messages, go_on))
            failure, text = self._pipe.recv()
        except (EOFError, OSError):
            raise DataError(f"{self._name} {self._reason()}") from None
        if failure:
            raise DataError(f"{self._name} {failure}")
        return str(text)

    def _start(self) -> None:
        ours, theirs = Pipe()
        with warnings.catch_warnings():  # of a fork beside other threads: the child needs none of what they hold
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            status = 1
            try:
                ours.close()
                _serve(theirs, self._tokenizer, self._template, self._limits)
                status = 0
            finally:
                os._exit(status)  # nothing of the parent's is to be ended here
        theirs.close()
        self._pipe, self._child = ours, child
        self._end = weakref.finalize(self, _end, ours, child, os.getpid())

    def _reason(self) -> str:
        """Return why the process has ended."""
        self._pipe = None
        status = self._end() or 0
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
            return f"takes more than {self._limits.seconds} s of the processor for one conversation"
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _TOO_MANY_STEPS:
            return f"takes more than {self._limits.steps:,} steps for one conversation"
        return f"ended its process (status {status})"


def template_file(tokenizer: Any) -> str | None:
    """Return the file of a tokenizer's chat template; None if it is in none."""
    path = getattr(tokenizer, "path", None)
    if not path:
        return None
    names = ("chat_template.jinja", "tokenizer_config.json")
    return next((str(Path(path, name)) for name in names if Path(path, name).is_file()), str(path))


def _end(pipe: Connection, child: int, parent: int) -> int:
    """End the process, and return its status as `os.waitpid` has it."""
    pipe.close()
    if os.getpid() != parent:  # forked from it later, by others
        return 0
    with suppress(OSError):
        os.kill(child, signal.SIGKILL)  # another process may have the pipe as well
        return os.waitpid(child, 0)[1]
    return 0


# ------------------------------------------------------------------------------------------------------------ the child


def _serve(pipe: Connection, tokenizer: Any, template: str, limits: TemplateLimits) -> None:
    """Answer until the other end of the pipe closes: why it failed, or nothing and the text."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other end's matter
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    end_with_parent()
    _limit_memory(limits.bytes)
    with suppress(EOFError, OSError):
        while True:
            messages, go_on = pipe.recv()
            pipe.send(_answer(tokenizer, template, limits, messages, go_on))


def _answer(
    tokenizer: Any, template: str, limits: TemplateLimits, messages: Conversation, go_on: bool
) -> tuple[str | None, str]:
    steps = 0

    def count(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps > limits.steps:
            os._exit(
                _TOO_MANY_STEPS
            )  # an exception would be dropped while an object's __del__ runs, and tracing with it
        return count if frame.f_code.co_filename == "<template>" else None

    soft = math.ceil(time.process_time()) + limits.seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    text, error = "", None
    sys.settrace(count)
    try:
        text = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=go_on
        )
    except Exception as raised:  # templates raise what they like
        error = raised
    finally:
        sys.settrace(None)
    if isinstance(error, MemoryError):
        return f"takes more than {limits.bytes >> 20} MiB of memory for one conversation", ""
    if error is not None:
        return f"fails ({(str(error).splitlines() or [type(error).__name__])[0]})", ""
    most = limits.characters + sum(len(message["content"]) for message in messages)
    if len(text) > most:
        return f"makes {len(text):,} characters of one conversation, and {most:,} are the most", ""
    return None, str(text)


def _limit_memory(nbytes: int) -> None:
    """Limit the address space to what is used now plus `nbytes`, where the system says how much is used."""
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        soft = pages * resource.getpagesize() + nbytes
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
