"""The training loop: one flat function that every script calls, and the small objects it needs.

Order of one step: accumulate micro-batches (gradients travel with the last one), weigh them, clip, step, agree with the
other ranks on loss, tokens, finiteness and a wish to stop, report, save. When and on what ranks agree is up to the sync
(sync.Exact, halving.Fp16, diloco.DiLoCo).
"""

import contextlib
import math
import time
from dataclasses import asdict, dataclass, field

import torch

from aura import backend, console, ops, products, sharding
from aura.clock import Clock
from aura.ema import Average
from aura.errors import OutOfMemory, PeerLost, TrainingFault, UserError, agreed, first_line
from aura.files import explain
from aura.session import is_communication_error
from aura.signals import Abandoned, orderly_stop

FAULT_LIMIT = 3  # non-finite steps without a new checkpoint in between after which a run gives up
GOOD_STEPS = 50  # without a fault, after which skipped ones count from 0 again: 2 % of all steps may be lost
SMALLEST_LOSS_SCALE = 1.0  # an fp16 scale below this means the gradients themselves are not finite


@dataclass(frozen=True)
class Policy:
    """What the loop does when. Intervals are in optimiser steps; 0 means never. micro_tokens: about how many tokens a
    micro-batch has; its loss is divided by this, so that fp16 sees values near 1, and the true count, which may vary,
    is put right before the step."""

    max_steps: int
    micro_tokens: int
    grad_accum: int = 1
    grad_clip: float = 1.0
    log_interval: int = 10
    eval_interval: int = 0
    sample_interval: int = 0
    checkpoint_freq: int = 0
    nan_policy: str = "restart"  # restart | skip | stop
    seed: int = 0


@dataclass
class Progress:
    """How far a run has come; stored in each checkpoint. step: optimiser steps done."""

    step: int = 0
    tokens: int = 0
    lr_scale: float = 1.0
    faults: int = 0
    recovered: int = 0  # the step after which a fault was last acted on
    fresh: int = 0  # the step after which the weights were last begun anew
    seconds: float = 0.0  # spent in all the runs that led here
    epoch_loss: float = 0.0  # sum of the losses, and tokens, of the epoch's good steps so far
    epoch_tokens: int = 0
    loss: float = math.nan  # of the last step that all ranks know of
    logged: list | None = None  # by which Reporter.start knows the run's own table
    owed: dict | None = None  # the row of the last step without its evaluation, which a stop left for the next start


class Precision:
    """Automatic mixed precision for one device. name: 'bf16', 'fp16' or 'fp32'."""

    def __init__(self, name, device):
        self.name, self.device_type = name, device.type
        self.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}[name]
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    def autocast(self):
        """The context of a forward pass."""
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.dtype is not None)


