"""A lease has one holder, whatever clocks, networks and schedulers do, and nobody waits for a dead one or itself."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.common.artifacts import lease, process
from services.common.artifacts.attempt import ATTEMPT_VARIABLE
from services.common.artifacts.lease import ChangeWatch, HeldLease, LeaseTaken, LockState, LockWatch, hold_lease
from services.common.errors import ArtifactError, DeviceError, TryAgain
from services.common.testing.fork_server import start_process
from services.common.testing.waiting import wait_until
from services.common.tests.builders import write_foreign_lock

SHORT_LEASE_SECONDS = 0.3
PATIENT = 10**6


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "0123456789abcdef.lock"


@pytest.fixture
def short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LEASE_SECONDS", SHORT_LEASE_SECONDS)
    monkeypatch.setattr(lease, "POLL_SECONDS", 0.01)


def hold(lock: Path, node: str | None = None, attempt: str = "") -> None:
    """Hold the lock until the process is killed."""
    os.environ[ATTEMPT_VARIABLE] = attempt
    if node:
        process.node_name = lambda: node
    with hold_lease(lock):
        threading.Event().wait()


def never_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(seconds: float) -> None:
        raise AssertionError("it waits")

    monkeypatch.setattr(time, "sleep", wait)


def look_for(watch: ChangeWatch, seconds: float) -> LockState:
    deadline = time.monotonic() + seconds
    while (state := watch.poll()) is not LockState.DEAD and time.monotonic() < deadline:
        time.sleep(0.01)
    return state


def test_a_step_of_the_clock_does_not_make_a_live_holder_look_dead(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = start_process(hold, lock)
    wait_until(lock.exists)
    monkeypatch.setattr(time, "time", lambda: 2e9)
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: 2e9)
    os.utime(lock, (0, 0))
    watch = LockWatch(lock)

    assert watch.poll() is LockState.HELD

    holder.kill()
    holder.join()
    assert watch.poll() is LockState.DEAD


def test_the_lock_of_a_killed_process_is_taken_over_before_its_lease_ends(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LEASE_SECONDS", float(PATIENT))
    holder = start_process(hold, lock)
    wait_until(lock.exists)
    holder.kill()
    holder.join()

    with hold_lease(lock) as held:
        assert held.is_held()


def test_a_process_that_nobody_has_reaped_is_dead() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        found = process._read_state(child.pid)
        name = process.ProcessName(process.node_name(), child.pid, found[1] if found else None)
        assert process.is_running(name)

        child.kill()
        wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)
        assert process.is_running(name) is False


def test_a_process_that_got_the_pid_of_a_dead_holder_is_not_taken_for_it(lock: Path) -> None:
    with hold_lease(lock):
        content = lock.read_text()
    lock.write_text(content.replace(" ticks", "1 ticks").replace(f'"pid": {os.getpid()}', f'"pid": {os.getppid()}'))

    assert LockWatch(lock).poll() is LockState.DEAD


@pytest.mark.parametrize("age_seconds", [-PATIENT, 0, PATIENT])
def test_a_holder_on_another_machine_is_dead_once_nothing_changes(
    lock: Path, short_lease: None, age_seconds: float
) -> None:
    """The age of the lock is ignored: the clock of that machine, or of the file server, may be wrong by days."""
    write_foreign_lock(lock)
    os.utime(lock, (time.time() - age_seconds,) * 2)
    watch = LockWatch(lock)
    began = time.monotonic()

    assert watch.poll() is LockState.UNKNOWN
    assert look_for(watch, seconds=60) is LockState.DEAD
    assert time.monotonic() - began >= SHORT_LEASE_SECONDS


def test_a_holder_on_another_machine_is_alive_while_it_changes_its_lock(lock: Path, short_lease: None) -> None:
    """The modification time of the lock, which the file server sets, may stand still."""
    watch = LockWatch(lock)
    began = time.monotonic()
    beats = 0
    while time.monotonic() - began < 3 * SHORT_LEASE_SECONDS:
        write_foreign_lock(lock, beats := beats + 1)
        os.utime(lock, (0, 0))

        assert watch.poll() is LockState.UNKNOWN


def test_a_holder_changes_its_lock_also_while_its_clock_stands_still(
    lock: Path, short_lease: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    with hold_lease(lock) as held:
        seen = {lock.read_bytes()}
        wait_until(lambda: seen.add(lock.read_bytes()) or len(seen) > 3)  # type: ignore[func-returns-value]

        assert held.is_held()
    assert not lock.exists()


def test_a_reader_that_was_stopped_does_not_take_its_own_sleep_for_silence(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader wakes up between two looks, and the holder has changed its lock meanwhile."""
    write_foreign_lock(lock)
    watch = LockWatch(lock)
    watch.poll()
    write_foreign_lock(lock, beats=1)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + PATIENT)

    assert watch.poll() is LockState.UNKNOWN


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[" * 10_000,
        b'{"token": 1, "node": 2, "pid": "x", "started": 3, "attempt": ""}',
        b'{"token": "", "node": "", "pid": 1, "started": "", "attempt": ""}',
        b'{"token": "", "node": "", "pid": 1, "started": ""}',
    ],
)
def test_a_lock_that_names_nobody_is_free_once_it_stays_so(lock: Path, short_lease: None, content: bytes) -> None:
    """A machine that lost power leaves such a lock."""
    lock.write_bytes(content)
    assert LockWatch(lock).poll() is LockState.UNKNOWN

    with hold_lease(lock) as held:
        assert held.is_held()


