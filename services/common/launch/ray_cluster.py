"""Starts or joins the Ray cluster that a command uses, and leaves it when the command ends.

Without RAY_ADDRESS a command starts a Ray cluster of this machine alone. It listens on loopback, runs in sessions of
its own, which a signal to the command's process group does not reach, and ends with the command.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray

from services.common.errors import DeviceError, TryAgain
from services.common.launch.batch.ray_process import OBJECT_STORE_BYTES
from services.common.launch.cluster_address import AUTO, cluster_address
from services.common.launch.guard import start_guard
from services.common.launch.ray_watch import (
    POLL_SECONDS,
    RayCall,
    find_ended,
    is_lost,
    probe_port,
    require_ray,
    watch_cluster,
    watch_processes,
)
from services.common.process.entry_point import call_at_end
from services.common.process.hard_deadline import ending_after
from services.common.process.private_folder import new_name, private_folder
from services.common.process.stop_signals import STOP_SIGNALS, deferring_stop_signals

JOIN_SECONDS = 60.0
"""Seconds in which somebody has to listen at RAY_ADDRESS."""
CONNECT_SECONDS = 8.0
"""Seconds for a connection to a Ray that this command has started; Ray's library takes less than one."""
SHUTDOWN_SECONDS = 10.0
"""Seconds that Ray's library gets to leave the cluster: it has no limit of its own for a process that hangs."""
_PORT_POLL_SECONDS = 0.02
_SIGACTION_BYTES = 256  # more than a `struct sigaction` has: 152 in glibc

_connecting = threading.Lock()


def connect(num_cpus: int, resources: Mapping[str, float] | None = None) -> None:
    """Join the Ray cluster of RAY_ADDRESS, or start one on this machine that offers these CPUs and resources.

    Any thread may call this, and several at a time.
    """
    with _connecting:
        if ray.is_initialized():
            require_ray()
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        address = cluster_address()
        if address is None:
            started: list[subprocess.Popen[Any]] = []
            call = RayCall(partial(_start_here, started, options, num_cpus, resources or {}), goes_on=True)
            if failure := call.wait(partial(_require_living, started)):
                raise failure
        else:
            _join(address, {**options, "runtime_env": {"env_vars": {"PYTHONPATH": _python_path()}}})
        logging.getLogger("ray").setLevel(logging.ERROR)


def _start_here(
    started: list[subprocess.Popen[Any]], options: dict[str, Any], num_cpus: int, resources: Mapping[str, float]
) -> None:
    """Start a Ray of this machine alone; `started` receives its processes."""
    os.environ.pop("RAY_ADDRESS", None)  # it may be set and empty
    # Otherwise Ray replaces the loopback address by one that other machines can reach. Ray has read this variable when
    # it was imported, so the constant is for this process and the variable for the processes that Ray starts.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
    # A token of this Ray's own. Otherwise Ray keeps one in ~/.ray, and a container's user may have no home to write to.
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    stack = ExitStack()
    # Ray's default folder is below one that every user can write to.
    folder = stack.enter_context(private_folder(new_name("ray"), is_short=True))
    call_at_end(partial(_leave, started, stack))
    with _keeping_handlers(), _starting_sessions(started), _leaving_out_services(), _noticing_losses(started):
        try:
            ray.init(
                address="local",  # otherwise Ray joins any cluster of this machine, such as another command's
                num_cpus=max(num_cpus, os.cpu_count() or 1),
                # Given, so that Ray does not look for GPUs itself: a worker that opens its GPU checks the device.
                num_gpus=int(resources.get("GPU", 0)),
                resources={name: amount for name, amount in resources.items() if name != "GPU"},
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(folder),
                **options,
            )
        except Exception as error:
            _require_living(started)
            if isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError):
                raise
            raise _failed_start(str(error).rstrip(".")) from error  # such as a machine that is too busy
    watch_processes(started)


def _require_living(started: list[subprocess.Popen[Any]]) -> None:
    """Raise `TryAgain` where one of the processes has ended: Ray's library notices that after half a minute."""
    if ended := find_ended(started):
        raise _failed_start(ended)


def _failed_start(why: str) -> TryAgain:
    return TryAgain(f"Ray did not start on this machine: {why}. Run the same command again.")


@contextmanager
def _replacing(module: Any, **parts: Any) -> Iterator[None]:
    """Replace parts of a module of Ray's library for the block."""
    before = {name: getattr(module, name) for name in parts}
    vars(module).update(parts)
    try:
        yield
    finally:
        vars(module).update(before)


@contextmanager
def _keeping_handlers() -> Iterator[None]:
    """Keep Ray from replacing the command's signal handlers: one of Ray's exits with 1 or 15, another prints a dump.

    Python sets handlers in the main thread alone, and Ray is started in another, so the handlers are the kernel's.
    """
    libc = ctypes.CDLL(None)
    before = {signum: ctypes.create_string_buffer(_SIGACTION_BYTES) for signum in STOP_SIGNALS}
    for signum, action in before.items():
        libc.sigaction(int(signum), None, action)
    try:
        with _replacing(ray._private.utils, set_sigterm_handler=lambda handler: None):
            yield
    finally:
        for signum, action in before.items():
            libc.sigaction(int(signum), action, None)


