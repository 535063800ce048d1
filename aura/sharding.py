"""Weights, gradients and optimiser state cut into one part for each process, for models larger than one card: ZeRO-3
(Rajbhandari et al. 2020) by torch's fully_shard (FSDP2).

Each rank owns a slice along the first axis of every parameter. The weights of a block are gathered while it computes
and given back after; its gradients are averaged over the ranks as they are cut. What is stored stays whole, so a
checkpoint knows nothing of how many processes wrote it.
"""

import contextlib
import itertools
import warnings

import torch
import torch.distributed as c10d

from aura import products
from aura.errors import TrainingFault, UserError, agreed
from aura.exchange import average_rows
from aura.signals import Abandoned

AGREE_BATCHES = 4  # of an evaluation, between two looks at who was asked to stop: seconds on a slow CPU
GATHER = getattr(c10d, "all_gather_single", c10d.all_gather_into_tensor)  # as torch 2.13 calls them
SCATTER = getattr(c10d, "reduce_scatter_single", c10d.reduce_scatter_tensor)


def shard(module, optimizer, dist, dtype=None):
    """Where that was asked for, cut `module` over the ranks of `dist`, in place, with the weights of rank 0, and let
    `optimizer`, which has no state yet, follow. Each parameter becomes a DTensor on dist.device; until then `module`
    may be on the CPU and, on other ranks than 0, on the meta device. No other rank ever holds more than its slices and
    one whole tensor.

    module.blocks() -> submodules that are called one after another. In each, every child that holds matrices is
    gathered by itself; norms, which a neighbouring block may use, and all the rest are gathered for the whole forward
    and backward. dtype: of the products under autocast, which every forward then needs; None for that of the weights.
    Between the micro-batches of a step each rank holds the gradients of all parameters (4 bytes each).
    Raises UserError where the group cannot do it, TrainingFault where it does it wrong.
    """
    if not dist.sharded:
        return
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    require_nccl(dist)
    dist.mesh = mesh = dist.mesh or DeviceMesh.from_group(c10d.group.WORLD, dist.device.type)
    check_average(dist, mesh)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing here writes in place
    # By name for now: an optimiser that held them would keep the whole weights on the device.
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for group in optimizer.param_groups:
        group["params"] = [names[id(parameter)] for parameter in group["params"]]
    weights = module.state_dict() if dist.main else {}
    module.to("meta")
    # Autocast alone would compute the same, but each cast copy of a weight would live from forward to backward, a whole
    # model of them on every card. Weights gathered in the products' dtype need no cast, and half the bytes. What
    # autocast keeps in float32 (norms, embeddings, the residual stream) is not in a block's matrices; inputs are left
    # to it.
    cast = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in module.blocks():
        for part in block.children():
            if any(parameter.dim() >= 2 for parameter in part.parameters()):
                fully_shard(part, mesh=mesh, mp_policy=cast)
                if torch.__version__ < (2, 11):
                    part.register_forward_pre_hook(_unshard)
    # By default a root keeps its weights until the next backward: after an evaluation they would be out of date.
    fully_shard(module, mesh=mesh, reshard_after_forward=True)
    module.to_empty(device=dist.device)
    for name, owner in module.state_dict().items():
        tensor = dist.broadcast_tree(weights.pop(name).cpu() if dist.main else None)
        with torch.no_grad():
            owner.copy_(_slice(tensor, owner) if is_shard(owner) else tensor)
    parameters = dict(module.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [parameters[name] for name in group["params"]]


def require_nccl(dist):
    """Raise UserError where shards are to be exchanged between GPUs and not by NCCL."""
    if dist.device.type == "cuda" and dist.backend != "nccl":
        raise agreed(UserError, f"--fsdp con GPU necesita NCCL y este grupo usa {dist.backend}"
                                 f"{f' ({dist.fallback})' if dist.fallback else ''}: arregle NCCL, o quite --fsdp")


def _unshard(part, _):
    """A forward pre-hook that gathers `part`, as torch does from 2.11 on. Where a block is computed again, 2.10 leaves
    that to the backward of its output: too late for one that is used several times, as the backward of its last use
    has given the weights back."""
    part.unshard()


def release(mesh):
    """Let the group of `mesh` go: caches of DTensor's keep the mesh to the end of the process, and through it the
    group's threads (see cli.run)."""
    getattr(mesh, "_pg_registry", {}).clear()


def check_average(dist, mesh):
    """Prove that gradients of shards are the mean over the ranks: backends have summed where they should average, which
    an optimiser that normalises hides. Raises TrainingFault."""
    from torch.distributed.fsdp import fully_shard

    probe = torch.nn.Linear(2, dist.world_size + 1, bias=False, device=dist.device)
    fully_shard(probe, mesh=mesh)
    (probe(torch.ones(1, 2, device=dist.device)) * (dist.rank + 1)).sum().backward()
    found, right = whole(probe.weight.grad), (dist.world_size + 1) / 2
    if not torch.allclose(found, torch.full_like(found, right)):
        raise agreed(TrainingFault, f"el grupo {dist.backend} no promedia bien los gradientes de --fsdp (ha dado "
                                     f"{found.flatten()[0].item():g} en vez de {right:g}): actualice torch, o quite "
                                     "--fsdp")


def in_step(batches, dist, request=None):
    """Yield this rank's `batches`; to be called on all ranks. Where a forward pass takes all of them, each yields as
    many: None once it has no more. request: a StopRequest, by which all leave at the same batch.

    Raises Abandoned when any rank was asked to stop."""
    batches, every = iter(batches), 1 if dist.sharded else AGREE_BATCHES
    for number in itertools.count():
        batch = next(batches, None)
        if number % every == 0:
            left, asked = dist.sum([batch is not None, bool(request and request.number)])
            if asked:
                raise Abandoned
            if not left:
                return
        if batch is not None or dist.sharded:
            yield batch


def is_shard(tensor):
    """Whether `tensor` is this rank's slice of a larger one."""
    return hasattr(tensor, "full_tensor")  # DTensor's, whose import would cost every run its time


def whole(tensor):
    """`tensor`, or the whole tensor that it is a slice of, for which every rank has to call this."""
    return tensor.full_tensor() if is_shard(tensor) else tensor


def own_part(module, optimizer):
    """keep(place, tensor) for Session.broadcast_tree: what this rank owns of a tensor that is whole in a checkpoint, on
    the parameter's device, and the tensor itself where `module` is not cut. place: the keys that lead to it."""
    named = dict(module.named_parameters())
    numbered = dict(enumerate(parameter for group in optimizer.param_groups for parameter in group["params"]))

    def keep(place, tensor):
        owner = None
        if place[0] in ("model", "ema"):
            owner = named.get(place[1])
        elif place[:2] == ("optimizer", "state"):
            owner = numbered.get(place[2])
        return _slice(tensor, owner) if is_shard(owner) and owner.shape == tensor.shape else tensor

    return keep


def _slice(tensor, owner):
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, owner.device_mesh, owner.placements, src_data_rank=None)


