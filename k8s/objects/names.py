"""The names that nobody can read from the cluster: of the objects that client and controller look for, and of those
that they make. Other versions of both know them, too.
"""

from __future__ import annotations

NAMESPACE = "millrace"
CLUSTER = "millrace"
DEPLOYER = "deployer"  # the deploy Jobs' service account
NEURON = "aws.amazon.com/neuron"  # the device plugin's resource, a Trainium chip

QUEUE_ANNOTATION = "volcano.sh/queue-name"
GROUP_ANNOTATION = "scheduling.k8s.io/group-name"

STAGE_LABEL = "millrace.dev/stage"
DEPLOYMENT_LABEL = "millrace.dev/deployment"
DRAIN_ANNOTATION = "millrace.dev/drain-seconds"
COMPONENT_LABEL = "millrace.dev/component"
VARIANT_ANNOTATION = "millrace.dev/variant"

# On a deploy Job: what was tried, how it ended, and who asks it to stop.
ATTEMPTS_ANNOTATION = "millrace.dev/attempts"
CHECKPOINTS_ANNOTATION = "millrace.dev/checkpoints"
OUTCOME_ANNOTATION = "millrace.dev/outcome"
STOP_ANNOTATION = "millrace.dev/stop"

# On a PodGroup: the RayJob that its pods are placed for, and whether they stay afterwards.
PLACED_FOR_ANNOTATION = "millrace.dev/placed-for"
KEEP_ANNOTATION = "millrace.dev/keep"

NODES_KEY = "nodes"  # of a RayJob's metadata: those of its attempt


def job_name(stage: str) -> str:
    """One name per stage, so that the API server itself lets one deployment of it exist at a time."""
    return f"deploy-{stage}"


def lease_name(stage: str) -> str:
    return f"stage-{stage}"


def good_images_annotation(stage: str) -> str:
    """On the RayCluster: the images with which the stage ended well, oldest first."""
    return f"millrace.dev/{stage}-good-images"


def checkpoint_annotation(stage: str) -> str:
    """On the RayCluster: seconds that the slowest checkpoint of the stage's newest deployment took."""
    return f"millrace.dev/{stage}-checkpoint-seconds"


def recipe_name(stage: str, digest: str) -> str:
    """A recipe's ConfigMap is named by its content: a pod that is made again mid-run reads what the first one read."""
    return f"{stage}-recipe-{digest[:10]}"