@dataclass
class Run:
    """All that changes as a run goes on: what a checkpoint holds, and what a resumed run takes from one. module: not
    wrapped, perhaps cut into shards. average: an ema.Average. sync: see sync.Exact."""

    module: torch.nn.Module
    optimizer: torch.optim.Optimizer
    precision: Precision
    loader: object
    average: Average
    sync: object
    progress: Progress = field(default_factory=Progress)
    before: dict = field(default_factory=dict)  # the arguments in the checkpoint that it goes on from

    def state(self, policy):
        """The run as nested dicts of tensors, where they are, and plain values."""
        progress = self.progress
        return {
            "model": self.module.state_dict(), "ema": self.average.weights, "optimizer": self.optimizer.state_dict(),
            "scaler": self.precision.scaler.state_dict(), "sync": self.sync.state(),
            "scheduler": {"steps": policy.max_steps, "lr_scale": progress.lr_scale},
            "loader": self.loader.state_dict(), "random": {"seed": policy.seed, "step": progress.step},
            "progress": {**asdict(progress), "tokens": progress.tokens + self.sync.unheard()}}

    def restore(self, state, same_data=True):
        """Put a checkpoint's state back. same_data: the loader goes on where it was; other data begin anew."""
        self.load_weights(state)
        self.average.load(state.get("ema"))
        if self.precision.scaler.is_enabled() and state["scaler"]:
            self.precision.scaler.load_state_dict(state["scaler"])
        if same_data:
            self.loader.load_state_dict(state["loader"])
        self.sync.restore(state.get("sync", {}), state.get("own"))
        self.progress = Progress(**state["progress"])
        if not same_data or self.loader.epoch_ended:  # a larger batch than before may leave out what was left of it
            self.progress.epoch_loss, self.progress.epoch_tokens = 0.0, 0

    @contextlib.contextmanager
    def as_delivered(self):
        """A block in which the module holds the weights that are evaluated and, in the end, handed over: those that the
        ranks agree on, or their average. To be entered on all ranks."""
        with self.sync.agreed(), self.average.applied():
            yield

    def load_weights(self, state):
        """Take the weights and the optimiser's moments of a checkpoint. The optimiser keeps the hyperparameters it was
        made with: what a user asks for now wins over what was saved."""
        self.module.load_state_dict(state["model"])
        asked = [{key: value for key, value in group.items() if key != "params"}
                 for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, values in zip(self.optimizer.param_groups, asked, strict=True):
            group.update(values)


def micro_seed(seed, step, number):
    """The seed of dropout in micro-batch `number` of a step, counted over all ranks: random state as a pure function,
    so that resuming needs no more than the step, and one process that accumulates draws the masks that several would.
    (Odd multipliers, SplitMix64's of Steele et al. 2014 among them, spread neighbouring steps.)"""
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + number * 0x94D049BB133111EB) % 2**64
    mixed = (mixed ^ (mixed >> 31)) * 0xD6E8FEB86659FD93 % 2**64
    return (mixed ^ (mixed >> 32)) % 2**63


