# Every command of the project. `make demo` and `make test` need a fresh checkout and nothing else.
# What a target needs and nobody has asked for before is built or installed then, and kept up to date from then on.
.PHONY: demo site wheel test-wheel test test-rust test-oldest test-lab check format fuzz chaos long setup tools kernel \
	java lock docs pictures clean

PYTHON ?= python3
BIN := .venv/bin
export VIRTUAL_ENV := $(CURDIR)/.venv
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# Where it is set, each process compiles all that it imports: 1 to 2 s for each worker of a test.
unexport PYTHONDONTWRITEBYTECODE
CARGO := cargo
STEP := @sh tools/step.sh

# The lab's part in the kernel: only once `make kernel` was asked for, since most users need neither it nor clang.
KERNEL = $(shell test -e .venv/.kernel && echo kernel)
FEATURES = $(if $(KERNEL),--features kernel)
# All crates at once, with the features of the extension: then all that they share is compiled once for every command.
CRATES = --release --workspace $(if $(KERNEL),--features mission-python/kernel,--exclude mission-kernel)
# The library for tasks in Java: what needs it is left out where Maven is not.
JAR := mission_control/jvm/mission-control.jar
JAVA := $(shell command -v mvn > /dev/null && echo $(JAR))

demo: setup            ## set up, build, show what Mission Control is for: an unchanged program, and two jobs at 7 to 3
	@$(BIN)/mission demo

# Tests wait, too. Each process takes tests of its own; one that has none left takes those of another.
TESTS_AT_ONCE ?= 3
AT_ONCE := -n $(TESTS_AT_ONCE) --dist worksteal

test: test-rust tools $(JAVA)   ## the suite that needs no root; what takes a minute or more alone is in `make long`
	$(BIN)/pytest -m "not lab and not long and not wheel" $(AT_ONCE)

test-rust: setup       ## the part of `make test` that is in Rust
	$(CARGO) test $(CRATES) --quiet

# Where private parts of Dask are used. `make test` has the newest version that is supported, of requirements.lock.
OLDEST := target/oldest
OLDEST_TESTS := unchanged_programs messages messages_on_dask lanes turns streams

test-oldest: tools $(JAVA)   ## what uses private parts of Dask, with the oldest version that is supported (tools/oldest.txt)
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(BIN)/uv pip install --quiet --python $(OLDEST)/bin/python -r requirements.lock --override tools/oldest.txt
	cp -r .venv/lib/python3*/site-packages/mission_control* $(OLDEST)/lib/python3*/site-packages/
	$(OLDEST)/bin/python -m pytest $(OLDEST_TESTS:%=tests/test_%.py) $(AT_ONCE)

test-lab: kernel tools ## the rest: namespaces, switch ports, congestion control; needs root, clang, libelf and iperf3
	$(BIN)/mission lab check
	$(BIN)/pytest -m lab --must-run

format: .venv/.tools   ## what needs no build: formatting, lints and types of Python
	$(CARGO) fmt --all --check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: format setup    ## formatting, lints, types; the generated documents are up to date
	$(CARGO) clippy $(CRATES) --all-targets --quiet -- -D warnings
	$(BIN)/python -m mission_control.docs --check

CHAOS_ROUNDS ?= 200
chaos: tools           ## jobs under every fault, CHAOS_ROUNDS rounds; some of them are in `make test`
	$(BIN)/python -m tests.chaos --rounds $(CHAOS_ROUNDS)

SEEDS ?= 1000000
long: tools $(JAVA)    ## what takes longer than CI has: a million seeds of the virtual cluster, ten thousand hosts in one, more with the oldest Dask, 200 workers, 1,000 rounds of chaos, as root 200 of the service
	VIRTUAL_SEEDS=$(SEEDS) VIRTUAL_HOSTS=10000 $(CARGO) test --release -p mission-core --test virtual_cluster -- --nocapture
	$(BIN)/pytest -m long $(AT_ONCE)
	$(MAKE) test-oldest OLDEST_TESTS="$(OLDEST_TESTS) delegates delegates_and_deaths interface java"
	$(BIN)/python -m tests.many_workers
	$(BIN)/python -m tests.chaos --rounds 1000 --at-once 3
	if [ "$$(id -u)" = 0 ] && command -v etcd > /dev/null; then $(BIN)/python -m tests.chaos_of_service --rounds 200; fi

FUZZ_SECONDS ?= 30
# Our crates are instrumented; those of others are the ones of every other build.
fuzz: setup            ## fuzz what a stranger can send, for FUZZ_SECONDS; needs a C++ compiler
	RUSTC_WORKSPACE_WRAPPER=$(CURDIR)/tools/rustc_with_coverage.sh $(CARGO) build $(CRATES) --bin heads --quiet
	mkdir -p target/fuzz/corpus target/fuzz/found
	target/release/heads -max_total_time=$(FUZZ_SECONDS) -max_len=2048 -print_final_stats=1 \
		-artifact_prefix=target/fuzz/found/ target/fuzz/corpus fuzz/seeds

