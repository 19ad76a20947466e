# Needs GNU make 3.81 or newer, Python 3.10 or newer with venv, and a C++ compiler.

VENV   := .venv
PY     := $(VENV)/bin/python
READY  := $(VENV)/kvtool-ready
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && { echo $$p; break; }; done)

# one thread: two are slower on a busy machine, and results must not depend on their number
ONE_THREAD := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 NUMBA_NUM_THREADS=1
PYTEST := $(ONE_THREAD) $(PY) -m pytest -q
# a file's tests go to one worker; tests/conftest.py begins with the longest files. A worker that crashes ends the run
# and names its test: pytest-xdist 3.8 hangs where it starts another
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# the contract is about policies; their kernels are held against the definitions in these
KERNEL_TESTS := $(addsuffix .py,$(addprefix tests/policies/test_,policies cells bumblebee buzz cam divergence h2o keys \
	roco scissorhands snapkv weightedkv))
# a stage of their own: what fails here fails everywhere
PATCH_TESTS := tests/tools/test_patches.py tests/tools/test_build.py
SANITIZED := $(foreach part,GGML LLAMA,-D$(part)_SANITIZE_ADDRESS=ON -D$(part)_SANITIZE_UNDEFINED=ON)
# Mesa's Vulkan on the CPU: the files it needs, each with the Debian package that has it
MESA := /usr/share/vulkan/icd.d/lvp_icd.*.json:mesa-vulkan-drivers /usr/include/vulkan/vulkan.h:libvulkan-dev \
	/usr/bin/glslc:glslc /usr/include/spirv/unified1/spirv.hpp:spirv-headers
DEVICE_TESTS := tests/llama/test_llama.py tests/llama/test_placement.py $(addsuffix .py,$(addprefix tests/engine/test_,offload exactness engine session \
	signals prefill sliding recall recall_whole exact_reader residents joint checkpoints draft mtp))
# their joint steps take longest, and one case shows them
DEVICE_TESTS += $(foreach case,gemma3 gemma4-corm gemma4-recall,'--deselect=tests/engine/test_joint.py::test_joint_steps_do_not_change_any_kind_of_model[$(case)')
# for the checks alone: one architecture, no optimization, no driver to link to
CUDA_ARCH ?= 86
CUDA_ARGS = -DGGML_CUDA=on -DGGML_CUDA_NO_VMM=ON -DCMAKE_CUDA_ARCHITECTURES=$(CUDA_ARCH)-real \
	$(shell nvcc --help 2>/dev/null | grep -q Ofast-compile && echo -DCMAKE_CUDA_FLAGS=-Ofc=max)
# for measurements on another machine: of any CPU with AVX2, which all servers with such GPUs have
GPU_ARCH ?= 90
GPU_ARGS = -DGGML_CUDA=on -DGGML_CUDA_NO_VMM=ON -DCMAKE_CUDA_ARCHITECTURES=$(GPU_ARCH)-real -DGGML_NATIVE=OFF \
	$(foreach set,SSE42 AVX AVX2 BMI2 FMA F16C,-DGGML_$(set)=ON)
# $(call IN_SITE,COMMAND): unpacks the wheel that COMMAND prints into a folder $$site, deleted after the recipe
IN_SITE = wheel=$$($(1)) && site=$$(mktemp -d) && trap 'rm -rf "$$site"' EXIT && \
	$(PY) -m pip install -qq --disable-pip-version-check --no-deps --target "$$site" "$$wheel" >&2
# before a stage that is asked for by itself; `make test` has seen to it
NEEDED := library $(READY)
STAGES := lint test-patches test-bounds test-plain

.DEFAULT_GOAL := help
.PHONY: help setup prepared library kernels chat dist check-dist test test-long $(STAGES) stock build-server check-stock check-archs check-cuda gpu-check check-vulkan check-page fuzz fuzz-serve fuzz-sanitized papers papers-tables docs clean

