# Everything runs from .venv, made with plain pip from pinned versions. `make help` lists the targets.

PYTHON ?= python3.11
BENCHES ?= render pack prepare open load rollout
ARGS ?=

# Named by the content it was installed from: unchanged requirements install nothing.
key = $(shell cat pyproject.toml $(1) | cksum | cut -d ' ' -f 1)
DEV := requirements/dev.txt requirements/tokenizers.txt
DEV_STAMP := .venv/installed-$(call key,$(DEV))

.PHONY: help install test check demo bench clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1 /p' $(MAKEFILE_LIST) | while read -r name does; do printf '  make %-8s %s\n' $$name "$$does"; done

install: $(DEV_STAMP) ## make .venv with the pinned versions and the package, editable

test: check ## install, check, run every test (ARGS="-k words" to choose)
	.venv/bin/python -m pytest -n 2 --dist loadfile $(ARGS)

check: $(DEV_STAMP) ## format, lint, types, import direction
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/python scripts/check_imports.py

demo: $(DEV_STAMP) ## from the embedded conversations to what exists so far, step by step
	PATH="$(CURDIR)/.venv/bin:$$PATH" bash scripts/demo.sh

bench: $(DEV_STAMP) ## side by side with peers (BENCHES="render" to choose)
	@set -e; for name in $(BENCHES); do echo "== benchmarks/$$name.py"; .venv/bin/python benchmarks/$$name.py; done

clean: ## remove what the other targets made, environments included
	rm -rf .venv demo build dist src/chatmill.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch stands in the same pip command as all the rest, so nothing else can pull another build of it.
define fill
	@echo "$(@D): installing $(1) (minutes the first time, nothing the next)"
	@rm -f $(@D)/installed-*
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $(1)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/tokenizers.txt
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
endef

$(DEV_STAMP): | .venv/bin/python
	$(call fill,requirements/dev.txt)

.venv/bin/python:
	@for py in $(PYTHON) python3 none; do \
		if $$py -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi; \
	done; \
	if [ $$py = none ]; then \
		echo "neither $(PYTHON) nor python3 is Python 3.11 or newer; name one: make PYTHON=/path/to/python3.11" >&2; exit 1; \
	fi; \
	echo "$(@D:/bin=): made with $$py"; \
	$$py -m venv $(@D:/bin=) || { rm -rf $(@D:/bin=); exit 1; }