def train(model, run, loss_fn, schedule, checkpointer, reporter, policy, dist, *, begin_step=None, evaluate=None,
          sample=None, reinitialise=None, clock=None):
    """Train `model` until policy.max_steps or until a signal asks every rank to stop.

    model: what runs forward, run.module or what run.sync.wrap() made of it. loss_fn(model, batch) -> (sum of the losses
    of the tokens that count, how many count), both on the device or plain. schedule(step) -> learning rate.
    begin_step(step): called before each step with its 0-based number. evaluate(request) -> dict of metrics, on all
    ranks, which a StopRequest may end (see sharding.in_step). sample(step, request) -> None, likewise. reinitialise():
    fresh weights, for a NaN before any checkpoint. clock: a Clock that somebody reads. Returns the number of the signal
    that ended the run or 0: all steps may be done, and the last evaluation left.
    Raises TrainingFault, naming the last checkpoint, when NaNs do not end, memory is not enough, a rank is lost or
    nothing can be saved.
    """
    module, optimizer, precision, loader = run.module, run.optimizer, run.precision, run.loader
    average, sync, progress = run.average, run.sync, run.progress
    parameters = list(module.parameters())  # to walk a model takes the time of some kernels
    clock = clock or Clock(dist)
    sharding.time_exchanges(module, clock)
    clock.begin(progress.step, policy.max_steps)
    console.outlive()

    with orderly_stop() as request, _noted(run, reporter), _checkpoint_named(run, policy, checkpointer, dist, request):
        stop, stalled, spent, begun = 0, 0.0, progress.seconds, time.perf_counter()
        if progress.owed is not None:
            stop = _evaluate_owed(run, policy, evaluate, sample, request, checkpointer, reporter, clock, dist)
        while progress.step < policy.max_steps and not stop:
            started = time.perf_counter()
            checkpointer.poll()
            lr = schedule(progress.step) * progress.lr_scale
            for group in optimizer.param_groups:
                group["lr"] = lr
            if begin_step is not None:
                begin_step(progress.step)
            model.train()
            seeds = [micro_seed(policy.seed, progress.step, dist.rank * policy.grad_accum + micro)
                     for micro in range(policy.grad_accum)]
            loss, count = _accumulate(model, loss_fn, loader, policy, precision, seeds, clock)
            precision.scaler.unscale_(optimizer)
            gradients = [p.grad for p in parameters if p.grad is not None]
            norm = ops.total_norm(gradients)
            with clock.phase("communication"):
                norm = sharding.whole(norm)
            loss, share = sync.weigh(loss, count, request, clock)
            norm = norm.item() * policy.micro_tokens * share
            progress.step += 1

            trouble = _apply(optimizer, precision.scaler, gradients, policy.micro_tokens * share, loss, norm,
                             policy.grad_clip)
            last = progress.step == policy.max_steps
            if trouble and policy.nan_policy == "restart" and not last:  # at the end nothing would be learnt again
                sync.retreat()

            ended = last or loader.epoch_ended
            evaluated = evaluate is not None and (ended or _due(progress.step, policy.eval_interval))
            sampled = sample is not None and (ended or _due(progress.step, policy.sample_interval))
            saved = last or _due(progress.step, policy.checkpoint_freq)
            settle = ended or evaluated or sampled or saved or progress.step == 1
            faulty, gave_up = False, None
            if evaluated:  # should a rank be lost before that, what the others save leaves it to the next start
                progress.owed = {}
            for known in sync.advance(progress.step, trouble, clock, settle=settle, last=last):
                stop = max(stop, known.stop)
                progress.tokens += int(known.count)
                progress.loss = clock.loss = known.loss
                if known.trouble:
                    faulty = True
                    with clock.phase("start"):
                        gave_up = _recover(run, known, policy, checkpointer, reporter, dist, reinitialise)
                else:
                    progress.epoch_loss += known.loss * known.count
                    progress.epoch_tokens += int(known.count)
            if not faulty or sync.weights:
                average.update(progress.step, sync.weights)
            clock.step = progress.step
            reporter.count(count * dist.world_size, time.perf_counter() - started)

            metrics = {"lr": lr, "grad_norm": norm, "stall_s": stalled, **_measured(progress, loader, dist.device)}
            found = {}
            if evaluated:
                progress.owed = {**metrics, "total_seconds": spent + time.perf_counter() - begun}
                with clock.phase("evaluate"), run.as_delivered():
                    found, asked = evaluate_unless_stopped(evaluate, request, dist)
                metrics, stop = metrics | found, max(stop, asked)
                progress.owed = progress.owed if asked else None
            progress.seconds = spent + time.perf_counter() - begun
            if evaluated or ended or _due(progress.step, policy.log_interval) or progress.step == 1:
                with clock.phase("save"):
                    progress.logged = reporter.log(progress.step, total_seconds=progress.seconds,
                                                   **metrics) or progress.logged
                stalled = 0.0
            if sampled and not stop:
                with clock.phase("evaluate"), run.as_delivered():
                    sample(progress.step, request)
            if (saved or stop or gave_up) and _worth_keeping(run, found, policy, reporter, dist):
                if saved and not faulty:
                    _win_back_rate(progress, reporter)
                progress.seconds = spent + time.perf_counter() - begun
                stalled += _save(run, policy, checkpointer, reporter, clock, interrupted=bool(stop) and not last)
            if gave_up:
                raise gave_up
            clock.lap(count)
        request.number = request.number or stop  # what others were asked may still reach this rank
        with clock.phase("save"):
            checkpointer.finish()
            sync.close()
            # If rank 0 dies in writing the last checkpoint, the others name the one before.
            if not dist.wait_for_main():  # torchrun was killed, and its end is the signal: nothing can be handed over
                stop = max(dist.gather_objects(request.number))
            elif progress.step >= policy.max_steps and progress.owed is None:
                stop = 0  # it came too late
    clock.end(stop)
    return stop


