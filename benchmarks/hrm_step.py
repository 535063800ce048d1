"""One training step of HRM-Text1: ours with our kernels, ours with torch's, and the official HRM-Text model.

    git clone https://github.com/sapientinc/HRM-Text
    pip install einops pydantic
    python benchmarks/hrm_step.py --hrm-text HRM-Text --json hrm_step.json

A step is forward, loss, backward, clipping of the gradients and fused AdamW, for everybody the same, from the same
weights, on the same tokens, in one process, in turns. Before anything is timed the logits of each are compared with
float64. The official classes are taken as they are, in plain torch: FlashAttention 3, which only runs on Hopper cards,
gives way to scaled_dot_product_attention, and its head shares the embedding's weights, as ours does.
"""

import dataclasses
import functools
import importlib
import sys
import types
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import measure  # noqa: E402
import train_step  # noqa: E402

from aura import cli, ops  # noqa: E402
from aura.models import hrm  # noqa: E402

OURS, SDPA, OFFICIAL = "ours", "ours with sdpa", "HRM-Text"
BATCH = 8


def our_loss(model, batch):
    return model(batch[:, :-1], batch[:, 1:]) / batch[:, 1:].numel()


def ours(name, choice, config):
    return train_step.Contestant(name, hrm.HRM(config), lambda model, tokens: model(tokens), our_loss,
                                 lambda: ops.using(choice))


@functools.cache
def official_classes(folder):
    """(model, head) of a checkout, with torch's attention in place of FlashAttention 3."""

    def attention(q, k, v, is_causal, **_):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*heads_first, is_causal=is_causal).transpose(1, 2)

    for name, function in (("models.flash_attention_prefixlm_v2", "flash_attn_varlen_prefixlm"),
                           ("flash_attn_interface", "flash_attn_with_kvcache")):
        sys.modules[name] = types.ModuleType(name)
        setattr(sys.modules[name], function, attention)
    sys.path.insert(0, folder)
    model = importlib.import_module("models.baselines.hrm_nocarry_bp_warmup").HierarchicalReasoningModel
    return model, importlib.import_module("models.lm_head").LMHead


