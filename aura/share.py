"""One machine has the prepared data; the others receive it over the group and check it by hash."""

import hashlib
import os
import socket
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as c10d

from aura import placement
from aura.dataset import Dataset, read, size_of, unused
from aura.errors import UserError
from aura.files import building, explain, put_in_place, remove_abandoned, require_writable_directory, write_json
from aura.processes import boot
from aura.shards import HEADER_BYTES

SEND_BYTES = 32 << 20


def share_out(dist, dataset, data_dir):
    """Give every machine the Dataset that rank 0 has, checked by hash; returns it with the local folder.

    Only ranks whose --data-dir lacks it receive it, one per machine and folder. `dataset` matters on rank 0 alone.
    """
    # The folder may have another name than the data in it: somebody may have renamed it.
    meta, name = dist.broadcast_tree((dataset.meta, dataset.directory.name) if dist.main else None)
    final = Path(data_dir) / name
    have = dist.main or _has_intact(dist, meta, final)
    if not have:
        require_writable_directory(data_dir, "--data-dir")
        with unused(final):
            pass  # or it would be found out once all has been sent
    places = dist.gather_objects((have, _place(data_dir)))
    needy = sorted({place: rank for rank, (has, place) in reversed(list(enumerate(places))) if not has}.values())
    if needy:
        dist.print(f"{placement.told('No tiene', needy, 'los datos')}: se envían {size_of(meta) / 1e6:.1f} MB desde el "
                   "rango 0.")
        # Without local synchronisation NCCL would have every other rank split its communicator, for which it waits for
        # the members, who do not.
        group = c10d.new_group([0, *needy], backend="gloo", timeout=timedelta(seconds=dist.timeout),
                               use_local_synchronization=True)
        if dist.rank in needy:
            _transfer(dist, meta, dataset, final, group)
        dist.run_on_main(lambda: _transfer(dist, meta, dataset, final, group))  # the rest wait as long as it takes
        dist.barrier()
    local = read(final)
    if local is None or local.sha256 != meta["sha256"]:
        raise UserError(f"[rango {dist.rank}] los datos de {str(data_dir)!r} no coinciden con los del rango 0")
    return local


def _has_intact(dist, meta, final):
    """Whether this machine's own copy is the one of rank 0; its first process reads it through to be sure."""
    try:
        local = read(final)
        if local is not None and dist.local_rank == 0:
            local.verify()
    except UserError as problem:
        dist.print_each(f"Aviso: {problem}. Se pide de nuevo al rango 0.")
        return False
    if local is None or local.sha256 == meta["sha256"]:
        return local is not None
    dist.print_each(f"Aviso: en {str(local.directory)!r} hay otros datos preparados: se sustituyen por los del rango 0")
    return False


def _place(data_dir):
    """A text that differs between machines, also copies of one virtual machine, and between folders of one machine."""
    stat = os.stat(data_dir)
    return f"{socket.gethostname()}/{boot()}/{stat.st_dev}/{stat.st_ino}"


def _transfer(dist, meta, dataset, final, group):
    if dist.main:
        for name, sha256 in dataset.files():
            _require_whole(dist, name, sha256, _send_file(dataset.directory / name, group, _skipped(name)))
        return
    try:
        remove_abandoned(final.parent)
        with building(final) as target:
            for name, sha256 in Dataset(target, meta).files():
                _require_whole(dist, name, sha256, _receive_file(target / name, group, _skipped(name)))
            write_json(target / "dataset.json", meta)
            with unused(final):
                put_in_place(target, final)
    except OSError as problem:
        raise UserError(f"[rango {dist.rank}] {str(final.parent)!r}: no se pueden guardar los datos recibidos "
                        f"({explain(problem)}); haga sitio, o indique otra carpeta con --data-dir") from problem


def _skipped(name):
    """Bytes at the beginning of a file that its hash leaves out: a shard's hash is that of its tokens."""
    return HEADER_BYTES if name.endswith(".bin") else 0


def _require_whole(dist, name, sha256, got):
    if got != sha256:
        raise UserError(f"[rango {dist.rank}] {name}: el contenido no coincide con su sha256; prepare los datos de "
                        "nuevo con --prepare")


def _send_file(path, group, skip):
    size = torch.tensor([path.stat().st_size])
    c10d.broadcast(size, src=0, group=group)
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(SEND_BYTES):
            digest.update(chunk[skip:])
            skip = 0
            c10d.broadcast(torch.frombuffer(bytearray(chunk), dtype=torch.uint8), src=0, group=group)
    return digest.hexdigest()


def _receive_file(path, group, skip):
    size = torch.zeros(1, dtype=torch.int64)
    c10d.broadcast(size, src=0, group=group)
    left, digest = int(size), hashlib.sha256()
    with open(path, "wb") as file:
        while left:
            chunk = torch.empty(min(left, SEND_BYTES), dtype=torch.uint8)
            c10d.broadcast(chunk, src=0, group=group)
            data = chunk.numpy().tobytes()
            digest.update(data[skip:])
            skip = 0
            file.write(data)
            left -= len(data)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()
