"""Exception classes: one per kind of failure, each also derived from the built-in that a caller would expect.

A message says what was wrong, what is allowed, and where to look: lower case, short, no full stop.
"""

from __future__ import annotations

EXIT_FAILURE = 1
EXIT_USAGE = 2  # bad input: nothing was started, nothing was written
EXIT_INTERRUPTED = 130  # SIGINT
EXIT_TERMINATED = 143  # SIGTERM before there was anything to save
EXIT_REQUEUE = 75  # EX_TEMPFAIL: saved, start the same command again


class HpctrainError(Exception):
    """Base of the errors that this package raises on purpose.

    If ``everywhere`` is true, all ranks raise the same error together: rank 0 may print it for all
    of them, and every rank can exit normally. Otherwise the raising rank must end the job.
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
    """A corpus or a data file is missing, unreadable or invalid."""


class LaunchError(HpctrainError, RuntimeError):
    """The ranks that the launcher started and those that MPI sees do not match, or MPI is missing."""

    exit_code = EXIT_USAGE


class DeviceError(HpctrainError, RuntimeError):
    """The ranks of a node cannot get the devices that they request."""

    exit_code = EXIT_USAGE


class MismatchError(HpctrainError, RuntimeError):
    """Ranks disagree about something that must be equal: versions, settings, parameters."""

    exit_code = EXIT_USAGE


class CommunicationError(HpctrainError, RuntimeError):
    """A message or a collective cannot be completed as requested."""


class RankFailedError(CommunicationError):
    """Another rank has died, so an operation with it cannot be completed."""


class LostReplicasError(CommunicationError):
    """So many ranks have died that no replica of a split model is complete, so the run cannot continue without them."""


class DeadlineError(CommunicationError, TimeoutError):
    """Other ranks did not join a collective in time."""


class CheckpointError(HpctrainError, OSError):
    """A checkpoint cannot be written, or is torn, damaged or not for this model."""

    exit_code = EXIT_USAGE


class CheckpointFaultError(CheckpointError):
    """The file system failed while a checkpoint was written, with an error that may be temporary."""

    exit_code = EXIT_FAILURE  # a later start may succeed: a full disk is not bad input


class FileSystemError(HpctrainError, OSError):
    """The file system of a run's folder failed, and so did all retries."""


class LockError(HpctrainError, OSError):
    """Another job uses the same folder."""

    exit_code = EXIT_USAGE


class CorruptionError(MismatchError):
    """Replicas of a weight or moment that were equal differ: a bit has changed, or ranks made different updates."""

    exit_code = EXIT_FAILURE  # a later start, from the last checkpoint, may succeed


class NonFiniteError(HpctrainError, ArithmeticError):
    """A loss, gradient or parameter is NaN or infinite."""