@pytest.mark.parametrize("number", [errno.EEXIST, errno.EIO, errno.ESTALE])
def test_a_lock_that_was_made_although_the_answer_was_lost_is_not_waited_for(
    lock: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A network file system sends a request again when it hears nothing, and then finds that the lock exists."""
    link = os.link

    def answer_wrongly(source: Path, target: Path) -> None:
        link(source, target)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", answer_wrongly)

    with hold_lease(lock) as held:
        assert held.is_held()
    assert list(lock.parent.iterdir()) == []


def test_a_lock_that_this_process_could_not_remove_is_not_waited_for(
    lock: Path, short_lease: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, target: Path) -> Path:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken, hold_lease(lock):
        broken.setattr(Path, "rename", fail)
        broken.setattr(Path, "unlink", fail)
        broken.setattr(time, "sleep", lambda seconds: None)

    monkeypatch.setattr(lease, "LEASE_SECONDS", float(PATIENT))
    lock.exists()
    with hold_lease(lock) as held:
        assert held.is_held()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_lock_that_cannot_be_read_for_a_while_is_not_stolen(
    lock: Path, short_lease: None, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """After a while the attempt to read it ends with exit code 75."""
    opened, failures = os.open, [PATIENT]

    def fail(path: Any, *arguments: Any, **options: Any) -> int:
        if path == lock and failures[0]:
            failures[0] -= 1
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *arguments, **options)

    write_foreign_lock(lock)
    before = lock.read_bytes()
    monkeypatch.setattr(os, "open", fail)
    with (
        pytest.raises(TryAgain, match=f"{lock}: .*'{os.strerror(number)}' for 0 s"),
        hold_lease(lock),
    ):
        pass
    failures[0] = 0
    assert lock.read_bytes() == before

    lock.unlink()
    with hold_lease(lock) as held:
        with monkeypatch.context() as patient:
            patient.setattr(lease, "LEASE_SECONDS", float(PATIENT))
            failures[0] = 3
            held.lease.require()
        failures[0] = PATIENT
        with pytest.raises(TryAgain, match=os.strerror(number)):
            held.lease.require()
        failures[0] = 0
    assert not lock.exists()


def test_the_lock_of_an_attempt_that_is_over_is_taken_over_at_the_first_look(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler has seen the end of that attempt, so nobody waits for silence."""
    never_wait(monkeypatch)
    monkeypatch.setenv(ATTEMPT_VARIABLE, "trainer-0a1b2c/11")
    write_foreign_lock(lock, attempt="trainer-0a1b2c/9")

    with hold_lease(lock) as held:
        assert held.is_held()
        assert json.loads(lock.read_text())["attempt"] == "trainer-0a1b2c/11"
    assert list(lock.parent.iterdir()) == []


@pytest.mark.parametrize(
    "holder",
    [
        "trainer-0a1b2c/2",  # the same, submitted anew to another head
        "trainer-0a1b2c/3",
        "trainer-ffffff/1",
        "trainer-0a1b2/1",
        "",
        "trainer-0a1b2c",
        "trainer-0a1b2c/-1",
        "trainer-0a1b2c/" + "0" * 5_000,
        "/1",
        ["trainer-0a1b2c/1"],
        None,
        7,
    ],
)
def test_no_other_attempt_is_taken_for_one_that_is_over(
    lock: Path, monkeypatch: pytest.MonkeyPatch, holder: object
) -> None:
    monkeypatch.setenv(ATTEMPT_VARIABLE, "trainer-0a1b2c/2")
    write_foreign_lock(lock, attempt=holder)

    assert LockWatch(lock).poll() is LockState.UNKNOWN
    with pytest.raises(LeaseTaken), hold_lease(lock, waits=False):
        pass


def test_who_is_no_attempt_waits_for_one(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ATTEMPT_VARIABLE, raising=False)
    write_foreign_lock(lock, attempt="trainer-0a1b2c/1")

    assert LockWatch(lock).poll() is LockState.UNKNOWN


@pytest.mark.parametrize("node", ["another-machine", pytest.param(None, marks=pytest.mark.slow)])
def test_an_attempt_that_was_given_up_and_lives_on_holds_nothing_any_more(
    lock: Path, short_lease: None, monkeypatch: pytest.MonkeyPatch, node: str | None
) -> None:
    """The attempt is cut off from its scheduler but not from the file system, and renews its lease all the while, on
    the next attempt's machine or on another.
    """
    holder = start_process(hold, lock, node, "trainer-0a1b2c/1")
    wait_until(lock.exists)
    beaten = lock.read_bytes()
    wait_until(lambda: lock.read_bytes() != beaten)
    monkeypatch.setenv(ATTEMPT_VARIABLE, "trainer-0a1b2c/2")
    with monkeypatch.context() as unwaiting:
        never_wait(unwaiting)
        held_by = hold_lease(lock)
        held = held_by.__enter__()

    assert held.is_held()
    seen = {lock.read_bytes()}
    wait_until(lambda: seen.add(lock.read_bytes()) or len(seen) > 5)  # type: ignore[func-returns-value]
    assert held.is_held(), "the other one still beats"
    assert holder.is_alive()
    held_by.__exit__(None, None, None)
    assert not lock.exists()
    holder.kill()
    holder.join()


def test_of_two_attempts_that_are_both_alive_the_later_alone_may_publish(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ATTEMPT_VARIABLE, "trainer-0a1b2c/1")
    before = HeldLease(lock)
    assert before.try_acquire(LockWatch(lock))
    lease_before = before.lease
    monkeypatch.setattr(process, "node_name", lambda: "the next pod")
    monkeypatch.setenv(ATTEMPT_VARIABLE, "trainer-0a1b2c/2")
    with hold_lease(lock) as after:
        with pytest.raises(TryAgain, match=f"{lock}: .*lost"):
            lease_before.require()
        with pytest.raises(TryAgain, match=f"{lock}: .*lost"):
            before.renew()
        assert not before.beat()
        monkeypatch.setenv(ATTEMPT_VARIABLE, "trainer-0a1b2c/1")
        monkeypatch.setattr(process, "node_name", lambda: "the pod before")
        assert not before.try_acquire(LockWatch(lock)), "it cannot take it back"
        before.release()
        after.lease.require()


@pytest.mark.parametrize("wrong", ["1", "trainer", "trainer/", "trainer/x", "a b/1", "x" * 5_000 + "/1", "a/1234567"])
def test_a_variable_that_names_no_attempt_is_refused(lock: Path, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv(ATTEMPT_VARIABLE, wrong)
    with pytest.raises(DeviceError, match=ATTEMPT_VARIABLE) as refused, hold_lease(lock):
        pass
    assert len(str(refused.value)) < 500


def test_a_lease_is_lost_to_who_took_over_and_that_one_keeps_it(lock: Path) -> None:

    def work() -> None:
        with hold_lease(lock) as held:
            write_foreign_lock(lock)
            assert not held.beat()
            with pytest.raises(TryAgain, match=f"{lock}: .*lost"):
                held.lease.require()
            raise FileNotFoundError("a folder that the other one removed")

    with pytest.raises(TryAgain, match=f"{lock}: .*lost") as caught:
        work()

    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert LockWatch(lock).poll() is LockState.UNKNOWN


def test_a_lease_whose_lock_was_removed_is_lost(lock: Path) -> None:
    with hold_lease(lock) as held:
        lock.unlink()

        assert not held.beat()
        assert not held.is_held()


def change_hands_before_rename(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def change_hands(path: Path, target: Path) -> Path:
        if path == lock:
            write_foreign_lock(lock.with_name("new"))
            lock.with_name("new").replace(lock)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", change_hands)


def test_a_release_never_removes_the_lock_of_somebody_else(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another writer may take over between the last look at the lock and its removal."""
    with hold_lease(lock):
        change_hands_before_rename(lock, monkeypatch)

    assert "another-machine" in lock.read_text()
    assert list(lock.parent.iterdir()) == [lock]


def test_of_two_that_find_the_same_dead_holder_the_later_leaves_the_first_alone(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = start_process(hold, lock)
    wait_until(lambda: list(lock.parent.iterdir()) == [lock])  # without the file that was linked to it
    holder.kill()
    holder.join()
    change_hands_before_rename(lock, monkeypatch)

    with pytest.raises(LeaseTaken), hold_lease(lock, waits=False):
        pass

    assert "another-machine" in lock.read_text()
    assert list(lock.parent.iterdir()) == [lock]


def test_with_a_new_token_the_holder_goes_on_and_what_had_the_old_one_does_not(lock: Path, short_lease: None) -> None:
    with hold_lease(lock) as held:
        old = held.lease
        new = held.renew()

        assert not old.is_held()
        assert new.is_held()
        before = lock.read_bytes()
        wait_until(lambda: lock.read_bytes() != before)
        assert held.is_held()
    assert not lock.exists()


def test_a_lost_lease_gets_no_new_token(lock: Path) -> None:
    with hold_lease(lock) as held:
        write_foreign_lock(lock)
        with pytest.raises(TryAgain, match=f"{lock}: .*lost"):
            held.renew()

    assert "another-machine" in lock.read_text()


def test_who_is_told_to_stop_while_it_waits_leaves_nothing(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_foreign_lock(lock)

    def stop(seconds: float) -> None:
        raise TryAgain("stopped by SIGTERM")

    monkeypatch.setattr(time, "sleep", stop)
    with pytest.raises(TryAgain, match="by SIGTERM"), hold_lease(lock):
        pass

    assert list(lock.parent.iterdir()) == [lock]


def test_a_link_to_nothing_in_the_place_of_a_lock_is_an_error_and_no_writer_to_wait_for(lock: Path) -> None:
    lock.symlink_to("/nowhere/at/all")

    with pytest.raises(ArtifactError, match=f"{lock}: a link to nothing"), hold_lease(lock):
        pass


def test_a_folder_in_the_place_of_a_lock_is_an_error_that_says_so(lock: Path) -> None:
    lock.mkdir()

    with pytest.raises(ArtifactError, match=f"{lock}: a folder"), hold_lease(lock):
        pass


@pytest.mark.parametrize("change", [lambda stat: stat, lambda stat: stat.replace(b"(", b"(a) Z 1 (")])
def test_a_name_of_a_program_does_not_confuse_what_is_read_of_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[bytes], bytes]
) -> None:
    folder = tmp_path / str(os.getpid())
    folder.mkdir()
    (folder / "stat").write_bytes(change(Path(f"/proc/{os.getpid()}/stat").read_bytes()))
    expected = process.this_process().started
    (tmp_path / "self").symlink_to(str(os.getpid()))
    monkeypatch.setattr(process, "_PROC", tmp_path)

    assert process.this_process().started == expected
