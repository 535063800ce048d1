"""What must be the same on all ranks, or in order on each: collected on every rank before any group exists."""

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import tempfile

import torch
import torch.distributed as c10d

import aura
from aura import backend, cgroup, compilation, dataset, extension, links, placement, sources
from aura.errors import UserError
from aura.files import explain, nearest

# Those that decide how text becomes tokens and how tensors are stored; the others only draw, count and show.
PACKAGES = ("numpy", "sentencepiece", "safetensors")
GIT_SECONDS = 5


def collect(place, peers, device, folders):
    """A dict of plain values about this process. peers: as the session's before_group gets them. folders: {flag: folder
    that training writes to}."""
    return {**peers[place.rank], "pid": os.getpid(), "device": str(device), "versions": _versions(),
            "code": {"hash": sources.fingerprint(), **_git()}, "kernels": _kernels(),
            "data": _data(folders["--data-dir"]), "gpu": _gpu(device),
            "disks": [_disk(flag, folder) for flag, folder in folders.items()],
            "network": _network(place, peers, device), "processor": _processor()}


def _versions():
    nccl = torch.cuda.nccl.version() if c10d.is_nccl_available() and torch.cuda.is_available() else None
    found = {"Python": ".".join(platform.python_version_tuple()[:2]), "torch": torch.__version__,
             "CUDA": torch.version.cuda, "NCCL": nccl and ".".join(map(str, nccl)), "aura": aura.__version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def _git():
    """The commit and whether files it holds were changed; both None where there is no git or no repository."""
    def git(*words):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return subprocess.run(["git", "-C", compilation.ROOT, *words], capture_output=True, text=True, check=True,
                                  timeout=GIT_SECONDS, stdin=subprocess.DEVNULL).stdout.strip()

    commit = git("rev-parse", "--short=10", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no") if commit else None
    return {"commit": commit, "changed": None if changed is None else bool(changed)}


def _kernels():
    """Whether the fused kernels are built here (True), or can be (True), or why not; builds nothing."""
    try:
        extension.require_buildable()
    except compilation.Unavailable as problem:
        return str(problem)
    return True


def _data(data_dir):
    """The data set prepared last, by the hash it was prepared with and that of the tokenizer as it is now."""
    try:
        last = dataset.latest(data_dir)
        if last is None:
            return None
        tokenizer = last.directory / last.meta["tokenizer"]["file"]
        return {"name": last.meta["name"], "sha256": last.sha256, "bytes": dataset.size_of(last.meta),
                "tokenizer": hashlib.sha256(tokenizer.read_bytes()).hexdigest()}
    except (UserError, OSError) as problem:
        return {"problem": str(problem) if isinstance(problem, UserError) else f"{problem.filename}: "
                f"{explain(problem)}"}


def _gpu(device):
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return {"modelo": properties.name, "memoria": f"{properties.total_memory / 1e9:.0f} GB", "driver": _driver(),
            "count": torch.cuda.device_count()}


def _driver():
    """The version of NVIDIA's driver, None where nvidia-ml-py is missing or does not say."""
    try:
        import pynvml
        pynvml.nvmlInit()
        try:
            return pynvml.nvmlSystemGetDriverVersion()
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # an optional library may raise anything
        return None


def _disk(flag, folder):
    """What is free where `folder` is or will be, and why nothing can be written there; leaves nothing behind."""
    there, problem = nearest(folder), None
    try:
        with tempfile.TemporaryFile(dir=there) as probe:
            probe.write(b"x" * 4096)
            probe.flush()
    except OSError as refused:
        problem = explain(refused)
    return {"flag": flag, "folder": str(folder), "device": there.stat().st_dev, "free": shutil.disk_usage(there).free,
            "problem": problem}


def _network(place, peers, device):
    name = placement.interface_towards(place, peers)
    addresses = placement.interface_addresses()
    alone = len({peer["address"] for peer in peers.values()}) == 1
    variables = ["GLOO_SOCKET_IFNAME", *(["NCCL_SOCKET_IFNAME"] if device.type == "cuda" else [])]
    given = {variable: os.environ[variable] for variable in variables if name and variable in os.environ}
    wrong = [[variable, value, value in addresses] for variable, value in given.items()
             if not _carries(variable, value, name, addresses, alone)]
    return {"interface": name, "wrong": wrong, **(links.interface_facts(name) if name else {})}


def _carries(variable, value, name, addresses, alone):
    """Whether traffic towards the others can go over the interfaces of the variable's `value`, as gloo reads its own,
    whole names that must all be there, or NCCL: names or their beginnings; with ^ all others, with = the whole name. On
    one machine any interface will do."""
    mark, words = value[:1], value.lstrip("^=").split(",")
    wanted = addresses if alone else [name]
    if variable.startswith("GLOO"):
        words = value.split(",")
        return addresses.keys() >= set(words) and any(there in words for there in wanted)
    if mark == "^":
        return not all(there.startswith(tuple(words)) for there in wanted)
    return any(there in words or (mark != "=" and there.startswith(tuple(words))) for there in wanted)


def _processor():
    nice = os.getpriority(os.PRIO_PROCESS, 0) if hasattr(os, "getpriority") else None
    return {"name": backend.device_name(torch.device("cpu")), "cores": cgroup.cores(),
            "threads": torch.get_num_threads(), "nice": nice}
