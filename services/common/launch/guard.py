"""A small process beside every command that ends the command, or its processes, where the command itself hangs.

The C code of the command's signal handler writes every stop signal to `python -m services.common.launch.guard`, so that
the guard acts even where the command's main thread never returns to Python. The guard runs in a session of its own, has
no thread, and reads only files of /proc until the command has ended. It has four duties:

- After a second stop signal the command has END_SECONDS to end in order. Then the guard has a thread of the command end
  it with its exit code, and after KILL_SECONDS the guard kills it.
- The guard kills a process of the command that has been stopped for STOPPED_SECONDS: the command notices a lost process
  and starts it again, but would wait for a frozen one. While the command itself is stopped, as by Ctrl-Z, the guard
  leaves its processes alone.
- When a stop signal is pending for a stopped command, the guard sends SIGCONT, as a shell does: otherwise nothing would
  handle the signal.
- When the command has ended, in any way, the guard kills its remaining family and removes its private folders.

A guard without `heed_signals` has the last duty only.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing import current_process
from pathlib import Path
from signal import SIGINT, SIGTERM
from threading import Thread, main_thread

import psutil

from services.common.launch.process_family import (
    MARK,
    STOPPED_SECONDS,
    end_family,
    find_family,
    find_stopped,
    is_stopped,
)
from services.common.process.stop_signals import (
    END_SECONDS,
    REPEAT_SECONDS,
    STOP_SIGNALS,
    call_before_forced_end,
    end_at_once,
    say_if_heard,
)
from services.common.process.stopwatch import Stopwatch

KILL_SECONDS = END_SECONDS + 1.0
POLL_SECONDS = 0.25
LOOK_SECONDS = 0.02
FAMILY_SECONDS = 2.0
"""Seconds between two searches for frozen processes."""
FAMILY_END_SECONDS = 2.0
"""Seconds for which a command that ends searches for remaining processes of its family."""
LEFT_SECONDS = 30.0
"""Seconds for which the guard searches after the command's end: a process with much memory takes seconds to die."""

GUARD_THREAD = "guard"
"""Name of the command's thread that waits for messages from the guard."""

_INTERRUPT = signal.SIGURG
"""Signal that interrupts a system call of the main thread. Nothing else uses SIGURG, and its handler does nothing."""
_SHARED_MEMORY = Path("/dev/shm")  # nosec B108 # only measured and swept
_END = b"end "
_NOTE = b"note"
_SESSION = b"session "
_HEED = b"heed"
_MESSAGE_BYTES = 64
# Both types keep the boundaries of messages. macOS has only SOCK_DGRAM.
_SOCKET_TYPE = socket.SOCK_SEQPACKET if sys.platform == "linux" else socket.SOCK_DGRAM

_guards: list[Guard] = []
"""The guard of this process, if it has one."""


class Guard:
    """The command's end of its guard."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(8)
        self._sessions: set[int] = set()
        self._socket, self._theirs = socket.socketpair(socket.AF_UNIX, _SOCKET_TYPE)
        command = [sys.executable, "-m", __name__, str(self._theirs.fileno()), str(os.getpid()), self.mark]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=[self._theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # otherwise a reader of the command's output would wait for the guard too
            start_new_session=True,
        )
        # The guard's end of the socket stays open in the command too: without it a signal handler's write to a killed
        # guard would fail, and Python would print the error.
        os.environ[MARK] = self.mark
        current_process()._config["semprefix"] = f"/{semaphore_prefix(self.mark)}"  # type: ignore[attr-defined]

    def watch_session(self, session: int) -> None:
        """Make the processes of this session members of the command's family."""
        self._sessions.add(session)
        self._socket.send(_SESSION + str(session).encode())

    def heed_signals(self) -> None:
        """Let the guard act on stop signals and on frozen processes. Has to be called in the main thread."""
        self._socket.send(_HEED)
        self._socket.setblocking(False)  # a signal handler must not wait
        Thread(target=_obey, args=(self._socket,), name=GUARD_THREAD, daemon=True).start()
        signal.signal(_INTERRUPT, lambda signum, frame: None)
        signal.set_wakeup_fd(self._socket.fileno(), warn_on_full_buffer=False)
        call_before_forced_end(self.leave_rest)

    def end_family(self) -> None:
        """Kill all processes that this one has started, except the guard."""
        end_family(os.getpid(), self._sessions, self.mark, FAMILY_END_SECONDS, spared=[self._process.pid])

    def leave_rest(self) -> None:
        """Leave the family to the guard, which kills it after this process has ended; where the guard was frozen or
        killed itself, kill the family now.
        """
        if self._process.poll() is not None or is_stopped(self._process.pid):
            self._process.kill()
            self.end_family()

    def end(self) -> None:
        """Kill all processes that this one has started, the guard last, and remove their private folders."""
        self.end_family()
        _remove_folders()
        self._process.kill()
        self._process.wait()


def start_guard() -> Guard:
    """The guard of this process; the first call starts it."""
    if not _guards:
        _guards.append(Guard())
    return _guards[0]


def end_guard() -> None:
    """End the guard, if there is one, and all other processes of this one, which is about to end in order."""
    if _guards:
        _guards.pop().end()


def _obey(channel: socket.socket) -> None:
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while True:
        poll.poll()
        message = channel.recv(_MESSAGE_BYTES)
        if message.startswith(_END):
            end_at_once(int(message.removeprefix(_END)))
        # The kernel may have delivered the stop signal to any thread, but Python handles it in the main thread alone:
        # interrupt the call in which the main thread waits.
        with suppress(ProcessLookupError):
            signal.pthread_kill(main_thread().ident or 0, _INTERRUPT)


