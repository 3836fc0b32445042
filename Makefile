# The commands of README.md. Each makes its own environment in .venv on first use.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
VENV   ?= .venv
BIN     = $(VENV)/bin
# Two workers are what the smallest supported machine has; more only helps on more cores.
JOBS   ?= 2

.PHONY: help demo test soak check format bench clean

help:
	@echo "make demo    train a small model with one faulty operator and find it (minutes)"
	@echo "make test    run the test suite"
	@echo "make soak    disturb runs at every kind of file operation, fuzz the readers (an hour)"
	@echo "make check   formatting, lint, types, layers, workflow lint"
	@echo "make format  rewrite the sources in the project's format"
	@echo "make bench   print the benchmark ratios"

demo:
	@$(PYTHON) .ci/bootstrap.py $(VENV) check
	@$(BIN)/spool demo

test:
	@$(PYTHON) .ci/bootstrap.py $(VENV) dev
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

# The table goes into docs/faults.md.
soak:
	@$(PYTHON) .ci/bootstrap.py $(VENV) dev
	$(BIN)/python tests/faults/fuzz.py --minutes 10
	$(BIN)/python -m pytest -m soak
	$(BIN)/python tests/faults/kill.py --points 200 --table faults.md

check:
	@$(PYTHON) .ci/bootstrap.py $(VENV) dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/snakefmt --check Snakefile rules
	$(BIN)/snakemake --lint

format:
	@$(PYTHON) .ci/bootstrap.py $(VENV) dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/snakefmt Snakefile rules

bench:
	@$(PYTHON) .ci/bootstrap.py $(VENV) dev
	@for f in benchmarks/[a-z]*.py; do echo "== $$f"; $(BIN)/python $$f || exit 1; done

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
