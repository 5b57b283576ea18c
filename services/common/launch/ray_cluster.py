"""The Ray cluster that this process is connected to: started in place or joined, watched, and left.

Without RAY_ADDRESS a Ray cluster of this machine alone is started in place: bound to loopback, in a session of its own,
which a signal to the command's process group does not reach, and ending with the program.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, ClassVar

import ray

from services.common.errors import DeviceError, MillraceError, TryAgain
from services.common.launch.batch.ray_process import OBJECT_STORE_BYTES
from services.common.launch.cluster_address import AUTO, cluster_address, split_address
from services.common.launch.guard import start_guard
from services.common.process.entry_point import call_at_end
from services.common.process.private_folder import new_name, private_folder
from services.common.process.stop_signals import deferring_stop_signals

JOIN_SECONDS = 60.0
POLL_SECONDS = 1.0
LOST_SECONDS = 20.0
PROBE_SECONDS = 10.0
SHUTDOWN_SECONDS = 10.0
"""Seconds in which Ray's library has to leave the cluster: it waits for what does not answer without a limit."""
LOST_HEAD_FAILURES = 4  # Ray's library ends the process after 60 s without the head


_starts: list[_Call] = []
"""The start on this machine that was begun: none or one."""


def begin_start(num_cpus: int) -> None:
    """Where no cluster is joined, start one on this machine while the caller goes on; `connect` waits for it."""
    if cluster_address() is None and not ray.is_initialized() and not _starts:
        # On Linux the kernel kills Ray's processes when the thread ends that started them.
        _starts.append(_Call(partial(_connect, num_cpus, {}), is_thread_kept=True))


def connect(num_cpus: int, resources: Mapping[str, float] | None = None) -> None:
    """Join the cluster of RAY_ADDRESS, or start one on this machine that has so much, in Ray's view."""
    if _starts and (failure := _starts.pop().wait()):
        raise failure
    if ray.is_initialized():
        _watch.require_ray()
        return
    _connect(num_cpus, resources or {})


def _connect(num_cpus: int, resources: Mapping[str, float]) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "runtime_env": {"env_vars": {"PYTHONPATH": _python_path()}},
    }
    address = cluster_address()
    if address is None:
        _start_here(options, num_cpus, resources)
    else:
        _join(address, options)
    logging.getLogger("ray").setLevel(logging.ERROR)


@contextmanager
def calling_ray() -> Iterator[None]:
    """For calls into Ray by the main thread: Ray drops what a signal handler raises there, and prints it.

    Raises `TryAgain` when Ray is lost.
    """
    with deferring_stop_signals():
        try:
            _watch.require_ray()
            yield
        except MillraceError:
            raise
        except Exception as error:
            if _watch.is_lost(within_seconds=2 * POLL_SECONDS):
                raise _watch.loss from error
            raise


def call_in_thread(call: Callable[[], object]) -> Exception | None:
    """What a long call into Ray raised. In the main thread it would take Ctrl-C and SIGTERM away from us.

    Raises `TryAgain` when Ray is lost.
    """
    return _Call(call).wait()


class _Call:
    """A call in a thread of its own, from its begin on."""

    running: ClassVar[set[_Call]] = set()

    def __init__(self, call: Callable[[], object], *, is_thread_kept: bool = False) -> None:
        self._call = call
        self._is_thread_kept = is_thread_kept
        self._has_ended = threading.Event()
        self._failure: Exception | None = None
        self.running.add(self)
        threading.Thread(target=self._run, name="ray-call", daemon=True).start()

    def wait(self) -> Exception | None:
        """What the call raised, when it has ended. Raises `TryAgain` when Ray is lost."""
        while not self._has_ended.wait(0.2):
            _watch.require_ray()
        return self._failure

    def has_ended(self, within_seconds: float) -> bool:
        return self._has_ended.wait(within_seconds)

    def _run(self) -> None:
        try:
            self._call()
        except Exception as error:  # noqa: BLE001 - handed to the main thread
            self._failure = error
        except BaseException as error:  # noqa: BLE001 - the main thread waits for it
            self._failure = RuntimeError(f"{error!r}")
        self.running.remove(self)
        self._has_ended.set()
        if self._is_thread_kept:
            threading.Event().wait()