class _CommandWatch:
    """The guard's end: watches the command."""

    def __init__(self, command: int, mark: str, channel: socket.socket) -> None:
        self._command, self._mark, self._channel = command, mark, channel
        self._sessions: set[int] = set()
        self._is_heeding = False
        self._first_at: float | None = None
        self._second_at: float | None = None
        self._signum = 0
        self._has_sent_end = self._is_killed = False
        self._stopped: dict[int, Stopwatch] = {}
        self._family_due = 0.0

    def run(self) -> None:
        """Watch until the command and its family have ended."""
        with suppress(ConnectionError):  # the command ended before it had read all messages
            self._watch()
        deadline = time.monotonic() + LEFT_SECONDS
        while os.getppid() == self._command and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)  # the command is closing its files, and holds their locks until then
        end_family(self._command, self._sessions, self._mark, LEFT_SECONDS)
        _remove_folders()
        for path in _SHARED_MEMORY.glob(f"sem.{semaphore_prefix(self._mark)}-*"):
            path.unlink(missing_ok=True)

    def _watch(self) -> None:
        while os.getppid() == self._command:
            if select.select([self._channel], [], [], POLL_SECONDS)[0]:
                message = self._channel.recv(_MESSAGE_BYTES)
                if not message:
                    break
                self._take(message)
            if self._is_heeding:
                self._end_command()
                if is_stopped(self._command):
                    self._wake_command()
                else:
                    self._kill_frozen()

    def _take(self, message: bytes) -> None:
        if message.startswith(_SESSION):
            self._sessions.add(int(message.removeprefix(_SESSION)))
        elif message == _HEED:
            self._is_heeding = True
        elif message[0] in STOP_SIGNALS:
            self._channel.send(_NOTE)
            now = time.monotonic()
            if self._first_at is None:
                self._first_at = now
            elif self._second_at is None and now - self._first_at > REPEAT_SECONDS:
                self._second_at, self._signum = now, message[0]

    def _end_command(self) -> None:
        if self._second_at is None:
            return
        seconds = time.monotonic() - self._second_at
        if seconds > END_SECONDS and not self._has_sent_end:
            self._has_sent_end = True
            self._channel.send(_END + str(self._signum).encode())
        if seconds > KILL_SECONDS and not self._is_killed:
            self._is_killed = True
            _say("killed, because it did not end after the second signal. Run the same command again to continue.")
            with suppress(ProcessLookupError):
                os.kill(self._command, signal.SIGKILL)

    def _wake_command(self) -> None:
        """Send SIGCONT to a stopped command that has a pending stop signal, and to its group: a shell stops both."""
        self._stopped.clear()
        if _has_stop_signal(self._command):
            with suppress(ProcessLookupError):
                os.killpg(os.getpgid(self._command), signal.SIGCONT)
                os.kill(self._command, signal.SIGCONT)

    def _kill_frozen(self) -> None:
        now = time.monotonic()
        if now < self._family_due:
            return
        self._family_due = now + FAMILY_SECONDS
        stopped = find_stopped()
        family = find_family(self._command, self._sessions, self._mark) if stopped else []
        frozen = {process.pid: process for process in family if process.pid in stopped}
        self._stopped = {pid: self._stopped.get(pid, Stopwatch()) for pid in frozen}
        for pid, process in frozen.items():
            if self._stopped[pid].look(lasts=True) >= STOPPED_SECONDS:
                with suppress(psutil.Error):
                    name = f"{process.name()} (pid {pid})"
                    process.kill()
                    _say(f"{name}: killed, because it was stopped for {STOPPED_SECONDS:.0f} s and others wait for it.")


def _remove_folders() -> None:
    """Remove the private folders that no living process uses."""
    # Imported here, because the guard's start must not slow the command's.
    from services.common.errors import StorageError  # noqa: PLC0415
    from services.common.process.private_folder import private_base, remove_abandoned  # noqa: PLC0415

    for is_short in (True, False):
        with suppress(StorageError):  # a base that cannot be made, as on a full disk, has no folder to remove
            remove_abandoned(private_base(is_short))


def semaphore_prefix(mark: str) -> str:
    """Prefix of the names of semaphores that `multiprocessing` makes in /dev/shm for the command with this mark."""
    return f"millrace-{mark}"


def _has_stop_signal(pid: int) -> bool:
    """Whether a stop signal waits for this stopped process. Always False on systems without /proc.

    The signal is pending, or a thread was stopped between taking the signal and running its handler: then this signal
    alone is blocked in that thread.
    """
    with suppress(OSError):
        status = _read_status(Path(f"/proc/{pid}/status"))
        if (status["SigPnd"] | status["ShdPnd"]) & _mask(*STOP_SIGNALS):
            return True
        blocked = [_read_status(path)["SigBlk"] for path in Path(f"/proc/{pid}/task").glob("*/status")]
        return any(each & _mask(*STOP_SIGNALS) in (_mask(SIGTERM), _mask(SIGINT)) for each in blocked)
    return False


def _read_status(path: Path) -> dict[str, int]:
    """The signal sets of a process or thread by their names in proc_pid_status(5); bit n - 1 stands for signal n."""
    lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    fields = (line.split(":", 1) for line in lines if line.startswith(("Sig", "Shd")))
    return {name: int(value, 16) for name, value in fields if name != "SigQ"}


def _mask(*signums: int) -> int:
    return sum(1 << (signum - 1) for signum in signums)


def _say(text: str) -> None:
    say_if_heard(f"millrace: {text}\n")


def main(arguments: list[str]) -> None:
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    descriptor, command, mark = arguments
    with socket.socket(fileno=int(descriptor)) as channel:
        _CommandWatch(int(command), mark, channel).run()


if __name__ == "__main__":
    main(sys.argv[1:])
