# `make` alone lists the targets. Variables: make demo RECIPE=recipes/other.toml ROOT=/data

RECIPE ?= recipes/tiny-cpu.toml
ROOT ?= ./fsx

python := .venv/bin/python
# The names on make's own command line, of which the deploy commands refuse those that they have no use for.
named = $(strip $(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),$(name))))
deploy = MAKE_VARIABLES="$(named)" $(python) -m deploy.commands
cluster = $(python) -m k8s.client
infra = .venv-infra/bin/python -m infra
images = ./bootstrap python -m images

.PHONY: help setup demo test test-slow torch29 test-torch29 test-nxd-parity test-images test-cluster test-cluster-smoke test-batch \
	test-cuda check format lock clean \
	cluster-local cluster-local-down load-images cluster-up cluster-down deploy-stage stage-status stage-logs stop-stage \
	rollback-stage stage-run pipeline base-image images demo-images pin platforms release sbom benchmark-tokenizer benchmark-parallel \
	benchmark-trainer infra-cost infra-preflight infra-plan infra-up infra-down infra-leftovers addons \
	addons-diff addons-argocd check-infra test-infra cluster-manifests infra-environment

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-19s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Make .venv from the lockfile. TORCH=cpu: with a torch without CUDA; TORCH=locked: with CUDA again.
	@./bootstrap

demo: setup ## Tokenize, compile and train RECIPE under ROOT, then show the run.
	$(python) -m services.tokenizer --recipe "$(RECIPE)" --root "$(ROOT)"
	$(python) -m services.compiler --recipe "$(RECIPE)" --root "$(ROOT)"
	$(python) -m services.trainer --recipe "$(RECIPE)" --root "$(ROOT)"
	@$(python) -m services.trainer summary --recipe "$(RECIPE)" --root "$(ROOT)"

test: setup ## Run the quick tests, two files at a time.
	$(python) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-slow: setup ## Run the slow tests.
	$(python) -m pytest -m slow

torch29: ## Make .venv-torch29, with torch_xla and the Neuron variant's torch: 8 GB. `services.compiler plan` needs it.
	./bootstrap uv venv --quiet --allow-existing --python "$$(./bootstrap python -c 'import sys; print(sys.executable)')" .venv-torch29
	./bootstrap uv pip sync --quiet --compile-bytecode --python .venv-torch29/bin/python --require-hashes lockfiles/dev-neuron.txt

test-torch29: torch29 ## Run the program's tests in it.
	.venv-torch29/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder services/common services/compiler services/trainer

test-nxd-parity: ## Compare our layers with neuronx-distributed's own, in .venv-nxd-parity: NXD_SOURCE=, a checkout of it.
	@test -d "$(NXD_SOURCE)/src/neuronx_distributed" || { echo "make test-nxd-parity NXD_SOURCE=FOLDER: expected a checkout of github.com/aws-neuron/neuronx-distributed, got '$(NXD_SOURCE)', which has no src/neuronx_distributed" >&2; exit 2; }
	./bootstrap uv venv --quiet --allow-existing --python "$$(./bootstrap python -c 'import sys; print(sys.executable)')" .venv-nxd-parity
	./bootstrap uv pip sync --quiet --compile-bytecode --python .venv-nxd-parity/bin/python --require-hashes lockfiles/nxd-parity.txt
	NXD_SOURCE="$(abspath $(NXD_SOURCE))" PJRT_DEVICE=CPU .venv-nxd-parity/bin/python -m pytest -rs services/common/program/tests/test_nxd_parity.py

test-images: setup ## Run the tests that build and run images; they need Docker, root and debootstrap.
	$(python) -m pytest -m images tests/images

test-cluster: setup ## Run the tests on a real Kubernetes that is started here; they need root, Go and Debian's packages.
	@$(images) base
	$(python) -m pytest -m cluster tests/cluster

test-cluster-smoke: setup ## The part of it that runs in CI: the kit itself, and one real stage on it.
	@$(images) base
	$(python) -m pytest -m cluster tests/cluster/test_kit.py tests/cluster/test_smoke.py

test-cuda: setup ## Run the tests on this machine's NVIDIA GPUs.
	$(python) -m pytest -m cuda -rs tests/hardware services/common/program/tests/test_native_device.py

