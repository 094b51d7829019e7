"""Errors a user can act on. Entry points print their one sentence, not a traceback."""


class UserError(ValueError):
    """A mistake in flags, files or a program of one's own; the message is one sentence that says what would be
    valid. status: the exit status of a program that ends with it."""

    status = 2


class ScheduleError(UserError, RuntimeError):
    """A schedule cannot be built for this shape (ranks, microbatches, layers, options).

    A RuntimeError as well, which megatron-core's own schedules raise there.
    """


class ProgramError(UserError):
    """A program (built or loaded from a CSV file) is malformed, incomplete or cannot run."""


class DataError(UserError):
    """Data files are missing, corrupt, or do not fit the flags."""


class CheckpointError(UserError):
    """A checkpoint cannot be read or written."""


class CorruptionError(UserError):
    """Bits are not what they should be: in memory, in a message, or as a rank computed them."""

    status = 3


class LostSaveError(CheckpointError):
    """Training completed, but its result could not be saved."""

    status = 1
