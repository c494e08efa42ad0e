# The commands that people and CI use in this repository. `make` alone lists them.
#
# Everything runs in .venv, which is made from PYTHON on first use and brought up to date whenever pyproject.toml or
# constraints.txt change. Training needs the packages of `.[all,plot]` only; linters, test tools and every optional
# feature come with the first target that needs them (`.[dev]`, some 2 GB more).
# ARGS is passed on: make train ARGS="env=pong", make test ARGS="-k batcher".

PYTHON ?= python3
BIN := .venv/bin
TRAINING := .venv/.installed
DEV := .venv/.dev
COUNTERPARTS := .venv/counterparts/.installed
# Without compiling: Python compiles the few modules that are imported when they are, and 2 GB hold many more.
INSTALL := -m pip install -q --disable-pip-version-check --no-compile

.DEFAULT_GOAL := help
.PHONY: help train test test-long test-cluster test-learning chaos nightly soak lint bench proto dashboards reference docs manifests tools counterparts constraints wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' Makefile

train: $(TRAINING) ## train CartPole with live progress; ARGS="env=pong" for something else
	@$(BIN)/seedrl run $(ARGS)

test: lint tools ## lint, then run every test that takes seconds; five minutes in all
	$(BIN)/pytest -n auto --dist loadfile $(ARGS)

test-long: $(DEV) $(COUNTERPARTS) tools ## run the tests of whole commands and of many processes; some minutes more
	$(BIN)/pytest -m 'long and not chaos' -n auto --dist loadscope $(ARGS)

test-cluster: $(DEV) tools ## run the tests of ranks, hosts, Ray and pods; ten minutes more
	$(BIN)/pytest -m cluster $(ARGS)

test-learning: $(DEV) ## run the slow tests that train until something is learned
	$(BIN)/pytest -m slow --timeout=1800 $(ARGS)

chaos: $(DEV) tools ## inject faults for some minutes: kills, cuts, loss, clock jumps, floods; CYCLES=10000 for all of C10
	@$(BIN)/python $(INSTALL) atheris || echo "atheris cannot be installed here, so the decoder is not fuzzed"
	$(BIN)/pytest -m chaos -s $(ARGS)

EACH ?= 45
nightly: $(DEV) $(COUNTERPARTS) tools ## run the cluster, learning, chaos and bench tiers, EACH=45 minutes at most; the report goes to nightly/
	@MINUTES=$(EACH) bash .ci/nightly

MINUTES ?= 30
soak: $(DEV) ## train for MINUTES=30 with a fault every 30 s; the report goes to docs/soak.md
	$(BIN)/python -m tests.chaos.soak minutes=$(MINUTES) $(ARGS)

lint: $(DEV) ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(DEV) ## measure everything, into bench/RESULTS.md; ARGS="stage=service out=results.json" for one stage only
	$(BIN)/seedrl bench $(or $(ARGS),out=bench/results/results.json)
	$(if $(ARGS),,$(BIN)/seedrl bench render bench/results/results.json bench/RESULTS.md)

proto: $(DEV) ## generate seedrl/v1 from proto/
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. proto/seedrl/v1/*.proto

dashboards: $(TRAINING) ## make the Grafana dashboard and the Prometheus console from seedrl/monitoring/panels.py
	$(BIN)/python -m seedrl.monitoring.dashboards conf/observability

tools: ## install Prometheus, Chromium, Qt, zsh, Node.js and iptables, which some tests use, if this is Debian or Ubuntu and we are root
	@bash .ci/tools

counterparts: $(COUNTERPARTS) ## install the other ends of our bridges, which conflict with our own packages, into .venv/counterparts

reference: $(TRAINING) ## write docs/metrics.md from the declarations
	$(BIN)/python -m seedrl.monitoring.reference > docs/metrics.md

docs: $(DEV) ## build the documentation into site/, with every link checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

manifests: $(DEV) ## write tests/golden/kubernetes again, after a change of what `seedrl render` writes
	$(BIN)/python -m tests.manifests

constraints: ## update constraints.txt to pin everything that `.[dev]` installs today
	@clean=$$(mktemp -d) && trap 'rm -rf "$$clean"' EXIT && \
	$(PYTHON) -m venv "$$clean/venv" && \
	grep '^torch==' constraints.txt > "$$clean/torch" && \
	"$$clean/venv/bin/python" $(INSTALL) -c "$$clean/torch" -e '.[dev]' && \
	"$$clean/venv/bin/python" -m pip freeze --all --exclude-editable > "$$clean/freeze" && \
	{ grep '^#' constraints.txt; sed -e '/^pip==/d' -e 's/+.*//' "$$clean/freeze"; } > "$$clean/constraints" && \
	cp "$$clean/constraints" constraints.txt

wheel: $(DEV) ## build dist/seedrl-*.whl
	$(BIN)/python -m build --wheel --no-isolation

clean: ## remove everything that make has made, .venv included, but keep runs/
	rm -rf .venv dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(TRAINING): pyproject.toml constraints.txt
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || { \
		$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("seedrl needs Python 3.11 or newer and $(PYTHON) is " + sys.version.split()[0] + "; name another one: make PYTHON=python3.11")' && \
		$(PYTHON) -m venv --clear .venv; }
	@echo "installing what training needs into .venv"
	@$(BIN)/python $(INSTALL) -c constraints.txt -e '.[all,plot]'
	@touch $@

$(DEV): $(TRAINING)
	@echo "installing the development tools into .venv; the first time this takes some minutes"
	@$(BIN)/python $(INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@

$(COUNTERPARTS): $(TRAINING)
	@echo "installing the other ends of our bridges into .venv/counterparts"
	@$(PYTHON) -m venv --clear .venv/counterparts
	@.venv/counterparts/bin/python $(INSTALL) 'openenv==0.10.0' 'openpi-client==0.1.2'
	@touch $@
