# Two commands from a fresh clone: `make train` trains the demo, `make test` runs the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: train test lint clean

train: $(READY)
	$(BIN)/python train_gpt2_spanish.py --preset demo --dataset-name muestra --checkpoint-dir checkpoints/demo \
		--log-dir logs/demo --output demo.pth --resume none
	$(BIN)/python -m aura.generate --checkpoint demo.pth --prompt "Una mañana" --length 120 --num-samples 3
	@echo "Curva de pérdida: logs/demo/loss.png"

test: $(READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .

$(READY): requirements.txt setup.py $(wildcard csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "error: hace falta Python 3.10 o posterior; indique otro con make PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2> /dev/null || \
		{ echo "error: falta el módulo venv de Python; instálelo con: sudo apt install python3-venv python3-dev" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m aura.extension
	@touch $(READY)

clean:
	rm -rf $(VENV) build *.egg-info
