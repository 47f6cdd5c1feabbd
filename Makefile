# Set-up happens by itself: a virtual environment in .venv, and lavapipe where no GPU is found.
.PHONY: help setup demo docs quick test test-full test-lowest test-browser lint bench campaign mutants clean

help:
	@echo "make demo    fine-tune the small model that ships with the project"
	@echo "make docs    build the documentation's site, in build/site"
	@echo "make quick   run the cheap tests, while developing; K=expression chooses among them"
	@echo "make test    run the tests that a change must pass"
	@echo "make test-full    run every case of every test, and the short campaigns"
	@echo "make test-lowest    the same with the lowest versions of all dependencies"
	@echo "make test-browser    the page in Firefox and Chromium, which it installs"
	@echo "make lint    ruff, mypy, the import rules, and whether every test can be collected"
	@echo "make campaign    attack runs, files and texts for hours; ONLY=kills COUNT=50 SEED=7 for less"
	@echo "make mutants    change one operator at a time and see which tests notice; COUNT=60 SEED=1"
	@echo "make bench   time a step's parts on this machine"

setup:
	@tools/setup.sh dev

demo:
	@tools/setup.sh
	@.venv/bin/qlora-wgpu train demo/demo.yaml --overwrite

docs:
	@tools/setup.sh docs
	.venv/bin/mkdocs build --strict

# The ordinary tests with the lowest versions that pyproject.toml allows; `test` has the highest.
test-lowest: setup
	.venv/bin/uv venv --quiet --allow-existing .venv-lowest
	.venv/bin/uv pip install --quiet --python .venv-lowest/bin/python --resolution lowest-direct -e ".[dev]"
	.venv-lowest/bin/python -m pytest tests --tier test -n 2 --dist worksteal

# Three tiers (tests/support/tiers.py); the middle one is the gate, and may cost no more than this,
# of which half are a software GPU's compiling, where no shader has been compiled before.
export PYTHONDONTWRITEBYTECODE =  # modules are compiled once for all processes
PYTEST = .venv/bin/python -m pytest -n 2 --dist worksteal
BUDGET = 1900

quick: setup
	$(PYTEST) tests --tier quick $(if $(K),-k "$(K)")

test: setup
	$(PYTEST) tests --tier test --budget $(BUDGET)

test-full: setup
	$(PYTEST) tests campaigns --tier full

# Debian's packages where a browser is missing: some 200 MB.
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

# Campaigns are scripts, or tests whose examples Hypothesis draws; all are run, whatever the ones
# before find, but for those that need torch, which is not installed here.
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

# How sharp the tests are. TIERS="quick test full" goes on with what survives, which takes hours;
# RESULTS=FILE keeps outcomes, so that a run that was stopped goes on.
mutants: setup
	.venv/bin/python -m tools.mutants $(COUNT:%=--count %) $(SEED:%=--seed %) \
		$(if $(TIERS),--tiers $(TIERS)) $(RESULTS:%=--results %)

clean:
	rm -rf .venv .venv-lowest
