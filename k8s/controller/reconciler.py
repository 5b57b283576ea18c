"""The reconciler of one deployment: it places the gang, starts and follows attempts, and takes the stage down.

It is level-triggered: each pass observes the cluster, lets `decide` choose one action, and does it. The reconciler
remembers nothing that it could not observe again, so it may be killed between any two lines and restarted; only the
limits of its waits begin again. That of the deployment itself counts from the deploy Job's creation.
"""

from __future__ import annotations

import signal
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path

from deploy.exit_codes import EXIT_AGAIN
from deploy.progress import ProgressPrinter
from k8s.controller.decision import Action, Step, decide
from k8s.controller.history import find_newest_checkpoints, record_checkpoint_seconds, record_good_image
from k8s.controller.node_pool import NodePool, PoolState
from k8s.controller.observation import Gang, Observation, State, has_progressed
from k8s.controller.preflight import judge, read_answer
from k8s.controller.ray_jobs import LOG_FOLDER, DriverLog, RayJobs, RayUnreachable
from k8s.objects.api import Api, ApiUnreachable, Conflict, Object
from k8s.objects.attempt import (
    has_been_submitted,
    has_ended,
    nodes_of,
    placed_size,
    rayjobs_of,
    render_isolated_rayjob,
    render_pod_group,
    render_rayjob,
)
from k8s.objects.capacity import count_room
from k8s.objects.deployment import Deployment
from k8s.objects.lost_pods import LostPods
from k8s.objects.names import CLUSTER, job_name
from k8s.objects.placement import addresses_of, explain_placement, pods_of
from k8s.objects.record import (
    Acceptance,
    Outcome,
    Record,
    ask_to_stop,
    find_passed_limit,
    read_record,
    write_acceptance,
    write_attempt,
    write_outcome,
)
from k8s.objects.teardown import deploy_pods_of, release_pods, stop_rayjobs
from k8s.objects.worker_group import WorkerGroup, read_worker_group, render_worker_group, replace_group, scale_down
from services.common.errors import EXIT_BUG, MillraceError

POLL_SECONDS = 2.0
SETTLE_SECONDS = 60.0
"""Seconds that the operator may take to mark a RayJob as ended after Ray has said so."""
LOG_SECONDS = 20.0
"""Seconds to wait for the rest of an ended driver's log."""
LOST_LOG_SECONDS = 2.0
"""Seconds to wait for the log of a driver whose node is gone. Such a stream ends with a connection's limit, if ever."""


