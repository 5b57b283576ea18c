#!/usr/bin/env bash
# Makes a slim Python base image with debootstrap, for machines that reach Debian's packages but no image registry:
# `make_base.sh SUITE PYTHON IMAGE`, as root. DEBIAN_MIRROR= names another mirror.
set -euo pipefail
suite=$1 python=$2 image=$3
if [ "$(id -u)" != 0 ] || ! command -v debootstrap >/dev/null; then
    echo "making $image needs root and debootstrap (Debian: apt-get install debootstrap). With an image registry no base" \
        "image has to be made: \`make images\` pulls it" >&2
    exit 4
fi
folder=$(mktemp -d)
root=$folder/root
trap 'rm -rf "$folder"' EXIT
echo "making $image with debootstrap"
# shellcheck disable=SC2086  # without a mirror there is no argument
debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "$suite" "$root" ${DEBIAN_MIRROR:-} >"$folder/log" || {
    tail -n 8 "$folder/log" >&2
    echo "debootstrap failed: see above. DEBIAN_MIRROR=http://... names another mirror" >&2
    exit 4
}
found=$(chroot "$root" python3 -c 'import platform; print(platform.python_version())')
if [ "$found" != "$python" ]; then
    echo "Debian $suite has Python $found now, and images/platforms.toml pins $python: change \`python\` and \`slim\` in" \
        "its tables [*.debian], and build every image of the variant again" >&2
    exit 4
fi
# Folders that nothing reads at run time: 137 MB of 275 (Debian 12).
for unread in var/cache/apt var/lib/apt/lists usr/share/doc usr/share/man usr/share/locale var/log; do
    find "$root/$unread" -mindepth 1 -delete
done
tar --directory "$root" --numeric-owner --sort=name --create . |
    docker import --change 'CMD ["python3"]' --change 'ENV LANG=C.UTF-8' - "$image"
echo "made $image; \`make images\` builds on it"
