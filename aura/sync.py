"""How processes that hold the same model learn from each other: --sync.

    ddp      gradients averaged in every step, exact: DistributedDataParallel
    fp16     the same with gradients in half the bytes (aura/halving.py)
    diloco   many steps alone between two agreements, for slow networks (aura/diloco.py)
    auto     the fastest of them by what this network and these machines are measured to do (aura/pace.py)
"""

import contextlib
import math
import secrets
from dataclasses import dataclass, replace

from aura.errors import UserError, agreed

METHODS = ("ddp", "fp16", "diloco")
DETAILS = ("sync_every", "sync_lr", "sync_momentum")  # of diloco
DEVICE_BYTES = {"fp16": 4, "diloco": 12}  # of each parameter, besides weights, gradients and the optimiser's
FILE_BYTES = {"diloco": 4}  # of each parameter in a checkpoint: state()
OWN_FILE_BYTES = {"fp16": 4, "diloco": 9}  # and beside it on rank 0: own_state()
SYNC_EVERY = 56  # 1/224 of ddp's bytes: 1 byte a weight in so many steps, not 4 in each
SYNC_LR, SYNC_MOMENTUM = 0.7, 0.9  # of DiLoCo's outer step, as published
FEW_AGREEMENTS = 100  # fewer, and smaller batches are worth their cost: docs/wsl2.md
# A momentum of m remembers 1 / (1 - m) agreements, and what it still holds when the run ends is lost: at most one in so
# many of the run's. docs/wsl2.md has the losses at 26 and 104 agreements, with this and as published.
RECALL, FEW_LR, FEW_MOMENTUM = 30, 0.9, 0.5


@dataclass(frozen=True)
class Known:
    """What every rank knows of a step. loss: mean per token over all ranks, count: their tokens. stop: the highest
    signal that any of them was sent. trouble: what was not finite, "" when all was."""

    step: int
    loss: float
    count: float
    stop: int
    trouble: str = ""


class Exact:
    """A sync: what start and loop.train need of a method. Here every step is agreed on before it is taken, with ddp,
    shards or one process; so it is in halving.Fp16, and not in diloco.DiLoCo.

    weights: the agreed weights, tensors in the order of the module's parameters; None where the module itself holds
    them. setting: what must be the same for a process to take over an own_state(), {} where there is no such state.
    origin: the name of the run when it first began, by which a checkpoint that another rank than 0 had to save is
    recognised; None where rank 0 alone saves.
    """

    method = "ddp"
    weights = origin = None

    def __init__(self, dist):
        self.dist, self.setting = dist, {}

    def wrap(self, model):
        """The model to train, whose gradients are averaged over the ranks as backward ends."""
        return self.dist.wrap(model)

    def weigh(self, loss, count, request, clock):
        """(mean loss per token, share) of a step in which this rank's losses add up to `loss` over `count` tokens.
        share: times a sum over tokens, as it is in the gradients, gives the mean. request: signals.StopRequest."""
        signals = [0.0] * self.dist.world_size
        signals[self.dist.rank] = float(request.number)
        own = [loss.item(), float(count)]  # on CUDA what was only queued is done now
        with clock.phase("communication"):
            loss_sum, total, *signals = self.dist.sum([*own, *signals])
        mean = loss_sum / total if total else math.nan
        self.known = Known(0, mean, max(total, 1.0), int(max(signals)))
        return mean, self.dist.world_size / self.known.count

    def advance(self, step, trouble, clock, *, settle=False, last=False):
        """The Knowns that all ranks have from now on, after this rank's `step`. trouble: what was wrong with it, "" if
        nothing."""
        return [replace(self.known, step=step, trouble=trouble)]

    def unheard(self):
        """Tokens of steps done that are in no Known yet, as if each rank had had as many as this one."""
        return 0

    def retreat(self):
        """Put the agreed weights in place of this rank's own, if it has such."""

    def agreed(self):
        """A block in which the module holds the agreed weights."""
        return contextlib.nullcontext()

    def close(self):
        """Nothing is under way between two steps."""

    def state(self):
        """What a checkpoint keeps of the agreement, besides the weights."""
        return {"origin": self.origin} if self.origin else {}

    def own_state(self):
        """What this rank alone knows, without which a run would not go on bit for bit; None where there is no such
        thing."""

    def restore(self, state, own):
        """Go on from the state() and the own_state() of a checkpoint; `own` is None where that cannot be had."""
        self.origin = state.get("origin")


def check(method, args, sharded):
    """Raise UserError, on every rank, for a --sync that a model cut into shards cannot have, or whose details were
    given and mean nothing."""
    if sharded and method in ("fp16", "diloco"):
        raise agreed(UserError, f"--sync {method}: cada proceso necesita el modelo entero, y aquí se reparte entre "
                                "todos; quite --sync, o fsdp")
    useless = _given(args, DETAILS)
    if useless and method in ("ddp", "fp16"):
        raise agreed(UserError, f"{useless}: solo tiene efecto con --sync diloco, y aquí es --sync {method}: quite "
                                "lo uno o lo otro")


def idle_alone(args):
    """What was given of how several processes share their work, which a single one does not: "--fsdp, --sync fp16", ""
    if nothing."""
    return _given(args, ("fsdp", "strategy", "sync", *DETAILS))


def _given(args, names):
    """Those of the arguments that were given and ask for more than what all begin with, as they are typed."""
    values = {name: getattr(args, name) for name in names if name in getattr(args, "given", ())}
    return ", ".join(f"--{name.replace('_', '-')}" + f" {value}" * (value is not True)
                     for name, value in values.items() if value not in ("auto", "ddp"))


def outer_step(args, steps):
    """(learning rate, momentum) of diloco's agreements in a run of so many steps; what the arguments give wins.

    As published from 10 * RECALL agreements on; of fewer the momentum is less and the rate more, evenly between the
    published and the FEW ones."""
    momentum = min(SYNC_MOMENTUM, max(FEW_MOMENTUM, 1 - RECALL * args.sync_every / max(1, steps)))
    lr = FEW_LR + (SYNC_LR - FEW_LR) * (momentum - FEW_MOMENTUM) / (SYNC_MOMENTUM - FEW_MOMENTUM)
    return (lr if args.sync_lr is None else args.sync_lr,
            momentum if args.sync_momentum is None else args.sync_momentum)


def name_run(dist):
    """A name that no other run has, the same on all ranks: what was saved together bears it."""
    return dist.broadcast_tree(secrets.token_hex(8))
