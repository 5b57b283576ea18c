# The images of the two services that contain the program (services/common/program), the compiler and the trainer:
#   docker build -f images/program.Dockerfile --build-arg SERVICE=trainer .
# The defaults below are those of the cpu variant on the official slim Python. `make images STAGE=trainer` passes the
# pins of images/platforms.toml, and `make check` fails when a default differs from its pin.
# The classic builder must be able to build this file: no RUN --mount, no here-documents.
ARG SERVICE
ARG BASE=python:3.11.14-slim-bookworm
ARG VARIANT=cpu
ARG PINNED_PYTHON=3.11.14
ARG RAY_VERSION=2.60.0

# What the base of the trn2 variant lacks; nothing for the others. The address of an index may contain a token, so only
# builder stages declare such variables: the history of the final image shows none.
FROM ${BASE} AS system
USER root
ARG VARIANT
ARG PINNED_PYTHON
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG UV_PYTHON_INSTALL_MIRROR
ARG NEURON_APT_URL
COPY images/prepare_base.sh images/installer.sh images/neuron-runtime.txt lockfiles/uv.txt /build/
COPY images/inputs /build/inputs
RUN sh /build/prepare_base.sh "$VARIANT"

# The compiler's packages are the first packages of the trainer's image too. Both images share every layer that is made
# before SERVICE is declared in a stage.
FROM system AS compiler-packages
ARG BASE
ARG VARIANT
ARG PINNED_PYTHON
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG TORCH_INDEX_URL
ARG TORCH_FIND_LINKS
ARG NEURON_INDEX_URL
ARG NEURON_FIND_LINKS
ENV PATH=/opt/python/cpython-$PINNED_PYTHON-linux-x86_64-gnu/bin:$PATH
COPY images/install.sh images/without_cuda.py images/torch-neuron.txt /build/
COPY lockfiles/compiler-${VARIANT}.txt /build/
RUN sh /build/install.sh compiler-${VARIANT}.txt

FROM compiler-packages AS service-packages
ARG SERVICE
ARG BASE
ARG VARIANT
ARG PINNED_PYTHON
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG TORCH_INDEX_URL
ARG TORCH_FIND_LINKS
COPY lockfiles/${SERVICE}-${VARIANT}.txt /build/
RUN sh /build/install.sh --add ${SERVICE}-${VARIANT}.txt

FROM ${BASE} AS packages
USER root
ARG VARIANT
COPY images/install_toolchain.sh /build/
RUN sh /build/install_toolchain.sh "$VARIANT"
COPY images/make_user.sh /build/
RUN set -eu; sh /build/make_user.sh; rm -r /build
COPY --from=system /opt/python /opt/python
COPY --from=system /opt/aws /opt/aws
COPY --from=compiler-packages /opt/venv /opt/venv
COPY --from=service-packages /delta /

# Programs write everything except artifacts to /scratch: see images/make_user.sh. USER is set because Ray and Inductor
# look up the user's name, which the user of `docker run --user` may not have. NEURON_COMPILE_CACHE_URL, because the
# Neuron compiler's own cache is in /var/tmp otherwise.
ARG SERVICE
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/app \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/scratch \
    TMPDIR=/scratch \
    XDG_CACHE_HOME=/scratch/.cache \
    RAY_TMPDIR=/scratch \
    NEURON_COMPILE_CACHE_URL=/scratch/neuron-compile-cache \
    USER=millrace \
    MILLRACE_SERVICE=$SERVICE

