# Targets set themselves up: a virtual environment in .venv, and lavapipe if there is no GPU.
.PHONY: help setup demo demo-grpo demo-images docs quick test test-full test-lowest test-browser lint bench campaign mutants clean

help:
	@echo "make demo          fine-tune the small model that comes with the project"
	@echo "make demo-grpo     train the demo's adapter further, by rewards alone"
	@echo "make demo-images   fine-tune a small vision-language model on drawn pictures"
	@echo "make docs          build the documentation in build/site"
	@echo "make quick         run the cheap tests, during development; K=EXPRESSION selects some"
	@echo "make test          run the tests that a change must pass"
	@echo "make test-full     run all cases of all tests, and the short campaigns"
	@echo "make test-lowest   run make test with the lowest versions of all dependencies"
	@echo "make test-browser  test the page in Firefox and Chromium, which it installs"
	@echo "make lint          run ruff, mypy and import-linter, and collect all tests"
	@echo "make campaign      attack runs, files and inputs for hours; ONLY=kills COUNT=50 SEED=7 for less"
	@echo "make mutants       change one operator at a time, and see which tests fail; COUNT=60 SEED=1"
	@echo "make bench         benchmark the parts of a step on this machine"

setup:
	@tools/setup.sh dev

demo:
	@tools/setup.sh
	@.venv/bin/qlora-wgpu train demo/demo.yaml --overwrite

# It continues the adapter of `make demo`, which runs first if there is none.
demo-grpo:
	@tools/setup.sh
	@test -d runs/demo/adapter || .venv/bin/qlora-wgpu train demo/demo.yaml --overwrite
	@.venv/bin/qlora-wgpu train demo/grpo/grpo.yaml --overwrite

demo-images:
	@tools/setup.sh images
	@.venv/bin/python demo/images/make_data.py
	@.venv/bin/qlora-wgpu train demo/images/images.yaml --overwrite
	@.venv/bin/qlora-wgpu eval runs/demo-images --generate --max-new-tokens 8

docs:
	@tools/setup.sh docs
	.venv/bin/mkdocs build --strict

# `make test` with the lowest versions that pyproject.toml allows; `test` has the highest.
test-lowest: setup
	.venv/bin/uv venv --quiet --allow-existing .venv-lowest
	.venv/bin/uv pip install --quiet --python .venv-lowest/bin/python --resolution lowest-direct -e ".[dev]"
	.venv-lowest/bin/python -m pytest tests --tier test -n 2 --dist worksteal

# Three tiers (tests/support/tiers.py). A change must pass the middle one, within this budget of CPU
# seconds; a software GPU needs half of them to compile shaders for the first time.
export PYTHONDONTWRITEBYTECODE =  # so that modules are compiled once for all processes
PYTEST = .venv/bin/python -m pytest -n 2 --dist worksteal
BUDGET = 1500

quick: setup  # its tests often wait for others' processes: a third worker computes meanwhile
	$(PYTEST) -n 3 tests --tier quick $(if $(K),-k "$(K)")

test: setup
	$(PYTEST) tests --tier test --budget $(BUDGET)

test-full: setup
	$(PYTEST) tests campaigns --tier full

# Installs Debian's packages if a browser is missing: about 200 MB.
test-browser: setup
	command -v firefox-esr firefox >/dev/null || apt-get install -y firefox-esr
	command -v chromium google-chrome >/dev/null || apt-get install -y chromium
	.venv/bin/python -m pytest tests/browser -o python_files='check_*.py' \
		-o log_cli=true -o log_cli_level=INFO --durations 10

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	@seen=$$(.venv/bin/python -m pytest tests campaigns --collect-only -qqq) || { echo "$$seen"; exit 1; }

bench: setup
	.venv/bin/python benchmarks/step.py
	.venv/bin/python benchmarks/quantize.py

# Campaigns are scripts, or tests with examples drawn by Hypothesis. All are run, even after failures,
# except those that need torch, which is not installed here.
campaign: setup
	@failed=; \
	for name in $(or $(ONLY),$$(grep -lE "__main__|^@given" campaigns/*.py \
		| xargs grep -L "^import torch" | xargs -n 1 basename -s .py | sed s/^test_//)); do \
		echo "== $$name"; \
		if [ -e campaigns/$$name.py ]; then \
			.venv/bin/python -m campaigns.$$name $(COUNT:%=--count %) $(SEED:%=--seed %); \
		else \
			.venv/bin/python -m pytest campaigns/test_$$name.py --hypothesis-show-statistics \
				--count $(or $(COUNT),20000) --hypothesis-seed=$(or $(SEED),0); \
		fi || failed="$$failed $$name"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi

# Mutation testing. TIERS="quick test full" runs more tiers on mutants that survive;
# RESULTS=FILE keeps outcomes, so that a stopped run can be resumed.
mutants: setup
	.venv/bin/python -m tools.mutants $(COUNT:%=--count %) $(SEED:%=--seed %) \
		$(if $(TIERS),--tiers $(TIERS)) $(RESULTS:%=--results %)

clean:
	rm -rf .venv .venv-lowest