def is_lost() -> bool:
    """Whether Ray itself was lost, which no call into it outlives."""
    return _watch.is_lost()


class _Watch:
    """Notices that Ray itself is lost. Ray's library would end the process a minute later, with 1."""

    def __init__(self) -> None:
        self._lost = threading.Event()
        self._what = ""

    def begin(self, find_lost: Callable[[], str], interval_seconds: float) -> None:
        """Ask `find_lost` until it answers with a few words, or Ray has been left."""
        thread = threading.Thread(target=self._ask, args=(find_lost, interval_seconds), name="ray-watch", daemon=True)
        thread.start()

    def is_lost(self, within_seconds: float = 0.0) -> bool:
        return self._lost.wait(within_seconds)

    def require_ray(self) -> None:
        """Raises `TryAgain` when Ray is lost."""
        if self.is_lost():
            raise self.loss

    @property
    def loss(self) -> TryAgain:
        return TryAgain(f"Ray was lost: {self._what}. The same command continues from what was committed.")

    def _ask(self, find_lost: Callable[[], str], interval_seconds: float) -> None:
        watched = ray._private.worker._global_node
        while not self._what:
            time.sleep(interval_seconds)
            self._what = find_lost()
            if not ray.is_initialized() or ray._private.worker._global_node is not watched:
                self._what = ""
                return
        self._lost.set()
        time.sleep(LOST_SECONDS)  # enough, unless the main thread hangs in a call into Ray
        os.write(2, f"millrace: {self.loss}\n".encode())
        os._exit(TryAgain.exit_code)


_watch = _Watch()


def _start_here(options: dict[str, Any], num_cpus: int, resources: Mapping[str, float]) -> None:
    os.environ.pop("RAY_ADDRESS", None)  # an empty one
    # Else Ray replaces a loopback address by the one at which other machines reach this one. It read the
    # variable when it was imported, so this process needs the constant, and the processes it starts the variable.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # processes without our variables: no work fits them
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
    stack = ExitStack()
    # Ray's own folder would be one that everybody can write to.
    folder = stack.enter_context(private_folder(new_name("ray"), is_short=True))
    started: list[subprocess.Popen[Any]] = []
    call_at_end(partial(_leave, started, stack))
    with deferring_stop_signals(), _leaving_sigterm_to_us(), _starting_sessions(started):
        try:
            ray.init(
                address="local",  # else Ray joins one that it finds on this machine, such as another command's
                num_cpus=max(num_cpus, os.cpu_count() or 1),
                # A resource of its own in Ray, which would look for GPUs itself; the worker that opens one looks here.
                num_gpus=int(resources.get("GPU", 0)),
                resources={name: amount for name, amount in resources.items() if name != "GPU"},
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(folder),
                **options,
            )
        except Exception as error:
            raise _explain_failed_start(error, started) from error
    node: Any = ray._private.worker._global_node
    essential = {name: node.all_processes[name][0].process for name in ("gcs_server", "raylet")}
    _watch.begin(partial(_find_ended, essential), POLL_SECONDS)


def _find_ended(processes: dict[str, subprocess.Popen[Any]]) -> str:
    return ", ".join(
        f"its process {name} ended with {process.returncode}"
        for name, process in processes.items()
        if process.poll() is not None
    )


def _explain_failed_start(error: Exception, started: list[subprocess.Popen[Any]]) -> Exception:
    """A process that was killed, or a machine too busy for Ray's own time limits, is no reason to give up."""
    ended = [process for process in started if process.poll() is not None]
    if not ended and isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError):
        return error
    return TryAgain(f"Ray did not start on this machine: {error}. The same command tries it again.")


@contextmanager
def _leaving_sigterm_to_us() -> Iterator[None]:
    """Ray would replace our handler by one that exits with 1 or 15."""
    utils = ray._private.utils
    set_handler, utils.set_sigterm_handler = utils.set_sigterm_handler, lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = set_handler


@contextmanager
def _starting_sessions(started: list[subprocess.Popen[Any]]) -> Iterator[None]:
    """Let each process of Ray's lead a session, to which no signal to our group comes, and end with this process."""
    guard = start_guard()
    services: Any = ray._private.services
    popen = services.ConsolePopen

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[Any]:
        process = popen(*arguments, **options, start_new_session=True)
        started.append(process)
        guard.watch_session(process.pid)
        return process

    services.ConsolePopen = start
    try:
        yield
    finally:
        services.ConsolePopen = popen


