# One word each; CI uses the same. Everything is set up in .venv by whatever target needs it first.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
STAMP := $(VENV)/.ready
BENCH := build/bench
EXPORTS := build/exports
RDMA := build/rdma
FOREIGN := build/foreign
OPTIMIZERS := build/optimizers
PLUGINS := build/plugins
LOADERS := build/loaders
TRACKERS := build/trackers
NOTEBOOKS := build/notebooks
SIZE ?= M
# rows of docs/works-with.md, from the tests with the marker "shows"
ROWS = -p tests.works_with.rows --target $@ --rows tests/works_with/results/$@.json
WORKERS ?= 2
# Tests start some thousand interpreters; without bytecode each compiles all of Relight again: 0.7 s of 3.2 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: device help demo fast fix check test docs site unit clean slips grid layouts matrix endings versions optimizers loaders plugins trackers notebooks production long teeth storm ranks crash kills followers powercuts blocks damage nonces racing migrations engines soak simulate drill lives hosts preempt hour clusters fleet cases faults peers oracle ceph nfs azure foreign exports readers fuzz pages slurm manifests link mirrors outward bench idle gpu changelog wheel package lock

help: ## what there is
	@sed -nE -e 's/^##@ (.*)/\n\1/p' -e 's/^([a-z]+):.*## (.*)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12

# torch first, so that nothing after it can pull another; then the rest, by hash and without resolving; then Relight itself.
# A Python whose venv has no pip of its own (some distributions split it off) is helped out by the pip outside.
$(STAMP): requirements/torch.txt requirements/test.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Relight needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	@echo "setting up $(VENV) (once; about two minutes)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) >/dev/null 2>&1 || \
		{ $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	@$(PIP) install --constraint requirements/torch.txt torch==2.13.0
	@$(PIP) install --no-deps --require-hashes --requirement requirements/test.txt
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

# Rivals and other frameworks, each group in an environment of its own: build/NAME has what requirements/NAME.txt pins, by hash. What comes as source is
# built with the torch that is there, DeepSpeed without its operators.
.PRECIOUS: build/%/.ready

