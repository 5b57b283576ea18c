# `make` alone lists the targets. Variables: make demo RECIPE=recipes/other.toml ROOT=/data

RECIPE = recipes/tiny-cpu.toml
ROOT = ./fsx

stages := tokenizer compiler trainer
python := .venv/bin/python
# From the oldest Python on; "fewest" gives every Python the same pins.
compile := ./bootstrap uv pip compile --quiet --universal --python-version 3.11 --fork-strategy fewest \
	--generate-hashes --annotation-style line --custom-compile-command "make lock" $(if $(UPGRADE),--upgrade)

.PHONY: help setup demo test test-slow check format lock clean

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Make .venv from the lockfile. TORCH=cpu: without CUDA, torch from TORCH_INDEX_URL or TORCH_FIND_LINKS.
	@./bootstrap

demo: setup ## Tokenize, compile and train RECIPE under ROOT, then show the run.
	$(python) -m services.tokenizer --recipe "$(RECIPE)" --root "$(ROOT)"
	$(python) -m services.compiler --recipe "$(RECIPE)" --root "$(ROOT)"
	$(python) -m services.trainer --recipe "$(RECIPE)" --root "$(ROOT)"
	@$(python) -m services.trainer summary --recipe "$(RECIPE)" --root "$(ROOT)"

test: setup ## Run the quick tests, two files at a time.
	$(python) -m pytest -n 2 --dist loadfile

test-slow: setup ## Run the slow tests.
	$(python) -m pytest -m slow

check: setup ## Lint, check the format and the types.
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy

format: setup ## Fix what ruff can fix.
	$(python) -m ruff check --fix-only .
	$(python) -m ruff format .

lock: ## Resolve the requirements into lockfiles/, keeping pins that fit. UPGRADE=1: take the newest.
	echo uv | $(compile) - -o lockfiles/uv.txt
	$(compile) $(sort $(wildcard services/*/requirements.txt)) requirements-dev.txt -o lockfiles/dev.txt
	set -e; for stage in $(stages); do \
		$(compile) services/common/requirements.txt services/$$stage/requirements.txt \
			-c lockfiles/dev.txt -o lockfiles/$$stage.txt; \
	done

clean: ## Remove .venv, .uv and caches; never ROOT.
	rm -rf .venv .uv .uv.partial .mypy_cache .pytest_cache .ruff_cache
	find $(wildcard services tests) -name __pycache__ -type d -prune -exec rm -rf {} +
