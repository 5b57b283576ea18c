#!/bin/sh
# Debian's packages that the program needs when it runs: `install_toolchain.sh VARIANT`, inside the build of an image.
#
# cpu: Inductor builds graphs with g++ and Python's headers; for warm ones it still runs `g++ --version`, `g++ -v` and
# one `g++ -E` (measured, torch 2.13), so the trainer needs it too. cuda: the same, because the host's part of a graph is
# C++ there, too; and Triton builds its launcher from C with the first of $CC, gcc and clang (triton/runtime/build.py,
# 3.7), against Python.h. cuda.h is in Triton's own package. It links libcuda.so.1, the driver's, which it finds with
# `/sbin/ldconfig -p` (of libc-bin, in every Debian), else on LD_LIBRARY_PATH: where the driver's libraries are mounted
# differs from host to host, so TRITON_LIBCUDA_PATH is not set here. neuron: Ray's backend calls pkill.
set -eu
headers="$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h"
case "$1" in
neuron) packages=procps ;;
cuda) packages="g++ gcc" ;;
*) packages=g++ ;;
esac
if [ "$1" != neuron ] && [ ! -e "$headers" ]; then packages="$packages libpython3-dev"; fi
apt-get update
# shellcheck disable=SC2086  # two packages are two words
apt-get install --yes --no-install-recommends $packages
rm -rf /var/lib/apt/lists/*
