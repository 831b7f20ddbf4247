"""Name the kinds of failure: one class each, every one also the built-in that a caller would expect.

A message says what was wrong, what is allowed, and where to look: lower case, short, no full stop.
"""

from __future__ import annotations

EXIT_FAILURE = 1
EXIT_USAGE = 2  # bad input: nothing was started, nothing was written
EXIT_INTERRUPTED = 130  # SIGINT
EXIT_TERMINATED = 143  # SIGTERM before there was anything to save
EXIT_REQUEUE = 75  # EX_TEMPFAIL: saved, please start the same command again


class HpctrainError(Exception):
    """Base of the errors that this package raises on purpose.

    ``everywhere`` says that all ranks raise the same error together, so that rank 0 may speak for all of them
    and every rank can leave on its own feet; otherwise the raising rank must end the job.
    """

    exit_code = EXIT_FAILURE

    def __init__(self, message: str, *, everywhere: bool = False) -> None:
        super().__init__(message)
        self.everywhere = everywhere


class UsageError(HpctrainError, ValueError):
    """A value given by the user is not allowed."""

    exit_code = EXIT_USAGE


class SettingsError(UsageError):
    """A setting is unknown, of the wrong type or out of range."""


class DataError(UsageError):
    """A corpus or a data file is missing, unreadable or not what it should be."""


class LaunchError(HpctrainError, RuntimeError):
    """The launcher promised something that MPI did not keep, or MPI is missing."""

    exit_code = EXIT_USAGE


class DeviceError(HpctrainError, RuntimeError):
    """The ranks of a node cannot have the devices that they ask for."""

    exit_code = EXIT_USAGE


class MismatchError(HpctrainError, RuntimeError):
    """Ranks disagree about something that must be equal: versions, settings, parameters."""

    exit_code = EXIT_USAGE


class CommunicationError(HpctrainError, RuntimeError):
    """A message or a collective cannot be carried out as asked."""


class DeadlineError(CommunicationError, TimeoutError):
    """Other ranks did not come to a collective in time."""


class CheckpointError(HpctrainError, OSError):
    """A checkpoint cannot be written, or is torn, damaged or not for this model."""

    exit_code = EXIT_USAGE


class LockError(HpctrainError, OSError):
    """Another job works in the same folder."""

    exit_code = EXIT_USAGE


class NonFiniteError(HpctrainError, ArithmeticError):
    """A loss, gradient or parameter is NaN or infinite."""
