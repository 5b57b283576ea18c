"""Joins the Ray cluster of RAY_ADDRESS, or starts a Ray of this machine that ends with the command."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, chdir, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray

from services.common.errors import DeviceError, TryAgain
from services.common.launch.batch.ray_process import OBJECT_STORE_BYTES
from services.common.launch.child_processes import handing_on_imports, python_path, socket_folder
from services.common.launch.cluster_address import AUTO, cluster_address, split_address
from services.common.process.entry_point import call_at_end
from services.common.process.shutdown import deferring_stop_signals

JOIN_SECONDS = 60.0
"""Seconds in which somebody has to listen at RAY_ADDRESS."""
SHUTDOWN_SECONDS = 10.0
"""Seconds that Ray gets to end: its library has no limit of its own for a process that hangs."""
POLL_SECONDS = 1.0

_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


def connect(num_cpus: int, resources: Mapping[str, float] | None = None) -> None:
    """Join the Ray cluster of RAY_ADDRESS, or start a Ray of this machine that offers these CPUs and resources.

    The first call has to be in the main thread. Raises `TryAgain` where Ray does not start or answer, and `DeviceError`
    where the cluster has another version.
    """
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = cluster_address()
    # Blocked signals are inherited: one to the command's group then does not end Ray's processes before the command is
    # done. Ray itself blocks SIGINT in them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    try:
        # Ray's workers look for modules in this process's directory first, where a person may have a folder `services`.
        with chdir(Path(__file__).parents[3]), deferring_stop_signals():  # sets the handlers again, which Ray replaces
            if address is None:
                _start(num_cpus, resources or {})
            else:
                _join(address)
    except SystemExit:  # of Ray's handler, where another thread received a SIGTERM meanwhile
        signal.raise_signal(signal.SIGTERM)
        raise TryAgain("the command was stopped while Ray started. Run the same command again.") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    logging.getLogger("ray").setLevel(logging.ERROR)


def _start(num_cpus: int, resources: Mapping[str, float]) -> None:
    os.environ.pop("RAY_ADDRESS", None)  # it may be set and empty
    os.environ.setdefault("RAY_worker_niceness", "0")  # otherwise 15
    # Ray Train's cleaner of placement groups would look up its own run in another Ray of this machine, and remove the
    # group of a run that it does not find there. It leaves the group alone where nobody answers.
    os.environ["RAY_API_SERVER_ADDRESS"] = "http://127.0.0.1:1"
    # A token of this Ray's own. Otherwise Ray keeps one in ~/.ray, and a container's user may have no home to write to.
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    folder, others, started = ExitStack(), psutil.Process().children(), list[psutil.Process]()
    call_at_end(partial(_leave, started, folder))
    path = folder.enter_context(socket_folder("millrace-ray-"))
    try:
        with handing_on_imports():  # workers with an environment of their own would start later
            ray.init(
                address="local",  # otherwise Ray joins any cluster of this machine, such as another command's
                num_cpus=max(num_cpus, os.cpu_count() or 1),
                # Given, so that Ray does not look for GPUs itself: a worker that opens its GPU checks the device.
                num_gpus=int(resources.get("GPU", 0)),
                resources={name: amount for name, amount in resources.items() if name != "GPU"},
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(path),
                **_QUIET,
            )
    except Exception as error:
        if isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError):
            raise
        why = str(error).rstrip(".")  # such as a machine that is too busy
        raise TryAgain(f"Ray did not start on this machine: {why}. Run the same command again.") from error
    finally:
        started += [each for each in psutil.Process().children() if each not in others]


def _join(address: str) -> None:
    deadline = time.monotonic() + JOIN_SECONDS
    while place := split_address(address):  # None for `auto`, which Ray looks up itself
        try:
            socket.create_connection(place, timeout=POLL_SECONDS).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise _unreachable(error) from error
        time.sleep(POLL_SECONDS)
    call_at_end(partial(_leave, [], ExitStack()))
    try:
        # The address: Ray Train would else look for its run in any Ray of its node, and remove the placement group.
        known = {} if address == AUTO else {"RAY_ADDRESS": address}
        ray.init(address=address, runtime_env={"env_vars": {"PYTHONPATH": python_path(), **known}}, **_QUIET)
    except Exception as error:
        if "ersion mismatch" in str(error):
            raise DeviceError(f"the Ray cluster at {address} has another version: {error}") from error
        raise _unreachable(error) from error


def _unreachable(error: Exception) -> TryAgain:
    return TryAgain(
        f"no Ray cluster answers at RAY_ADDRESS={os.environ.get('RAY_ADDRESS')} ({error}). Start the cluster and run "
        f"the same command again, or unset RAY_ADDRESS: the command then uses this machine alone."
    )


def _leave(started: list[psutil.Process], folder: ExitStack, exit_code: int) -> None:
    """Leave the cluster, end the processes of Ray that this command has started, and remove their folder."""
    deadline = time.monotonic() + SHUTDOWN_SECONDS
    living = [each for each in started if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    family = [each for process in living for each in (process, *process.children(recursive=True))]
    by_name = {each.name(): each for each in living}
    # Without these two Ray's library would wait for them, or end this process with a code of its own.
    is_whole = not started or {"raylet", "gcs_server"} <= by_name.keys()
    if is_whole:
        leaving = threading.Thread(target=ray.shutdown, name="ray-shutdown", daemon=True)
        leaving.start()
        # Ray sends SIGTERM, which is blocked there, and SIGKILL a second later to one process after the other. Once the
        # raylet, the first, has ended, nothing needs the others.
        psutil.wait_procs([by_name["raylet"]] if started else [], SHUTDOWN_SECONDS)
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(living, SHUTDOWN_SECONDS)
    folder.close()
    if is_whole:
        leaving.join(max(0.0, deadline - time.monotonic()))
    if not is_whole or leaving.is_alive():
        with suppress(OSError):  # stdout has no reader
            sys.stdout.flush()
        os._exit(exit_code)
