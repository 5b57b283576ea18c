# `make` lists the targets, and `make help TARGET=demo` explains one and its variables, from these comments:
#   ##@ a heading; ## a target's text; #? its variables: names that are explained at the end of this file, the name of a
#   target that has the same variables, or NAME=VALUES, two spaces and the meaning.
# Variables are given as in: make demo RECIPE=recipes/other.toml ROOT=/data

python := .venv/bin/python
# Names of variables on make's own command line. Deploy commands refuse names that they do not know.
named = $(strip $(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),$(name))))
# Commands that speak to AWS and Kubernetes run without torch, in an environment that is made in seconds.
client = .venv-infra/bin/python
deploy = MAKE_VARIABLES="$(named)" $(client) -m deploy.commands
cluster = $(client) -m k8s.client
infra = $(client) -m infra
on_cluster = $(filter-out local,$(TARGET))
# A subcommand of the trainer that reads runs: here, or in a short job on TARGET, which prints the path of its page.
inspect = $(if $(on_cluster),STAGE=trainer COMMAND='$(1)' MAKE_VARIABLES="$(filter-out RUN COMPARE,$(named))" $(client) -m deploy.commands stage-run,$(python) -m services.trainer $(1) --root "$(or $(ROOT),./fsx)")
images = ./bootstrap python -m images
# A virtual environment with exactly the packages of a lockfile: $(call environment,.venv-docs,docs).
environment = cmp -s lockfiles/$(2).txt $(1)/installed.txt && $(1)/bin/python -c '' || { ./bootstrap uv venv --quiet --allow-existing --python "$$(./bootstrap python -c 'import sys; print(sys.executable)')" $(1) && ./bootstrap uv pip sync --quiet --compile-bytecode --python $(1)/bin/python --require-hashes lockfiles/$(2).txt && cp lockfiles/$(2).txt $(1)/installed.txt; }
# Looks the pins up in the OSV database, each file by itself. The images' locks are left out: the unions (dev.txt,
# dev-neuron.txt) have the same pins.
audit_locks = for lock in $(filter-out $(foreach stage,head tokenizer compiler trainer,lockfiles/$(stage)-%),$(wildcard lockfiles/*.txt)); do \
	echo "pip-audit $$lock"; .venv-security-checks/bin/pip-audit --strict --vulnerability-service osv --disable-pip \
	--require-hashes --progress-spinner off --requirement $$lock || failed=1; done; exit $${failed:-0}
parallel = -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help setup demo runs report cluster-local clean cluster-up cluster-down deploy-stage pipeline stage-status \
	stage-logs stop-stage rollback-stage stage-run infra-environment infra-cost infra-preflight infra-up infra-down \
	infra-leftovers eks-up addons images lock refresh-pins release check check-security test test-slow torch29 \
	test-torch29 test-cluster test-cuda test-neuron test-batch soak check-infra test-infra docs docs-environment benchmark

# Multi-line recipes that a variable of their target chooses.
define cluster_local
@echo "cluster-local, 1 of 4: the base image (all four steps take 15 to 30 minutes at first, later 5)"
@$(images) base
@echo "cluster-local, 2 of 4: Kubernetes, Volcano and KubeRay"
@$(python) -m tests.cluster.kit up
@echo "cluster-local, 3 of 4: the images of this checkout, built and copied to the node (minutes; 7 GB)"
@$(MAKE) --no-print-directory images LOAD=1
@echo "cluster-local, 4 of 4: the RayCluster"
@KUBECONFIG=.cluster/kubeconfig OVERLAY=local $(cluster) cluster-up
endef

define peer_lm-eval
./bootstrap uv pip install --quiet --target .lm-eval --python .venv/bin/python --no-deps --require-hashes -r lockfiles/lm-eval.txt
LM_EVAL=.lm-eval .venv/bin/python -m pytest -rs tests/integration/test_lm_eval.py
endef

define peer_nxd
@test -d "$(NXD_SOURCE)/src/neuronx_distributed" || { echo "make test-slow PEER=nxd NXD_SOURCE=FOLDER: expected a checkout of github.com/aws-neuron/neuronx-distributed, got '$(NXD_SOURCE)', which has no src/neuronx_distributed" >&2; exit 2; }
@$(call environment,.venv-nxd-parity,nxd-parity)
NXD_SOURCE="$(abspath $(NXD_SOURCE))" PJRT_DEVICE=CPU .venv-nxd-parity/bin/python -m pytest -rs services/common/program/tests/test_nxd_parity.py
endef

##@ On this machine

help: ## List the targets, or explain one target and its variables.
#? TARGET=NAME  The target to explain.
	@awk -v target="$(if $(filter command,$(firstword $(origin TARGET))),$(TARGET))" -f make-help.awk $(firstword $(MAKEFILE_LIST))

setup: ## Make .venv from the lockfile.
#? TORCH=cpu|locked  cpu installs torch without CUDA, also for later runs; locked restores the lockfile's.
#? TORCH_INDEX_URL=URL  The index of torch without CUDA. Default: PyTorch's own.
#? TORCH_FIND_LINKS=FOLDER  A folder or page with the wheel of torch without CUDA.
	@./bootstrap

demo: setup ## Tokenize, compile and train a recipe on this machine, and show the run.
#? RECIPE=FILE  The recipe. Default: recipes/tiny-cpu.toml.
#? ROOT=FOLDER  The folder for all artifacts. Default: ./fsx.
#? ARGS
	@MAKE_VARIABLES="$(named)" $(python) -m deploy.commands demo

runs: $(if $(on_cluster),infra-environment,setup) ## List runs and branches: state, steps, loss, cost; or compare some.
#? COMPARE="RUN ..."  Compare runs, with a table of the recipe values that differ. Names, or prefixes of several.
#? TARGET=local|kuberay|batch  Where the runs are. Default: local.
#? ROOT=FOLDER  The folder for all artifacts. Default: ./fsx. TARGET=local only.
	@$(call inspect,$(if $(COMPARE),compare $(COMPARE),runs))

report: $(if $(on_cluster),infra-environment,setup) ## Write the report of a run, also while it goes on.
#? RUN=NAME  The run, by its name or a unique prefix of it. Required.
#? TARGET=local|kuberay|batch  Where the run is. Default: local.
#? ROOT=FOLDER  The folder for all artifacts. Default: ./fsx. TARGET=local only.
	@$(call inspect,report "$(RUN)")

cluster-local: setup infra-environment ## Start Kubernetes, Volcano, KubeRay and a Ray head on this machine.
#? DOWN=1  Stop them instead; the artifacts stay in /var/lib/millrace/fsx.
	$(if $(filter-out 0,$(DOWN)),@$(python) -m tests.cluster.kit down,$(cluster_local))

clean: ## Remove virtual environments and caches; keep artifacts and images.
	rm -rf .venv .venv.before .venv-torch29 .venv-nxd-parity .venv-infra .venv-infra-checks .venv-security-checks .venv-docs .lm-eval .uv .uv.partial .mypy_cache .pytest_cache .ruff_cache .pants-bootstrap .pants.d dist build millrace.egg-info
	find $(wildcard millrace services tests images deploy k8s benchmarks infra docs) -name __pycache__ -type d -prune -exec rm -rf {} +

##@ Deploy on KubeRay or AWS Batch

cluster-up: infra-environment ## Create or update the RayCluster in an existing Kubernetes.
#? OVERLAY HEAD_TAG
#? DRY_RUN=1  Print the manifests as YAML instead; the head's image is unset without HEAD_TAG.
	@$(cluster) $(if $(filter-out 0,$(DRY_RUN)),cluster-manifests,cluster-up)

cluster-down: infra-environment ## Delete the RayCluster and its namespace; keep the artifacts.
#? OVERLAY
#? FORCE=1  Delete although a stage is deployed, or holds nodes of a node group.
	@$(cluster) cluster-down

deploy-stage: infra-environment ## Deploy a stage, and follow it to its end.
#? STAGE TARGET RECIPE TAG NODES ARGS RETRIES DRY_RUN OUTPUT FOLLOW MODE WAIT WAIT_AFTER_LOSS DRAIN KEEP
#? HOURS AGAIN CONFIG
	@$(deploy) deploy-stage

pipeline: $(if $(filter local,$(TARGET)),setup,infra-environment) ## Run the three stages on a target, in one live view.
#? TARGET=kuberay|batch|local  Where the stages run; local is this machine. Default: kuberay.
#? ROOT=FOLDER  The folder for all artifacts. Default: ./fsx. TARGET=local only.
#? NODES=NUMBER  Nodes of the trainer, whose graphs are compiled. Default: the recipe's.
#? RECIPE ARGS RETRIES DRY_RUN OUTPUT FOLLOW MODE WAIT WAIT_AFTER_LOSS DRAIN HOURS AGAIN CONFIG
	@MAKE_VARIABLES="$(named)" $(if $(filter local,$(TARGET)),$(python),$(client)) -m deploy.commands pipeline

stage-status: infra-environment ## Show which stages are deployed, their progress, and how the last ended.
#? TARGET CONFIG
	@$(deploy) stage-status

stage-logs: infra-environment ## Follow a stage that is deployed.
#? STAGE TARGET CONFIG
	@$(deploy) stage-logs

stop-stage: infra-environment ## Let a stage commit a checkpoint, then end its deployment.
#? STAGE TARGET CONFIG
	@$(deploy) stop-stage

rollback-stage: infra-environment ## Deploy the previous image with which a stage succeeded.
#? STAGE TARGET NODES RETRIES DRY_RUN OUTPUT FOLLOW MODE WAIT WAIT_AFTER_LOSS DRAIN KEEP HOURS AGAIN CONFIG
#? RECIPE=FILE  The recipe. Default: that of the stage's last deployment.
#? ARGS="--section.key=value ..."  Recipe overrides and other options. Default: those of the last deployment.
	@$(deploy) rollback-stage

stage-run: infra-environment ## Run a subcommand of a stage in a short job on a CPU node.
#? STAGE TARGET COMMAND TAG MEMORY DRY_RUN OUTPUT FOLLOW WAIT CONFIG
#? RECIPE=FILE  The recipe. Default: that of the stage's last deployment.
#? HOURS=NUMBER  Limit of the subcommand, at most 48. Default: 6.
	@$(deploy) stage-run

##@ Infrastructure on AWS

infra-environment: # A small environment for commands that speak to AWS and Kubernetes, which need no torch.
	@$(call environment,.venv-infra,infra)

infra-cost: infra-environment ## Show what the infrastructure costs, by list prices.
#? STACK VARS
#? NODES=NUMBER  Trainium nodes of the estimate. Default: those of the recipe.
#? CPU_NODES=NUMBER  CPU nodes of the estimate. Default: 0.
#? HOURS=NUMBER  Hours of the run. Default: plan's estimate for RECIPE, or 24 where it has none.
#? RECIPE=FILE  The recipe of the run. Default: recipes/llama2-7b-trn1.toml.
	@$(infra) cost

infra-preflight: infra-environment ## Check AWS quotas and reservation before infra-up.
#? STACK VARS
#? NODES=NUMBER  Trainium nodes to check for. Default: the most that the stack allows.
	@$(infra) preflight

infra-up: infra-environment ## Create or update the infrastructure, after showing the cost and asking.
#? infra-cost YES
#? DRY_RUN=1  Show the cost and Terraform's whole plan, and change nothing.
#? OVERLAY=eks|FOLDER  With STACK=eks: the overlay whose settings.env is written. Default: eks.
#? CONFIG=FILE  With STACK=batch: the file that is written. Default: deploy/batch/config.txt.
	@$(infra) $(if $(filter-out 0,$(DRY_RUN)),plan,up)

eks-up: infra-environment ## Make EKS, add-ons, images and the RayCluster, step by step.
#? infra-cost YES
#? DRY_RUN=1  Show the cost and Terraform's whole plan, and change nothing.
#? OVERLAY=eks|FOLDER  The overlay whose settings.env is written. Default: eks.
#? VARIANT=neuron|trn2  The devices of the images. Default: those of trainium.shape.
	@infra/eks_up.sh

infra-down: infra-environment ## Destroy the infrastructure in order, after asking; may be repeated.
#? STACK VARS YES
#? OVERLAY=eks|FOLDER  With STACK=eks: the overlay of the cluster. Default: eks.
#? CONFIG=FILE  With STACK=batch: the file that infra-up wrote. Default: deploy/batch/config.txt.
#? KEEP_DATA=true|false  false also deletes bucket, file system and images. Default: true.
	@$(infra) down

infra-leftovers: infra-environment ## List the infrastructure's resources in the account, with prices.
#? STACK VARS
	@$(infra) leftovers

addons: infra-environment ## Install the cluster's add-ons with helm.
#? ONLY
#? DRY_RUN=1  Show what would be installed, upgraded or left, and change nothing.
	@$(infra) addons

##@ Images and releases

images: $(if $(filter-out 0,$(LOAD)),setup) ## Build the images of this checkout.
#? STAGE=head|tokenizer|compiler|trainer  The image. Default: all four.
#? VARIANT
#? TORCH=cpu  Install torch without CUDA.
#? PUSH=REGISTRY  Push the images to this registry.
#? LOAD=1  Copy the images to the node of the local cluster.
#? DEBOOTSTRAP=1  First make their Python base image with debootstrap, without a registry.
#? SBOM=1  Instead, write a CycloneDX bill of materials for each image into dist/sbom.
	@$(if $(filter-out 0,$(DEBOOTSTRAP)),$(images) base)
	@$(images) $(if $(filter-out 0,$(SBOM)),sbom,build)
	@$(if $(filter-out 0,$(LOAD)),$(python) -m tests.cluster.kit load $$($(images) names))

lock: ## Resolve the requirements into lockfiles/, and keep pins that still fit.
#? UPGRADE=1  Take the newest versions.
	@$(images) lock

refresh-pins: infra-environment ## Compare charts, AMIs, Kubernetes and other pins with the newest releases.
#? WRITE=1  Also write new charts, AMI releases, ends of support and digests of base images.
	@$(client) -m deploy.pins

release: ## Release a stage with a version of its own.
#? STAGE=head|tokenizer|compiler|trainer  The stage. Required.
#? VERSION=MAJOR.MINOR.PATCH  The new version. Required.
	@$(images) release

##@ Checks, tests and benchmarks

check: setup ## Check lint rules, format, types and the layers of imports.
#? FIX=1  First fix the format, and the lint errors that ruff can fix.
	$(if $(filter-out 0,$(FIX)),$(python) -m ruff check --fix-only .)
	$(if $(filter-out 0,$(FIX)),$(python) -m ruff format .)
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy
	.venv/bin/lint-imports --no-cache --no-logo

check-security: setup ## Check the code with bandit, and the lockfiles' pins with pip-audit.
	@$(call environment,.venv-security-checks,security-checks)
	.venv-security-checks/bin/bandit --quiet --configfile pyproject.toml --recursive millrace services deploy k8s infra images benchmarks docs
	@if timeout 5 bash -c ': >/dev/tcp/api.osv.dev/443' 2>/dev/null; then $(audit_locks); \
	else echo "pip-audit: no pin was looked up, because api.osv.dev does not answer"; fi

test: SHELL := bash
test: setup ## Run the quick tests, two files at a time; prints CPU seconds.
	@TIMEFORMAT="%U s user, %S s system, %R s in all"; time $(python) -m pytest $(parallel)

test-slow: setup ## Run the slow tests, or compare with another program.
#? PEER=lm-eval|nxd  Instead, an exported model in lm-evaluation-harness, or our layers beside neuronx-distributed.
#? NXD_SOURCE=FOLDER  With PEER=nxd: a checkout of github.com/aws-neuron/neuronx-distributed.
	$(if $(PEER),$(or $(peer_$(PEER)),$(error PEER=$(PEER): expected lm-eval or nxd)),$(python) -m pytest -m slow)

torch29: # An environment with torch_xla; 8 GB.
	@$(call environment,.venv-torch29,dev-neuron)

test-torch29: torch29 ## Run the program's tests with the Neuron variant's torch.
	.venv-torch29/bin/python -m pytest $(parallel) services/common services/compiler services/trainer

test-cluster: setup ## Run the tests on a Kubernetes that is started here; needs root and Go.
#? SMOKE=1  Only the part that CI runs: one real stage.
	@$(images) base
	$(python) -m pytest -m cluster tests/cluster$(if $(filter-out 0,$(SMOKE)),/test_kit.py tests/cluster/test_smoke.py)

test-cuda: setup ## Run the tests on this machine's NVIDIA GPUs.
	$(python) -m pytest -m cuda -rs tests/hardware

test-neuron: $(if $(wildcard /dev/neuron0),,setup) ## Run the tests on this machine's NeuronCores, with the shell's Python.
#? DEVICE=trn1|trn2  trn2 runs on trn3 too, and where no device is on a stand-in in .venv. Default: trn2.
#? MATCHING=WORDS  Words of the tests' names. Default: all tests.
	$(if $(wildcard /dev/neuron0),python,$(python)) -m pytest -m "neuron or slow" -rs -s tests/hardware/test_$(or $(DEVICE),trn2).py -k "$(MATCHING)"

test-batch: setup ## Run the tests on simulated AWS Batch nodes; needs root, iproute2, tini.
	$(python) -m pytest -m batch infra/tests/batchsim

soak: setup ## Run pipelines under injected faults, and audit them; needs root.
#? MINUTES=NUMBER  Minutes after which no further pipeline begins. Default: 30.
#? SEED=NUMBER  Seed of a soak to repeat. Default: a new one, which is printed.
#? CYCLE=NUMBER  Run this cycle of the seed alone.
#? FOLDER=FOLDER  Folder for disks, logs and the undisturbed run. Default: /tmp/millrace-soak.
	$(python) -m tests.soak --minutes $(or $(MINUTES),30) $(if $(SEED),--seed $(SEED)) $(if $(CYCLE),--cycle $(CYCLE)) --folder "$(or $(FOLDER),/tmp/millrace-soak)"

check-infra: ## Run Terraform's own tests, checkov, shellcheck and yamllint, offline.
#? TF_PLUGIN_MIRROR
	@$(call environment,.venv-infra-checks,infra-checks)
	@infra/check.sh

test-infra: setup ## Apply and destroy the infrastructure in a simulated AWS; takes minutes.
#? TF_PLUGIN_MIRROR
	$(python) -m pytest -m slow infra

docs: setup docs-environment ## Build the documents and the generated reference as a site in dist/site.
	@.venv-docs/bin/mkdocs build # with --quiet it would pass over broken links

docs-environment: # mkdocs alone: the pages that need the services' packages are made in .venv.
	@$(call environment,.venv-docs,docs)

benchmark: setup ## Measure a stage and its alternatives.
#? STAGE=tokenizer|trainer  The stage. Required.
#? ARGS="--rounds 5 ..."  Options of the benchmark.
	@$(python) -m benchmarks.$(or $(STAGE),$(error make benchmark STAGE=tokenizer|trainer: STAGE is missing)) $(ARGS)

# Variables that several targets have.
#? STAGE=tokenizer|compiler|trainer  The stage. Required.
#? TARGET=kuberay|batch  Where stages run. Default: kuberay.
#? COMMAND="WORD ..."  The subcommand and its options, without --recipe and --root. Required.
#? RECIPE=FILE  The recipe. Default: the overlay's, or on Batch recipes/llama2-7b-trn1.toml.
#? TAG=TAG|DIGEST|IMAGE  The stage's image. Default: the one that make images builds.
#? NODES=NUMBER  The trainer's nodes, also for the compiler; the tokenizer's own. Default: the recipe's.
#? ARGS="--section.key=value ..."  Recipe overrides, and other options of the stage.
#? RETRIES=NUMBER  Further attempts after exit code 75 or a lost head. Default: 3.
#? DRY_RUN=1  Show the plan, and change nothing.
#? OUTPUT=yaml  With DRY_RUN=1: write what would be applied to stdout.
#? FOLLOW=0  Return at once instead of following the stage to its end.
#? MEMORY=GIB  Memory of the subcommand. Default: all of a CPU node. TARGET=kuberay only.
#? MODE=shared|isolated  isolated: a Ray cluster for this stage alone. TARGET=kuberay only.
#? WAIT=SECONDS  Limit for placing the nodes at first. Default: 1800. TARGET=kuberay only.
#? WAIT_AFTER_LOSS=SECONDS  Limit for replacing lost nodes. Default: 21600. TARGET=kuberay only.
#? DRAIN=SECONDS  Grace period of a pod, for a checkpoint. Default: measured. TARGET=kuberay only.
#? KEEP=1  Leave the pods and their nodes up after the stage. TARGET=kuberay only.
#? HOURS=NUMBER  Limit of a stage; on Batch, of an attempt. Default: none; on Batch 24 or the recipe's.
#? AGAIN=1  Redeploy even if it already succeeded. TARGET=batch only.
#? CONFIG=FILE  The account's queues and roles. Default: deploy/batch/config.txt. TARGET=batch only.
#? OVERLAY=local|eks|FOLDER  The manifests, in k8s/overlays. Default: local.
#? HEAD_TAG=TAG|DIGEST|IMAGE  The head's image. Default: the one that make images builds.
#? STACK=eks|batch|FOLDER  The Terraform stack. Default: eks.
#? VARS=FILE.tfvars  Variables of the Terraform stack. Default: the stack's own.
#? YES=1  Do not ask.
#? ONLY=NAME,NAME  The add-ons. Default: all.
#? VARIANT=cpu|cuda|neuron|trn2  The devices of the images. Default: cpu.
#? TF_PLUGIN_MIRROR=FOLDER  A folder with Terraform's providers, for use without a network.
