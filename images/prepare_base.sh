#!/bin/sh
# Puts Python into /opt/python and Neuron's runtime into /opt/aws where the base of a trn2 image lacks them:
# `prepare_base.sh VARIANT`, during the build, in a stage of which the image gets these two folders alone. The bases of the
# other variants have all that they need, so both folders stay empty.
set -eu
mkdir -p /opt/python /opt/aws
[ "$1" = trn2 ] || exit 0
cd "$(dirname "$0")"
apt-get update
apt-get install --yes --no-install-recommends ca-certificates
is_pinned() { [ "$(python3 -c 'import platform; print(platform.python_version())')" = "$PINNED_PYTHON" ]; }
is_pinned || apt-get install --yes --no-install-recommends python3-venv
# shellcheck source=images/installer.sh
. ./installer.sh

# uv's managed Python of exactly this patch version; uv checks its hash (docs.astral.sh/uv/concepts/python-versions).
if ! is_pinned; then
    [ -n "${UV_PYTHON_INSTALL_MIRROR:-}" ] || unset UV_PYTHON_INSTALL_MIRROR
    if ! uv/bin/uv python install --no-bin --install-dir /opt/python "$PINNED_PYTHON"; then
        echo "prepare_base: uv could not install Python $PINNED_PYTHON; its message is above. Name a mirror of" \
            "python-build-standalone with UV_PYTHON_INSTALL_MIRROR=, or a base image with this Python: BASE=" >&2
        exit 1
    fi
fi

# Neuron's repository by the name of the release, as AWS documents it (awsdocs-neuron, setup/pytorch/manual.rst).
lacking=""
while read -r package; do
    found=$(dpkg-query --show --showformat '${Version}' "${package%%=*}" 2>/dev/null || true)
    case "$found" in "${package#*=}"*) ;; *) lacking="$lacking $package*" ;; esac
done <<PACKAGES
$(grep -v '^#' neuron-runtime.txt)
PACKAGES
[ -n "$lacking" ] || exit 0
https=""
[ -z "$bundle" ] || https="-o Acquire::https::CAInfo=$bundle"
repository=${NEURON_APT_URL:-https://apt.repos.neuron.amazonaws.com}
install -d /etc/apt/keyrings
# shellcheck source=/dev/null
. /etc/os-release
echo "deb [signed-by=/etc/apt/keyrings/neuron.asc] $repository $VERSION_CODENAME main" >/etc/apt/sources.list.d/neuron.list
# shellcheck disable=SC2086  # an option and several packages are several words
if ! {
    /usr/lib/apt/apt-helper $https download-file "$repository/GPG-PUB-KEY-AMAZON-AWS-NEURON.PUB" \
        /etc/apt/keyrings/neuron.asc && apt-get $https update &&
        apt-get $https install --yes --no-install-recommends $lacking
}; then
    echo "prepare_base: Neuron's repository did not give$lacking for $VERSION_CODENAME; apt's message is above. Name a" \
        "mirror with NEURON_APT_URL=, or a base image that has these packages: BASE=" >&2
    exit 1
fi
