"""DistributedDataParallel with buckets that never change, some gradients left out, and an end that cannot hang."""

import torch.distributed as c10d
from torch.nn.parallel import DistributedDataParallel


def wrap(module, device, by_rows):
    """`module` under DistributedDataParallel, from rank 0's weights. by_rows: the parameters whose gradients it leaves
    alone, since they travel otherwise (see exchange.py); they stand under that name in what is returned."""
    apart = set(map(id, by_rows))
    Parallel._set_params_and_buffers_to_ignore_for_model(
        module, [name for name, parameter in module.named_parameters() if id(parameter) in apart])
    for parameter in by_rows:
        c10d.broadcast(parameter.detach(), src=0)
    devices = [device.index] if device.type == "cuda" else None
    wrapped = Parallel(module, device_ids=devices, gradient_as_bucket_view=True)
    wrapped.order_buckets()
    wrapped.broadcast_buffers = False  # no step changes one; it would be a wait for rank 0 inside every forward
    wrapped.by_rows = by_rows
    return wrapped


class Parallel(DistributedDataParallel):
    """DistributedDataParallel whose buckets never change, and which does not hang when it is freed after its group.

    By itself it lays out the buckets anew after its first backward, and where a gradient lies in its bucket decides in
    which order those of more than two ranks are added up: the first step after a resume would round otherwise than the
    same step of a run that was never stopped.

    What the last backward sent is freed by gloo's threads, which need the GIL for it; whoever frees the group joins
    those threads. The reducer does so with the GIL held, and both wait for ever; Python's own reference lets go of it
    (https://github.com/pytorch/pytorch/issues/56297). So the reducer goes first, while self.process_group is there."""

    def _build_params_for_reducer(self):
        parameters, sparse = super()._build_params_for_reducer()
        return parameters[::-1], sparse[::-1]  # about as backward completes their gradients

    def order_buckets(self):
        """Lay out the buckets for good, before there are gradients."""
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def __del__(self):
        for holder in ("logger", "reducer"):  # the logger has the reducer, too
            vars(self).pop(holder, None)
