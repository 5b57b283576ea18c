"""AWS Batch as moto has it, without containers: jobs stay where a test puts them, and what moto drops is kept here."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from moto import mock_aws
from moto.batch.models import batch_backends

from deploy.batch.batch_target import BatchTarget
from deploy.batch.config import Config
from deploy.batch.jobs import Jobs
from deploy.client.request import DeployRequest
from infra.account.batch_queues import ACTIVE_STATUSES
from infra.account.session import Account
from infra.tests.moto_batch import keep_jobs_still, make_queue
from services.common.recipe.schema import STAGES
from tests.deploy.batch.builders import SMALL, config_of
from tests.polling import script_polls

ACCOUNT, REGION = "123456789012", "us-west-2"
TAG = "0.1.0-gabc-neuron"
MEDIA_TYPE = "application/vnd.docker.distribution.manifest.v2+json"


def ask(stage: str = "trainer", **changes: Any) -> DeployRequest:
    """A request for an image that the account has."""
    fields: dict[str, Any] = {"stage": stage, "recipe": SMALL, "tag": TAG}
    return DeployRequest(**fields | changes)


class Cloud:
    """An account with two queues, log groups, and an image of each stage."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.while_waiting = script_polls(patch)
        """Scripts the events of the account, one for each poll of a command that waits."""
        self.config: Config = config_of(ECR_REPO=f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/millrace")
        self.account = Account(REGION)
        self.jobs = Jobs(self.account, self.config)
        self.target = BatchTarget(self.config, self.jobs)
        self.submitted: list[dict[str, Any]] = []
        """Requests as they were sent: moto drops overrides, tags and what depends on what."""
        self._registered: dict[str, list[dict[str, Any]]] = {}
        """Requests for the revisions of each job definition, of which moto drops the nodes."""
        self.batch = self.account.client("batch")
        self.batch.meta.events.register("provide-client-params.batch.SubmitJob", self._record_job)
        self.batch.meta.events.register("provide-client-params.batch.RegisterJobDefinition", self._record_definition)
        self.batch.meta.events.register("after-call.batch.DescribeJobDefinitions", self._give_back_nodes)
        self.batch.meta.events.register("after-call.batch.DescribeJobs", self._tell_of_main_nodes)
        self.are_attempts_the_main_nodes = False
        """Does DescribeJobs tell of attempts with the main node, which moto does not have, in place of the job?"""
        self._streams: dict[str, str] = {}
        for queue in (self.config.trainium.name, self.config.cpu.name):
            make_queue(self.account.client, queue)
        for stage in STAGES:
            self.account.client("logs").create_log_group(logGroupName=f"/millrace/{stage}")
            self.account.client("ecr").create_repository(repositoryName=f"millrace/{stage}")
            self.push(stage, TAG)

    def push(self, stage: str, tag: str) -> str:
        """An image's digest."""
        layer = {"digest": f"sha256:{tag}", "size": 1}
        manifest = json.dumps({"schemaVersion": 2, "config": layer, "layers": [layer]})
        made = self.account.client("ecr").put_image(
            repositoryName=f"millrace/{stage}", imageManifest=manifest, imageTag=tag, imageManifestMediaType=MEDIA_TYPE
        )
        return str(made["image"]["imageId"]["imageDigest"])

    def move(
        self,
        status: str,
        exit_code: int | None = None,
        reason: str = "",
        said: str = "",
        stage: str = "",
        container_reason: str = "",
    ) -> None:
        """Every active job (of a stage) goes to a status; an end is that of its newest attempt."""
        for job in self._backend._jobs.values():
            if job.status not in ACTIVE_STATUSES or stage not in job.job_definition.name:
                continue
            job.status, job.job_stopped_reason = status, reason or None
            stream = f"{job.job_definition.name}/default/{job.job_id}-{len(job.attempts)}"
            if status == "RUNNING" or status not in ACTIVE_STATUSES:
                self._say(job.job_definition.name.split("-")[1], stream, said)
                self._streams[job.job_id] = stream
            if status not in ACTIVE_STATUSES:
                end = {"logStreamName": stream, "exitCode": exit_code, "reason": container_reason or None}
                end = {key: value for key, value in end.items() if value is not None}
                job.attempts.append({"container": end})

    @property
    def _backend(self) -> Any:
        return batch_backends[ACCOUNT][REGION]

    def _say(self, stage: str, stream: str, text: str) -> None:
        logs = self.account.client("logs")
        with suppress(logs.exceptions.ResourceAlreadyExistsException):
            logs.create_log_stream(logGroupName=f"/millrace/{stage}", logStreamName=stream)
        now = int(time.time() * 1000)  # CloudWatch takes no time to come
        events = [{"timestamp": now, "message": line} for line in text.splitlines()]
        if events:
            logs.put_log_events(logGroupName=f"/millrace/{stage}", logStreamName=stream, logEvents=events)

    def _record_job(self, params: dict[str, Any], **_: Any) -> None:
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}", params["jobName"]), "Batch refuses it, moto does not"
        self.submitted.append(params)

    def _record_definition(self, params: dict[str, Any], **_: Any) -> None:
        self._registered.setdefault(params["jobDefinitionName"], []).append(params)

    def _tell_of_main_nodes(self, parsed: dict[str, Any], **_: Any) -> None:
        for job in list(parsed.get("jobs", [])):
            stream = self._streams.get(job["jobId"])
            main_node = {"jobId": f"{job['jobId']}#0", "container": {"logStreamName": stream} if stream else {}}
            if self.are_attempts_the_main_nodes:
                main_node["attempts"] = job.get("attempts", [])
                job["attempts"] = [{"container": {}} for _ in main_node["attempts"]]
            parsed["jobs"].append(main_node)

    def _give_back_nodes(self, parsed: dict[str, Any], **_: Any) -> None:
        for each in parsed.get("jobDefinitions", []):
            registered = self._registered[each["jobDefinitionName"]][each["revision"] - 1]
            tags = self._backend.list_tags_for_resource(each["jobDefinitionArn"])
            each.update({key: value for key, value in registered.items() if key != "tags"} | {"tags": tags})


@contextmanager
def simulated_account() -> Iterator[Cloud]:
    with pytest.MonkeyPatch.context() as patch, mock_aws():
        keep_jobs_still(patch)
        yield Cloud(patch)
