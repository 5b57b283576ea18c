"""moto on loopback, an AWS for `aws_endpoint` until it is killed, with what the stacks need and moto lacks.

python -m infra.tests.fakeaws PORT

That is machine images; EKS' add-ons, identities and access entries; placement groups; FSx' data
repositories; the subscribers, tags and actions of budgets; and Batch's compute environments whose groups are in their
launch template. They only store and return their arguments.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from threading import Lock
from typing import Any
from urllib.parse import unquote, urlparse
from uuid import uuid4

from moto.batch.models import BatchBackend, JobQueue
from moto.batch.responses import BatchResponse
from moto.budgets.responses import BudgetsResponse
from moto.core.responses import ActionResult, EmptyResult
from moto.ec2.models.amis import Ami, AmiBackend
from moto.ec2.responses import EC2Response
from moto.eks import models as eks_models
from moto.eks import urls as eks_urls
from moto.fsx.models import FileSystem
from moto.fsx.responses import FSxResponse
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

from infra.aws_releases import read_machine_images

ACCOUNT = "123456789012"  # moto's
TRAINIUM_AMI = "ami-0123456789abcdef0"
EKS_AMIS = [
    f"amazon-eks-node-al2023-x86_64-{kind}-1.35-v{day}"
    for kind in ("neuron", "standard")
    for day in ("20260505", "20260610")
]
EKS_DESCRIPTION = "EKS-optimized Kubernetes node based on Amazon Linux 2023, (k8s: 1.35.4, containerd: 2.2.*)"
CREATED = 1735689600.0  # a time as AWS' JSON has it
LUSTRE_VERSION = "2.15"
KINDS = {
    "addons": "addon",
    "pod-identity-associations": "association",
    "access-entries": "accessEntry",
    "access-policies": "associatedAccessPolicy",
}
Store = dict[str, dict[str, Any]]
Reply = tuple[int, dict[str, str], str]


def serve(port: int) -> None:
    os.environ["MOTO_IAM_LOAD_MANAGED_POLICIES"] = "true"  # else AmazonEKSClusterPolicy is NoSuchEntity
    _add_machine_images()
    _add_placement_groups()
    _add_fsx()
    _add_budgets()
    _add_batch()
    _add_eks()
    run_simple("127.0.0.1", port, DomainDispatcherApplication(create_backend_app), threaded=True)


def _add_machine_images() -> None:
    """The releases of AWS' images that the stacks name: moto has others."""
    load = AmiBackend._load_amis
    names = {TRAINIUM_AMI: read_machine_images("ecs", "trn1.32xlarge").default}
    names |= {f"ami-{number:08x}{name[-8:]}": name for number, name in enumerate(EKS_AMIS)}

    def load_amis(backend: AmiBackend) -> None:
        load(backend)
        for key, name in names.items():
            kind: dict[str, Any] = {"owner_id": "591542846629", "owner_alias": "amazon", "description": EKS_DESCRIPTION}
            backend.amis[key] = Ami(backend, key, name=name, **kind)

    _extend(AmiBackend, _load_amis=load_amis)


def _add_placement_groups() -> None:
    groups: Store = {}

    def create(response: EC2Response) -> ActionResult:
        name = response._get_param("GroupName")
        groups[name] = {
            "GroupName": name,
            "GroupId": f"pg-{uuid4().hex[:17]}",
            "GroupArn": f"arn:aws:ec2:{response.region}:{ACCOUNT}:placement-group/{name}",
            "Strategy": response._get_param("Strategy"),
            "State": "available",
        }
        return ActionResult({"PlacementGroup": groups[name]})

    def describe(response: EC2Response) -> ActionResult:
        names = response._get_param("GroupNames", []) or list(groups)
        return ActionResult({"PlacementGroups": [groups[name] for name in names if name in groups]})

    def delete(response: EC2Response) -> ActionResult:
        groups.pop(response._get_param("GroupName"), None)
        return EmptyResult()

    _extend(EC2Response, create_placement_group=create, describe_placement_groups=describe)
    _extend(EC2Response, delete_placement_group=delete)