test-batch: setup ## Run the tests on simulated nodes of AWS Batch; they need root, iproute2 and tini.
	$(python) -m pytest -m batch infra/tests/batchsim

cluster-local: setup ## Start a Kubernetes with Volcano and KubeRay on this machine, with images and a Ray head; it stays up.
	@echo "cluster-local, 1 of 5: the base image; all of it takes 15 to 30 minutes the first time, then 5"
	@$(images) base
	@echo "cluster-local, 2 of 5: Kubernetes, Volcano and KubeRay"
	@$(python) -m tests.cluster.kit up
	@echo "cluster-local, 3 of 5: the images of this checkout"
	@$(images) build
	@echo "cluster-local, 4 of 5: the images go to the node (minutes; 7 GB)"
	@$(MAKE) --no-print-directory load-images
	@echo "cluster-local, 5 of 5: the RayCluster"
	@KUBECONFIG=.cluster/kubeconfig OVERLAY=local $(cluster) cluster-up

cluster-local-down: setup ## Stop it and remove what it made; the artifacts in /var/lib/millrace/fsx stay.
	@$(python) -m tests.cluster.kit down

load-images: setup ## Bring the working tree's images to the node of cluster-local: STAGE= (all).
	@$(python) -m tests.cluster.kit load $$($(images) names)

cluster-up: setup ## Make the RayCluster and all around it: OVERLAY=local|eks|FOLDER, HEAD_TAG=.
	@$(cluster) cluster-up

cluster-manifests: setup ## Print what cluster-up applies: OVERLAY=, HEAD_TAG=. With `make -s` stdout is YAML alone.
	@$(cluster) cluster-manifests

cluster-down: setup ## Delete it; artifacts stay. OVERLAY=, FORCE=1 while a stage is deployed.
	@$(cluster) cluster-down

deploy-stage: setup ## Run a stage: STAGE= [TARGET=kuberay|batch RECIPE= TAG= NODES= ARGS= MODE= RETRIES= HOURS= KEEP=1 DRY_RUN=1 FOLLOW=0].
	@$(deploy) deploy-stage

stage-status: setup ## What is deployed, where it stands, how it ended.
	@$(deploy) stage-status

stage-logs: setup ## Follow a stage that is deployed: STAGE=.
	@$(deploy) stage-logs

stop-stage: setup ## Let a stage commit a checkpoint, and take it down: STAGE=.
	@$(deploy) stop-stage

rollback-stage: setup ## Deploy the last image with which a stage ended well: STAGE=.
	@$(deploy) rollback-stage

stage-run: setup ## Run a subcommand of a stage in a short Job: STAGE= COMMAND="export ..." [TARGET= RECIPE= TAG= BRING= TO= HOURS= MEMORY= DRY_RUN=1].
	@$(deploy) stage-run

pipeline: setup ## Deploy the three stages, one after the other.
	@$(deploy) pipeline

infra-environment: # The little that the infrastructure's commands need: a price should not wait for torch.
	@./bootstrap uv venv --quiet --allow-existing --python "$$(./bootstrap python -c 'import sys; print(sys.executable)')" .venv-infra
	@./bootstrap uv pip sync --quiet --compile-bytecode --python .venv-infra/bin/python --require-hashes lockfiles/infra.txt

infra-cost: infra-environment ## What a target costs, by list prices: [STACK=eks|batch] NODES= HOURS= CPU_NODES= RECIPE= VARS=FILE.tfvars.
	@$(infra) cost

infra-preflight: infra-environment ## Look in the account for what would stop it: zone, quota, addresses, reservation, images. [STACK=eks|batch] NODES= TAG= VARS=.
	@$(infra) preflight

infra-plan: infra-environment ## What infra-up would make: terraform's plan, and the cost. [STACK=eks|batch] VARS=.
	@$(infra) plan

infra-up: infra-environment ## Make a target and all around it, after showing the cost and asking: [STACK=eks|batch] VARS= YES=1.
	@$(infra) up

infra-down: infra-environment ## Take it down in order, after asking; it can be cut and run again. [STACK=eks|batch] VARS= YES=1 KEEP_DATA=false KEEP_CLUSTER=true.
	@$(infra) down

infra-leftovers: infra-environment ## What of it is in the account, with prices. [STACK=eks|batch] VARS=.
	@$(infra) leftovers

