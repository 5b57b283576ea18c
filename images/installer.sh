#!/bin/sh
# Sourced in /build during the build of an image: installs uv, at its locked version, into /build/uv, and gives it and
# apt the package index and the CA bundle of the machine that builds.
#
# uv does not read pip's variables, and an empty address would not be replaced by the default.
if [ -n "${PIP_INDEX_URL:-}" ]; then export UV_DEFAULT_INDEX="$PIP_INDEX_URL"; else unset PIP_INDEX_URL; fi
if [ -n "${PIP_EXTRA_INDEX_URL:-}" ]; then export UV_INDEX="$PIP_EXTRA_INDEX_URL"; else unset PIP_EXTRA_INDEX_URL; fi
bundle=$(find "$PWD/inputs" -name '*.crt' | sort | head -n 1)
[ -z "$bundle" ] || export PIP_CERT="$bundle" SSL_CERT_FILE="$bundle"
if [ ! -e uv/bin/uv ]; then
    python3 -m venv uv
    uv/bin/pip install --quiet --no-cache-dir --disable-pip-version-check --require-hashes -r uv.txt
fi
