# make demo: install, train the packaged Chinese example, read two of its answers.
# make test: install with the test extras, run the unit tests and the first test of each promise, one worker more than there are cores.
# make test-rest: the tests that `make test` leaves out, and every combination of the grids; half an hour.
# make test-all: both.
# make wheel: dist/unpad-*.whl, with the kernels for this platform where they can be compiled.
# make census: judge every causal model of the installed transformers, and write docs/internals/census.md; some ten minutes.
# make processes: compare runs of 1 to 4 processes, end such of 1, 2 and 3 in every way, lose and gain hosts, and write the tables of docs/internals/several_processes.md.
# make fuzz: try every reader of outside bytes with damaged ones; CASES=5000000 in all runs together, SECONDS=3600, WORKERS=1.
# make crash: cut the power after every operation of recorded runs, 10,000 states of each kind, and let every call fail once; hours, in parts.
# make kill: kill runs at random instants and resume them; KILLS=1000 in all runs together.
# make size: count what a reader of the package has to hold in mind.
# make readme: run every command whose output the pages show, and fail where they drift.
# TORCH_INDEX=URL passes an index for torch to pip; SYSTEM_TORCH=1 uses the torch that is installed already.
PYTHON ?= python3
VENV = .venv
# Modules are compiled when they are first imported, and kept then whatever the environment says: pip would compile the 17,000 of all
# packages one after the other, which takes most of a minute, and tests start hundreds of processes.
PIP = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile
export PYTHONDONTWRITEBYTECODE =
TORCH_INDEX ?=
SYSTEM_TORCH ?=
RUN = runs/demo

# Threads that wait asleep: the few tests with two threads share their cores with other tests.
PYTEST = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/python -m pytest -n auto --dist worksteal

.PHONY: demo test test-rest test-all wheel readme census processes fuzz crash kill lint size clean
demo: $(VENV)/.installed
	@rm -rf $(RUN)
	@$(VENV)/bin/unpad train zh_chat --out $(RUN) train.log_every=200
	@$(VENV)/bin/unpad eval $(RUN) --replies 1
	@echo "next:  $(VENV)/bin/unpad chat demo                     talk to it"
	@echo "       $(VENV)/bin/unpad train chat data.chat=FILE     train a model on your own conversations; README.md has the rest"

test: $(VENV)/.installed-dev
	@$(PYTEST) --set quick

test-rest: $(VENV)/.installed-dev
	@UNPAD_GRID=full $(PYTEST) --set rest

test-all: $(VENV)/.installed-dev
	@UNPAD_GRID=full $(PYTEST)

wheel: $(VENV)/bin/python
	@rm -f dist/unpad-*.whl
	@$(VENV)/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@ls dist/unpad-*.whl

fuzz: $(VENV)/.installed-dev
	@OMP_NUM_THREADS=1 $(VENV)/bin/python benchmarks/fuzz.py $(if $(CASES),--cases $(CASES)) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(WORKERS),--workers $(WORKERS))

readme: $(VENV)/.installed-dev
	@$(VENV)/bin/python docs/outputs.py

size: $(VENV)/.installed-dev
	@$(VENV)/bin/python benchmarks/size.py

census: $(VENV)/.installed-dev
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/python benchmarks/census.py

processes: $(VENV)/.installed-dev
	@$(VENV)/bin/python benchmarks/equal_processes.py
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/python benchmarks/endings.py --write
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/python benchmarks/elastic.py --write

crash: $(VENV)/.installed-dev
	@OMP_NUM_THREADS=1 $(VENV)/bin/python benchmarks/reliability/crash.py $(if $(STATES),--states $(STATES))

kill: $(VENV)/.installed-dev
	@OMP_NUM_THREADS=1 $(VENV)/bin/python benchmarks/reliability/kill.py $(if $(KILLS),--kills $(KILLS))

lint: $(VENV)/.installed-dev
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy --num-workers 2 || { [ $$? = 2 ] && $(VENV)/bin/mypy; } # 2: it found no fault, but failed itself, as on a busy machine

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "unpad needs Python 3.11 or newer; this is %d.%d. Name another: make demo PYTHON=python3.12" % sys.version_info[:2])'
	@$(PYTHON) -m venv $(if $(SYSTEM_TORCH),--system-site-packages) $(VENV)

SOURCES = pyproject.toml constraints.txt setup.py $(wildcard unpad/nn/native/*.cpp unpad/nn/native/*.h)

$(VENV)/.installed: $(VENV)/bin/python $(SOURCES)
	$(call install,.[tensorboard])
	@touch $@

# Not after .installed: each of the two compiles the kernels.
$(VENV)/.installed-dev: $(VENV)/bin/python $(SOURCES)
	$(call install,.[dev])
	@touch $(VENV)/.installed $@

define install
	@echo "installing into $(VENV): some minutes, of which compiling the kernels takes about one of processor time"
	@$(if $(SYSTEM_TORCH),true,$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -c constraints.txt torch)
	@$(PIP) $(if $(SYSTEM_TORCH),,-c constraints.txt) -e '$(1)'
endef

clean:
	rm -rf $(VENV) build dist *.egg-info unpad/nn/native/*.so