build/%/.ready: requirements/torch.txt requirements/test.txt requirements/%.txt pyproject.toml
	@echo "setting up $(@D) (once; some minutes)"
	@$(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check --quiet install --constraint requirements/torch.txt torch==2.13.0
	@$(@D)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps --require-hashes --requirement requirements/test.txt
	@DS_BUILD_OPS=0 $(@D)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps --require-hashes $(if $(filter bench,$*),,--no-build-isolation) --requirement requirements/$*.txt
	@$(@D)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps --no-build-isolation --editable .
	@touch $@

##@ Every day

demo: $(STAMP) ## train, kill, resume, compare: two minutes
	$(BIN)/relight demo

fast: $(STAMP) ## lint, types, layers, and the tests of what changed: under two minutes
	$(BIN)/python tests/fast.py

fix: $(STAMP) ## repair what can be repaired: lint, format, generated pages, word counts; half a minute
	$(BIN)/ruff check --fix --quiet src tests proofs benchmarks examples || true
	$(BIN)/ruff format --quiet src tests proofs benchmarks examples
	$(BIN)/python -m relight.config.page docs/configuration.md
	$(BIN)/python -m relight.config.schema docs/relight.schema.json
	$(BIN)/python -m relight.doctor.page docs/doctor.md
	$(BIN)/python tests/house/test_monitoring_page.py
	$(BIN)/python -m relight.monitoring.generated deploy
	$(BIN)/python tests/house/test_http_api_page.py
	$(BIN)/python tests/house/test_torch_private.py
	$(BIN)/python -m tests.slips.page
	$(BIN)/python tests/capture/test_config_values.py
	$(BIN)/python -m tests.works_with.page
	$(BIN)/python -m tests.cli.reference_page
	$(BIN)/python tests/house/messages.py
	$(BIN)/python tests/house/prose.py --lower

check: $(STAMP) docs ## lint, types, layers, docs; a minute
	$(BIN)/ruff check src proofs tests benchmarks examples
	$(BIN)/ruff format --check --quiet src proofs tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test: check unit ## all that CI runs; half an hour

docs: $(STAMP) ## do the pages tell what is so: names, settings, events, links, code, pins; and do they build as a site; two minutes
	$(BIN)/python -m pytest tests/house/test_docs.py tests/house/test_api_pages.py tests/house/test_repository.py tests/cli/test_cli_documented.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir build/site

site: $(STAMP) ## the pages as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

unit: $(STAMP) ## the tests, without the long proofs; WORKERS=n at once; up to three that fail are run again alone; half an hour
	rm -rf .pytest_cache
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder || { [ $$? = 1 ] && $(BIN)/python tests/once_more.py; }

clean: ## remove what was made
	rm -rf $(VENV) dist build .pytest_cache .ruff_cache .mypy_cache .hypothesis

##@ Exact resume

slips: $(STAMP) ## an ordinary user's slips, each as a script: nothing lost, nothing hidden
	TESTS_PLAIN_TORCH=1 $(BIN)/python -m pytest -m "slow or not slow" tests/slips

grid: $(STAMP) ## exact resume over the whole grid
	TESTS_PLAIN_TORCH=1 $(BIN)/python -m pytest -m grid tests/exact

layouts: $(STAMP) ## 21 layouts on one to four ranks, each restored under every other
	RELIGHT_TEST_EVERY_LAYOUT=1 $(BIN)/python -m pytest tests/ranks/test_layouts.py

matrix: $(STAMP) ## features against each other, every pair, with mirrored drives, TLS, a simulated device, followers, trackers: saved in one way, killed, restored in another; 20 minutes
	$(BIN)/python tests/matrix/matrix.py

endings: $(STAMP) ## jobs with loader workers, ended by signals to their group, 200 times in each of 50 ways: the last step saved; two hours
	$(BIN)/python -m proofs.endings --trials 200 --jobs 8

versions: ## the tests that touch torch, with each supported torch and Python that can be installed: an hour, and 6 GB at a time
	$(PYTHON) tests/package/versions.py

optimizers: $(OPTIMIZERS)/.ready ## 290 optimizers and forms of nine libraries, saved and restored into new objects, and jobs with 16 of them killed: the same losses, to the bit; five minutes
	TORCHDYNAMO_DISABLE=1 $(OPTIMIZERS)/bin/python tests/optimizers/sweep.py --results tests/optimizers/results.json
	TESTS_PLAIN_TORCH=1 $(OPTIMIZERS)/bin/python -m pytest -m "slow or not slow" -n0 $(ROWS) --timeout 900 tests/works_with/test_optimizers_killed.py
	$(OPTIMIZERS)/bin/python -m tests.works_with.page

loaders: $(LOADERS)/.ready ## streamed data of Hugging Face, WebDataset, MosaicML, torchdata: killed twice, each batch and loss to the bit; ten minutes
	TESTS_PLAIN_TORCH=1 $(LOADERS)/bin/python -m pytest -m "slow or not slow" -n0 $(ROWS) --timeout 900 tests/works_with/test_loaders_killed.py
	$(LOADERS)/bin/python -m tests.works_with.page

plugins: $(PLUGINS)/.ready ## the plug-ins and PEFT, against each framework: its example killed and resumed to the same losses; about twenty minutes
	find $(PLUGINS)/extensions -name lock -delete 2>/dev/null || true # a build that was killed leaves one, and the next build would wait for it
	RELIGHT_TEST_ALL_PLUGINS=1 TORCH_EXTENSIONS_DIR=$(abspath $(PLUGINS))/extensions $(PLUGINS)/bin/python -m pytest $(ROWS) tests/plugins --timeout 900
	$(PLUGINS)/bin/python -m tests.works_with.page

trackers: $(TRACKERS)/.ready ## TensorBoard, W&B offline, MLflow: a job killed five times, one run, each step once; configurations of Hydra, argparse, pydantic; three minutes
	RELIGHT_TEST_ALL_TRACKERS=1 $(TRACKERS)/bin/python -m pytest -m "slow or not slow" $(ROWS) tests/trackers tests/capture/test_config_values.py tests/works_with/test_configs_killed.py
	$(TRACKERS)/bin/python -m tests.works_with.page

notebooks: $(NOTEBOOKS)/.ready ## cells of a real Jupyter kernel that are interrupted sixty times and run again: no checkpoint lost, nothing leaked; four minutes
	$(NOTEBOOKS)/bin/python -m pytest tests/notebooks --timeout 900

production: $(STAMP) ## a GPT with everything on at once, more by seed, and a day of trouble, three seeds: each step's loss as if nothing had happened
	for turn in "0 1" "1 2" "2 1"; do $(BIN)/python examples/production/run.py --seed $${turn% *} --tp $${turn#* } || exit 1; done

long: $(STAMP) ## what the tests leave out: more kinds, worlds, moments, of jobs that fail and go on
	TESTS_PLAIN_TORCH=1 $(BIN)/python -m pytest -m slow --numprocesses $(WORKERS) --dist load --timeout 600 $(addprefix tests/,supervise ranks drain prove drill agent crash/test_crash_engine.py store/test_striped_training.py simulate house)

##@ Kills, power cuts, damage

teeth: $(STAMP) ## remove each fsync, link and check once: something must fail; two minutes alone
	$(BIN)/python -m proofs.mutation_check

storm: $(STAMP) ## 600 SIGKILLs of trainer, agent, both, while saves are under way; an hour
	$(BIN)/python -m tests.agent.storm --count 600

ranks: $(STAMP) ## 500 times one rank of several is killed, stopped or without room, at each point of a save; an hour
	$(BIN)/python -m tests.ranks.storm --count 500

crash: $(STAMP) ## 100,000 crash points
	$(BIN)/python -m proofs.crash --points 100000

kills: $(STAMP) ## 5,000 SIGKILLs by syscall
	$(BIN)/python -m proofs.kills --count 5000

followers: $(STAMP) ## 200 SIGKILLs of relight follow and its commands, 100 of relight export --follow, while a reader reads; ten minutes
	$(BIN)/python -m tests.followers.evaluation_kills --count 200
	$(BIN)/python -m tests.export.newest_kills --count 100

powercuts: $(STAMP) ## 3,000 power cuts under a saving process on ext4, 500 on XFS: by root, on loop devices
	$(BIN)/python -m proofs.power_cuts --count 3000
	$(BIN)/python -m proofs.power_cuts --count 500 --file-system xfs

blocks: $(STAMP) ## 5,000 disks that a power cut may leave, on ext4, 1,000 on XFS, made of a log of blocks: by root, with FUSE
	$(BIN)/python -m proofs.block_log --count 5000
	$(BIN)/python -m proofs.block_log --count 1000 --file-system xfs

damage: $(STAMP) ## every bit of every record
	$(BIN)/python -m pytest -m slow tests/damage tests/hostile

nonces: $(STAMP) ## 10,000 encrypted saves, killed anywhere: no pair of key and nonce comes twice
	$(BIN)/python tests/encryption/nonces.py --saves 10000

racing: $(STAMP) ## savers, restorers, drains, pruning, sweeping at once for ten minutes, killed at random, with clocks off by years
	$(BIN)/python tests/drain/racing.py --seconds 600

migrations: $(EXPORTS)/.ready ## old checkpoints, migrated by processes and by Ray, each killed 20 times: all arrive, once
	$(EXPORTS)/bin/python tests/migrate/kills.py
	$(EXPORTS)/bin/python tests/migrate/kills.py --engine ray --count 120 --begin 8 --work 0.3

engines: $(EXPORTS)/.ready ## heavy commands on processes and on Ray: 200 workers and 20 commands killed with each: results equal to the bit
	$(EXPORTS)/bin/python -m tests.engines.kills
	$(EXPORTS)/bin/python -m tests.engines.kills --engine ray
	$(EXPORTS)/bin/python -m benchmarks.engines --out benchmarks/results/engines.json

soak: $(STAMP) ## 2,000 saves: memory, descriptors, threads of trainer and agent stay flat
	$(BIN)/python tests/agent/soak.py --saves 2000

simulate: $(STAMP) ## 1,000,000 schedules of saves by several ranks, fencing and deletion on a store that fails: two to three hours
	$(BIN)/python -m proofs.schedules --count 1000000 --seed 0 --jobs 2

##@ Failures of jobs

drill: $(STAMP) ## all rehearsals of relight drill, on the job that it brings: five minutes
	$(BIN)/relight drill

lives: $(STAMP) ## 200 failures of real jobs under relight run, of twelve kinds: taken for what they were, and gone on from
	$(BIN)/python tests/supervise/lives.py

hosts: $(STAMP) ## machines in network namespaces: lost, cut off in one direction or both, healed, replaced, two groups at once; five seeds
	$(BIN)/python tests/supervise/hosts.py --seeds 5

preempt: $(STAMP) ## a machine that is wanted back, at 50 moments for each of 30, 5 and 1 s of grace: about an hour
	$(BIN)/python tests/supervise/preempt.py --count 50

hour: $(STAMP) ## an hour of relight run in which nothing is wrong and much looks like it: no alarm
	$(BIN)/python tests/supervise/soak.py

clusters: $(STAMP) ## relight.adaptive() against an oracle, on 60 clusters, 500 failures each
	$(BIN)/python -m pytest -m slow -n0 tests/cost_model

fleet: $(STAMP) ## the simulator against closed forms and published results, and a schedule that learns against one that knows: an hour
	$(BIN)/python -m benchmarks.fleet

cases: $(STAMP) ## both case studies, before and after: goodput, way back, storage; half an hour
	$(BIN)/python -m benchmarks.case_studies

##@ Stores, servers, other tools

faults: $(STAMP) ## every request of a run's life in an object store x everything that can go wrong with it, and 300 lives in which much does
	$(BIN)/python tests/store/faults.py --seed 7

peers: $(STAMP) $(RDMA)/.ready ## peers of 64 MB each in processes of their own: all pairs killed, every coding, connections cut everywhere; RDMA, with 100 kills
	$(BIN)/python -m pytest -m slow tests/peers
	$(RDMA)/bin/python -m pytest tests/peers/test_rdma.py
	$(RDMA)/bin/python tests/peers/rdma_kills.py --count 100

oracle: $(STAMP) ## what to keep, against a plain reading of the rules' words: 10,000 histories
	EXAMPLES=10000 $(BIN)/python -m pytest tests/reclaim/test_retention_oracle.py --timeout 3000

ceph: $(STAMP) ## the object store's tests on Ceph's gateway, a server used in earnest (Debian: radosgw ceph-mon ceph-osd ceph-common; root)
	RELIGHT_TEST_S3=rados $(BIN)/python -m pytest tests/store/test_objects_conformance.py tests/store/test_objects.py \
		tests/store/test_objects_training.py tests/store/test_object_faults.py

nfs: $(STAMP) ## the store's suite and more on NFS, with client machines that are killed (Debian: nfs-ganesha nfs-ganesha-vfs user-mode-linux; root)
	$(BIN)/python -c 'import sys; from tests.store.nfs_lab import missing; sys.exit(missing() or 0)'
	$(BIN)/python -m pytest -m slow --verbose --capture no --timeout 900 tests/store/test_nfs.py

azure: $(STAMP) ## the shipped store suite and imports on Azure's emulator, which npm installs
	mkdir -p build/azurite && npm install --silent --no-audit --no-fund --prefix build/azurite azurite
	AZURITE=build/azurite/node_modules/.bin/azurite-blob $(BIN)/python -m pytest tests/store/test_objects_conformance.py tests/migrate/test_from_clouds.py -k 'Azure or azure'

foreign: $(FOREIGN)/.ready ## checkpoints of other frameworks: written anew by them, brought in, a thousand wounds each
	rm -rf $(FOREIGN)/golden
	$(FOREIGN)/bin/python tests/importers/make/everything.py $(FOREIGN)/golden
	RELIGHT_TEST_FOREIGN=$(FOREIGN)/golden RELIGHT_TEST_FUZZ=1000 $(FOREIGN)/bin/python -m pytest --timeout 3000 tests/importers

exports: $(EXPORTS)/.ready ## models of transformers, exported and loaded by from_pretrained: the same logits, to the bit
	HF_HUB_OFFLINE=1 $(EXPORTS)/bin/python tests/export/logits.py
	$(EXPORTS)/bin/python -m pytest -q $(ROWS) tests/export/test_hub.py
	$(EXPORTS)/bin/python -m tests.works_with.page

readers: $(STAMP) ## hostile readers on a real relight serve with 256 descriptors, for a minute: health within 1 s, bounded answers
	$(BIN)/python -m tests.serve.storm --seconds 60

fuzz: build/fuzz/.ready ## the dashboard's API asked by schemathesis, from its own schema, as each role: no 5xx, no traceback, no answer that the schema lacks
	build/fuzz/bin/python -m tests.serve.fuzz --examples $(or $(EXAMPLES),100)

pages: build/pages/.ready ## the dashboard in a real browser: each page and action, two widths, light and dark, axe; pictures in build/shots (Debian: chromium; npm)
	npm install --silent --no-audit --no-fund --prefix build/axe axe-core@4.14.1
	build/pages/bin/python -m pytest -m slow --timeout 300 tests/serve/test_browser.py tests/serve/test_structure.py

slurm: $(STAMP) ## the sbatch templates on a real Slurm of one node: signalled, queued again, gone on (Debian: slurmctld slurmd slurm-client munge; root)
	$(BIN)/python -c 'import sys; from tests.deploy.slurm_lab import missing; sys.exit(missing() or 0)'
	$(BIN)/python -m pytest -m slow --timeout 900 tests/deploy/test_slurm.py

manifests: build/manifests/.ready ## deploy/kubernetes against the schemas of Kubernetes, JobSet, Kubeflow's Trainer and the Prometheus operator
	build/manifests/bin/python -m tests.deploy.schemas

outward: $(STAMP) ## copies to a further tier by several nodes: 100,000 schedules, planted bugs, 250 kills, the time with limited links: 40 minutes
	$(BIN)/python -m proofs.outward --count 100000 --jobs 2
	$(BIN)/python -m proofs.outward --planted --count 20000
	$(BIN)/python -m tests.drain.outward_kills --count 200
	$(BIN)/python -m tests.drain.outward_kills --count 50 --seed 1000 --all
	$(BIN)/python -m benchmarks.outward --out benchmarks/results/outward.json --plot benchmarks/results/outward.png

mirrors: $(STAMP) ## a drive of two fails: 300 points on loop devices (by root, 25 minutes), 3,000 points and power cuts on simulated drives
	$(BIN)/python -m proofs.mirrors --count 300
	$(BIN)/python -m tests.store.test_mirrored_cuts 1000

link: $(STAMP) ## the share of a network link that a save takes, with and without a bound: by root, in network namespaces
	$(BIN)/python -m benchmarks.link --out benchmarks/results/link.json

##@ Measurements

bench: $(BENCH)/.ready ## against every rival that installs, in rounds: SIZE=S, M, L or spread
	$(BENCH)/bin/python -m benchmarks.run --size $(SIZE)

idle: $(STAMP) ## what starting and idling cost: import, commands, agent, server, supervisor
	$(BIN)/python -m benchmarks.idle --out benchmarks/results/idle.json --plot benchmarks/results/idle.png

gpu: $(STAMP) ## the tests for accelerators on a real one with CUDA; without such a device all are skipped
	TESTS_DEVICE=cuda $(BIN)/python -m pytest -m "gpu or device" tests/gpu tests/device

device: $(STAMP) ## the same tests on a simulated accelerator, 10,000 trials of its adversary, planted bugs, exact resume, the demo: an hour and a half
	$(BIN)/python -m tests.device.simulated -m pytest -n0 -m device tests/device
	$(BIN)/python -m tests.device.simulated -m tests.device.adversary --count 10000
	$(BIN)/python -m tests.device.simulated -m tests.device.adversary --planted
	TESTS_PLAIN_TORCH=1 $(BIN)/python -m tests.device.simulated -m pytest -n0 -m grid tests/exact
	$(BIN)/python -m tests.device.simulated -m relight demo --quick --device sim --out build/demo-on-a-device.png

##@ Releases

changelog: $(STAMP) ## print the fragments of changelog.d, one section for each kind
	@$(BIN)/python tests/house/changelog.py

wheel: $(STAMP) ## build, and import what was built in a clean environment
	rm -rf dist build/wheel && $(BIN)/python -m hatchling build
	$(BIN)/python -m venv build/wheel
	build/wheel/bin/python -m pip --disable-pip-version-check --quiet install dist/*.whl
	cd build && wheel/bin/python -I ../tests/house/built_wheel.py
	build/wheel/bin/relight --version

package: build/package/.ready ## wheel and sdist, built twice to the same bytes, checked, tried as installed on each Python there is; bill of materials in build
	build/package/bin/python tests/package/make_package.py $(addprefix --python ,$(PYTHONS))

lock: $(STAMP) ## write each requirements/NAME.txt from NAME.in, with hashes
	$(BIN)/python -m venv build/lock && build/lock/bin/python -m pip --disable-pip-version-check --quiet install uv
	for name in $(patsubst requirements/%.in,%,$(wildcard requirements/*.in)); do \
		build/lock/bin/uv pip compile requirements/$$name.in --quiet --no-deps --universal --python-version 3.11 --generate-hashes \
			--no-annotate --custom-compile-command "make lock" --output-file requirements/$$name.txt || exit 1; done
