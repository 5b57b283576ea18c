"""What the reconciler does next."""

from __future__ import annotations

from k8s.objects.deployment import Deployment

WHOLE_GANG_SECONDS = 300.0  # for which all nodes are waited for where fewer would do


def next_size(deployment: Deployment, nodes: int, is_after_loss: bool, room: int, waited_seconds: float) -> int:
    """The number of nodes to place a gang on that still lacks some of `nodes`; 0 to give up.

    After a loss it is the largest that the recipe allows and for which there may be room; Volcano has the last word.
    """
    patience = deployment.start_timeout_seconds
    if is_after_loss and waited_seconds > min(WHOLE_GANG_SECONDS, patience):
        fewer = next((each for each in deployment.fewer_nodes if each < nodes and each <= room), None)
        if fewer is not None:
            return fewer
    return 0 if waited_seconds > patience else nodes
