#!/bin/sh
# Installs the packages of a lock during the build of an image, with the Python of the base image.
#
#   sh install.sh LOCK          make /opt/venv from the lock
#   sh install.sh --add LOCK    install the lock into /opt/venv too, and copy the files that are new to /delta
#
# A Dockerfile copies /opt/venv into the image as one layer and /delta as a second one, so that two images with the same
# first lock share the first layer.
set -eu
cd "$(dirname "$0")"
add=""
if [ "$1" = --add ]; then add=yes && shift; fi
lock=$1
torch_source="${TORCH_INDEX_URL:-}${TORCH_FIND_LINKS:-}"

fail() {
    echo "install: $*" >&2
    exit 1
}

# The package indexes have this torch with CUDA, so they are not asked.
install_torch() { # PIN
    if [ -n "${TORCH_INDEX_URL:-}" ] || [ -z "$torch_source" ]; then
        set -- "$1" --default-index "${TORCH_INDEX_URL:-https://download.pytorch.org/whl/cpu}"
    else
        set -- "$1" --no-index
    fi
    if [ -n "${TORCH_FIND_LINKS:-}" ]; then set -- "$@" --find-links "$TORCH_FIND_LINKS"; fi
    env -u UV_DEFAULT_INDEX -u UV_INDEX uv/bin/uv pip install --quiet --no-deps "$@" ||
        fail "$1 without CUDA was not found; uv's message is above. Name an index that this machine reaches with" \
            "TORCH_INDEX_URL=, or, but for trn2, build without TORCH=cpu, TORCH_INDEX_URL and TORCH_FIND_LINKS"
}

# A dependency that the lock has stays at its version, and any other comes at its newest fitting version. A package that
# Neuron's index has comes from no other index, whoever registers its name elsewhere.
install_torch_neuron() { # PIN ...
    if [ -n "${NEURON_INDEX_URL:-}" ] || [ -z "${NEURON_FIND_LINKS:-}" ]; then
        set -- --index "${NEURON_INDEX_URL:-https://pip.repos.neuron.amazonaws.com}" "$@"
    fi
    if [ -n "${NEURON_FIND_LINKS:-}" ]; then set -- --find-links "$NEURON_FIND_LINKS" "$@"; fi
    uv/bin/uv pip install --quiet --constraints "$lock" "$@" ||
        fail "Neuron's packages could not be installed beside those of $lock; uv's message is above. Name an index that" \
            "this machine reaches with NEURON_INDEX_URL="
}

case "$lock" in
*-cuda.txt)
    [ -z "$torch_source" ] || fail "$lock needs the CUDA libraries and Triton of the locked torch: build without" \
        "TORCH=cpu, TORCH_INDEX_URL and TORCH_FIND_LINKS"
    ;;
esac
found=$(python3 -c 'import platform; print(platform.python_version())')
[ "$found" = "$PINNED_PYTHON" ] || fail "the base image $BASE has Python $found, and images/platforms.toml pins" \
    "$PINNED_PYTHON. Ray refuses to mix patch versions: use a base image with Python $PINNED_PYTHON, or build every image" \
    "of the variant with PINNED_PYTHON=$found"

# shellcheck source=images/installer.sh
. ./installer.sh
# Python would compile all of torch at every start of an image with a read-only root.
export VIRTUAL_ENV=/opt/venv UV_NO_CACHE=1 UV_COMPILE_BYTECODE=1
if [ -z "$add" ]; then
    # The venv of the compiler and the trainer shows torch and the Neuron packages of the Neuron image.
    site=""
    if [ "$lock" = compiler-neuron.txt ]; then site=--system-site-packages; fi
    python3 -m venv --without-pip $site "$VIRTUAL_ENV"
fi
touch before
torch=$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' "$lock")
cp "$lock" locked.txt
if [ -n "$torch" ] && [ -n "$torch_source" ]; then
    install_torch "$torch" # first, so that the build ends early when the index does not have it
    python3 without_cuda.py "$lock" >locked.txt
fi
# A lock names every package, except those of the Neuron image: there is no dependency to look for. Any index may have
# the pinned version, as with pip. The hashes decide whether it is the right file.
uv/bin/uv pip install --quiet --no-deps --index-strategy unsafe-best-match --require-hashes -r locked.txt
if [ "$lock" = compiler-trn2.txt ] && [ -z "$add" ]; then
    # shellcheck disable=SC2046  # a pin is a word
    set -- $(grep -v '^#' torch-neuron.txt)
    install_torch "$1"
    shift
    install_torch_neuron "$@"
fi
if [ -n "$add" ]; then
    mkdir /delta
    cd /
    find opt/venv -cnewer /build/before ! -type d -print0 | tar --create --null --files-from=- |
        tar --extract --directory /delta
fi