help:
	@echo 'make chat         set up, then start a chat; ARGS="--policy buzz --budget 512" go to kvtool chat'
	@echo 'make setup        build llama.cpp (once), install kvtool into $(VENV), compile its kernels'
	@echo 'make dist         write two wheels to dist/: kvtool, and llama.cpp for every CPU of this kind of machine'
	@echo 'make clean        remove $(VENV); builds and downloads stay in the cache'
	@echo
	@echo 'PYTHON=python3.12           another Python'
	@echo 'CMAKE_ARGS=-DGGML_CUDA=on   build for a GPU; later calls keep it, CMAKE_ARGS= resets it'
	@echo 'KVTOOL_WHEELS=folder        use its kvtool_llama-*.whl, if one fits, instead of compiling'
	@echo
	@echo 'for those who change the code:'
	@echo 'make check-dist   install the wheels of make dist without a compiler, and run them; takes minutes'
	@echo 'make test         set up, then run every check: $(STAGES)'
	@echo 'make test-long    the same with every size, kill, random call and build of wheels, and the tests of lab/;'
	@echo '                 takes long'
	@echo 'make lint         run ruff and mypy'
	@echo 'make stock        build the same llama.cpp without the patch, for comparisons'
	@echo 'make check-stock  compare the logits of the two, bit by bit; DIR=folder: of the models there, too'
	@echo 'make build-server build llama-server from the same sources to build/server/bin, for lab/benchmarks/agents.py'
	@echo 'make check-archs  run every architecture of llama.cpp that is not refused, as a small random model;'
	@echo '                 takes minutes; DIR=folder keeps the models there'
	@echo 'make check-cuda   compile with nvcc for one architecture (CUDA_ARCH=86), and run the tests of the engine'
	@echo '                 if there is an NVIDIA GPU'
	@echo 'make gpu-check    pack what measuring kvtool on an NVIDIA GPU needs into build/gpu-check, and measure if there'
	@echo '                 is one; GPU_ARCH=90 is an H100 or H200, WHEEL=file takes a library that is built already;'
	@echo '                 ARGS="--only 2a,2b" measures some parts'
	@echo 'make check-vulkan run the tests of the engine on Mesa'"'"'s Vulkan: the CPU as a device with its own memory'
	@echo 'make check-page   use the page of kvtool serve in Chromium; ARGS="--shots DIR" writes pictures of it'
	@echo 'make fuzz         try many more damaged models and random calls than make test does'
	@echo 'make fuzz-serve   send kvtool serve 22,000 random requests and a crowd'
	@echo 'make fuzz-sanitized  the same calls in a build with -fsanitize=address,undefined (gcc)'
	@echo 'make papers       repeat the papers'"'"' experiments: DATA=folder, MODELS=folder, IDS="..." for some;'
	@echo '                 see lab/papers/README.md'
	@echo 'make papers-tables  write the tables of the documents from lab/papers/records'
	@echo 'make docs         write docs/cli.md from the help texts of the commands'

$(PY):
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo 'kvtool needs Python 3.10 or newer; name one: make setup PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) >&2 || { rm -rf $(VENV); \
		echo 'cannot create a virtual environment (Debian, Ubuntu: sudo apt install python3-venv)' >&2; exit 1; }

# runs every time, and ends at once if the wheel for these flags is installed
library: $(PY)
	@$(PY) -m kvtool.build --install >/dev/null

$(READY): pyproject.toml | $(PY)
	@echo 'installing kvtool and its dependencies (a minute or two)' >&2
	@$(PY) -m pip install -qq --disable-pip-version-check -e '.[test]' >&2
	@touch $@

# pip loads packages and numba compiles while C++ is compiled
prepared: $(PY)
	@$(MAKE) --no-print-directory -j2 library kernels

setup: prepared
	@echo 'kvtool is ready: source $(VENV)/bin/activate, then kvtool chat starts a chat, and kvtool -h lists the commands' >&2

kernels: $(READY)
	@$(PY) -m kvtool.build.kernels

chat: prepared
	@$(VENV)/bin/kvtool chat $(ARGS)