def load_whole(module, weights):
    """module.load_state_dict for weights that every rank has whole."""
    owners = module.state_dict()
    module.load_state_dict({name: _slice(tensor, owners[name]) if is_shard(owners[name]) else tensor
                            for name, tensor in weights.items()})


class _TimedExchange:
    """For FSDPModule.set_custom_all_gather and set_custom_reduce_scatter: torch's own exchange, timed by a Clock."""

    def __init__(self, exchange, clock):
        self.exchange, self.clock = exchange, clock

    def allocate(self, size, *, dtype, device):
        """An empty tensor."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, **options):
        with self.clock.phase("communication"):
            return self.exchange(output_tensor, input_tensor, **options)


def time_exchanges(module, clock):
    """Let `clock` (clock.Clock) time the exchanges of the shards of `module`, if it is cut; on the CPU alone, where an
    exchange is over when its call returns."""
    for part in module.modules():
        if hasattr(part, "set_custom_all_gather") and not clock.blind:
            part.set_custom_all_gather(_TimedExchange(GATHER, clock))
            part.set_custom_reduce_scatter(_TimedExchange(SCATTER, clock))


@contextlib.contextmanager
def exchanging(model, wanted):
    """A block in which backward exchanges gradients between the ranks or, where that is not wanted, keeps adding them
    up on each. model: sharded, under DistributedDataParallel or halving.Halved, or plain."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(wanted)
    waits_for_gradients = hasattr(model, "no_sync")
    with (model.no_sync() if waits_for_gradients and not wanted else contextlib.nullcontext(),
          products.adding(not (waits_for_gradients and wanted))):
        yield
    if wanted:
        for parameter in getattr(model, "by_rows", ()):
            average_rows(parameter.grad, c10d.get_world_size())
        if hasattr(model, "arrive"):
            model.arrive()


@contextlib.contextmanager
def same_output(module):
    """A block in which every rank's call of `module` returns the tensor of rank 0: so they all decide alike what
    depends on it, such as when a text ends, though their cards may round differently."""

    def take_over(module, inputs, output):
        c10d.broadcast(output, src=0)

    hook = module.register_forward_hook(take_over)
    try:
        yield
    finally:
        hook.remove()
