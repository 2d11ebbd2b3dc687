# Two commands: `make demo` and `make test`. Both set up all that they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST_WORKERS ?= 2

.PHONY: demo test test-ci test-all storm lint types clean browser ssh fuse slurm agents pufferlib bench spooler release-check licences pictures docs

$(VENV)/.demo: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[quickstart,ui]'
	$(BIN)/python -m compileall -q src/looplab
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all]' --group dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps 'gym-super-mario-bros>=7.4,<8'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps 'nes-py>=8.2,<9' 'gym<0.27' gym-notices tqdm || \
	  echo "no C++ compiler: nes-py, the other way to play Mario, is left out"
	$(BIN)/python -m compileall -q src/looplab
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo
	$(BIN)/looplab demo

lint: $(VENV)/.dev
	$(BIN)/ruff check src tests benchmarks tools
	$(BIN)/ruff format --check src tests benchmarks tools

types: $(VENV)/.dev
	$(BIN)/mypy

# The reports are tested in a real browser. Where it can be installed by apt it is, else those tests are skipped.
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null 2>&1 || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || \
	  echo "no chromium: the tests that need a browser are skipped"

# Signed anchors are tested with the real ssh-keygen, installed in the same way.
ssh:
	@command -v ssh-keygen >/dev/null 2>&1 || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends openssh-client >/dev/null; } || \
	  echo "no ssh-keygen: the tests that need it are skipped"

# Two mounts of one folder stand for two hosts that share a disk.
fuse:
	@command -v bindfs >/dev/null 2>&1 || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends bindfs >/dev/null; } || \
	  echo "no bindfs: the tests that need a shared disk are skipped"

# The Slurm executor is tested on a real Slurm, which the tests start on loopback; installed in the same way.
slurm:
	@command -v sbatch >/dev/null 2>&1 || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null; } || \
	  echo "no Slurm: the tests that need it are skipped"

# The real coding agents, for the tests that drive them; they speak to a scripted model on loopback.
agents:
	@[ -x .agents/node_modules/.bin/codex ] && [ -x .agents/node_modules/.bin/claude ] || \
	  { command -v npm >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && \
	      apt-get install -y -qq --no-install-recommends npm >/dev/null; }; \
	    npm install --silent --no-audit --no-fund --prefix .agents @openai/codex @anthropic-ai/claude-code; } || \
	  echo "no npm: the tests that need codex and claude are skipped"

# The real PufferLib, for the test that trains with it: packages alone, compiled in a few minutes.
pufferlib:
	@[ -x .pufferlib/bin/puffer ] || PYTHON=$(PYTHON) sh tests/pufferlib.sh .pufferlib

# Property tests with fewer examples, and without the slowest tests. `make test-ci` has all but the longest.
test: lint types browser ssh fuse
	LOOPLAB_TEST_EXAMPLES=25 $(BIN)/pytest -n $(PYTEST_WORKERS) --dist loadgroup -m "not slow and not long"

test-ci: lint types browser ssh fuse slurm
	$(BIN)/pytest -n $(PYTEST_WORKERS) --dist loadgroup -m "not long"

test-all: lint types browser ssh fuse slurm
	$(BIN)/pytest -n $(PYTEST_WORKERS) --dist loadgroup

# Hostile files of every kind, then minutes of attacks: a study that suffers all the time, and others by class beside it.
# What did not hold is printed with the command that repeats it. `make storm MINUTES=60 SEED=7 EXAMPLES=5000`.
storm: $(VENV)/.dev
	LOOPLAB_TEST_RANDOM=1 LOOPLAB_TEST_EXAMPLES=$(or $(EXAMPLES),400) $(BIN)/pytest -q tests/fuzz --hypothesis-seed=$(or $(SEED),0)
	$(BIN)/python benchmarks/storm.py --minutes $(or $(MINUTES),5) --seed $(or $(SEED),0)

# The pictures of README and docs: a terminal as SVG, the report and the live page as a browser shows them.
pictures: $(VENV)/.dev browser
	$(BIN)/python tools/take_pictures.py docs

# A peer of benchmarks/launch_peers.py, installed in the same way.
spooler:
	@command -v tsp >/dev/null 2>&1 || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends task-spooler >/dev/null; } || \
	  echo "no task-spooler: the benchmarks leave it out"

# All benchmarks beside their peers. Figures are appended to benchmarks/history.jsonl, those that got worse are named, the
# last ones are written to benchmarks/RESULTS.md, and plots to build/bench. `make bench ONLY=launch,cli`, `make bench FULL=1`.
bench: $(VENV)/.dev browser spooler
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --group bench
	$(BIN)/python benchmarks/run.py --plots build/bench --results benchmarks/RESULTS.md $(if $(FULL),--full) $(if $(ONLY),--only $(ONLY))

# Wheel and sdist, built and installed in a clean environment, with extras; sizes and import times. Other Pythons too:
# `make release-check PYTHONS="python3.12 python3.13"`.
release-check: $(VENV)/.dev
	$(BIN)/python tools/release_check.py $(foreach python,$(PYTHONS),--also $(python))

# The licences of all dependencies, as a table and as an SBOM, in build/.
licences: $(VENV)/.dev
	$(BIN)/python tools/licences.py build

# The documentation as a site, in build/site, from this repository alone. The search needs a server:
# `python3 -m http.server -d build/site`.
docs: $(VENV)/.dev
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --group docs
	$(BIN)/python tools/site_pages.py build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) demo build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
