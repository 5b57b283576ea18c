"""An EKS cluster of moto's with a managed node group, whose nodes come and go in a world in memory."""

from __future__ import annotations

from typing import Any

from botocore.awsrequest import AWSResponse
from moto.eks.models import eks_backends

from k8s.objects.node_group import NODE_GROUP_LABEL, _connect
from tests.k8s.builders import READY, REGION
from tests.k8s.world import World

ACCOUNT = "123456789012"  # moto's
POOL = "millrace/trainium"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/nodes"


SIZES = {"minSize": 0, "maxSize": 4, "desiredSize": 0}


def make_node_group(client: Any) -> None:
    """Make the EKS cluster `millrace` with its node group `trainium`, which has no nodes yet."""
    client.create_cluster(name="millrace", roleArn=ROLE, resourcesVpcConfig={"subnetIds": ["subnet-1"]})
    client.create_nodegroup(
        clusterName="millrace",
        nodegroupName="trainium",
        nodeRole=ROLE,
        scalingConfig=SIZES,
        instanceTypes=["trn1.32xlarge"],
        subnets=["subnet-1"],
        labels={"millrace.dev/pool": "trainium", "millrace.dev/shape": "trn1.32xlarge"},
        taints=[{"key": "aws.amazon.com/neuron", "value": "true", "effect": "NO_SCHEDULE"}],
    )


class Cloud:
    """A managed node group, which a test may leave without capacity."""

    def __init__(self) -> None:
        if not eks_backends[ACCOUNT][REGION].clusters:  # making one takes a fifth of a second
            make_node_group(_connect())
        self._group.scaling_config = dict(SIZES)
        self._group.status, self._group.health = "ACTIVE", {"issues": []}
        self.has_capacity = True
        self.sizes: list[int] = [0]
        """The desired sizes of the group, in their order."""

    @property
    def size(self) -> int:
        return int(self._group.scaling_config["desiredSize"]) if self._groups else 0

    def set_health(self, code: str, message: str) -> None:
        self._group.status = "DEGRADED"
        self._group.health = {"issues": [{"code": code, "message": message, "resourceIds": []}]}

    def serve(self, world: World) -> None:
        """Bring a world's nodes to the group's size. Of too many nodes, those with pods go: EKS chooses freely."""
        if self.size != self.sizes[-1]:
            self.sizes.append(self.size)
        nodes = sorted(world.api.names("Node"), key=lambda name: name in world.bound())
        for name in nodes[self.size :] if self.size < len(nodes) else []:
            world.api.delete("Node", name)
        for number in range(self.size if self.has_capacity else 0):
            name = f"ip-{number}"
            if not world.api.find("Node", name) and len(world.api.names("Node")) < self.size:
                world.set_node(name, [], [READY])
                label = {NODE_GROUP_LABEL: "trainium"}
                world.api.merge("Node", name, {"metadata": {"labels": label}})

    @property
    def _group(self) -> Any:
        return self._groups["trainium"]

    @property
    def _groups(self) -> dict[str, Any]:
        return eks_backends[ACCOUNT][REGION].clusters["millrace"].nodegroups


class Refusal:
    """Makes EKS refuse the calls of one operation."""

    def __init__(self, operation: str, status: int, code: str, times: int = 1_000_000) -> None:
        self.refused = 0
        self._times, self._status, self._code = times, status, code
        self._event = f"before-call.eks.{operation}"
        _connect().meta.events.register(self._event, self._answer)

    def end(self) -> None:
        _connect().meta.events.unregister(self._event, self._answer)

    def _answer(self, **_: Any) -> tuple[AWSResponse, dict[str, Any]] | None:
        if self.refused == self._times:
            return None
        self.refused += 1
        said = {"Code": self._code, "Message": f"said by {self._code}"}
        answer = {"Error": said, "ResponseMetadata": {"HTTPStatusCode": self._status}}
        return AWSResponse("https://eks", self._status, {}, None), answer
