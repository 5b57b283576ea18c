#!/bin/sh
# Installs the Debian packages that the program runs: `install_toolchain.sh VARIANT`, during the build of an image.
#
# cpu: Inductor compiles graphs with g++ and Python's headers. With a warm cache it still runs `g++ --version`, `g++ -v`
# and one `g++ -E` (measured, torch 2.13), so the trainer needs g++, too.
# cuda: Inductor compiles the host's part of a graph with g++. Triton compiles its launcher with the first of $CC, gcc and
# clang (triton/runtime/build.py, 3.7) and with Python.h; cuda.h is in Triton's package. It links the driver's
# libcuda.so.1, which it finds with `/sbin/ldconfig -p` (in Debian's libc-bin) or on LD_LIBRARY_PATH. TRITON_LIBCUDA_PATH
# is not set, because hosts differ in where the driver's libraries are mounted.
# neuron: nothing, neuronx-cc brings its own. trn2: the base lacks the certificates that slim Python has.
set -eu
case "$1" in
neuron) exit 0 ;;
trn2) packages=ca-certificates ;;
cuda) packages="g++ gcc" ;;
*) packages=g++ ;;
esac
case "$packages" in
g++*)
    headers="$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h"
    if [ ! -e "$headers" ]; then packages="$packages libpython3-dev"; fi
    ;;
esac
apt-get update
# shellcheck disable=SC2086  # two packages are two words
apt-get install --yes --no-install-recommends $packages
rm -rf /var/lib/apt/lists/*
