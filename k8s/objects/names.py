"""The names that nobody can read from the cluster: of the objects that client and controller look for, and of those
that they make. Other versions of both know them, too.
"""

from __future__ import annotations

NAMESPACE = "millrace"
CLUSTER = "millrace"
DEPLOYER = "deployer"  # the deploy Jobs' service account
NEURON = "aws.amazon.com/neuron"  # the device plugin's resource, a Trainium chip; also the taint of its nodes
EFA = "vpc.amazonaws.com/efa"  # the other device plugin's, an interface
INSTANCE_TYPE_LABEL = "node.kubernetes.io/instance-type"
POOL_LABEL = "millrace.dev/pool"  # of nodes: a stage's pods go to one pool
SHAPE_LABEL = "millrace.dev/shape"  # of node groups: their instance type, which EKS does not tell

IMAGES_ANNOTATION = "millrace.dev/images"  # of the namespace: how the names of images that may run there begin

QUEUE_ANNOTATION = "volcano.sh/queue-name"
GROUP_ANNOTATION = "scheduling.k8s.io/group-name"

STAGE_LABEL = "millrace.dev/stage"
DEPLOYMENT_LABEL = "millrace.dev/deployment"
DRAIN_ANNOTATION = "millrace.dev/drain-seconds"
COMPONENT_LABEL = "millrace.dev/component"
VARIANT_ANNOTATION = "millrace.dev/variant"
DEFAULT_RECIPE_ANNOTATION = "millrace.dev/default-recipe"  # on the RayCluster: of deployments that name none
REGION_ANNOTATION = "millrace.dev/region"  # on the RayCluster: where the deploy Job finds the nodes' cloud

# A Lease: each pool's size before any deployment raised it, and the nodes that each stage or one-off holds of it.
NODE_POOLS = "node-pools"
NODE_POOLS_ANNOTATION = "millrace.dev/node-pools"

# On a deploy Job: what was tried, how it ended, and who asks it to stop.
ATTEMPTS_ANNOTATION = "millrace.dev/attempts"
CHECKPOINTS_ANNOTATION = "millrace.dev/checkpoints"
OUTCOME_ANNOTATION = "millrace.dev/outcome"
STOP_ANNOTATION = "millrace.dev/stop"

# On a PodGroup: the RayJob that its pods are placed for, and whether they stay afterwards.
PLACED_FOR_ANNOTATION = "millrace.dev/placed-for"
KEEP_ANNOTATION = "millrace.dev/keep"

# The Jobs of a one-off, by the label millrace.dev/component: a subcommand of a stage, and what holds its node.
ONE_OFF = "one-off"
ONE_OFF_NODES = "one-off-nodes"
USER_ANNOTATION = "millrace.dev/user"  # on a one-off's Job: who asked for it
# On the namespace: where one-offs may run, and what one takes at most. The client writes what follows from the overlay.
ONE_OFF_POOL_ANNOTATION = "millrace.dev/one-off-pool"
ONE_OFF_CPUS_ANNOTATION = "millrace.dev/one-off-cpus"
ONE_OFF_MEMORY_ANNOTATION = "millrace.dev/one-off-memory"

NODES_KEY = "nodes"  # of a RayJob's metadata: those of its attempt


def job_name(stage: str) -> str:
    """One name per stage, so that the API server itself lets one deployment of it exist at a time."""
    return f"deploy-{stage}"


def lease_name(stage: str) -> str:
    return f"stage-{stage}"


def one_off_nodes_name(one_off: str) -> str:
    """The Job that holds the node of a one-off, by the name of the one-off's own Job."""
    return f"{ONE_OFF_NODES}{one_off.removeprefix(ONE_OFF)}"


def good_images_annotation(stage: str) -> str:
    """On the RayCluster: the images with which the stage ended well, oldest first."""
    return f"millrace.dev/{stage}-good-images"


def checkpoint_annotation(stage: str) -> str:
    """On the RayCluster: seconds that the slowest checkpoint of the stage's newest deployment took."""
    return f"millrace.dev/{stage}-checkpoint-seconds"


# Of a stage's nodes. On the RayCluster and not on the pods' template: another price or end, which may come while the
# stage runs, is no change of its pods.


def node_pool_annotation(stage: str) -> str:
    """The managed node group (CLUSTER/GROUP) that the nodes come from; without it they are simply there."""
    return f"millrace.dev/{stage}-node-pool"


def node_shape_annotation(stage: str) -> str:
    """Their instance type."""
    return f"millrace.dev/{stage}-node-shape"


def node_price_annotation(stage: str) -> str:
    """Dollars an hour of one of them."""
    return f"millrace.dev/{stage}-node-price"


def capacity_end_annotation(stage: str) -> str:
    """When the capacity that is reserved for them ends."""
    return f"millrace.dev/{stage}-capacity-ends-at"


def recipe_name(stage: str, digest: str) -> str:
    """A recipe's ConfigMap is named by its content: a pod that is made again mid-run reads what the first one read."""
    return f"{stage}-recipe-{digest[:10]}"
