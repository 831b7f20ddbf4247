from __future__ import annotations

import inspect

import pytest

from hpctrain import errors

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
BUILTINS = (ValueError, RuntimeError, OSError, TimeoutError, ArithmeticError)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not errors.HpctrainError])
def test_every_error_is_an_hpctrain_error_and_a_builtin(kind: type[errors.HpctrainError]) -> None:
    assert issubclass(kind, errors.HpctrainError)
    assert issubclass(kind, BUILTINS)
    assert kind.exit_code in (errors.EXIT_FAILURE, errors.EXIT_USAGE)
    assert kind.__doc__


@pytest.mark.parametrize("kind", KINDS)
def test_the_message_is_kept_and_everywhere_is_optional(kind: type[errors.HpctrainError]) -> None:
    assert str(kind("what was wrong")) == "what was wrong"
    assert not kind("x").everywhere and kind("x", everywhere=True).everywhere


def test_after_a_fault_of_the_file_system_a_job_restarts() -> None:
    faults = (errors.FileSystemError, errors.CheckpointFaultError)
    assert {kind.exit_code for kind in faults} == {errors.EXIT_FAILURE}
    assert errors.CheckpointError.exit_code == errors.EXIT_USAGE


def test_exit_codes_differ() -> None:
    assert (errors.EXIT_FAILURE, errors.EXIT_USAGE, errors.EXIT_REQUEUE) == (1, 2, 75)
