"""KubeRay as a target of deployments."""

from __future__ import annotations

from typing import TextIO

from deploy.client.one_off import OneOffRequest
from deploy.client.request import DeployRequest
from k8s.client.commands import deploy_stage, rollback_stage, run_pipeline, show_log, stop_stage
from k8s.client.one_off import run_one_off
from k8s.client.status import describe_status
from k8s.objects.api import Api
from services.common.recipe.schema import Stage


class KubeRay:
    """The RayCluster of a namespace."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def deploy(self, request: DeployRequest, output: TextIO | None) -> int:
        return deploy_stage(self._api, request, output)

    def show_status(self) -> int:
        print(describe_status(self._api))
        return 0

    def show_log(self, stage: Stage) -> int:
        return show_log(self._api, stage)

    def stop(self, stage: Stage) -> int:
        return stop_stage(self._api, stage)

    def roll_back(self, request: DeployRequest, output: TextIO | None) -> int:
        return rollback_stage(self._api, request, output)

    def run_one_off(self, request: OneOffRequest, output: TextIO | None) -> int:
        return run_one_off(self._api, request, output)

    def run_pipeline(self, request: DeployRequest, output: TextIO | None) -> int:
        return run_pipeline(self._api, request, output)
