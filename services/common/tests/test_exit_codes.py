"""A program of Millrace ends with an exit code and a message that a person outside sees."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from services.common.errors import (
    EXIT_INTERRUPTED,
    ArtifactError,
    DeviceError,
    MillraceError,
    RecipeError,
    StorageError,
    TryAgain,
    WorkersLost,
)
from services.common.process.entry_point import exit_code_for, exit_code_of
from services.common.process.shutdown import (
    DRAIN_TIMEOUT_VARIABLE,
    Stopped,
    check_grace_period,
    on_stop_signal,
    raise_stopped,
)
from services.common.testing.artifacts import publish
from services.common.testing.commands import REPOSITORY, start_python
from services.common.testing.recipes import make_recipe

STAGE = [sys.executable, "-m", "services.common.tests.stage"]


def start(*arguments: str | Path, under: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*under, *STAGE, *map(str, arguments)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [(RecipeError, 2), (ArtifactError, 3), (DeviceError, 4), (StorageError, 5), (TryAgain, 75), (WorkersLost, 75)],
)
def test_every_error_has_its_exit_code_and_prints_its_message(
    error: type[MillraceError], exit_code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> int:
        raise error("what, where and the next command")

    assert exit_code_of(work) == exit_code
    assert capsys.readouterr().err == "millrace: what, where and the next command\n"


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        *((OSError(number, "", "/fsx/x"), 5) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)),
        *((OSError(number, "", "/fsx/x"), 75) for number in (errno.ESTALE, errno.EIO, errno.ETIMEDOUT)),
        *((OSError(number, "", "/fsx/x"), 2) for number in (errno.ENOENT, errno.ENAMETOOLONG)),
        *((OSError(number, "", "/fsx/x"), 4) for number in (errno.EMFILE, errno.ENOMEM)),
        (MemoryError(), 4),
        (json.JSONDecodeError("expected a value", "", 0), 3),
        (tomllib.TOMLDecodeError("expected a value"), 3),
        (KeyboardInterrupt(), 130),
        (Stopped(signal.SIGTERM, "stopped"), 75),
        (ConnectionResetError(errno.ECONNRESET, ""), 1),
        (KeyError("a bug"), 1),
    ],
    ids=repr,
)
def test_an_error_of_python_or_a_library_has_an_exit_code(error: BaseException, exit_code: int) -> None:
    assert exit_code_for(error) == exit_code


def test_a_stop_that_a_library_turns_into_its_own_error_is_still_a_stop() -> None:
    def read() -> int:
        try:
            signal.raise_signal(signal.SIGINT)
        except Stopped:
            raise ValueError("of the library, as if its file were closed") from None
        return 0

    with on_stop_signal(lambda signum: raise_stopped(signum, "stopped")):
        assert exit_code_of(read) == EXIT_INTERRUPTED


def test_any_name_can_be_printed_on_a_terminal_of_any_encoding(tmp_path: Path) -> None:
    publish(tmp_path / "é", make_recipe(tmp_path))

    command = ["-m", "services.common.artifacts", "verify", str(tmp_path / "é")]
    process = start_python(command, PYTHONIOENCODING="ascii")
    printed, _ = process.communicate()

    assert (process.returncode, "\\xe9" in printed) == (0, True), printed


@pytest.mark.parametrize(
    ("behaviour", "number", "exit_code"),
    [
        ("wait", signal.SIGINT, 130),
        ("wait", signal.SIGTERM, 75),
        ("load", signal.SIGTERM, 75),
        ("defer", signal.SIGTERM, 75),
        ("call-back", signal.SIGTERM, 75),
    ],
)
def test_a_signal_has_its_exit_code_and_no_traceback(behaviour: str, number: signal.Signals, exit_code: int) -> None:
    stage = start(behaviour)
    assert stage.stdout is not None
    assert stage.stdout.readline() == "ready\n"
    stage.send_signal(number)
    _, printed = stage.communicate()

    assert stage.returncode == exit_code
    assert printed.startswith("millrace: ")
    assert "Traceback" not in printed


def test_a_signal_that_comes_twice_at_once_is_one_request() -> None:
    """`timeout` sends it to its child, and to the group that the child is in; what is being cleaned up goes on."""
    stage = start("clean-up")
    assert stage.stdout is not None
    assert stage.stdout.readline() == "ready\n"
    stage.send_signal(signal.SIGTERM)
    assert stage.stdout.readline() == "cleaning up\n"
    stage.send_signal(signal.SIGTERM)
    output, printed = stage.communicate()

    assert (stage.returncode, output) == (75, "clean\n")
    assert printed.count("Stopped by SIGTERM") == 1


def test_a_signal_that_the_command_was_started_to_ignore_stays_ignored() -> None:
    stage = start("wait", under=("sh", "-c", 'trap "" HUP; exec "$@"', "sh"))
    assert stage.stdout is not None
    assert stage.stdout.readline() == "ready\n"
    stage.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        stage.wait(timeout=1)
    stage.send_signal(signal.SIGTERM)
    stage.communicate()

    assert stage.returncode == 75


def test_a_terminal_that_closes_ends_the_command_like_sigterm() -> None:
    """The terminal's reader has gone when the signal comes: nothing can be printed."""
    terminal, side = os.openpty()
    stage = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *STAGE, "wait"], cwd=REPOSITORY, stdin=side, stdout=side, stderr=side
    )
    os.close(side)
    assert os.read(terminal, 100).strip() == b"ready"
    os.close(terminal)

    assert stage.wait() == 75


def test_a_bug_keeps_its_traceback_and_ends_with_1() -> None:
    stage = start("bug")
    _, printed = stage.communicate()

    assert stage.returncode == 1
    assert "Traceback" in printed
    assert "KeyError: 'nowhere'" in printed


@pytest.mark.parametrize("behaviour", ["one-line", "many-lines"])
def test_a_reader_that_has_gone_is_no_error(behaviour: str) -> None:
    """`head` has read enough. What is written fails at once, or when the buffer is flushed at the end."""
    reader, writer = os.pipe()
    os.close(reader)
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    stage = subprocess.Popen([*STAGE, behaviour], cwd=REPOSITORY, stdout=writer, stderr=subprocess.PIPE, env=buffered)
    os.close(writer)
    _, printed = stage.communicate()

    assert (stage.returncode, printed) == (0, b"")


@pytest.mark.parametrize(
    ("notice", "seconds", "told"),
    [("300", 100.0, ()), ("300", 121.0, ("121.0 s", "300 s", "363 s")), (None, 1e6, ())],
)
def test_a_checkpoint_that_is_too_slow_for_the_notice_of_a_stop_is_said(
    monkeypatch: pytest.MonkeyPatch, notice: str | None, seconds: float, told: tuple[str, ...]
) -> None:
    """A laptop gives no notice, and all the time there is."""
    monkeypatch.delenv(DRAIN_TIMEOUT_VARIABLE, raising=False)
    if notice:
        monkeypatch.setenv(DRAIN_TIMEOUT_VARIABLE, notice)

    warning = check_grace_period(seconds)

    assert bool(warning) == bool(told)
    assert all(number in warning for number in told)