def _add_fsx() -> None:
    as_moto_has_it = FileSystem.to_dict
    associations: Store = {}

    def to_dict(file_system: FileSystem) -> dict[str, Any]:
        found = as_moto_has_it(file_system)
        lustre = {**(file_system.lustre_configuration or {}), "MountName": "fakemnt"}
        # moto forgets the version that was asked for, without which each plan would replace the file system.
        found |= {"Lifecycle": "AVAILABLE", "CreationTime": CREATED, "FileSystemTypeVersion": LUSTRE_VERSION}
        return {**found, "LustreConfiguration": lustre}

    def create(response: FSxResponse) -> str:
        asked = json.loads(response.body)
        name = f"dra-{uuid4().hex[:17]}"
        arn = f"arn:aws:fsx:{response.region}:{ACCOUNT}:association/{asked['FileSystemId']}/{name}"
        associations[name] = {**asked, "AssociationId": name, "ResourceARN": arn, "Lifecycle": "AVAILABLE"}
        return json.dumps({"Association": associations[name]})

    def describe(response: FSxResponse) -> str:
        names = json.loads(response.body).get("AssociationIds") or list(associations)
        return json.dumps({"Associations": [associations[name] for name in names if name in associations]})

    def delete(response: FSxResponse) -> str:
        name = json.loads(response.body)["AssociationId"]
        associations.pop(name, None)
        return json.dumps({"AssociationId": name, "Lifecycle": "DELETING"})

    _extend(FileSystem, to_dict=to_dict)
    _extend(FSxResponse, create_data_repository_association=create)
    _extend(FSxResponse, describe_data_repository_associations=describe, delete_data_repository_association=delete)


def _add_budgets() -> None:
    actions: Store = {}

    def subscribers(response: BudgetsResponse) -> str:
        asked = json.loads(response.body)
        budget = response.backend.budgets[asked["AccountId"]][asked["BudgetName"]]
        of_this = [each for each in budget.notifications if _is_same(each.details, asked["Notification"])]
        return json.dumps({"Subscribers": [subscriber for each in of_this for subscriber in each.subscribers]})

    def create(response: BudgetsResponse) -> str:
        asked = json.loads(response.body)
        name = str(uuid4())
        actions[name] = {**asked, "ActionId": name, "Status": "STANDBY"}
        return json.dumps({"AccountId": asked["AccountId"], "BudgetName": asked["BudgetName"], "ActionId": name})

    def describe(response: BudgetsResponse) -> str | tuple[int, dict[str, str], str]:
        asked = json.loads(response.body)
        if asked["ActionId"] not in actions:
            return 400, {"status": "400"}, json.dumps({"__type": "NotFoundException", "message": "no such action"})
        action = actions[asked["ActionId"]]
        return json.dumps({"AccountId": asked["AccountId"], "BudgetName": asked["BudgetName"], "Action": action})

    def delete(response: BudgetsResponse) -> str:
        asked = json.loads(response.body)
        action = actions.pop(asked["ActionId"])
        return json.dumps({"AccountId": asked["AccountId"], "BudgetName": asked["BudgetName"], "Action": action})

    _extend(BudgetsResponse, describe_subscribers_for_notification=subscribers, create_budget_action=create)
    _extend(BudgetsResponse, describe_budget_action=describe, delete_budget_action=delete)
    _extend(BudgetsResponse, list_tags_for_resource=lambda _: json.dumps({"ResourceTags": []}))


def _add_batch() -> None:
    """Batch takes the role that is linked to it, and the security groups of a launch template: moto wants both said.
    And moto forgets when a queue cancels a job that is stuck."""
    validate, create = BatchBackend._validate_compute_resources, BatchBackend.create_compute_environment
    create_queue, describe_queue = BatchResponse.createjobqueue, JobQueue.describe
    limits: dict[str, list[dict[str, Any]]] = {}
    lock = Lock()

    def validate_resources(backend: BatchBackend, resources: dict[str, Any]) -> None:
        vpc = backend.ec2_backend.get_subnet(resources["subnets"][0]).vpc_id
        groups = resources.get("securityGroupIds") or list(backend.ec2_backend.groups[vpc])[:1]
        validate(backend, {**resources, "securityGroupIds": groups})

    def create_environment(backend: BatchBackend, **asked: Any) -> Any:
        with lock:
            return create(backend, **asked | {"service_role": asked.get("service_role") or _linked_role(backend)})

    def create_job_queue(response: BatchResponse) -> str:
        limits[response._get_param("jobQueueName")] = response._get_param("jobStateTimeLimitActions") or []
        return create_queue(response)

    def describe_job_queue(queue: JobQueue) -> dict[str, Any]:
        return {**describe_queue(queue), "jobStateTimeLimitActions": limits.get(queue.name, [])}

    _extend(BatchBackend, _validate_compute_resources=validate_resources, create_compute_environment=create_environment)
    _extend(BatchResponse, createjobqueue=create_job_queue)
    _extend(JobQueue, describe=describe_job_queue)


