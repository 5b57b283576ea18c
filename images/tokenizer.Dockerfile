# The image of the tokenizer:
#   docker build -f images/tokenizer.Dockerfile .
# The defaults below are those of the cpu variant on the official slim Python. `make images STAGE=tokenizer` passes the
# pins of images/platforms.toml, and `make check` fails when a default differs from its pin.
# The classic builder must be able to build this file: no RUN --mount, no here-documents.
ARG BASE=python:3.11.14-slim-bookworm
ARG VARIANT=cpu
ARG PINNED_PYTHON=3.11.14
ARG RAY_VERSION=2.60.0

FROM ${BASE} AS dependencies
USER root
ARG BASE
ARG VARIANT
ARG PINNED_PYTHON
# The address of an index may contain a token, so only builder stages declare these: the history of the final image
# shows neither.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
COPY images/install.sh images/installer.sh images/without_cuda.py /build/
COPY images/inputs /build/inputs
COPY lockfiles/uv.txt lockfiles/tokenizer-${VARIANT}.txt /build/
RUN sh /build/install.sh tokenizer-${VARIANT}.txt

FROM ${BASE} AS packages
USER root
COPY images/make_user.sh /build/
RUN set -eu; sh /build/make_user.sh; rm -r /build
COPY --from=dependencies /opt/venv /opt/venv

# Programs write everything except artifacts to /scratch: see images/make_user.sh. USER is set because Ray looks up the
# user's name, which the user of `docker run --user` may not have.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/app \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/scratch \
    TMPDIR=/scratch \
    XDG_CACHE_HOME=/scratch/.cache \
    RAY_TMPDIR=/scratch \
    USER=millrace \
    MILLRACE_SERVICE=tokenizer

# Imports every library that the service needs before any code of the service is copied: an image without one of them
# gets no tag. Only the modules that make up the check are copied before it, so that a change elsewhere in the code does
# not repeat it.
FROM packages AS code
ARG VARIANT
COPY services/common/errors.py /app/services/common/
COPY services/common/hardware/faults.py services/common/hardware/image_platform.py /app/services/common/hardware/
COPY services/common/process/entry_point.py services/common/process/shutdown.py /app/services/common/process/
RUN MILLRACE_VARIANT=$VARIANT python -m services.common.hardware.image_platform --without-device
COPY services/common /app/services/common
COPY infra/shapes.json /app/infra/shapes.json
COPY services/tokenizer /app/services/tokenizer
# The image's user must be able to read files of a checkout that was made under a strict umask.
RUN chmod -R a+rX /app

FROM packages
WORKDIR /app
COPY --from=code /app/services/common /app/services/common
COPY --from=code /app/infra /app/infra
COPY --from=code /app/services/tokenizer /app/services/tokenizer
# Kernels for every x86-64 processor since 2015, as a node may have another one than this machine.
ENV NUMBA_CPU_NAME=x86-64-v3 \
    NUMBA_CPU_FEATURES=
RUN python -m services.tokenizer.encoding.chunk_encoder
USER 10001:10001
ENTRYPOINT ["python", "-m", "services.tokenizer"]
CMD []
HEALTHCHECK NONE

# Metadata that changes with every commit comes last; it makes no layer.
ARG BASE
ARG VARIANT
ARG PINNED_PYTHON
ARG RAY_VERSION
ARG SDK_VERSION=none
ARG STAGE_VERSION=unversioned
ARG GIT_SHA=unknown
ARG IMAGE=none
ENV MILLRACE_VARIANT=$VARIANT \
    MILLRACE_GIT_SHA=$GIT_SHA \
    MILLRACE_IMAGE=$IMAGE
LABEL org.opencontainers.image.title="millrace tokenizer" \
    org.opencontainers.image.description="Turns text into packed Arrow shards" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.base.name="$BASE" \
    org.opencontainers.image.version="$STAGE_VERSION" \
    org.opencontainers.image.revision="$GIT_SHA" \
    millrace.service="tokenizer" \
    millrace.variant="$VARIANT" \
    millrace.platform="$VARIANT-python$PINNED_PYTHON-ray$RAY_VERSION" \
    millrace.python="$PINNED_PYTHON" \
    millrace.ray="$RAY_VERSION" \
    millrace.neuron-sdk="$SDK_VERSION" \
    millrace.reads="" \
    millrace.writes="corpus/5"
