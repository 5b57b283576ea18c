"""The deploy Job's work: gang, pods, RayJob, follow, retry, and down again.

It is level-triggered: each `_advance` reads the cluster, does the one next thing and remembers nothing that it could
not read again. So it may be killed between any two lines and started anew; only deadlines begin again.
"""

from __future__ import annotations

import signal
import threading
import time
import traceback
from pathlib import Path

from deploy.exit_codes import EXIT_AGAIN
from deploy.progress import Progress
from k8s.controller.decision import next_size
from k8s.controller.driver_log import LOG_FOLDER, DriverLog
from k8s.controller.history import find_newest_checkpoints, record_checkpoint_seconds, record_good_image
from k8s.controller.lease import LeaseHeld, StageLease
from k8s.controller.outcome import exit_code_of_driver, exit_code_of_rayjob, has_progressed, may_try_again
from k8s.controller.phase import Phase, phase_of
from k8s.controller.ray_jobs import DriverState, RayJobs, RayUnreachable
from k8s.objects.api import Api, ApiUnreachable, Conflict, Object
from k8s.objects.capacity import count_room
from k8s.objects.deployment import Deployment
from k8s.objects.lost_pods import LostPods
from k8s.objects.names import CLUSTER, job_name
from k8s.objects.placement import explain_placement, newest_event, pods_of
from k8s.objects.pod_group import placed_size, render_pod_group
from k8s.objects.rayjob import nodes_of, render_isolated_rayjob, render_rayjob
from k8s.objects.record import Outcome, Record, no_more_failures, read_record, write_attempt, write_outcome
from k8s.objects.teardown import drop_rayjobs, release_pods, stop_rayjobs
from k8s.objects.worker_group import WorkerGroup, read_worker_group, render_worker_group, replace_group, scale_down
from services.common.errors import EXIT_BUG, MillraceError

POLL_SECONDS = 2.0
PENDING_SECONDS = 300.0  # KubeRay and Ray leave a job that finds no resource PENDING for ever
SUBMIT_SECONDS = 300.0  # also what the operator may take to submit again after a lost head
HEAD_LOST_SECONDS = 600.0
SETTLE_SECONDS = 60.0  # in which the operator sees, too, that a driver has ended
LOG_SECONDS = 20.0


