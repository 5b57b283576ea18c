#!/bin/sh
# Makes the user and the folders of an image, during its build.
#
# Programs write artifacts to /fsx and everything else to /scratch; the rest of an image may be read-only. /tmp and
# /var/tmp are links to /scratch, because some programs do not read TMPDIR: the Neuron tools always write to
# /tmp/USER/neuroncc_compile_workdir, /tmp/neuron-core-dump and /var/tmp/neuron-compile-cache. The link /scratch/fsx is
# for programs that are started in /scratch: their default artifact root is ./fsx.
set -eu
groupadd --gid 10001 millrace
useradd --uid 10001 --gid 10001 --no-log-init --home-dir /scratch --shell /bin/bash millrace
install -d -o millrace -g millrace /fsx
install -d -m 1777 /scratch
ln -s /fsx /scratch/fsx
rm -rf /tmp /var/tmp
ln -s /scratch /tmp
ln -s /scratch /var/tmp
# shellcheck disable=SC2016  # the shell that reads the file expands PATH
echo 'export PATH="/opt/venv/bin:$PATH"' >/etc/profile.d/millrace.sh