def official(config, folder):
    make_model, make_head = official_classes(folder)
    sizes = {"max_seq_len": config.seq_len, "n_layers": config.n_layer, "hidden_size": config.n_embd,
             "num_heads": config.n_head, "expansion": 1.5 * config.n_ff / config.n_embd, "attn_type": "causal",
             "init_type": "lecun_normal", "norm_type": "pre", "norm_eps": 1e-6, "pos_emb_type": "rope",
             "rope_theta": config.rope_theta, "H_cycles": config.h_cycles, "L_cycles": config.l_cycles}
    model = make_head(make_model(sizes), {"vocab_size": config.vocab_size})
    model.model.zL_init = nn.Buffer(torch.zeros(config.n_embd))  # theirs is bfloat16, whatever the weights are
    model.lm_head.weight = model.embed_tokens.embedding_weight
    bp_steps = hrm.MAX_BP_PASSES

    def logits(model, tokens):
        return model(None, {"inputs": tokens}, bp_steps=bp_steps)[1]

    def loss(model, batch):  # what its head computes, without the collective of a group of processes
        return F.cross_entropy(logits(model, batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())

    contestant = train_step.Contestant(OFFICIAL, model, logits, loss, rename=official_name)
    if sum(p.numel() for p in model.parameters()) != config.parameters() - norm_weights(config):
        raise SystemExit("el modelo oficial no tiene el mismo tamaño")
    return contestant


def norm_weights(config):
    """Ours has weights in the norms of its blocks and before its head, theirs none."""
    return (2 * 2 * config.n_layer + 1) * config.n_embd


def official_name(name):
    """Their name for a tensor of ours."""
    name = name.replace("wte.weight", "embed_tokens.embedding_weight")
    for ours_part, theirs_part in (("l.blocks", "model.L_level.core.layers"), ("h.blocks", "model.H_level.core.layers"),
                                   ("start", "model.zL_init")):
        if name.startswith(ours_part):
            name = name.replace(ours_part, theirs_part, 1)
    for ours_part, theirs_part in (("attn.gqkv", "attn.gqkv_proj"), ("attn.out", "attn.o_proj"),
                                   ("mlp.gate_up", "mlp.gate_up_proj"), ("mlp.down", "mlp.down_proj")):
        name = name.replace(ours_part, theirs_part)
    return name


@torch.no_grad()
def same_start(playing, config, batch, dtype):
    """Give all the same fresh weights. Returns the relative RMS error of each one's logits against float64; ends the
    program where one computes a different function."""
    model = hrm.HRM(config).init_weights(train_step.SEED)
    for contestant in playing:
        contestant.load(model.state_dict())
    with ops.using("reference"):
        exact = model.double()(batch[:, :-1])
    found = {}
    for contestant in playing:
        with contestant.context(), train_step.autocast(dtype):
            logits = contestant.logits(contestant.model, batch[:, :-1])
        found[contestant.name], _ = measure.errors([logits], [exact])
        if not found[contestant.name] < train_step.TOLERANCE[dtype]:
            raise SystemExit(f"{contestant.name} no calcula lo mismo: error relativo {found[contestant.name]:.1e}")
    return found


def measure_case(args, config, dtype, threads, ceilings):
    """The rows of one type and number of threads."""
    generator = torch.Generator().manual_seed(train_step.SEED)
    batch = torch.randint(config.vocab_size, (args.batch_size, config.seq_len + 1), generator=generator)
    playing = [ours(OURS, "fused", config), ours(SDPA, "sdpa", config), official(config, args.hrm_text)]
    errors = same_start(playing, config, batch, dtype)
    steps = {c.name: functools.partial(c.step, batch, dtype) for c in playing}
    for contestant in playing:
        with contestant.context():
            steps[contestant.name]()  # makes the optimiser's state
    samples = measure.take_turns(steps, {c.name: c.context for c in playing}, rounds=args.rounds,
                                 long_s=train_step.LONG_S)
    ceiling = max(measure.product_ceilings(dtype), key=ceilings.__getitem__)
    tokens = args.batch_size * config.seq_len
    for peer in playing[1:]:
        times = measure.comparison(samples[OURS], samples[peer.name])
        rate = tokens / times["ours_ms"] * 1e3
        yield {"op": "training step hrm", "dtype": dtype, "variant": args.preset, "direction": "step",
               "shape": [args.batch_size, config.seq_len], "threads": threads, "peer": peer.name, **times,
               "ours_tokens_per_s": rate, "peer_tokens_per_s": tokens / times["peer_ms"] * 1e3,
               "error": errors[OURS], "peer_error": errors[peer.name], "ceiling": ceiling,
               "share_of_ceiling": config.flops_per_token() * rate / (ceilings[ceiling] * 1e9)}


def race(args):
    """Measure what the arguments ask for, printing as it goes; returns what goes into the JSON file."""
    neighbours = measure.Neighbours()
    result = {"benchmark": "hrm_step", **measure.environment(), "ceilings": {}, "rows": []}
    config = hrm.PRESETS[args.preset]
    config = dataclasses.replace(config, seq_len=args.seq_len or config.seq_len)
    print(f"{result['device']}; {result['extension']} ({result['instruction_set']}); torch {torch.__version__} "
          f"({result['torch_instruction_set']}); milisegundos por paso")
    train_step.print_heads()
    for threads in args.threads:
        torch.set_num_threads(threads)
        ceilings = result["ceilings"][threads] = measure.ceilings(quick=True)
        for dtype in args.dtype:
            for row in measure_case(args, config, dtype, threads, ceilings):
                result["rows"].append(row)
                train_step.print_row(row)
    result["others_share"] = neighbours.warn()
    return result


def build_parser():
    parser = cli.Parser(description="Mide un paso de entrenamiento de HRM-Text1, en la CPU.")
    parser.add_argument("--json", type=measure.file, metavar="FICHERO", help="dónde escribir los resultados")
    parser.add_argument("--hrm-text", metavar="CARPETA", required=True,
                        help="copia de https://github.com/sapientinc/HRM-Text")
    parser.add_argument("--preset", type=cli.choice(*hrm.PRESETS), default="demo", help=", ".join(hrm.PRESETS))
    parser.add_argument("--threads", type=measure.threads, default="1,2", help="números de hilos")
    parser.add_argument("--dtype", type=measure.names(*measure.DTYPES), default="fp32",
                        help="fp32, y bf16 con autocast")
    parser.add_argument("--seq-len", type=cli.number(int, low=1), help="longitud (por defecto: la del preset)")
    parser.add_argument("--batch-size", type=cli.number(int, low=1), default=BATCH, help="secuencias")
    parser.add_argument("--rounds", type=cli.number(int, low=1), default=5, help="rondas, 3 si duran mucho")
    return parser


def main(argv=None):
    args = build_parser().parse_args(argv)
    measure.settle()
    with measure.restored():
        result = race(args)
    measure.write(args.json, result)


if __name__ == "__main__":
    cli.run(main)