def _linked_role(backend: BatchBackend) -> str:
    name = "AWSServiceRoleForBatch"
    found = [role for role in backend.iam_backend.get_roles() if role.name == name]
    role = found[0] if found else backend.iam_backend.create_role(name, "{}", "/aws-service-role/", None, "", [], None)
    return str(role.arn)


def _is_same(details: dict[str, Any], asked: dict[str, Any]) -> bool:
    parts = ("NotificationType", "ComparisonOperator", "Threshold")
    return all(details.get(part) == asked.get(part) for part in parts)


def _add_eks() -> None:
    """Four kinds of a cluster's items, each under its own path. What a caller sends is what it reads back."""
    # EKS has none of these where a launch template has them; moto makes them up, and a plan would replace the group.
    for made_up in ("DEFAULT_REMOTE_ACCESS", "DEFAULT_DISK_SIZE", "DEFAULT_INSTANCE_TYPES"):
        setattr(eks_models, made_up, None)
    items: Store = {}

    def create(path: str, kind: str, region: str, asked: dict[str, Any]) -> dict[str, Any]:
        cluster = path.split("/")[2]
        name = next((asked[key] for key in ("addonName", "policyArn", "principalArn") if key in asked), uuid4().hex)
        arn = f"arn:aws:eks:{region}:{ACCOUNT}:{KINDS[kind]}/{cluster}/{name}"
        defaults = {"namespace": "kube-system", "type": "STANDARD", "addonVersion": "v1.0.0-eksbuild.1"}
        times = dict.fromkeys(("createdAt", "modifiedAt", "associatedAt"), CREATED)
        made: dict[str, Any] = {
            "clusterName": cluster,
            "status": "ACTIVE",
            "health": {"issues": []},
            "username": name,
            **times,
        }
        arns = {"addonArn": arn, "accessEntryArn": arn, "associationArn": arn, "associationId": name}
        if kind == "addons":  # its identities are associations like any other, and it names them
            place, own = f"/clusters/{cluster}/pod-identity-associations", asked.get("podIdentityAssociations", [])
            identities = [create(place, "pod-identity-associations", region, each) for each in own]
            asked = asked | {"podIdentityAssociations": [each["associationArn"] for each in identities]}
        items[f"{path}/{name}"] = defaults | made | times | asked | arns
        return items[f"{path}/{name}"]

    def answer(request: Any, full_url: str, headers: Any) -> Reply:
        path = unquote(urlparse(full_url).path)
        kind = max(KINDS, key=path.rfind)
        asked = json.loads(request.data or b"{}")
        if path.endswith(f"/{kind}"):
            if request.method == "POST":
                return _reply(200, {KINDS[kind]: create(path, kind, _region(request), asked)})
            listed = [item for place, item in items.items() if place.startswith(f"{path}/")]
            return _reply(200, {"associatedAccessPolicies": listed})
        if path not in items:
            return _reply(404, {"message": f"no {path}"}, "ResourceNotFoundException")
        if request.method == "POST":
            items[path].update(asked)
        return _reply(200, {KINDS[kind]: items.pop(path) if request.method == "DELETE" else items[path]})

    for kind in KINDS.keys() - {"access-policies"}:  # which are below an entry
        for rest in ("$", "/(?P<item>.+)$"):
            eks_urls.url_paths[f"{{0}}/clusters/(?P<name>[^/]+)/{kind}{rest}"] = answer


def _region(request: Any) -> str:
    """The region in a request's signature: Credential=KEY/DATE/REGION/SERVICE/aws4_request."""
    return str(request.headers["Authorization"]).split("Credential=")[1].split("/")[2]


def _reply(status: int, body: dict[str, Any], error: str = "") -> Reply:
    headers = {"Content-Type": "application/json"} | ({"x-amzn-ErrorType": error} if error else {})
    return status, headers, json.dumps(body)


def _extend(extended: type, **methods: Callable[..., Any]) -> None:
    for name, method in methods.items():
        setattr(extended, name, method)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