class Reconciler:
    """Runs one deployment, or continues one that an earlier process began."""

    def __init__(self, api: Api, deployment: Deployment, pod: str) -> None:
        self._api = api
        self._deployment = deployment
        self._stage = deployment.stage
        self._pod = pod
        self._terminated = threading.Event()
        self._report = ProgressPrinter("deploy").report
        self._lost = LostPods(api, deployment.stage, self._report)
        self._pool = NodePool(api, self._stage, deployment.node_pool, self._report, deployment.capacity_ends_at)
        self._refused_since: float | None = None
        self._entered: tuple[object, float] = (None, 0.0)  # what `_with_wait` tells apart, and since when
        self._log: DriverLog | None = None

    def run(self) -> Outcome | None:
        """Reconcile until the deployment has ended and its pods are gone, and return its outcome.

        Returns None when another process continues the deployment.
        """
        signal.signal(signal.SIGTERM, lambda *_: self._terminated.set())
        while True:
            try:
                if self._terminated.is_set() and self._own_record():
                    self._report("this process was told to leave; the next pod of the Job continues")
                    return None
                outcome = None if self._is_another_at_work() else self._reconcile()
                self._refused_since = None
                if outcome:
                    if outcome.exit_code:
                        self._fail_job()
                    self._report(f"{outcome.message} (exit code {outcome.exit_code})")
                    return outcome
            except MillraceError as error:
                # The API does not answer, another process wrote first, or a right is missing for a moment. The stage
                # may hold nodes, so this process tries on until they are given back.
                self._report(f"trying again in {POLL_SECONDS:.0f} s: {error}")
                self._end_after_long_refusal(error)
            except Exception as error:  # noqa: BLE001 - a bug must not leave nodes held
                traceback.print_exc()
                self._end_at_once(Outcome(EXIT_BUG, f"a bug in the deploy tool: {error!r}"))
            self._pause()

    def _is_another_at_work(self) -> bool:
        """Whether an older pod of a deploy Job of the stage has not ended; one on a lost node is removed by force."""
        oldest = next((pod["metadata"]["name"] for pod in deploy_pods_of(self._api, self._stage)), self._pod)
        if oldest == self._pod:
            return False
        self._lost.remove(is_idle=False)
        self._report(f"waiting for pod {oldest}, which works on {self._stage}, to end")
        return True

    def _reconcile(self) -> Outcome | None:
        """Observe, decide and act once. Returns the outcome once everything is down."""
        record = self._read_record()
        if limit := find_passed_limit(record):
            ask_to_stop(self._api, record, limit)
            return None
        if not (record.acceptance or record.outcome or record.stop):
            self._await_acceptance(record)
            return None
        name = self._deployment.rayjob_name(len(record.attempts) + 1)
        rayjob = None if record.outcome else self._api.find("RayJob", name)
        lost = self._lost.remove(is_idle=rayjob is None)
        observation = self._with_wait(self._observe(record, rayjob))
        self._follow_log(observation)
        action = decide(observation)
        is_done = self._act(action, observation)
        if action.report:
            self._report(action.report)
        # A pod of the deploy Job on a lost node would keep the Job from ending.
        return record.outcome if is_done and not lost else None

    def _await_acceptance(self, record: Record) -> None:
        """Write what the stage's image answered, once: a later pod of the Job asks it again, and is not heard."""
        answer = read_answer(self._api, self._pod)
        if answer is None:
            self._report(f"waiting for the answer of the {self._stage}'s image")
            return
        match judge(self._deployment, answer):
            case Acceptance() as acceptance:
                write_acceptance(self._api, record, acceptance)
            case Outcome() as outcome:
                write_outcome(self._api, record, outcome)

    def _with_wait(self, seen: Observation) -> Observation:
        """The observation with the seconds that the deployment has waited in its state.

        A submitted job has a wait of its own: an isolated attempt may take longer than that for its Ray cluster.
        """
        entered = (seen.state, seen.gang.nodes if seen.gang else 0, has_been_submitted(seen.rayjob or {}))
        if entered != self._entered[0]:
            self._entered = (entered, time.monotonic())
        return replace(seen, waited_seconds=time.monotonic() - self._entered[1])

    def _observe(self, record: Record, rayjob: Object | None) -> Observation:
        seen = Observation(record=record, rayjob=rayjob)
        if rayjob is not None:
            return self._observe_attempt(seen, rayjob)
        if seen.state is not State.PLACING:
            return seen
        if not all(map(has_ended, rayjobs_of(self._api, self._stage))):
            return replace(seen, has_older_rayjobs=True)
        return replace(seen, gang=self._observe_gang(seen))

    def _observe_gang(self, seen: Observation) -> Gang:
        group = read_worker_group(self._api, self._stage)
        nodes = placed_size(self._api.find("PodGroup", group.pod_group), self._deployment, seen.attempt)
        wanted = render_worker_group(group, self._deployment)
        is_after_loss = bool(seen.record.attempts and self._deployment.fewer_nodes)
        gang = Gang(
            nodes=nodes,
            replicas=group.replicas,
            pods=len(pods_of(self._api, self._stage)),
            is_up_to_date=self._deployment.mode == "shared" and wanted["template"] == group.spec["template"],
            room=count_room(self._api, group) if is_after_loss else 0,
            pool=self._pool.observe(self._deployment.nodes, group),
            group=group,
        )
        if not gang.is_up_to_date or gang.replicas != nodes:
            return gang
        return replace(gang, missing=self._lost.faults or self._explain_missing(group, nodes))

    def _explain_missing(self, group: WorkerGroup, nodes: int) -> str:
        """A sentence about the pods that have not joined Ray; empty when all have.

        A pod that has joined can work, although the operator marks it ready 10 s later or more. Ray takes a pod that is
        gone for alive for a while, so only addresses of present pods count.
        """
        addresses, joined, said = addresses_of(self._api, self._stage), 0, ""
        if len(addresses) >= nodes:
            try:
                joined = len(addresses & self._ray(CLUSTER).find_addresses(group.routing_resource))
            except RayUnreachable as error:
                said = f"waiting for the Ray head: {error}"
        if joined >= nodes:
            return ""
        missing = explain_placement(self._api, group, nodes)
        return missing or said or f"{joined} of {nodes} {self._stage} pods have joined Ray"

    def _observe_attempt(self, seen: Observation, rayjob: Object) -> Observation:
        try:
            seen = replace(seen, driver=self._ray_of(rayjob).find(rayjob["metadata"]["name"]))
        except RayUnreachable as error:
            seen = replace(seen, ray_error=str(error))
        if seen.state is not State.STARTING:
            return seen
        group = read_worker_group(self._api, self._stage)
        pool = self._pool.observe(self._deployment.nodes) if self._deployment.mode == "isolated" else PoolState()
        reports = (explain_placement(self._api, group, nodes_of(rayjob)), pool.report)
        return replace(seen, missing="; ".join(filter(None, reports)))

    def _act(self, action: Action, seen: Observation) -> bool:
        """Do the action. Returns True when the stage is down."""
        group = seen.gang.group if seen.gang else None
        match action.step:
            case Step.STOP_OLDER_RAYJOBS:
                stop_rayjobs(self._api, self._stage)
            case Step.HOLD_NODES:
                self._pool.hold(self._deployment.nodes)
            case Step.EMPTY_GROUP if group:
                scale_down(self._api, group)
            case Step.PLACE_GANG if group:
                self._place(group, seen.attempt, action.nodes)
            case Step.SHRINK_GANG if group:
                self._apply_pod_group(group, seen.attempt, action.nodes)
            case Step.START_ATTEMPT if group:
                self._start(group, seen, action.nodes)
            case Step.STOP_DRIVER if seen.rayjob:
                self._ray_of(seen.rayjob).stop(seen.rayjob["metadata"]["name"])
            case Step.END_ATTEMPT if action.outcome:
                self._end_attempt(action.outcome, seen)
            case Step.END_DEPLOYMENT if action.outcome:
                write_outcome(self._api, seen.record, action.outcome)
            case Step.TAKE_DOWN | Step.STOP_RAYJOBS:
                return self._stop_rayjobs(seen) and (action.step is Step.STOP_RAYJOBS or self._take_down())
        return False

    def _place(self, group: WorkerGroup, attempt: int, nodes: int) -> None:
        """Make or change the PodGroup, and write the worker group in one piece where it differs."""
        self._apply_pod_group(group, attempt, nodes)
        wanted = render_worker_group(group, self._deployment)
        if group.replicas != nodes or wanted["template"] != group.spec["template"]:
            replace_group(self._api, group, wanted | {"replicas": nodes})

    def _apply_pod_group(self, group: WorkerGroup, attempt: int, nodes: int) -> None:
        self._api.apply(render_pod_group(group, self._deployment, attempt, nodes))

    def _start(self, group: WorkerGroup, seen: Observation, nodes: int) -> None:
        attempt, accepted = seen.attempt, seen.record.acceptance or Acceptance()
        self._apply_pod_group(group, attempt, nodes)
        for ended in rayjobs_of(self._api, self._stage):
            self._api.delete("RayJob", ended["metadata"]["name"])
        if self._deployment.mode == "isolated":
            self._api.create(render_isolated_rayjob(group, self._deployment, attempt, accepted.ray_version))
        else:
            self._api.create(render_rayjob(group, self._deployment, attempt, nodes))

    def _end_attempt(self, ended: Outcome, seen: Observation) -> None:
        """Write the end of the attempt to the record before its RayJob is removed."""
        if self._log:
            driver = seen.driver
            is_lost = driver is not None and driver.status.is_terminal() and driver.exit_code is None
            self._log.close(LOST_LOG_SECONDS if is_lost else LOG_SECONDS)
            self._log = None
        group = read_worker_group(self._api, self._stage)
        try:
            if ended.exit_code == 0:
                record_good_image(self._api, group, self._deployment.image)
            record_checkpoint_seconds(self._api, group)
        except (OSError, ValueError) as error:  # a lost history fails no stage; a run's folder may go at any time
            self._report(f"the history of the stage is not recorded: {error}")
        number = seen.attempt
        record = self._read_record()  # people write requests to stop to the same Job; only this process writes attempts
        checkpoints = self._find_checkpoints(group, record.checkpoints)
        is_newer = has_progressed(record.checkpoints, checkpoints, ended.message)
        write_attempt(self._api, record, replace(ended, progressed=is_newer), checkpoints)
        if seen.state is not State.ATTEMPT_ENDED:  # an ended RayJob stays for `kubectl get rayjobs`
            self._api.delete("RayJob", self._deployment.rayjob_name(number))
        progress = "; it left a newer checkpoint, so retries count from 0" if is_newer and ended.exit_code else ""
        self._report(f"attempt {number} ended with exit code {ended.exit_code}: {ended.message}{progress}")

    def _stop_rayjobs(self, seen: Observation) -> bool:
        """Stop the RayJobs, after the operator has had time to mark that of an ended attempt as ended."""
        if seen.record.attempts and seen.waited_seconds < SETTLE_SECONDS:
            return all(map(has_ended, rayjobs_of(self._api, self._stage)))
        return stop_rayjobs(self._api, self._stage) == 0

    def _take_down(self) -> bool:
        """Remove pods and PodGroup, then give back the nodes. Returns True once all of that is done."""
        left = release_pods(self._api, self._stage)
        if left:
            self._report(f"waiting for {left} {self._stage} pods to leave")
        return left == 0 and self._pool.release()

    def _find_checkpoints(self, group: WorkerGroup, before: dict[str, int]) -> dict[str, int]:
        """Find the trainer's newest checkpoints; the other stages have none, so their retries count attempts."""
        if group.name != "trainer" or not self._deployment.recipe:
            return {}
        try:
            return find_newest_checkpoints(Path(group.root), self._deployment.recipe)
        except OSError as error:
            self._report(f"the checkpoints cannot be read: {error}")
            return before

    def _fail_job(self) -> None:
        """Keep the Job from making another pod after this one, which ends with a failure."""
        if self._own_record() and (job := self._api.find("Job", job_name(self._stage))):
            failures = int((job.get("status") or {}).get("failed") or 0)
            self._api.merge("Job", job_name(self._stage), {"spec": {"backoffLimit": failures}})

    def _end_after_long_refusal(self, error: MillraceError) -> None:
        """End the deployment when the API refuses for longer than a start may take, so that no nodes stay held."""
        if isinstance(error, ApiUnreachable | Conflict | RayUnreachable):
            return
        self._refused_since = self._refused_since or time.monotonic()
        seconds = self._deployment.start_timeout_seconds
        if time.monotonic() - self._refused_since < seconds:
            return
        self._end_at_once(Outcome(error.exit_code, f"refused for {seconds} s: {error}"))

    def _end_at_once(self, outcome: Outcome) -> None:
        try:
            record = self._read_record()
            if not record.outcome:
                write_outcome(self._api, record, outcome)
        except MillraceError as away:
            self._report(f"trying again in {POLL_SECONDS:.0f} s: {away}")

    def _follow_log(self, observation: Observation) -> None:
        """Follow the log of the attempt's newest submission, even if that has ended already."""
        rayjob, driver = observation.rayjob, observation.driver
        if rayjob is None or driver is None or driver.status == "PENDING":
            return
        name = rayjob["metadata"]["name"]
        if self._log:
            if self._log.submission == (name, driver.started_at_ms):
                return
            self._log.abandon()
        folder = Path(read_worker_group(self._api, self._stage).root) / LOG_FOLDER / self._stage
        self._log = DriverLog(self._ray_of(rayjob), name, driver.started_at_ms, folder)
        self._report(f"the driver's log goes to {self._log.path}")

    def _read_record(self) -> Record:
        """Read the deployment's record. When somebody has deleted the Job, it is a record that ends the deployment."""
        outcome = Outcome(EXIT_AGAIN, "stopped, because its Job was deleted; the same command continues")
        gone = Record(self._deployment, "", "", (), {}, outcome, "", False, True, "", Acceptance())
        return self._own_record() or gone

    def _own_record(self) -> Record | None:
        """Read the record; None when the Job is gone, is being deleted, or belongs to another deployment."""
        record = read_record(self._api, self._stage)
        is_ours = record and record.deployment.id == self._deployment.id and not record.is_deleted
        return record if is_ours else None

    def _ray_of(self, rayjob: Object) -> RayJobs:
        """The Jobs API of the Ray cluster on which the attempt runs."""
        return self._ray((rayjob.get("status") or {}).get("rayClusterName") or CLUSTER)

    def _ray(self, cluster: str) -> RayJobs:
        return RayJobs(cluster, self._api.namespace)

    def _pause(self) -> None:
        # A process that was told to leave, but still takes its stage down, keeps the same interval.
        time.sleep(POLL_SECONDS) if self._terminated.is_set() else self._terminated.wait(POLL_SECONDS)
