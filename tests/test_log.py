from __future__ import annotations

import io
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr

import pytest

from hpctrain import log


@pytest.fixture(autouse=True)
def unconfigured() -> Iterator[None]:
    """Restore the package's logger after the test."""
    handlers, level, propagate = list(log.logger.handlers), log.logger.level, log.logger.propagate
    yield
    log.logger.handlers[:] = handlers
    log.logger.setLevel(level)
    log.logger.propagate = propagate


def test_without_configuration_nothing_is_logged() -> None:
    code = "from hpctrain.log import logger; logger.info('a'); logger.debug('b')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


def test_the_root_logger_is_not_changed() -> None:
    before = list(logging.getLogger().handlers)
    log.configure()
    assert logging.getLogger().handlers == before


def test_rank_0_logs_without_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(0)
    log.logger.info("step %d", 7)
    log.logger.debug("hidden")
    assert capsys.readouterr().err == "step 7\n"


def test_other_ranks_log_only_warnings_with_rank_and_host(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(3)
    log.logger.info("hidden")
    log.logger.warning("late")
    assert capsys.readouterr().err == f"[rank 3 {socket.gethostname()}] warning: late\n"


@pytest.mark.parametrize("rank, text", [(0, "debug: fine\n"), (1, "")])
def test_verbose_lowers_the_level_by_one(capsys: pytest.CaptureFixture[str], rank: int, text: str) -> None:
    log.configure(rank, verbose=True)
    log.logger.debug("fine")
    assert capsys.readouterr().err == text


def test_configuring_again_replaces_the_handler(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(0)
    log.configure(0)
    log.logger.info("once")
    assert capsys.readouterr().err == "once\n"


def test_messages_go_to_the_current_stderr() -> None:
    log.configure(0)
    with redirect_stderr(io.StringIO()) as later:
        log.logger.info("here")
    assert later.getvalue() == "here\n"


def test_messages_are_written_above_a_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    from tqdm import tqdm

    log.configure(0)
    with tqdm(total=2, file=sys.stderr, mininterval=0) as bar:
        bar.update()
        log.logger.info("in between")
    assert "\nin between\n" in capsys.readouterr().err.replace("\r", "\n")


@pytest.mark.parametrize("rank, text", [(0, "warning: a\nwarning: b\n"), (1, "")])
def test_a_warning_is_given_once_and_waits_for_the_rank(rank: int, text: str) -> None:
    code = (
        "from hpctrain import log; log.warn_once('a'); log.warn_once('a'); "
        f"log.configure({rank}); log.warn_once('a'); log.warn_once('b'); log.warn_once('b')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == text