addons: infra-environment ## Install the cluster's add-ons with helm: ONLY=kuberay,volcano (all) DRY_RUN=1.
	@$(infra) addons

addons-diff: infra-environment ## What make addons would change on the cluster: ONLY=.
	@$(infra) addons-diff

addons-argocd: infra-environment ## The same add-ons as Argo CD applications, on stdout: ONLY= PROJECT=.
	@$(infra) addons-argocd

check-infra: infra-environment ## Terraform's checks and tests, checkov, shellcheck, yamllint; offline. TF_PLUGIN_MIRROR=FOLDER for Terraform's.
	@./bootstrap uv venv --quiet --allow-existing --python "$$(./bootstrap python -c 'import sys; print(sys.executable)')" .venv-infra-checks
	@./bootstrap uv pip sync --quiet --compile-bytecode --python .venv-infra-checks/bin/python --require-hashes lockfiles/infra-checks.txt
	@$(infra) check

test-infra: setup ## Apply and destroy the stack against a simulated AWS: minutes. TF_PLUGIN_MIRROR=FOLDER.
	$(python) -m pytest -m slow infra

.PHONY: docs docs-environment picture
docs: setup docs-environment ## Build the documents, with a reference made from the code, as a site in dist/site.
	@.venv-docs/bin/mkdocs build # with --quiet it would pass over broken links

docs-environment: # mkdocs alone: the pages that need the services' packages are made in .venv.
	@./bootstrap uv venv --quiet --allow-existing --python "$$(./bootstrap python -c 'import sys; print(sys.executable)')" .venv-docs
	@./bootstrap uv pip sync --quiet --compile-bytecode --python .venv-docs/bin/python --require-hashes lockfiles/docs.txt

picture: setup ## Take the README's picture, docs/report.png, of the newest report under ROOT; needs Chromium.
	@$(python) -m docs.site.picture "$(ROOT)/run" docs/report.png

base-image: ## Make a slim Python base image with debootstrap, without a registry. AGAIN=1: replace it.
	@$(images) base

images: ## Build the images: STAGE= (all), VARIANT=cpu|cuda|neuron, TORCH=cpu, PUSH=REGISTRY.
	@$(images) build

demo-images: ## Run the demo with each stage in its container: STAGE= (all), TRAINER_TAG= for another image.
	@$(images) demo

platforms: ## Print the versions that all images of a variant have, and the requirements on a node.
	@$(images) platforms

pin: setup ## Write the digests behind base images into images/platforms.toml, the commits behind data sets into recipes.
	@$(images) pin
	@$(python) -m services.tokenizer pin recipes/*.toml

benchmark-tokenizer: setup ## Measure the tokenizer beside its alternatives; ARGS= options, such as "--megabytes 300".
	@$(python) -m benchmarks.tokenizer $(ARGS)

benchmark-parallel: setup ## Measure split models, exact sums and checkpoints; ARGS= options, such as "--rounds 9".
	@$(python) -m benchmarks.parallel $(ARGS)

benchmark-trainer: setup ## Measure the trainer beside its alternatives; ARGS= options, such as "--install-peers --rounds 5".
	@$(python) -m benchmarks.trainer $(ARGS)

release: setup ## Release a stage: STAGE=trainer BUMP=major|minor|patch.
	@$(python) -m images release

sbom: ## Write a CycloneDX bill of materials per image into dist/sbom.
	@$(images) sbom

check: setup ## Lint, check the format, the types and the layers of imports.
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy
	.venv/bin/lint-imports --no-cache --no-logo
	$(python) -m images check

format: setup ## Fix what ruff can fix.
	$(python) -m ruff check --fix-only .
	$(python) -m ruff format .

lock: ## Resolve the requirements into lockfiles/, keeping pins that fit. UPGRADE=1: take the newest.
	$(images) lock

clean: ## Remove .venv, .uv and caches; never ROOT, never images.
	rm -rf .venv .venv-torch29 .venv-nxd-parity .venv-infra .venv-infra-checks .venv-docs .uv .uv.partial .mypy_cache .pytest_cache .ruff_cache .pants-bootstrap .pants.d dist
	find $(wildcard services tests images deploy k8s benchmarks infra docs) -name __pycache__ -type d -prune -exec rm -rf {} +
