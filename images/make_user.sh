#!/bin/sh
# The user and the folders of every image; runs inside its build.
#
# /fsx holds the artifacts. /scratch is the one place to write besides it: the root may be read-only. /tmp and /var/tmp
# are links to it, for programs that read no variable: the Neuron tools write /tmp/USER/neuroncc_compile_workdir,
# /tmp/neuron-core-dump and /var/tmp/neuron-compile-cache whatever TMPDIR says. A program whose working directory is
# /scratch finds the default root, ./fsx, at the artifacts' folder.
set -eu
groupadd --gid 10001 millrace
useradd --uid 10001 --gid 10001 --no-log-init --home-dir /scratch --shell /bin/bash millrace
install -d -o millrace -g millrace /fsx
install -d -m 1777 /scratch
ln -s /fsx /scratch/fsx
rm -rf /tmp /var/tmp
ln -s /scratch /tmp
ln -s /scratch /var/tmp
# shellcheck disable=SC2016  # the shell that reads the file puts its own PATH there
echo 'export PATH="/opt/venv/bin:$PATH"' >/etc/profile.d/millrace.sh
