# Every command of the project. `make demo` and `make test` need a fresh checkout and nothing else.
.PHONY: demo site wheel test-wheel test test-oldest test-lab check fuzz chaos long setup java lock docs pictures clean

PYTHON ?= python3
BIN := .venv/bin
export VIRTUAL_ENV := $(CURDIR)/.venv
export PATH := $(CURDIR)/.venv/bin:$(PATH)
CARGO := cargo
# The lab's part in the kernel is built where clang and libelf are; the rest needs neither.
KERNEL := $(shell command -v clang > /dev/null && pkg-config --exists libelf zlib && echo kernel)
FEATURES := $(if $(KERNEL),--features kernel)
CRATES := --workspace $(if $(KERNEL),,--exclude mission-kernel)
# The library for tasks in Java is built where Maven is; the rest needs neither.
JAR := mission_control/jvm/mission-control.jar
JAVA := $(shell command -v mvn > /dev/null && echo $(JAR))
CARGO_TEST := $(CARGO) test $(CRATES) --exclude mission-python --profile tested --quiet

demo: setup            ## set up, build, show what Mission Control is for: an unchanged program, and two jobs at 7 to 3
	$(BIN)/mission demo

# Tests wait more than they compute. Each process takes tests of its own; one that has none left takes those of another.
TESTS_AT_ONCE ?= 3
AT_ONCE := -n $(TESTS_AT_ONCE) --dist worksteal

test: setup            ## the suite that needs no root; what takes a minute or more alone is in `make long`
	$(CARGO_TEST)
	$(BIN)/pytest -m "not lab and not long and not wheel" $(AT_ONCE)

# Where private parts of Dask are used. `make test` has the newest version that is supported, of requirements.lock.
OLDEST := target/oldest
OLDEST_TESTS := unchanged_programs messages messages_on_dask lanes turns streams

test-oldest: setup     ## what uses private parts of Dask, with the oldest version that is supported (tools/oldest.txt)
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(BIN)/uv pip install --quiet --python $(OLDEST)/bin/python -r requirements.lock --override tools/oldest.txt
	cp -r .venv/lib/python3*/site-packages/mission_control* $(OLDEST)/lib/python3*/site-packages/
	$(OLDEST)/bin/python -m pytest $(OLDEST_TESTS:%=tests/test_%.py) $(AT_ONCE)

test-lab: setup        ## the rest: namespaces, switch ports, congestion control; needs root, clang, libelf and iperf3
	$(BIN)/mission lab check
	$(BIN)/pytest -m lab --must-run

check: setup           ## formatting, lints, types; the generated documents are up to date
	$(CARGO) fmt --all --check
	$(CARGO) clippy $(CRATES) $(if $(KERNEL),--features mission-python/kernel) --all-targets --release --quiet -- -D warnings
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m mission_control.docs --check

CHAOS_ROUNDS ?= 200
chaos: setup           ## jobs under every fault, CHAOS_ROUNDS rounds; some of them are in `make test`
	$(BIN)/python -m tests.chaos --rounds $(CHAOS_ROUNDS)

SEEDS ?= 1000000
long: setup            ## what takes longer than CI has: a million seeds of the virtual cluster, more with the oldest Dask, 200 workers, 1,000 rounds of chaos, as root 200 of the service
	VIRTUAL_SEEDS=$(SEEDS) $(CARGO) test --release -p mission-core --test virtual_cluster -- --nocapture
	$(BIN)/pytest -m long $(AT_ONCE)
	$(MAKE) test-oldest OLDEST_TESTS="$(OLDEST_TESTS) delegates delegates_and_deaths interface java"
	$(BIN)/python -m tests.many_workers
	$(BIN)/python -m tests.chaos --rounds 1000 --at-once 3
	if [ "$$(id -u)" = 0 ] && command -v etcd > /dev/null; then $(BIN)/python -m tests.chaos_of_service --rounds 200; fi

# The flags that cargo-fuzz gives, without the sanitizer: that would need a nightly compiler.
FUZZ_FLAGS := -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
	-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table -Clink-dead-code \
	-Cdebug-assertions -Coverflow-checks
FUZZ_SECONDS ?= 30
HOST := $(shell rustc -vV | sed -n 's/^host: //p')

fuzz: setup            ## fuzz what a stranger can send, for FUZZ_SECONDS; needs a C++ compiler
	RUSTFLAGS="$(FUZZ_FLAGS)" $(CARGO) build --release --quiet --manifest-path fuzz/Cargo.toml --target-dir target/fuzz --target $(HOST)
	mkdir -p target/fuzz/corpus target/fuzz/found
	target/fuzz/$(HOST)/release/heads -max_total_time=$(FUZZ_SECONDS) -max_len=2048 -print_final_stats=1 \
		-artifact_prefix=target/fuzz/found/ target/fuzz/corpus fuzz/seeds

setup: .venv/.installed $(JAVA)   ## .venv with the package and its tools
	$(BIN)/maturin develop --release --uv --quiet --skip-install $(FEATURES)
	$(CARGO) build --release --quiet -p mission-transport --example rustls_loop

.venv/.installed: requirements.lock pyproject.toml tools/prerequisites.sh
	@PYTHON=$(PYTHON) sh tools/prerequisites.sh
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet -r requirements.lock
	$(BIN)/maturin develop --release --uv --quiet $(FEATURES)
	touch $@

java: $(JAR)           ## the library for tasks in Java; needs Java 17 and Maven

$(JAR): java/pom.xml $(shell find java/src -name '*.java')
	mvn --quiet --batch-mode --file java/pom.xml package
	cp java/target/mission-control.jar $@

lock:                  ## choose the newest versions that fit pyproject.toml
	$(BIN)/uv pip compile --quiet --no-header --no-emit-index-url --upgrade --all-extras --group dev pyproject.toml -o requirements.lock
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
wheel: setup           ## target/wheels: a wheel with the eBPF programs, an sdist, the licences; needs clang, libelf and Maven
	@test -n "$(KERNEL)" || { echo "a wheel needs clang, libelf-dev, zlib1g-dev and pkg-config" >&2; exit 3; }
	@test -n "$(JAVA)" || { echo "a wheel needs Maven and Java 17" >&2; exit 3; }
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

test-wheel: wheel      ## the wheel in environments without cargo, clang and this checkout; as root the lab, too
	$(BIN)/python -m pytest -m wheel --must-run tests/test_wheel.py

pictures: site         ## make the pictures of the documentation anew, two minutes; needs chromium
	$(BIN)/python tools/pictures.py

docs:                  ## draw the generated documents anew
	$(BIN)/python -m mission_control.docs

clean:
	rm -rf .venv target