setup: .venv/.built    ## .venv with the package, and what `make demo` imports
	@$(BIN)/maturin develop --release --uv --quiet --skip-install $(FEATURES) > target/maturin.log 2>&1 \
		|| { cat target/maturin.log >&2; exit 1; }

.venv/.packages: requirements.lock pyproject.toml tools/prerequisites.sh
	@PYTHON=$(PYTHON) sh tools/prerequisites.sh
	$(STEP) "1 of 2" "installs Python packages in .venv (100 MB; 5 to 60 s)" sh -c ' \
		{ test -x $(BIN)/python || $(PYTHON) -m venv .venv; } \
		&& $(BIN)/python -m pip install --quiet --disable-pip-version-check uv \
		&& $(BIN)/uv pip install --quiet -r pyproject.toml --extra bench maturin -c requirements.lock'
	@touch $@

.venv/.built: .venv/.packages
	$(STEP) "2 of 2" "compiles Mission Control and the crates that it uses, once (1 to 3 minutes on two cores)" \
		$(BIN)/maturin develop --release --uv $(FEATURES)
	@touch $@

tools: setup .venv/.tools   ## what tests and checks need beyond that
.venv/.tools: .venv/.packages
	$(STEP) "tools" "installs the Python packages of tests and checks (60 MB; 2 to 30 s)" \
		$(BIN)/uv pip install --quiet -r requirements.lock
	@touch $@

kernel:                ## build the lab's part in the kernel, too, from now on; needs clang, libelf, zlib, pkg-config
	@command -v clang > /dev/null && pkg-config --exists libelf zlib \
		|| { echo "the lab's part in the kernel needs clang, libelf and zlib: apt install clang libelf-dev zlib1g-dev pkg-config" >&2; exit 3; }
	@test -e .venv/.kernel || echo "builds the lab's part in the kernel, too, from now on (20 to 60 s)"
	@mkdir -p .venv && touch .venv/.kernel
	@$(MAKE) --no-print-directory setup

java: $(JAR)           ## the library for tasks in Java; needs Java 17 and Maven

$(JAR): java/pom.xml $(shell find java/src -name '*.java')
	$(STEP) "java" "builds the library for tasks in Java (5 to 60 s)" mvn --quiet --batch-mode --file java/pom.xml package
	@cp java/target/mission-control.jar $@

lock: setup            ## choose the newest versions that fit pyproject.toml
	$(BIN)/uv pip compile --quiet --no-header --no-emit-index-url --upgrade --all-extras --group tests pyproject.toml -o requirements.lock
	$(BIN)/uv pip compile --quiet --no-header --no-emit-index-url --upgrade --group pyproject.toml:site -c requirements.lock -o tools/site.lock
	$(BIN)/uv pip compile --quiet --no-header --no-emit-index-url --upgrade --group pyproject.toml:wheel -c requirements.lock -o tools/wheel.lock

site: setup            ## the documentation as pages, in target/site; a warning is an error
	$(BIN)/uv pip install --quiet -r tools/site.lock
	$(BIN)/python -m sphinx -b html -W --keep-going -q docs target/site
	@echo "open target/site/index.html"

WHEELS := target/wheels
# An environment of their own: maturin uses patchelf where it finds it, and changes what cargo has built with each run.
WHEEL_TOOLS := $(CURDIR)/target/wheel-tools
# Stripped before it is repaired: what patchelf has changed, strip breaks.
wheel: kernel $(JAR)   ## target/wheels: a wheel with the eBPF programs, an sdist, the licences; needs clang, libelf and Maven
	rm -rf $(WHEELS) target/unrepaired
	test -x $(WHEEL_TOOLS)/bin/python || $(PYTHON) -m venv $(WHEEL_TOOLS)
	$(BIN)/uv pip install --quiet --python $(WHEEL_TOOLS)/bin/python -r tools/wheel.lock
	$(BIN)/python tools/licences.py > mission_control/LICENCES.txt
	$(BIN)/maturin build --release --quiet $(FEATURES) --auditwheel skip --out target/unrepaired
	cd target/unrepaired && $(WHEEL_TOOLS)/bin/wheel unpack --dest unpacked *.whl && rm *.whl && \
		strip unpacked/*/mission_control/*.so && $(WHEEL_TOOLS)/bin/wheel pack unpacked/*
	PATH=$(WHEEL_TOOLS)/bin:$$PATH $(WHEEL_TOOLS)/bin/auditwheel repair --wheel-dir $(WHEELS) target/unrepaired/*.whl
	$(BIN)/maturin sdist --out $(WHEELS) 2> target/unrepaired/sdist.log || { cat target/unrepaired/sdist.log >&2; exit 1; }
	cp mission_control/LICENCES.txt $(WHEELS)
	$(WHEEL_TOOLS)/bin/auditwheel show $(WHEELS)/*.whl

test-wheel: wheel tools   ## the wheel in environments without cargo, clang and this checkout; as root the lab, too
	$(BIN)/python -m pytest -m wheel --must-run tests/test_wheel.py

pictures: site         ## make the pictures of the documentation anew, two minutes; needs chromium
	$(BIN)/python tools/pictures.py

docs: setup            ## draw the generated documents anew
	$(BIN)/python -m mission_control.docs

clean:
	rm -rf .venv target
