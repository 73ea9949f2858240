# Everything below works on a machine that has only Python 3.10 or newer and make.
#   make demo    train on real text, compare recall, end with one table and two pictures
#   make test    run the tests
#   make check   lint, format and type checks (what CI runs beside the tests)
#   make bench   run the benchmarks; bench-save keeps the medians, bench-compare holds a run against them

PYTHON ?= python3
VENV := .venv
# What is installed beside the library; CI adds cuda-check, with which the CUDA kernels are compiled (65 MB, no GPU).
EXTRAS ?= all
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TYPING := build/typing
# Regressions are counted from this much on a machine that does nothing else.
REGRESSION ?= 10%
# At most this many runs per case: the medians of a case that takes a second are not worth a minute.
BENCH := $(BIN)/python -m pytest benchmarks --benchmark-columns=median,iqr,rounds --benchmark-sort=name \
	--benchmark-max-time=2 --benchmark-min-rounds=5

.PHONY: install demo test check format bench bench-save bench-compare bench-report clean

install: $(INSTALLED)

# A stamp: the second run of a target installs nothing unless one of these two files has changed.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, this is " + sys.version)'
	@echo 'installing into $(VENV): a few minutes the first time'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/sdm-lite demo $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest $(ARGS)

# The three source folders import as one package, which type checkers see only through a folder that looks like it.
check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(TYPING) && mkdir -p $(TYPING)/sdm_lite
	ln -s $(CURDIR)/sdm_lite/* $(CURDIR)/autograd $(CURDIR)/cuda_kernels $(TYPING)/sdm_lite/
	cd $(TYPING) && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/build/mypy_cache

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	$(BENCH) $(ARGS)

bench-save: $(INSTALLED)
	$(BENCH) --benchmark-save=medians $(ARGS)

bench-compare: $(INSTALLED)
	$(BENCH) --benchmark-compare --benchmark-compare-fail=median:$(REGRESSION) $(ARGS)

# The table of docs/benchmarks.md: ratios against peers that run in turn with ours.
bench-report: $(INSTALLED)
	$(BIN)/python -m benchmarks.report $(ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