# Imports every library that the service needs before any code of the service is copied: an image without one of them
# gets no tag. Only the modules that make up the check are copied before it, so that a change elsewhere in the code does
# not repeat it.
FROM packages AS code
ARG SERVICE
ARG VARIANT
COPY services/common/errors.py /app/services/common/
COPY services/common/hardware/faults.py services/common/hardware/image_platform.py /app/services/common/hardware/
COPY services/common/process/entry_point.py services/common/process/shutdown.py /app/services/common/process/
RUN MILLRACE_VARIANT=$VARIANT python -m services.common.hardware.image_platform --without-device
COPY services/common /app/services/common
COPY infra/shapes.json /app/infra/shapes.json
COPY services/${SERVICE} /app/services/${SERVICE}
# The image's user must be able to read files of a checkout that was made under a strict umask.
RUN chmod -R a+rX /app

FROM packages AS packages-on-cpu

FROM packages AS packages-on-neuron

# Where Neuron's Debian packages put the runtime and its tools, as in AWS's own images. The program imports TorchNeuron
# itself, so that a process that has no worker's cores, such as the one that workers are forked from, touches no device.
FROM packages AS packages-on-trn2
ENV PATH=$PATH:/opt/aws/neuron/bin \
    LD_LIBRARY_PATH=/opt/aws/neuron/lib \
    TORCH_DEVICE_BACKEND_AUTOLOAD=0

# For a container that requests GPUs, the NVIDIA Container Toolkit mounts the driver's libraries (`compute`:
# libcuda.so.1) and its tools (`utility`: nvidia-smi, which reports the kind of GPU that a graph is compiled for):
# docs.nvidia.com/datacenter/cloud-native/container-toolkit, docker-specialized.
FROM packages AS packages-on-cuda
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

# The Neuron tools write into the working directory, too (log-neuron-cc.txt, output/), so it is /scratch.
FROM packages-on-${VARIANT} AS service
WORKDIR /scratch
ARG SERVICE
COPY --from=code /app/services/common /app/services/common
COPY --from=code /app/infra /app/infra
COPY --from=code /app/services/${SERVICE} /app/services/${SERVICE}
USER 10001:10001
CMD []
HEALTHCHECK NONE

# An ENTRYPOINT in exec form expands no variable, so each service has a stage of its own for it. Neither makes a layer.
FROM service AS service-compiler
ENTRYPOINT ["python", "-m", "services.compiler"]
LABEL org.opencontainers.image.description="Fills the compile cache" \
    millrace.reads="" \
    millrace.writes="compile_cache/1"

FROM service AS service-trainer
ENTRYPOINT ["python", "-m", "services.trainer"]
LABEL org.opencontainers.image.description="Trains on a corpus and a compile cache, and writes checkpoints" \
    millrace.reads="corpus/5 compile_cache/1 checkpoint/4" \
    millrace.writes="checkpoint/4 run/1"

# Metadata that changes with every commit comes last; it makes no layer. Pants takes FROM ${SERVICE} alone for an image
# that needs a tag.
FROM service-${SERVICE}
ARG SERVICE
ARG BASE
ARG VARIANT
ARG PINNED_PYTHON
ARG RAY_VERSION
ARG SDK_VERSION=none
ARG NEURON_DRIVER=none
ARG NVIDIA_DRIVER=none
ARG STAGE_VERSION=unversioned
ARG GIT_SHA=unknown
ARG IMAGE=none
ENV MILLRACE_VARIANT=$VARIANT \
    MILLRACE_GIT_SHA=$GIT_SHA \
    MILLRACE_IMAGE=$IMAGE
LABEL org.opencontainers.image.title="millrace $SERVICE" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.base.name="$BASE" \
    org.opencontainers.image.version="$STAGE_VERSION" \
    org.opencontainers.image.revision="$GIT_SHA" \
    millrace.service="$SERVICE" \
    millrace.variant="$VARIANT" \
    millrace.platform="$VARIANT-python$PINNED_PYTHON-ray$RAY_VERSION" \
    millrace.python="$PINNED_PYTHON" \
    millrace.ray="$RAY_VERSION" \
    millrace.neuron-sdk="$SDK_VERSION" \
    millrace.neuron-driver="$NEURON_DRIVER" \
    millrace.nvidia-driver="$NVIDIA_DRIVER"