def _python_path() -> str:
    return os.pathsep.join(filter(None, sys.path))


def _leave(started: list[subprocess.Popen[Any]], folder: ExitStack, exit_code: int) -> None:
    """Leave Ray, and end what of it was started here."""
    # Ray's library would wait for what is lost, or end this process itself when the thread goes on, with other codes.
    is_orderly = not _watch.is_lost() and not _Call.running and _Call(ray.shutdown).has_ended(SHUTDOWN_SECONDS)
    if started:
        start_guard().end_family()
    for process in started:
        process.wait()
    folder.close()
    if not is_orderly:
        with suppress(OSError):  # nobody reads
            sys.stdout.flush()
        start_guard().leave_rest()
        os._exit(exit_code)


def _join(address: str, options: dict[str, Any]) -> None:
    if address == AUTO:
        address = os.environ["RAY_ADDRESS"] = _find_cluster()
    _wait_for_cluster(address)
    with deferring_stop_signals(), _leaving_sigterm_to_us():
        try:
            # Fails in 40 s where something else listens; ray.init would try for a quarter of an hour.
            client: Any = ray._raylet
            client.GcsClient(address=ray._private.services.canonicalize_bootstrap_address(address))
            ray.init(**options)
        except Exception as error:
            if "ersion mismatch" in str(error):
                raise DeviceError(f"the Ray cluster at {address} is another: {error}") from error
            raise _unreachable(error) from error
    call_at_end(partial(_leave, [], ExitStack()))
    node: Any = ray._private.worker._global_node
    try:
        liveness = _Liveness(node.gcs_address, node.raylet_socket_name)
    except OSError as error:
        raise _unreachable(error) from error
    _watch.begin(liveness.find_lost, POLL_SECONDS)


class _Liveness:
    """Are the cluster's head and this node's raylet there? A network may fail for a while, a local socket does not.

    A connection to the raylet is held, which ends with the raylet: Ray's library ends the process with 1 as soon as it
    misses the raylet itself, seconds later.
    """

    def __init__(self, address: str, raylet_socket: str) -> None:
        self._address, self._head_failures, self._head_due = address, 0, 0.0
        self._raylet = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._raylet.connect(raylet_socket)
        self._raylet.setblocking(False)

    def find_lost(self) -> str:
        """Which of them is lost, in a few words."""
        if not self._is_raylet_there():
            return "its raylet on this node no longer answers"
        now = time.monotonic()
        if now >= self._head_due:
            self._head_due = now + PROBE_SECONDS
            self._head_failures = 0 if _answers(self._address) else self._head_failures + 1
        return "its head no longer answers" if self._head_failures >= LOST_HEAD_FAILURES else ""

    def _is_raylet_there(self) -> bool:
        try:
            return bool(self._raylet.recv(1, socket.MSG_PEEK))  # nothing: it has closed the connection
        except BlockingIOError:
            return True
        except OSError:
            return False


def _answers(address: str) -> bool:
    try:
        _probe_port(address)
    except OSError:
        return False
    return True


def _probe_port(address: str) -> None:
    place = split_address(address)
    assert place is not None
    socket.create_connection(place, timeout=POLL_SECONDS).close()


def _find_cluster() -> str:
    """The address of the cluster that has a node on this machine."""
    del os.environ["RAY_ADDRESS"]  # Ray would take `auto` for what was found
    try:
        return ray._private.services.canonicalize_bootstrap_address_or_die(AUTO)
    except ConnectionError as error:
        os.environ["RAY_ADDRESS"] = AUTO
        raise _unreachable(error) from error


def _wait_for_cluster(address: str) -> None:
    """Raises `TryAgain` when nobody listens at HOST:PORT for JOIN_SECONDS."""
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        try:
            _probe_port(address)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise _unreachable(error) from error
        time.sleep(POLL_SECONDS)


def _unreachable(error: Exception) -> TryAgain:
    return TryAgain(
        f"no Ray cluster answers at RAY_ADDRESS={os.environ.get('RAY_ADDRESS')} ({error}). Start it and run the same "
        f"command again, or unset RAY_ADDRESS: Ray is then started on this machine."
    )
