# Two commands matter: `make up` serves the demo model, `make test` checks everything.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
PYTEST_ARGS ?=

.PHONY: up test check test-clients test-clients-ci test-compose model clean

$(VENV)/.installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "baton needs $(PYTHON) (3.11 or newer) on the PATH"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "baton needs Python 3.11 or newer, this is " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[local,dev]'
	@touch $@

model: $(VENV)/.installed
	@$(BIN)/baton model pull smollm2-135m

up: model
	@exec $(BIN)/baton up $(ARGS)

test: model
	scripts/test $(PYTEST_ARGS)

check: $(VENV)/.installed
	scripts/check

test-clients: model
	scripts/test-clients

test-clients-ci: model
	scripts/test-clients ci

test-compose: $(VENV)/.installed
	compose/test-compose

clean:
	rm -rf $(VENV) .venv-clients
