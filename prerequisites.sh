#!/usr/bin/env bash
# Lists the programs that Millrace needs and this machine lacks, with the command that installs each. Ends with 4 where
# one is missing. For Amazon Linux 2023, Debian, Ubuntu and macOS.
#
#   ./prerequisites.sh                    for everything
#   ./prerequisites.sh local images       for some uses: local, images, kubernetes, aws
#   ./prerequisites.sh --install local    run the commands, with sudo where that is needed
# shellcheck disable=SC2329  # `require` calls the checks by their names
set -euo pipefail
cd "$(dirname "$0")"

is_install="" uses=""
for word in "$@"; do
    case "$word" in
    --install) is_install=1 ;;
    local | images | kubernetes | aws) uses="$uses $word" ;;
    *)
        sed -n '2,/^# shell/{/^# shell/d;s/^# \{0,1\}//p;}' "$0"
        [[ "$word" == -h || "$word" == --help ]] && exit 0
        exit 2
        ;;
    esac
done
uses=${uses:- local images kubernetes aws}

find_system() {
    local release=${OS_RELEASE:-/etc/os-release}
    if [[ "$(uname -s)" == Darwin ]]; then
        echo macos
    elif grep -q '^ID="\{0,1\}amzn' "$release" 2>/dev/null; then
        echo amazon
    elif grep -Eq '^(ID|ID_LIKE)="?(debian|ubuntu)' "$release" 2>/dev/null; then
        echo debian
    else
        echo other
    fi
}

system=$(find_system)
sudo="sudo "
[[ "$(id -u)" != 0 ]] || sudo=""
architecture=amd64
case "$(uname -m)" in aarch64 | arm64) architecture=arm64 ;; esac
kubectl_version=v1.35.4 # the version of the test cluster
helm_version=v3.19.0

choose() { # AMAZON DEBIAN MACOS: prints the command of this system
    case "$system" in
    amazon) echo "$1" ;;
    debian) echo "$2" ;;
    macos) echo "$3" ;;
    *) echo "" ;;
    esac
}

dnf() { echo "${sudo}dnf install -y $1"; }
apt() { echo "${sudo}apt-get update && ${sudo}apt-get install -y $1"; }

# Is the version that a program prints first at least MAJOR.MINOR?
is_new_enough() { # MAJOR MINOR TEXT
    local numbers
    numbers=$(sed -n 's/^[^0-9]*\([0-9][0-9]*\)\.\([0-9][0-9]*\).*/\1 \2/p' <<<"$3" | head -n 1)
    [[ -n "$numbers" ]] || return 1
    # shellcheck disable=SC2086  # two numbers
    set -- "$1" "$2" $numbers
    (($3 > $1 || ($3 == $1 && $4 >= $2)))
}

# Run, not looked up: macOS has programs that only ask for their own installation.
has_make() { make --version; }
has_git() { git --version; }
has_compiler() { ./bootstrap check compiler; }
has_python() { ./bootstrap check python; }
has_docker() { docker version; } # asks the engine: it may not run, or not for this user
has_pants() { ./pants runner; }
has_skopeo() { skopeo --version; }
has_kubectl() { kubectl version --client; }
has_helm() { is_new_enough 3 13 "$(helm version --short)"; }
has_terraform() { is_new_enough 1 10 "$(terraform version)"; }
has_aws() { aws --version; }

missing=0
require() { # USE CHECK NAME COMMAND
    [[ "$uses " == *" $1 "* ]] || return 0
    ! "$2" >/dev/null 2>&1 || return 0
    if [[ -n "$is_install" && -n "$4" ]]; then
        echo "installing $3: $4"
        bash -euo pipefail -c "$4" && "$2" >/dev/null 2>&1 && return
        echo "still missing: $3"
    else
        echo "missing, for $1: $3"
        echo "    ${4:-by its own instructions: this system has no package that is known here}"
    fi
    missing=4
}

binary="https://dl.k8s.io/release/$kubectl_version/bin/linux/$architecture/kubectl"
kubectl="curl -fsSLo /tmp/kubectl $binary && ${sudo}install -m 755 /tmp/kubectl /usr/local/bin/kubectl"
archive="https://get.helm.sh/helm-$helm_version-linux-$architecture.tar.gz"
helm="curl -fsSL $archive | ${sudo}tar -xz -C /usr/local/bin --strip-components=1 linux-$architecture/helm"
keyring=/usr/share/keyrings/hashicorp-archive-keyring.gpg
# shellcheck disable=SC2016  # the shell that runs the command expands the codename
terraform_apt="$(apt "curl gpg") && curl -fsSL https://apt.releases.hashicorp.com/gpg |
    ${sudo}gpg --dearmor --yes -o $keyring &&
    "'. /etc/os-release && echo "deb [signed-by='"$keyring"'] https://apt.releases.hashicorp.com $VERSION_CODENAME main" |
    '"${sudo}tee /etc/apt/sources.list.d/hashicorp.list >/dev/null && $(apt terraform)"
terraform_dnf="$(dnf dnf-plugins-core) &&
    ${sudo}dnf config-manager --add-repo https://rpm.releases.hashicorp.com/AmazonLinux/hashicorp.repo &&
    $(dnf terraform)"
archive=https://awscli.amazonaws.com/awscli-exe-linux-$(uname -m).zip # Ubuntu 24.04 has no package of it
aws="$(apt "curl unzip") && curl -fsSLo /tmp/awscli.zip $archive &&
    unzip -qo /tmp/awscli.zip -d /tmp && ${sudo}/tmp/aws/install --update"
tools="xcode-select --install"
engine=" && ${sudo}systemctl enable --now docker"
[[ -z "$sudo" ]] || engine="$engine && ${sudo}usermod -aG docker $(id -un) # then log in again"

require local has_make make "$(choose "$(dnf make)" "$(apt make)" "$tools")"
require local has_git git "$(choose "$(dnf git)" "$(apt git)" "$tools")"
require local has_compiler "a C++ compiler" "$(choose "$(dnf gcc-c++)" "$(apt g++)" "$tools")"
require local has_python "Python 3.11 to 3.14 with its headers" "$(choose "$(dnf "python3.12 python3.12-devel")" \
    "$(apt "python3 python3-dev python3-venv")" "brew install python@3.12")"
require images has_docker "Docker with an engine that answers this user" "$(choose "$(dnf docker)$engine" \
    "$(apt docker.io)$engine" "brew install --cask docker && open -a Docker")"
looks_up=kubernetes # deployments and pushes look images up
[[ "$uses " != *" images "* ]] || looks_up=images
require "$looks_up" has_skopeo skopeo "$(choose "$(dnf spal-release) && $(dnf skopeo)" "$(apt skopeo)" "brew install skopeo")"
require images has_pants "the pants launcher or Python 3.9, which builds images" "./bootstrap uv python install 3.9"
require kubernetes has_kubectl kubectl "$(choose "$kubectl" "$kubectl" "brew install kubernetes-cli")"
require kubernetes has_helm "helm 3.13 or newer" "$(choose "$helm" "$helm" "brew install helm")"
require aws has_terraform "Terraform 1.10 or newer" "$(choose "$terraform_dnf" "$terraform_apt" \
    "brew install hashicorp/tap/terraform")"
require aws has_aws "the AWS CLI" "$(choose "$(dnf awscli-2)" "$aws" "brew install awscli")"

[[ "$missing" != 0 ]] || echo "nothing is missing for:$uses"
exit "$missing"
