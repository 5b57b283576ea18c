#!/usr/bin/env bash
# Checks the infrastructure offline, for `make check-infra`: terraform fmt, validate and test with mocked providers,
# checkov, shellcheck and yamllint. Without terraform, or without a folder of providers in TF_PLUGIN_MIRROR, it says so and
# runs the rest.
#
# Everything runs on a copy, where a user's state, tfvars and provider locks are not.
set -euo pipefail
cd "$(dirname "$0")/.."

tools=$PWD/.venv-infra-checks/bin
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files --cached --others --exclude-standard -z | while IFS= read -r -d '' name; do
    [[ ! -e $name ]] || printf '%s\0' "$name"
done | xargs -0 cp --parents --no-dereference --target-directory "$copy"
cd "$copy"

test_stacks() {
    cat >terraform.rc <<RC
provider_installation {
  filesystem_mirror { path = "$(realpath "$TF_PLUGIN_MIRROR")" }
}
RC
    # terraform takes a quarter longer with the default of GOGC, 100; 400 is no faster.
    export TF_CLI_CONFIG_FILE=$PWD/terraform.rc GOGC=200
    local main stack tests=()
    for main in infra/stacks/*/main.tf; do
        stack=$(dirname "$main")
        terraform -chdir="$stack" init -backend=false -input=false >/dev/null
        terraform -chdir="$stack" validate
    done
    # One process a file, the longest first: terraform itself runs the files of a stack one after another.
    mapfile -t tests < <(ls -S infra/stacks/*/tests/*.tftest.hcl)
    # shellcheck disable=SC2016  # the inner shell expands these
    printf '%s\n' "${tests[@]}" | xargs -P 2 -I {} bash -c \
        'terraform -chdir="$(dirname "$(dirname {})")" test -no-color -filter="tests/$(basename {})"'
}

if ! command -v terraform >/dev/null; then
    echo "terraform left out: it is not on PATH; https://developer.hashicorp.com/terraform/install"
else
    terraform fmt -check -diff -recursive infra
    if [[ -n ${TF_PLUGIN_MIRROR:-} ]]; then
        test_stacks
    else
        echo "terraform test left out: TF_PLUGIN_MIRROR names no folder of \`terraform providers mirror FOLDER\`"
    fi
fi
"$tools/checkov" --config-file infra/checkov.yaml
mapfile -t scripts < <(grep -rlIE -m1 '^#!.*\bb?a?sh$' . | grep -v '\.tftpl$\|\.py$')
"$tools/shellcheck" "${scripts[@]}"
# Terraform's placeholders look like shell variables that nobody sets, or that are set to themselves.
"$tools/shellcheck" --exclude=SC2154,SC2269 infra/userdata/*.sh.tftpl
"$tools/yamllint" --strict --config-file .yamllint.yaml .