def _worth_keeping(run, found, policy, reporter, dist):
    """Whether the weights, and what an evaluation has just found of them, are finite: a checkpoint of others would be
    taken before the good ones, after a fault and by the next start. To be called on all ranks. Raises TrainingFault
    where no step is left that could lead to better weights."""
    wrong = [f"{name} vale {value:g}" for name, value in found.items() if not math.isfinite(value)]
    if dist.sum([not _finite(run)])[0]:
        wrong = ["los pesos no son finitos"]
    if wrong and run.progress.step == policy.max_steps:
        raise agreed(TrainingFault, f"tras el último paso, {wrong[0]} y no hay nada que entregar; pruebe con un --lr "
                                    "menor, --precision bf16 o fp32, o revise los datos")
    if wrong:
        reporter.event(run.progress.step, f"{wrong[0]}: no se guarda este punto de control")
    return not wrong


def _save(run, policy, checkpointer, reporter, clock, interrupted=False):
    """Write a checkpoint of the agreed weights, once the rows that it tells of are on the disk. Returns the seconds
    that training stood still."""
    own = run.sync.own_state()  # of this rank's weights, which are not there while the module holds the agreed ones
    with clock.phase("save"), run.sync.agreed():
        reporter.keep()
        return checkpointer.save(run.progress.step, run.state(policy), own=own, interrupted=interrupted)


def _due(step, interval):
    return interval > 0 and step % interval == 0


def _measured(progress, loader, device):
    """Metrics of the run so far; the sums of an epoch that ends here begin anew."""
    metrics = {"loss": progress.loss, "tokens": progress.tokens,
               "epoch": loader.epoch + loader.samples / loader.windows, "memory_gb": backend.peak_memory(device) / 1e9}
    if loader.epoch_ended:
        metrics["epoch_loss"] = progress.epoch_loss / max(1, progress.epoch_tokens)
        progress.epoch_loss, progress.epoch_tokens = 0.0, 0
    return metrics


def evaluate_unless_stopped(evaluate, request, dist):
    """(metrics, 0) or, where some rank was asked to stop in the middle and so all abandoned it, ({}, the signal)."""
    try:
        return evaluate(request) if evaluate else {}, 0
    except Abandoned:
        return {}, max(dist.gather_objects(request.number))


def _evaluate_owed(run, policy, evaluate, sample, request, checkpointer, reporter, clock, dist):
    """Make the evaluation that an earlier stop cut short, log the row of its step again, complete, write the text that
    was left out too, and save the run where no later checkpoint will tell that it is made. Returns 0, or the signal
    that cut it short once more."""
    progress = run.progress
    with clock.phase("evaluate"), run.as_delivered():
        found, stop = evaluate_unless_stopped(evaluate, request, dist)
    if not stop:
        progress.logged = reporter.log(progress.step, **progress.owed, **found) or progress.logged
        progress.owed = None
        if sample is not None and (progress.step >= policy.max_steps or run.loader.epoch_ended
                                   or _due(progress.step, policy.sample_interval)):
            with clock.phase("evaluate"), run.as_delivered():
                sample(progress.step, request)
        if progress.step >= policy.max_steps and _worth_keeping(run, found, policy, reporter, dist):
            _save(run, policy, checkpointer, reporter, clock)
    return stop


def _accumulate(model, loss_fn, loader, policy, precision, seeds, clock):
    """Backward of a micro-batch for each seed; gradients are exchanged with the last. Returns (sum of losses,
    tokens)."""
    loss_sum, count = 0.0, 0
    with products.step(model):
        for micro, seed in enumerate(seeds, 1):
            torch.manual_seed(seed)
            with sharding.exchanging(model, micro == len(seeds)):
                with precision.autocast():
                    with clock.phase("data"):
                        batch = loader.next()
                    loss, tokens = loss_fn(model, batch)
                clock.backward(precision.scaler.scale(loss / policy.micro_tokens), micro == len(seeds))
            clock.exchanged(micro == len(seeds))
            loss_sum = loss_sum + loss.detach()
            count += tokens
    return loss_sum, count


