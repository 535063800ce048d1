"""Train HRM-Text1 of 101 M parameters: two transformer stacks that think in cycles about each token.

    python hrm_training_small_100m.py --preset demo --dataset muestra          # two CPU cores, some minutes
    python hrm_training_small_100m.py --dataset corpus.txt                     # one GPU
    python launch_distributed.py --gpus 8 -- --dataset spanish                 # eight, text from the Hub as it trains
    torchrun --nproc_per_node=8 hrm_training_small_100m.py --dataset c4
    python -m aura.generate --checkpoint hrm.pth --prompt "En un lugar de la Mancha"

Started by torchrun, srun or launch_distributed.py, each process finds its place by itself. Data, checkpoints and logs
go to ./Data, ./checkpoints and ./logs; the same command goes on where it was stopped.
Exit codes: 0 done, 2 bad input, 3 a fault in training, 128 + signal after an orderly stop.
"""

from aura import cli, hrm_training
from aura.hrm_training import Preset
from aura.models import hrm

# 1024 sequences of 512 tokens a step, on eight GPUs as they are, on fewer with more accumulation.
PRESETS = {
    "100m": Preset(hrm.PRESETS["100m"], batch_size=64, grad_accum=2, gpus=8, lr=6e-4, max_steps=15_000,
                   warmup_ratio=0.02, grad_checkpointing=False),
    "demo": Preset(hrm.PRESETS["demo"], batch_size=8, grad_accum=1, gpus=1, lr=1e-3, max_steps=600,
                   warmup_ratio=0.1, grad_checkpointing=False, ema=0.99, beta2=0.99),
}


def build_parser():
    """The arguments of this script."""
    return hrm_training.make_parser("hrm_training_small_100m.py", "Entrena HRM-Text1 de 100 M de parámetros.", PRESETS)


if __name__ == "__main__":
    cli.run(lambda: hrm_training.run(build_parser(), PRESETS))
