"""Ends a command: with its exit status, or with one sentence on standard error and the error's exit status."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

from helixpipe.common.errors import UserError
from helixpipe.common.memory import asked_for, out_of_memory
from helixpipe.common.output import complain, give_up, open_streams

FAILED, USER_ERROR, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141
"""Exit statuses; the last two as a shell gives them."""

_OF_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def tell(program: str, error: UserError) -> None:
    """Print a user's mistake, after the program's name."""
    complain(f"{program}: {error}")


def run_command(program: str, command: Callable[[], int], told: Callable[[str, UserError], None] = tell) -> int:
    """Do what a command line asks for and return its exit status.

    A user's mistake (by `told`), an output that cannot be written, too little memory: one sentence on standard error,
    after the program's name. A reader of the output that has seen enough (`| head`), and Ctrl-C: no word.
    """
    open_streams()
    # torch reads it when it is imported. Else its C++ code prints a stack for each connection to a rank that has ended.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        give_up("stdout")
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except UserError as error:
        told(program, error)
        return error.status
    except (MemoryError, OSError, RuntimeError) as error:
        sentence = sentence_of(error)
        if sentence is None:
            raise
        complain(f"{program}: {sentence}")
        if out_of_memory(error) is not None:
            return FAILED
        give_up("stdout")
        return USER_ERROR


def sentence_of(error: BaseException) -> str | None:
    """Return a sentence on what the system refused, if the error says so; else None."""
    if (short := out_of_memory(error)) is not None:
        return f"{short} is out of memory{asked_for(str(error))}."
    if not isinstance(error, OSError):
        return None
    reason = error.strerror or str(error)
    if error.filename is None and error.errno in _OF_OUTPUT:
        return f"cannot write the output: {reason}."
    return f"{error.filename or 'the system refuses'}: {reason}."