def _apply(optimizer, scaler, gradients, factor, loss, norm, grad_clip):
    """Multiply the gradients by `factor`, which makes `norm` their norm, clip that to `grad_clip` (0: no limit), take
    the optimiser's step and free them. Returns "" or, where no step was taken because something was not finite, what.
    A norm that is not finite for fp16's loss scale is no such thing: the scaler skips the step and lowers the scale."""
    overflow = scaler.is_enabled() and scaler.get_scale() >= SMALLEST_LOSS_SCALE
    trouble = ""
    if math.isfinite(loss) and (math.isfinite(norm) or overflow):
        clip = min(1.0, grad_clip / (norm + 1e-6)) if grad_clip else 1.0
        torch._foreach_mul_(gradients, factor * clip if math.isfinite(norm) else 1.0)
        scaler.step(optimizer)
    else:
        trouble = f"pérdida {loss:g}, gradiente {norm:g}"
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return trouble


def _recover(run, known, policy, checkpointer, reporter, dist, reinitialise):
    """Act on a step whose loss or gradient was not finite on some rank; every rank comes here in the same step.

    Ranks may hear of a step some steps later (see sync.Known). With restart, a step that was taken before the last
    fault was acted on still had the rate from before it, and counts as part of that fault.
    Returns None where the run goes on. When this is one fault too many, raises TrainingFault or, where what has been
    learnt since the last checkpoint is to be saved first, returns it."""
    progress, sync = run.progress, run.sync
    if policy.nan_policy == "restart" and known.step <= progress.recovered:
        reporter.event(known.step, f"{known.trouble}: ocurrió aún con la tasa anterior y no cuenta otra vez")
        return None
    skips = policy.nan_policy == "skip" or policy.nan_policy == "restart" and _too_late_to_begin_anew(
        run, policy, checkpointer)
    if (skips or sync.weights) and known.step - progress.recovered > GOOD_STEPS:
        progress.faults = 0  # restart else goes back to the last checkpoint, and only a new one is an advance
    # At the end no step is left to learn again what the last checkpoint lacks: what has been learnt since is kept.
    at_the_end = known.step == policy.max_steps
    learnt = known.step > progress.recovered + 1
    progress.faults, progress.recovered = progress.faults + 1, progress.step
    times = f" por {progress.faults}.ª vez sin avanzar" if progress.faults > 1 else ""
    # Weights that were restored and gave no good step may be what is wrong.
    restored = not learnt and policy.nan_policy == "restart" and not sync.weights and checkpointer.has_any()
    fault = agreed(TrainingFault, f"la pérdida o el gradiente no es finito en el paso {known.step} ({known.trouble})"
                                  f"{times}; pruebe con un --lr menor, --precision bf16 o fp32, o revise los datos"
                                  f"{', o siga desde otro punto de control, o de cero, con --resume' * restored}")
    if policy.nan_policy == "stop" or progress.faults >= FAULT_LIMIT:
        reporter.event(known.step, f"{known.trouble}: se detiene el entrenamiento")
        if skips and _finite(run):
            return fault
        raise fault
    if skips or at_the_end and (sync.weights or learnt and _finite(run)):
        reporter.event(known.step, f"{known.trouble}: se salta este paso")
        return None
    progress.lr_scale *= 0.5
    came_from = "se vuelve allí a los pesos acordados"
    if not sync.weights:
        came_from = _restore_weights(run, checkpointer, dist, reinitialise, fault if at_the_end else None)
    reporter.event(known.step, f"{known.trouble}: {came_from}; desde ahora la tasa de aprendizaje es la prevista "
                   f"multiplicada por {progress.lr_scale:g}")
    return None


def _win_back_rate(progress, reporter):
    """At each checkpoint, count the faults from 0 again and, if there have been none since the one before, double a
    learning rate that earlier faults have lowered, up to the planned one: otherwise a bad value now and then would end
    all learning."""
    if not progress.faults and progress.lr_scale < 1:
        progress.lr_scale = min(1.0, 2 * progress.lr_scale)
        reporter.event(progress.step, "sin más fallos de un punto de control a otro; desde ahora la tasa de "
                       f"aprendizaje es la prevista multiplicada por {progress.lr_scale:g}")
    progress.faults = 0