class Reconciler:
    """Brings one deployment about, or goes on with one that an earlier process began."""

    def __init__(self, api: Api, deployment: Deployment, pod: str) -> None:
        self._api = api
        self._deployment = deployment
        self._stage_name = deployment.stage
        self._lease = StageLease(api, deployment.stage, f"{deployment.id}/{pod}")
        self._has_lease = False
        self._terminated = threading.Event()
        self._report = Progress("deploy").report
        self._lost = LostPods(api, deployment.stage, self._report)
        self._refused_since: float | None = None
        self._wait: tuple[str, float] = ("", 0.0)  # what is waited for, and since when
        self._log: DriverLog | None = None
        self._submission: tuple[str, int] | None = None  # the one whose log is followed
        self._stopped: tuple[str, int] | None = None  # the one that was told to stop

    def run(self) -> Outcome | None:
        """Until the deployment is over and its pods are gone. None when another process goes on with it."""
        signal.signal(signal.SIGTERM, lambda *_: self._terminated.set())
        while True:
            try:
                if self._terminated.is_set() and self._own_record():
                    self._lease.release()
                    self._report("told to leave; the Job starts again and goes on")
                    return None
                self._lease.hold()
                self._has_lease = True
                outcome = self._advance()
                self._refused_since = None
                if outcome:
                    if outcome.exit_code:
                        self._fail_job()
                    self._lease.release()
                    self._report(f"{outcome.message} (exit code {outcome.exit_code})")
                    return outcome
            except LeaseHeld as error:
                if self._has_lease:
                    self._report(f"{error}: this process leaves")
                    return None
                self._report(f"waiting: {error}")
            except MillraceError as error:
                # The API is away, somebody wrote in between, a right is missing for a moment: nodes may be held, so
                # this process stays until they are not.
                self._report(f"again in {POLL_SECONDS:.0f} s: {error}")
                self._end_after_long_refusal(error)
            except Exception as error:  # noqa: BLE001 - a bug must not leave nodes held either
                traceback.print_exc()
                self._end_at_once(Outcome(EXIT_BUG, f"a bug in the deploy tool: {error!r}"))
            self._pause()

    def _advance(self) -> Outcome | None:
        """Do the next thing; the outcome once everything is down."""
        record = self._read_record()
        attempt = len(record.attempts) + 1
        job = None if record.outcome else self._api.find("RayJob", self._deployment.rayjob_name(attempt))
        lost = self._lost.remove(is_idle=job is None)
        if record.outcome:  # a pod of ours on a lost node would keep the Job from being over
            return record.outcome if self._release(record) and not lost else None
        if record.attempts and not may_try_again(record):
            last = record.attempts[-1]
            self._end(record, last.exit_code, last.message)
        elif job is None and record.stop:
            self._end(record, EXIT_AGAIN, f"stopped by {record.stop}; the same command continues")
        elif job is None:
            self._start(record, attempt)
        else:
            self._watch(record, job)
        return None

    def _start(self, record: Record, attempt: int) -> None:
        """Place the gang; when it stands, create the RayJob."""
        # Any that is there is older, of an attempt or a deployment that was cut short: two would write one run.
        if drop_rayjobs(self._api, self._stage_name):
            self._report("waiting for an earlier attempt's RayJob to go. Does the KubeRay operator run?")
            if self._waits_for("a RayJob to go") > self._deployment.start_timeout_seconds:
                self._end(record, EXIT_AGAIN, "an earlier attempt's RayJob does not go")
            return
        group = read_worker_group(self._api, self._stage_name)
        nodes = placed_size(self._api.find("PodGroup", group.pod_group), self._deployment, attempt)
        missing = self._place(group, attempt, nodes)
        if missing:
            self._report(missing)
            self._wait_for_gang(record, group, nodes, missing)
            return
        is_isolated = self._deployment.mode == "isolated"
        make = render_isolated_rayjob(group, self._deployment, attempt)
        self._api.create(make if is_isolated else render_rayjob(group, self._deployment, attempt, nodes))
        name = self._deployment.rayjob_name(attempt)
        self._report(f"attempt {attempt}: RayJob {name} runs {self._deployment.image} on {nodes} nodes")

    def _wait_for_gang(self, record: Record, group: WorkerGroup, nodes: int, missing: str) -> None:
        """Wait on, go on with fewer nodes where the recipe allows that after a loss, or give up."""
        waited = self._waits_for(f"a gang of {nodes}")
        is_after_loss = bool(record.attempts and self._deployment.fewer_nodes)
        room = count_room(self._api, group) if is_after_loss else 0
        size = next_size(self._deployment, nodes, is_after_loss, room, waited)
        if size == 0:
            self._end(record, EXIT_AGAIN, f"not up after {self._deployment.start_timeout_seconds} s: {missing}")
        elif size < nodes:
            self._report(f"no {nodes} nodes after {waited:.0f} s, room for {room}: this attempt goes on with {size}")
            self._ensure_pod_group(group, len(record.attempts) + 1, size)

    def _place(self, worker_group: WorkerGroup, attempt: int, nodes: int) -> str:
        """Bring the gang closer to N Ray nodes with the deployment's image; what is missing still."""
        is_shared = self._deployment.mode == "shared"
        group = render_worker_group(worker_group, self._deployment)
        is_same = is_shared and group["template"] == worker_group.spec["template"]
        # Only at 0: else pods of one group run different images, and KubeRay chooses which pods of too many go.
        if (not is_same or worker_group.replicas > nodes) and (
            worker_group.replicas or pods_of(self._api, worker_group.name)
        ):
            scale_down(self._api, worker_group)
            return f"waiting for {worker_group.name} pods that were there before to leave"
        self._ensure_pod_group(worker_group, attempt, nodes)
        if not is_shared:
            return ""
        if not is_same or worker_group.replicas != nodes:
            replace_group(self._api, worker_group, group | {"replicas": nodes})
            return f"{worker_group.name}: {worker_group.replicas} -> {nodes} pods of {self._deployment.image}"
        missing = explain_placement(self._api, worker_group, nodes)
        if missing:
            return missing
        try:
            joined = self._ray(CLUSTER).count_nodes(worker_group.routing_resource)
        except RayUnreachable as error:
            return f"waiting for the Ray head: {error}"
        return f"{joined} of {nodes} {worker_group.name} pods have joined Ray" if joined < nodes else ""

    def _ensure_pod_group(self, worker_group: WorkerGroup, attempt: int, nodes: int) -> None:
        wanted = render_pod_group(worker_group, self._deployment, attempt, nodes)
        group = self._api.find("PodGroup", worker_group.pod_group)
        if group is None:
            self._api.create(wanted)
            return
        annotations = wanted["metadata"]["annotations"]
        there = group["metadata"].get("annotations") or {}
        if group["spec"].get("minMember") != nodes or not annotations.items() <= there.items():
            patch = {"metadata": {"annotations": annotations}, "spec": wanted["spec"]}
            self._api.merge("PodGroup", worker_group.pod_group, patch)

    def _watch(self, record: Record, job: Object) -> None:
        """Follow the attempt until Ray or the operator says how it ended. Ray's word comes first."""
        name = job["metadata"]["name"]
        ray = self._ray((job.get("status") or {}).get("rayClusterName") or CLUSTER)
        driver, unreachable = None, ""
        try:
            driver = ray.find(name)
        except RayUnreachable as error:
            unreachable = str(error)
        if driver:
            self._follow_log(ray, name, driver)
        phase = phase_of(job, driver, not unreachable, record.stop, self._deployment.mode)
        if phase is Phase.DRIVER_ENDED and driver:
            self._end_attempt(record, *exit_code_of_driver(driver, record.stop), is_ended=True)
        elif phase is Phase.RAYJOB_ENDED:
            self._end_attempt(record, *exit_code_of_rayjob(job), is_ended=True)
        elif phase is Phase.STOPPED_BEFORE_RUN:
            self._end_attempt(record, EXIT_AGAIN, f"stopped by {record.stop} before its driver ran")
        elif phase is Phase.STOPPING and driver:
            self._stop_driver(record, ray, name, driver)
        elif phase is Phase.PENDING:
            self._watch_pending(record, ray, job)
        elif phase is Phase.RUNNING and driver:
            self._waits_for("")
            self._report(f"attempt {len(record.attempts) + 1} is {driver.status.lower()}")
        elif phase is Phase.ISOLATED_START:
            self._watch_isolated_start(record, job)
        elif phase is Phase.HEAD_LOST:
            self._watch_lost_head(record, unreachable)
        else:
            self._watch_submission(record, job)

    def _stop_driver(self, record: Record, ray: RayJobs, name: str, driver: DriverState) -> None:
        self._report(f"stopping for {record.stop}: the driver has its notice")
        # Once per submission: after a lost head the operator submits the job again, which starts without it.
        if self._stopped != (name, driver.started_at_ms):
            ray.stop(name)
            self._stopped = (name, driver.started_at_ms)

    def _watch_lost_head(self, record: Record, error: str) -> None:
        if self._waits_for("the head") > HEAD_LOST_SECONDS:
            self._end_attempt(record, EXIT_AGAIN, f"the Ray head was lost: {error}")
        else:
            self._report("the Ray head does not answer; a new one runs this attempt again by itself")

    def _watch_isolated_start(self, record: Record, job: Object) -> None:
        """Its own head and pods are being placed."""
        name = (job.get("status") or {}).get("rayClusterName")
        cluster = self._api.find("RayCluster", name) if name else None
        group = read_worker_group(self._api, self._stage_name)
        refused = newest_event(self._api, cluster) if cluster else ""
        missing = explain_placement(self._api, group, self._deployment.nodes) or "its Ray head is starting"
        self._report(f"{missing} {f'({refused})' if refused else ''}".strip())
        if self._waits_for("its cluster") > self._deployment.start_timeout_seconds:
            seconds = self._deployment.start_timeout_seconds
            self._end_attempt(record, EXIT_AGAIN, f"not up after {seconds} s: {missing} {refused}".strip())

    def _watch_submission(self, record: Record, job: Object) -> None:
        """Ray does not know the job: not yet, or not any more, since the operator submits it again to a new head."""
        if self._waits_for("submission") > SUBMIT_SECONDS:
            state = (job.get("status") or {}).get("jobDeploymentStatus") or "nothing"
            self._end_attempt(
                record,
                EXIT_AGAIN,
                f"the operator did not submit the job within {SUBMIT_SECONDS:.0f} s; its RayJob says {state}. Does the "
                f"operator run, without a batch scheduler of its own (k8s/README.md)?",
            )
        else:
            self._report("waiting for the operator to submit the job")

    def _watch_pending(self, record: Record, ray: RayJobs, job: Object) -> None:
        group = read_worker_group(self._api, self._stage_name)
        missing = explain_placement(self._api, group, nodes_of(job, self._deployment)) or "all pods are ready"
        self._report(f"the job is pending; {missing}")
        if self._waits_for("a resource") > PENDING_SECONDS:
            ray.stop(job["metadata"]["name"])
            self._end_attempt(
                record,
                EXIT_AGAIN,
                f"the job was pending for {PENDING_SECONDS:.0f} s: no live Ray node has {group.routing_resource} to "
                f"give; {missing}",
            )

    def _end_attempt(self, record: Record, exit_code: int, message: str, is_ended: bool = False) -> None:
        """Record how it ended before anything of it is removed. A RayJob that has ended stays until the next begins."""
        if self._log:
            self._log.close(LOG_SECONDS)
            self._log = self._submission = None
        group = read_worker_group(self._api, self._stage_name)
        if exit_code == 0:
            record_good_image(self._api, group, self._deployment.image)
        try:
            record_checkpoint_seconds(self._api, group)
        except (OSError, ValueError, AttributeError) as error:  # a run's folder may be removed at any time
            self._report(f"no checkpoint time is recorded: {error}")
        number = len(record.attempts) + 1
        record = self._read_record()  # those who ask it to stop write to the Job, too; what was tried is ours alone
        checkpoints = self._look_for_checkpoints(group, record.checkpoints)
        is_newer = has_progressed(record.checkpoints, checkpoints, message)
        write_attempt(self._api, record, Outcome(exit_code, message, is_newer), checkpoints)
        if not is_ended:
            self._api.delete("RayJob", self._deployment.rayjob_name(number))
        self._waits_for("")
        progress = "; there is a newer checkpoint, so retries are counted anew" if is_newer and exit_code else ""
        self._report(f"attempt {number} ended with exit code {exit_code}: {message}{progress}")

    def _look_for_checkpoints(self, group: WorkerGroup, before: dict[str, int]) -> dict[str, int]:
        """The trainer's; no other stage goes on from a checkpoint, and its retries count attempts."""
        if group.name != "trainer" or not self._deployment.recipe:
            return {}
        try:
            return find_newest_checkpoints(Path(group.root), self._deployment.recipe)
        except OSError as error:
            self._report(f"no checkpoint is seen: {error}")
            return before

    def _end(self, record: Record, exit_code: int, message: str) -> None:
        tried = f" after {len(record.attempts)} attempts" if len(record.attempts) > 1 else ""
        write_outcome(self._api, record, Outcome(exit_code, message + tried))

    def _fail_job(self) -> None:
        """Else the Job makes another pod after this one, which ends with a failure."""
        if self._own_record() and (job := self._api.find("Job", job_name(self._stage_name))):
            self._api.merge("Job", job_name(self._stage_name), no_more_failures(job))

    def _end_after_long_refusal(self, error: MillraceError) -> None:
        """Nodes are not held for longer than a start may take by an API that says no."""
        self._refused_since = self._refused_since or time.monotonic()
        seconds = self._deployment.start_timeout_seconds
        if isinstance(error, ApiUnreachable | Conflict) or time.monotonic() - self._refused_since < seconds:
            return
        self._end_at_once(Outcome(error.exit_code, f"refused for {seconds} s: {error}"))

    def _end_at_once(self, outcome: Outcome) -> None:
        try:
            record = self._read_record()
            if not record.outcome:
                write_outcome(self._api, record, outcome)
        except MillraceError as away:
            self._report(f"again in {POLL_SECONDS:.0f} s: {away}")

    def _release(self, record: Record) -> bool:
        """RayJobs ended, then pods and gang down; True once they are gone."""
        is_patient = self._waits_for("the operator to see the end") < SETTLE_SECONDS
        ended = {self._deployment.rayjob_name(number) for number, _ in enumerate(record.attempts, start=1)}
        if stop_rayjobs(self._api, self._stage_name, frozenset(ended if is_patient else ())):
            return False
        # Pods that never stood are no use to anybody, and would take nodes as soon as there are some.
        if self._deployment.keep and record.attempts:
            return True
        left = release_pods(self._api, self._stage_name)
        if left:
            self._report(f"waiting for {left} {self._stage_name} pods to leave")
        return left == 0

    def _follow_log(self, ray: RayJobs, name: str, driver: DriverState) -> None:
        submission = (name, driver.started_at_ms)
        if driver.status == "PENDING" or self._submission == submission:
            return
        if self._log:
            self._log.abandon()
        folder = Path(read_worker_group(self._api, self._stage_name).root) / LOG_FOLDER / self._stage_name
        self._submission = submission
        self._log = DriverLog(ray, name, driver.started_at_ms, folder)
        self._report(f"the driver's log goes to {self._log.path}")

    def _read_record(self) -> Record:
        """The deployment's record. A Job that somebody deleted has none any more: its stage is stopped."""
        outcome = Outcome(EXIT_AGAIN, "stopped, because its Job was deleted; the same command continues")
        return self._own_record() or Record(self._deployment, "", "", (), {}, outcome, "", False, True, "")

    def _own_record(self) -> Record | None:
        """None when the Job is gone, is being deleted, or is another deployment's."""
        record = read_record(self._api, self._stage_name)
        is_ours = record and record.deployment.id == self._deployment.id and not record.is_deleted
        return record if is_ours else None

    def _ray(self, cluster: str) -> RayJobs:
        return RayJobs(cluster, self._api.namespace)

    def _waits_for(self, what: str) -> float:
        """Seconds for which this, and nothing else, has been waited for."""
        if self._wait[0] != what:
            self._wait = (what, time.monotonic())
        return time.monotonic() - self._wait[1]

    def _pause(self) -> None:
        # A process that was told to leave, but has a stage to bring down, goes on in the same rhythm.
        time.sleep(POLL_SECONDS) if self._terminated.is_set() else self._terminated.wait(POLL_SECONDS)