def _starting_sessions(started: list[subprocess.Popen[Any]]) -> AbstractContextManager[None]:
    """Start Ray's processes in sessions of their own, which signals to the command's group do not reach.

    The command's guard ends the processes of these sessions. `started` receives the processes. They import what this
    process can import: workers of Ray that start with an environment of their own would start later.
    """
    guard = start_guard()
    services: Any = ray._private.services
    popen = services.ConsolePopen

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[Any]:
        environment = {**(options.pop("env", None) or os.environ), "PYTHONPATH": _python_path()}
        process = popen(*arguments, **options, env=environment, start_new_session=True)
        started.append(process)
        guard.watch_session(process.pid)
        return process

    return _replacing(services, ConsolePopen=start)


@contextmanager
def _leaving_out_services() -> Iterator[None]:
    """Start Ray without its dashboard, its log monitor and its autoscaler's monitor, and its agents on free ports.

    `ray.init` has no options for that. These services take 1.7 s of CPU to start, and serve people who operate a
    cluster. An agent's default port is 52365: a second Ray of this machine would try that port for 3.4 s.
    """
    parameter: Any = ray._private.parameter
    fewer = partial(parameter.RayParams, dashboard_agent_listen_port=0, no_monitor=True, include_log_monitor=False)
    no_dashboard = (None, None)  # what the function returns without a dashboard
    with (
        _replacing(parameter, RayParams=fewer),
        _replacing(ray._private.services, start_api_server=lambda *arguments, **options: no_dashboard),
    ):
        yield


@contextmanager
def _noticing_losses(started: list[subprocess.Popen[Any]]) -> Iterator[None]:
    """Notice the loss of a process where Ray's library waits for an answer from it and keeps Python's lock meanwhile:
    30 s for the port of `gcs_server`, and a minute, at whose end the library ends this process with 1, to connect.
    """
    node: Any = ray._private.node
    raylet: Any = ray._raylet
    wait_for_port, connect_worker = node.wait_for_persisted_port, raylet.CoreWorker
    frozen = str(_failed_start(f"its gcs_server or its raylet did not answer for {CONNECT_SECONDS:.0f} s"))

    def wait(folder: str, node_id: str, name: str, timeout_ms: int) -> Any:
        path, deadline = Path(folder, node.get_port_filename(node_id, name)), time.monotonic() + timeout_ms / 1000
        while not path.exists() and time.monotonic() < deadline:
            _require_living(started)
            time.sleep(_PORT_POLL_SECONDS)
        return wait_for_port(folder, node_id, name)

    def connect(*arguments: Any, **options: Any) -> Any:
        _require_living(started)
        with ending_after(CONNECT_SECONDS, frozen, TryAgain.exit_code):
            return connect_worker(*arguments, **options)

    with _replacing(node, wait_for_persisted_port=wait), _replacing(raylet, CoreWorker=connect):
        yield


def _python_path() -> str:
    return os.pathsep.join(filter(None, sys.path))


def _leave(started: list[subprocess.Popen[Any]], folder: ExitStack, exit_code: int) -> None:
    """Disconnect from Ray, end the Ray processes that this command started, and remove their folder."""
    # Ray's library would wait for a lost process, or, in a thread that goes on, end this process with another code.
    is_orderly = not is_lost() and not RayCall.running and RayCall(ray.shutdown).has_ended(SHUTDOWN_SECONDS)
    if started:
        start_guard().end_family()
    for process in started:
        process.wait()
    folder.close()
    if not is_orderly:
        with suppress(OSError):  # stdout has no reader
            sys.stdout.flush()
        start_guard().leave_rest()
        os._exit(exit_code)


def _join(address: str, options: dict[str, Any]) -> None:
    if address == AUTO:
        address = os.environ["RAY_ADDRESS"] = _find_cluster()
    _wait_for_cluster(address)
    with deferring_stop_signals(), _keeping_handlers():
        try:
            # Fails after 40 s where another program listens; ray.init would try for a quarter of an hour.
            client: Any = ray._raylet
            client.GcsClient(address=ray._private.services.canonicalize_bootstrap_address(address))
            ray.init(**options)
        except Exception as error:
            if "ersion mismatch" in str(error):
                raise DeviceError(f"the Ray cluster at {address} has another version: {error}") from error
            raise _unreachable(error) from error
    call_at_end(partial(_leave, [], ExitStack()))
    node: Any = ray._private.worker._global_node
    try:
        watch_cluster(node.gcs_address, node.raylet_socket_name)
    except OSError as error:
        raise _unreachable(error) from error


def _find_cluster() -> str:
    """Find the address of the Ray cluster that has a node on this machine. Raises `TryAgain` where there is none."""
    del os.environ["RAY_ADDRESS"]  # Ray would return its value, `auto`, as the address
    try:
        return ray._private.services.canonicalize_bootstrap_address_or_die(AUTO)
    except ConnectionError as error:
        os.environ["RAY_ADDRESS"] = AUTO
        raise _unreachable(error) from error


def _wait_for_cluster(address: str) -> None:
    """Wait until somebody listens at HOST:PORT. Raises `TryAgain` after JOIN_SECONDS."""
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        try:
            probe_port(address)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise _unreachable(error) from error
        time.sleep(POLL_SECONDS)


def _unreachable(error: Exception) -> TryAgain:
    return TryAgain(
        f"no Ray cluster answers at RAY_ADDRESS={os.environ.get('RAY_ADDRESS')} ({error}). Start the cluster and run "
        f"the same command again, or unset RAY_ADDRESS: the command then uses this machine alone."
    )
