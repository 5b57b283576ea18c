#!/bin/sh
# Debian's packages that the program needs when it runs: `install_toolchain.sh VARIANT`, inside the build of an image.
#
# cpu: Inductor builds graphs with g++ and Python's headers; for warm ones it still runs `g++ --version`, `g++ -v` and
# one `g++ -E` (measured, torch 2.13), so the trainer needs it too. neuron: Ray's backend calls pkill.
set -eu
headers="$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h"
if [ "$1" = neuron ]; then packages=procps
elif [ -e "$headers" ]; then packages=g++
else packages="g++ libpython3-dev"; fi
apt-get update
# shellcheck disable=SC2086  # two packages are two words
apt-get install --yes --no-install-recommends $packages
rm -rf /var/lib/apt/lists/*
