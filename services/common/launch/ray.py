"""Ray: tasks for work that splits, Ray Train for workers that form a process group. The only import of Ray.

Without RAY_ADDRESS a Ray cluster of this machine alone is started in place, bound to loopback, and ends with
the program. Ray is used to launch, to notice dead workers and to hear of preemption, and for nothing else:
checkpoints, data order and metrics are files of ours.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
import ray.exceptions

from services.common.errors import MillraceError, WorkersLost
from services.common.launch.launcher import LOOPBACK_INTERFACE, R, T, WorkerEnvironment, name_the_cause

logger = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 128 * 2**20  # only small results travel through it
GROUP_START_SECONDS = 600.0

# A process or a node was lost, oftener than Ray runs a task again.
_LOST = (
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.LocalRayletDiedError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.ObjectLostError,
)


def map_tasks(function: Callable[[T], R], items: Sequence[T], num_workers: int) -> Iterator[tuple[int, R]]:
    """See `Launcher.map_tasks`. Ray runs a task again whose process or node was lost."""
    _connect(num_workers)
    remote = ray.remote(max_retries=3)(function)
    waiting = list(enumerate(items))[::-1]
    running: dict[ray.ObjectRef[Any], int] = {}
    try:
        while waiting or running:
            while waiting and len(running) < num_workers:
                index, item = waiting.pop()
                running[remote.remote(item)] = index
            done, _ = ray.wait(list(running), num_returns=1)
            for reference in done:
                yield running.pop(reference), ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise _cause(error) from None
    except _LOST as error:
        raise WorkersLost(str(error)) from error
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def run_workers(
    function: Callable[[Any, WorkerEnvironment], None], argument: Any, num_workers: int, threads_per_worker: int
) -> None:
    """See `Launcher.run_workers`. Ray Train forms the gloo group; a lost worker ends the whole group here, and
    the caller decides whether to start another: Ray's own restart would go by Ray's own checkpoints.
    """
    import ray.train.torch  # noqa: PLC0415 - takes seconds and torch, which map_tasks needs neither of

    _connect(num_workers * threads_per_worker)
    with tempfile.TemporaryDirectory(prefix="millrace-ray-") as storage:
        trainer = ray.train.torch.TorchTrainer(
            _WorkerFunction(function, argument),
            torch_config=ray.train.torch.TorchConfig(backend="gloo"),
            scaling_config=ray.train.ScalingConfig(
                num_workers=num_workers, resources_per_worker={"CPU": threads_per_worker}
            ),
            run_config=ray.train.RunConfig(
                name="attempt",
                storage_path=storage,
                # Ray's type stubs describe Train V1.
                failure_config=ray.train.FailureConfig(max_failures=0, max_preemption_failures=0),  # type: ignore[call-arg]
                worker_runtime_env={"env_vars": _worker_variables()},
            ),
        )
        failures: list[BaseException] = []
        thread = threading.Thread(target=_fit, args=(trainer, failures), name="ray-train", daemon=True)
        thread.start()
        while thread.is_alive():  # fit() in the main thread would take Ctrl-C and SIGTERM away from us
            thread.join(0.2)
    if failures:
        raise failures[0]


def is_preemption_noticed() -> bool:
    """See `Launcher.is_preemption_noticed`. Takes up to 9 ms: a barrier over all workers through one actor."""
    import ray.train  # noqa: PLC0415

    return ray.train.get_preemption_info() is not None


class _WorkerFunction:
    """What Ray Train calls in each worker."""

    def __init__(self, function: Callable[[Any, WorkerEnvironment], None], argument: Any) -> None:
        self._function, self._argument = function, argument

    def __call__(self) -> None:
        import ray.train  # noqa: PLC0415

        context = ray.train.get_context()
        environment = WorkerEnvironment(context.get_world_rank(), context.get_world_size(), "ray")
        self._function(self._argument, environment)


def _fit(trainer: Any, failures: list[BaseException]) -> None:
    import ray.train  # noqa: PLC0415

    try:
        trainer.fit()
    except ray.train.WorkerGroupError as error:
        failures.append(_explain_worker_failures(error))
    except ray.train.ControllerError as error:
        is_lost = isinstance(error.controller_failure, ray.exceptions.RayActorError)  # while the group was starting
        failures.append(WorkersLost(f"Ray lost a worker: {error}") if is_lost else error)
    except Exception as error:  # noqa: BLE001 - handed to the main thread, which raises it
        failures.append(error)


def _explain_worker_failures(error: Any) -> Exception:
    """One error for the group. A bug comes with Ray's report, which has the worker's traceback."""
    failures = error.worker_failures.values()
    # What a worker raised comes as itself; for one that died Ray puts an error of its own.
    raised = [failure for failure in failures if not type(failure).__module__.startswith("ray.")]
    cause = name_the_cause(raised, f"Ray lost a worker: {error}" if len(raised) < len(failures) else None)
    return cause if isinstance(cause, MillraceError | OSError) else RuntimeError(str(error))


def _connect(num_cpus: int) -> None:
    """Join the cluster of RAY_ADDRESS, or start one on this machine."""
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", str(GROUP_START_SECONDS))
    handler = signal.getsignal(signal.SIGTERM)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if "RAY_ADDRESS" not in os.environ:
        # Else Ray replaces a loopback address by the one at which other machines reach this one. It read the
        # variable when it was imported, so this process needs the constant, and the processes it starts the variable.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
        options |= {
            "address": "local",  # else Ray joins one that it finds on this machine, such as another command's
            "num_cpus": max(num_cpus, os.cpu_count() or 1),
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
        }
    ray.init(**options, runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}})
    logging.getLogger("ray").setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, handler)  # ray.init replaces it by one that exits with 15


def _worker_variables() -> dict[str, str]:
    return {} if "RAY_ADDRESS" in os.environ else {"GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE}


def _cause(error: ray.exceptions.RayTaskError) -> BaseException:
    cause = error.cause
    return cause if isinstance(cause, MillraceError | OSError) else error