@torch.no_grad()
def _finite(run):
    """Whether the weights that a checkpoint would keep are finite; to be called on all ranks."""
    with run.sync.agreed():
        return math.isfinite(sharding.whole(torch.nn.utils.get_total_norm(list(run.module.parameters()))))


def _too_late_to_begin_anew(run, policy, checkpointer):
    """Whether fresh weights would have fewer steps left to train them than the ones of now, which are finite, have had,
    and there is no checkpoint to go back to; to be called on all ranks."""
    had = run.progress.step - 1 - run.progress.fresh
    return not run.sync.weights and policy.max_steps - run.progress.step < had and not checkpointer.has_any() \
        and _finite(run)


def _restore_weights(run, checkpointer, dist, reinitialise, at_the_end):
    """Go back to the weights of the last checkpoint or, where there is none, to fresh ones; returns which in Spanish.
    at_the_end: an exception to raise instead of taking fresh weights, when no step is left to train them; else None."""
    state = checkpointer.reload(sharding.own_part(run.module, run.optimizer))
    if state is not None:
        run.load_weights(state)
        came_from = f"se restauran los pesos de {checkpointer.last}"
    elif at_the_end:
        raise at_the_end
    else:
        reinitialise()
        run.progress.fresh = run.progress.step
        run.optimizer.state.clear()
        came_from = "no hay punto de control: se reinician los pesos"
    dist.broadcast_weights(run.module)
    run.average.load(state and state.get("ema"))
    return came_from


@contextlib.contextmanager
def _noted(run, reporter):
    """A block whose fault stays in the log as well: the console of a night may be gone by the morning."""
    try:
        yield
    except TrainingFault as fault:
        reporter.fault(run.progress.step, str(fault))
        raise
    except Exception as problem:
        reporter.fault(run.progress.step, f"{type(problem).__name__}: {first_line(problem)}")
        raise


@contextlib.contextmanager
def _checkpoint_named(run, policy, checkpointer, dist, request):
    """A block whose faults all end by naming the checkpoint to go on from. When a rank is lost, those whose sync agrees
    only every so many steps first save what they last agreed on."""
    try:
        yield
    except TrainingFault as fault:
        if isinstance(fault, PeerLost):
            _save_agreed(run, policy, checkpointer, dist)
        if checkpointer.named() not in str(fault):
            _name(fault, checkpointer)
        raise
    except UserError as problem:  # data or a checkpoint that went bad while the run was on
        raise _name(TrainingFault(str(problem)), checkpointer) from problem
    except OSError as problem:
        fault = TrainingFault(f"no se puede escribir {problem.filename or 'en el disco'} ({explain(problem)})")
        raise _name(fault, checkpointer) from problem
    except (RuntimeError, MemoryError) as problem:
        if whose := backend.out_of_memory(problem):
            fault = OutOfMemory(f"no basta la memoria de {whose}: pruebe con un --batch-size menor y más --grad-accum, "
                                "que dan el mismo paso, con secuencias más cortas o, si este programa lo tiene, con "
                                "--grad-checkpointing")
            fault.request = request
            raise _name(fault, checkpointer) from problem
        if not (dist.grouped and is_communication_error(problem)):
            raise
        lost = dist.peer_lost(problem)
        _save_agreed(run, policy, checkpointer, dist)
        raise _name(lost, checkpointer) from problem
    finally:
        checkpointer.settle()


def _save_agreed(run, policy, checkpointer, dist):
    """Now that a rank is lost, save what those that are left last agreed on, where that is not the module itself."""
    if run.sync.weights and dist.rank != dist.saver:
        checkpointer.left_to = dist.saver
    elif run.sync.weights:
        with run.sync.agreed():
            checkpointer.save_alone(run.progress.step, run.state(policy))


def _name(fault, checkpointer):
    """`fault` with the checkpoint to go on from added to its text. The other ranks, which name their own, are told its
    `reason`, the text without it."""
    fault.reason = str(fault).rstrip(".")
    fault.args = (f"{fault.reason}; {checkpointer.named()}",)
    return fault
