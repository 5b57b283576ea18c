"""A small process beside a command that ends what the command cannot end itself.

`python -m services.common.launch.guard` is told of every stop signal by the C code that handles it in the command, so
it does its part also where the command's main thread never gets back to Python. It is in a session of its own, has no
thread, and reads no file but those of /proc until the command is gone. What it does:

- After a second stop signal it lets the command END_SECONDS to end in order and then has a thread of it end it with its
  exit code; a command that is still there after KILL_SECONDS is killed.
- A process of the command's that has been stopped for STOPPED_SECONDS is killed: what is lost is noticed and started
  again, what is frozen is only waited for. While the command itself is stopped, as by Ctrl-Z, it lets them all be.
- A command that is stopped gets a SIGCONT with a stop signal, as a shell gives it one, or nothing would handle that.
- When the command is gone, however it ended, all that is left of its family is killed, and its private folders go.

A guard that did not `heed_signals` does the last of these alone.
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
    Stopwatch,
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

KILL_SECONDS = END_SECONDS + 1.0
POLL_SECONDS = 0.25
LOOK_SECONDS = 0.02
FAMILY_SECONDS = 2.0
"""Seconds between two looks for frozen processes."""
FAMILY_END_SECONDS = 2.0
"""Seconds for which a command that ends looks for what is left of its family."""
LEFT_SECONDS = 30.0
"""Seconds for which the guard does, once the command is gone: processes with much memory take some to die."""

_INTERRUPT = signal.SIGURG
"""Nobody sends it here, and a handler that does nothing is enough for it to interrupt a call."""
_SHARED_MEMORY = Path("/dev/shm")
_END = b"end "
_NOTE = b"note"
_SESSION = b"session "
_HEED = b"heed"
_MESSAGE_BYTES = 64
# Both keep messages apart; macOS has the second one alone.
_SOCKET_TYPE = socket.SOCK_SEQPACKET if sys.platform == "linux" else socket.SOCK_DGRAM

_guards: list[Guard] = []
"""The one of this process: none or one."""


class Guard:
    """The command's side of its guard."""

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
            stdout=subprocess.DEVNULL,  # or who reads what the command prints would wait for the guard too
            start_new_session=True,
        )
        # Its end of the socket stays open here too: a write from a signal's handler to a guard that was killed would
        # fail, and Python would print that.
        os.environ[MARK] = self.mark
        current_process()._config["semprefix"] = f"/{semaphore_prefix(self.mark)}"  # type: ignore[attr-defined]

    def watch_session(self, session: int) -> None:
        """Count the processes of this session to the command's family."""
        self._sessions.add(session)
        self._socket.send(_SESSION + str(session).encode())

    def heed_signals(self) -> None:
        """Let the guard hear of stop signals and of frozen processes. To be called in the main thread."""
        self._socket.send(_HEED)
        self._socket.setblocking(False)  # as a handler of signals must not wait
        Thread(target=_do_as_told, args=(self._socket,), name="guard", daemon=True).start()
        signal.signal(_INTERRUPT, lambda signum, frame: None)
        signal.set_wakeup_fd(self._socket.fileno(), warn_on_full_buffer=False)
        call_before_forced_end(self.leave_rest)

    def end_family(self) -> None:
        """Kill all that this process has started, except for the guard."""
        end_family(os.getpid(), self._sessions, self.mark, FAMILY_END_SECONDS, spared=[self._process.pid])

    def leave_rest(self) -> None:
        """Leave to the guard what is left when this process has ended, or do it here where it cannot, because it was
        frozen or killed itself.
        """
        if self._process.poll() is not None or is_stopped(self._process.pid):
            self._process.kill()
            self.end_family()

    def end(self) -> None:
        """Kill all that this process has started, the guard at last, and remove the private folders that they used."""
        self.end_family()
        _remove_folders()
        self._process.kill()
        self._process.wait()


def start_guard() -> Guard:
    """The guard of this process, which is started by the first call."""
    if not _guards:
        _guards.append(Guard())
    return _guards[0]


def end_guard() -> None:
    """End the guard of this process, if it has one, and what else it has started: it is about to end in order."""
    if _guards:
        _guards.pop().end()


def _do_as_told(channel: socket.socket) -> None:
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while True:
        poll.poll()
        told = channel.recv(_MESSAGE_BYTES)
        if told.startswith(_END):
            end_at_once(int(told.removeprefix(_END)))
        # The kernel may have given the signal to any thread, as it does in a process that was stopped. What it
        # interrupts is the main thread's to go on with: only there Python handles the signal.
        with suppress(ProcessLookupError):
            signal.pthread_kill(main_thread().ident or 0, _INTERRUPT)


class _Watch:
    """The guard's side: what it knows of the command."""

    def __init__(self, command: int, mark: str, channel: socket.socket) -> None:
        self._command, self._mark, self._channel = command, mark, channel
        self._sessions: set[int] = set()
        self._is_heeding = False
        self._first_at: float | None = None
        self._second_at: float | None = None
        self._signum = 0
        self._is_told = self._is_killed = False
        self._stopped: dict[int, Stopwatch] = {}
        self._family_due = 0.0

    def run(self) -> None:
        """Until the command is gone, and what it left too."""
        with suppress(ConnectionError):  # it went with messages unread
            self._watch()
        deadline = time.monotonic() + LEFT_SECONDS
        while os.getppid() == self._command and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)  # it still closes its files one by one, and holds locks until then
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
        if seconds > END_SECONDS and not self._is_told:
            self._is_told = True
            self._channel.send(_END + str(self._signum).encode())
        if seconds > KILL_SECONDS and not self._is_killed:
            self._is_killed = True
            _say("Killed after the second signal: it did not end by itself. The same command continues.")
            with suppress(ProcessLookupError):
                os.kill(self._command, signal.SIGKILL)

    def _wake_command(self) -> None:
        """Wake a stopped command for which a stop signal waits, and its group, which a shell stops together."""
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
                    told = f"{process.name()} (pid {pid})"
                    process.kill()
                    _say(f"{told}: killed, because it was stopped for {STOPPED_SECONDS:.0f} s and others wait for it.")


def _remove_folders() -> None:
    """Remove the private folders that no living process uses."""
    # Here, because the guard imports as little as it can while the command starts.
    from services.common.process.private_folder import private_base, remove_abandoned  # noqa: PLC0415

    for is_short in (True, False):
        remove_abandoned(private_base(is_short))


def semaphore_prefix(mark: str) -> str:
    """Prefix of the names of the command's semaphores, which `multiprocessing` makes in /dev/shm."""
    return f"millrace-{mark}"


def _has_stop_signal(pid: int) -> bool:
    """Does a stop signal wait for this process, which is stopped? Unknown, and so no, on systems without /proc.

    It is pending, or a thread has just taken it that was stopped before its handler ran: then it alone is blocked.
    """
    with suppress(OSError):
        status = _read_status(Path(f"/proc/{pid}/status"))
        if (status["SigPnd"] | status["ShdPnd"]) & _mask(*STOP_SIGNALS):
            return True
        blocked = [_read_status(path)["SigBlk"] for path in Path(f"/proc/{pid}/task").glob("*/status")]
        return any(each & _mask(*STOP_SIGNALS) in (_mask(SIGTERM), _mask(SIGINT)) for each in blocked)
    return False


def _read_status(path: Path) -> dict[str, int]:
    """The sets of signals of a process or thread, where bit n - 1 stands for signal n."""
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
        _Watch(int(command), mark, channel).run()


if __name__ == "__main__":
    main(sys.argv[1:])