# one kvtool wheel: that of another version would be installed with it
dist: $(PY)
	@$(PY) -m pip install -qq --disable-pip-version-check -e '.[dist]' >&2
	@rm -f dist/kvtool-*.whl
	@$(PY) -m pip wheel -qq --disable-pip-version-check --no-deps --no-build-isolation -w dist . >&2
	@$(PY) -m kvtool.build --dist dist >/dev/null
	@ls dist/*.whl

check-dist: $(PY)
	@$(PY) tests/tools/check_dist.py dist $(ARGS)

# the long stage, and beside it the others one by one
test: setup
	@$(MAKE) --no-print-directory -j2 NEEDED= $(patsubst %,timed-%,test-plain $(filter-out test-plain,$(STAGES)))

test-long: setup
	@$(MAKE) --no-print-directory test LONG=--long

# says what a stage has said once it has ended; the long one says it at once
timed-%:
	@start=$$(date +%s); \
	if [ $* = test-plain ]; then $(MAKE) --no-print-directory $*; \
	else said=$$($(MAKE) --no-print-directory $* 2>&1); fi; code=$$?; \
	printf '%s\n' "$$said" "== $*: $$(($$(date +%s) - start)) s" >&2; exit $$code

# not on Python 3.10: its last NumPy has other types
lint: $(NEEDED)
	@$(PY) -m ruff check
	@$(PY) -c 'import sys; sys.exit(sys.version_info >= (3, 11))' || $(PY) -m mypy

test-patches: $(NEEDED)
	@$(PY) patches/sync.py check
	@$(PYTEST) $(PATCH_TESTS)

# an index is as wrong in code that is hardly optimized, which compiles in two thirds of the time
test-bounds: $(NEEDED)
	@NUMBA_BOUNDSCHECK=1 NUMBA_OPT=1 $(PYTEST) --small -m 'not engine' $(KERNEL_TESTS)

# the laboratory's tests too, if all is asked for
test-plain: $(NEEDED)
	@$(PYTEST) $(WORKERS) $(LONG) tests $(if $(LONG),lab) $(addprefix --ignore=,$(PATCH_TESTS))

stock: $(PY)
	@$(PY) -m kvtool.build --stock

build-server: setup
	@$(PY) -m pip install -qq --disable-pip-version-check cmake ninja >&2
	@export PATH="$$PWD/$(VENV)/bin:$$PATH" && mkdir -p build/server && \
		{ test -d build/server/llama || $(PY) patches/sync.py import build/server/llama >&2; } && \
		cmake -S build/server/llama -B build/server -G Ninja -DCMAKE_BUILD_TYPE=Release -DLLAMA_OPENSSL=OFF \
			$(foreach part,APP EXAMPLES TESTS UI,-DLLAMA_BUILD_$(part)=OFF) -DLLAMA_USE_PREBUILT_UI=OFF >/dev/null && \
		cmake --build build/server --target llama-server

check-stock: setup
	@$(call IN_SITE,$(PY) -m kvtool.build --stock) && \
		$(ONE_THREAD) $(PY) tests/tools/compare_stock.py "$$site" $(if $(DIR),--archs "$(DIR)")

# the program that writes most of the models is one of llama.cpp's own tests
check-archs: setup
	@$(PY) -m pip install -qq --disable-pip-version-check cmake ninja >&2
	@tree=$$(mktemp -d) && trap 'rm -rf "$$tree"' EXIT && export PATH="$$PWD/$(VENV)/bin:$$PATH" && \
		models="$(if $(DIR),$(DIR),$$tree/models)" && mkdir -p "$$models" && \
		$(PY) patches/sync.py import "$$tree/llama" >&2 && \
		cmake -S "$$tree/llama" -B "$$tree/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_COMMON=ON \
			-DLLAMA_BUILD_TESTS=ON $(foreach part,APP TOOLS EXAMPLES SERVER MTMD UI,-DLLAMA_BUILD_$(part)=OFF) \
			-DLLAMA_OPENSSL=OFF >/dev/null && \
		cmake --build "$$tree/build" --target test-llama-archs >/dev/null && \
		"$$tree/build/bin/test-llama-archs" -s 1 -o "$$models" >/dev/null && \
		$(PY) -m tests.tiny_archs "$$models" && \
		$(ONE_THREAD) $(PY) -m tests.tools.check_archs "$$models"

check-cuda: setup
	@$(call IN_SITE,CMAKE_ARGS='$(CUDA_ARGS)' $(PY) -m kvtool.build) && \
		export PYTHONPATH="$$site:$$PWD" && $(PY) tests/tools/check_backend.py CUDA && \
		if $(PY) tests/tools/check_backend.py CUDA --device >/dev/null 2>&1; then \
			$(CC) -O1 -shared -fPIC -o "$$site/cuda_f32.so" tests/tools/cuda_f32.c && \
			LD_PRELOAD="$$site/cuda_f32.so" NVIDIA_TF32_OVERRIDE=0 $(PYTEST) $(DEVICE_TESTS); \
		else echo 'no NVIDIA GPU: the tests of the engine did not run' >&2; fi

# the program and build/gpu-check are all that a machine with a GPU needs: no network, no compiler, no model
gpu-check: setup
	@wheel="$(WHEEL)"; wheel=$${wheel:-$$(CMAKE_ARGS='$(GPU_ARGS)' $(PY) -m kvtool.build)} && \
		$(PY) -m lab.benchmarks.gpu_pack build/gpu-check "$$wheel" --tests $(DEVICE_TESTS)
	@if nvidia-smi >/dev/null 2>&1; then $(PY) -m lab.benchmarks.gpu_check build/gpu-check --out build/gpu-check/out $(ARGS); \
	else echo 'no NVIDIA GPU here; on a machine with one, in a copy of this folder:' >&2; \
		echo 'python3 -m lab.benchmarks.gpu_check build/gpu-check --out build/gpu-check/out' >&2; fi

# ggml uses a device that is a CPU only if it is named; without half precision, for exact results
check-vulkan: setup
	@missing=; for each in $(MESA); do \
		ls $${each%:*} >/dev/null 2>&1 || missing="$$missing $${each#*:}"; done; \
		test -z "$$missing" || { echo "packages are missing: sudo apt install$$missing" >&2; exit 1; }
	@$(call IN_SITE,CMAKE_ARGS=-DGGML_VULKAN=on $(PY) -m kvtool.build) && \
		$(CC) -O1 -shared -fPIC -o "$$site/mesa_buffers.so" tests/tools/mesa_buffers.c -ldl && \
		export PYTHONPATH="$$site:$$PWD" LD_PRELOAD="$$site/mesa_buffers.so" \
			GGML_VK_VISIBLE_DEVICES=0 GGML_VK_DISABLE_F16=1 LP_NUM_THREADS=0 \
			VK_ICD_FILENAMES="$$(ls /usr/share/vulkan/icd.d/lvp_icd.*.json | head -n 1)" && \
		$(PY) tests/tools/check_backend.py Vulkan --device && $(PYTEST) $(DEVICE_TESTS)

# without a system's Chromium: .venv/bin/playwright install chromium, which downloads one
check-page: setup
	@$(PY) -m pip install -qq --disable-pip-version-check 'playwright>=1.50,<2' >&2
	@$(ONE_THREAD) $(PY) -m tests.tools.check_page $(ARGS)

fuzz: setup
	@$(ONE_THREAD) $(PY) -m tests.fuzz.fuzz_gguf --n 2000 --keep fuzz-found
	@$(ONE_THREAD) $(PY) -m tests.fuzz.fuzz_api --n 10000

# one heap: what threads leave free in heaps of their own grows for long
fuzz-serve: setup
	@$(ONE_THREAD) MALLOC_ARENA_MAX=1 $(PY) -m tests.fuzz.fuzz_serve
	@$(ONE_THREAD) MALLOC_ARENA_MAX=1 $(PY) -m tests.fuzz.fuzz_serve --api messages --requests 12000
	@$(ONE_THREAD) $(PY) -m tests.serve.crowd_serve

# Python itself is built without the sanitizer, so its library has to be loaded first
fuzz-sanitized: $(READY)
	@$(call IN_SITE,CMAKE_ARGS='$(SANITIZED)' $(PY) -m kvtool.build) && \
		env $(ONE_THREAD) PYTHONPATH="$$site" ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
			UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
			LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
			$(PY) -m tests.fuzz.fuzz_api --n 10000

papers: setup
	@test -d "$(DATA)" || { echo 'name the folder with the texts and data sets: make papers DATA=folder' >&2; exit 2; }
	@$(ONE_THREAD) $(PY) -m lab.papers run "$(DATA)" $(IDS) $(if $(MODELS),--models "$(MODELS)")

papers-tables: $(READY)
	@$(PY) -m lab.papers tables

docs: $(READY)
	@$(PY) docs/make_cli.py

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find kvtool tests patches lab -name __pycache__ -prune -exec rm -rf {} +
