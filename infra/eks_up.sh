#!/usr/bin/env bash
# From an AWS account to a RayCluster on EKS: `make eks-up`. Each step is a command of its own and may be repeated, so that
# the same command continues after a step that failed.
set -euo pipefail
cd "$(dirname "$0")/.."

overlay=${OVERLAY:-eks}
[[ -d k8s/overlays/$overlay ]] && overlay=k8s/overlays/$overlay

step() { # NUMBER COMMAND...
    printf '\neks-up, %s of 6: %s\n' "$1" "${*:2}"
    "${@:2}" || {
        code=$?
        echo "eks-up stopped at step $1 with exit code $code; the same command continues there" >&2
        exit "$code"
    }
}

log_in() {
    aws ecr get-login-password --region "$REGION" | docker login --username AWS --password-stdin "${REGISTRY%%/*}"
}

if [[ ${STACK:-eks} != eks ]]; then
    echo "eks-up makes the stack eks, and STACK=$STACK was given: make infra-up STACK=$STACK" >&2
    exit 2
fi
uses="images kubernetes aws"
[[ ${DRY_RUN:-0} == 0 ]] || uses=aws
# shellcheck disable=SC2086  # words
./prerequisites.sh $uses # what a later step lacks would be paid for, idle
step 1 make --no-print-directory infra-up STACK=eks
if [[ ${DRY_RUN:-0} != 0 ]]; then
    echo "DRY_RUN=1: nothing was changed, and steps 2 to 6 were left out"
    exit
fi
# shellcheck source=/dev/null
source "$overlay/settings.env"
find_variant='import sys; from images.platforms import find_variant; print(find_variant(sys.argv[1]))'
variant=${VARIANT:-$(.venv-infra/bin/python -c "$find_variant" "$TRAINIUM_SHAPE")}
export KUBECONFIG=${KUBECONFIG:-$HOME/.kube/config} # of these steps: a cluster of `make cluster-local` comes first elsewhere
step 2 aws eks update-kubeconfig --region "$REGION" --name "$CLUSTER_NAME"
step 3 make --no-print-directory addons
step 4 log_in
step 5 make --no-print-directory images VARIANT="$variant" PUSH="$REGISTRY"
step 6 make --no-print-directory cluster-up OVERLAY="$overlay"
[[ ! -e .cluster/kubeconfig ]] || echo "make cluster-local left a cluster here, too; for this one: export KUBECONFIG=$KUBECONFIG"
