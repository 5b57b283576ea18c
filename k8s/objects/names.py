"""Names of Kubernetes objects, labels and annotations that the client and the controller share."""

from __future__ import annotations

NAMESPACE = "millrace"
CLUSTER = "millrace"
DEPLOYER = "deployer"  # the deploy Jobs' service account
NEURON = "aws.amazon.com/neuron"  # the device plugin's resource, one Trainium chip; also the taint of Trainium nodes
EFA = "vpc.amazonaws.com/efa"  # the EFA device plugin's resource, one network interface
INSTANCE_TYPE_LABEL = "node.kubernetes.io/instance-type"
POOL_LABEL = "millrace.dev/pool"  # on nodes: the pods of a stage select one pool
SHAPE_LABEL = "millrace.dev/shape"  # on node groups: their instance type, which EKS does not tell

IMAGES_ANNOTATION = "millrace.dev/images"  # on the namespace: the prefixes of the images that may run in it

QUEUE_ANNOTATION = "volcano.sh/queue-name"
GROUP_ANNOTATION = "scheduling.k8s.io/group-name"

STAGE_LABEL = "millrace.dev/stage"
DEPLOYMENT_LABEL = "millrace.dev/deployment"
RUN_LABEL = "millrace.dev/run"  # on a deployment's Job, RayJobs and pods: the recipe's name, for reports of costs
DRAIN_ANNOTATION = "millrace.dev/drain-seconds"
COMPONENT_LABEL = "millrace.dev/component"
VARIANT_ANNOTATION = "millrace.dev/variant"
DEFAULT_RECIPE_ANNOTATION = "millrace.dev/default-recipe"  # on the RayCluster: for deployments that name no recipe
REGION_ANNOTATION = "millrace.dev/region"  # on the RayCluster: the AWS region of its nodes
NODE_GROUP_ANNOTATION = "millrace.dev/node-group"  # on the Lease of a node group: CLUSTER/GROUP

# On a deploy Job: the answer of the stage's image, its attempts, its outcome, who asked it to stop, and the record of
# the last deployment before it that its image accepted.
PREFLIGHT_ANNOTATION = "millrace.dev/preflight"
ATTEMPTS_ANNOTATION = "millrace.dev/attempts"
CHECKPOINTS_ANNOTATION = "millrace.dev/checkpoints"
OUTCOME_ANNOTATION = "millrace.dev/outcome"
STOP_ANNOTATION = "millrace.dev/stop"
BEFORE_ANNOTATION = "millrace.dev/before"

PLACED_FOR_ANNOTATION = "millrace.dev/placed-for"  # on a PodGroup: the RayJob that its pods are placed for

# Values of the label millrace.dev/component: the Job that runs a one-off, and the Job that holds its node.
ONE_OFF = "one-off"
ONE_OFF_NODES = "one-off-nodes"
USER_ANNOTATION = "millrace.dev/user"  # on a one-off's Job: the person who started it
# On the namespace: the pool where one-offs may run and the most that one may request. The client derives them from the
# overlay.
ONE_OFF_POOL_ANNOTATION = "millrace.dev/one-off-pool"
ONE_OFF_CPUS_ANNOTATION = "millrace.dev/one-off-cpus"
ONE_OFF_MEMORY_ANNOTATION = "millrace.dev/one-off-memory"

PREFLIGHT = "preflight"  # the init container of a deploy Job's pod, which runs the stage's image

NODES_KEY = "nodes"  # in a RayJob's metadata: the number of nodes of its attempt


def job_name(stage: str) -> str:
    """The deploy Job of a stage. One name per stage makes the API server refuse a second deployment of it."""
    return f"deploy-{stage}"


def one_off_nodes_name(one_off: str) -> str:
    """The Job that holds the node of the one-off whose Job is `one_off`."""
    return f"{ONE_OFF_NODES}{one_off.removeprefix(ONE_OFF)}"


# Of each stage, on the RayCluster and not on the pods' template: a new price or end of a reservation may come while the
# stage runs, and must not change its pods.
GOOD_IMAGES = "good-images"  # the images with which the stage ended with exit code 0, oldest first
CHECKPOINT_SECONDS = "checkpoint-seconds"  # the slowest checkpoint of the newest deployment
NODE_POOL = "node-pool"  # the managed node group (CLUSTER/GROUP) of the stage's nodes; absent for static nodes
NODE_SHAPE = "node-shape"  # the instance type of the stage's nodes
NODE_PRICE = "node-price"  # dollars an hour for one node
CAPACITY_END = "capacity-ends-at"  # the end of the capacity reservation for the nodes


def stage_annotation(stage: str, what: str) -> str:
    return f"millrace.dev/{stage}-{what}"


def recipe_name(stage: str, digest: str) -> str:
    """The ConfigMap of a recipe, named by its content: a pod that is replaced mid-run reads the recipe of the first."""
    return f"{stage}-recipe-{digest[:10]}"
