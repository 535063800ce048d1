"""Control groups: what a container, a job of a scheduler or a service may use of its machine; no torch needed."""

import contextlib
import math
import os
from pathlib import Path

MEMBERSHIP, ROOT = "/proc/self/cgroup", "/sys/fs/cgroup"


def _groups(controller, membership, root):
    """Yield (folder, version) of the control groups with this controller that the process is in, its own first.

    Lines of `membership` are number:controllers:path, with no controllers in version 2 (cgroups(7)).
    """
    try:
        lines = Path(membership).read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = Path(root, controller) if controllers else Path(root)
        inside = Path(path.lstrip("/"))
        for folder in (inside, *inside.parents):  # a container sees its own group at the top, whatever its path says
            yield top / folder, 1 if controllers else 2


def _memory_groups(membership, root):
    """Yield (limit in bytes, folder, version) of this process's control group and those above it that have a limit."""
    for folder, version in _groups("memory", membership, root):
        with contextlib.suppress(OSError):
            text = (folder / ("memory.limit_in_bytes" if version == 1 else "memory.max")).read_text().strip()
            if text.isdecimal():
                yield int(text), folder, version


def _processors(membership, root):
    """Yield the processor time, in cores, that each of the groups that limit it allows."""
    for folder, version in _groups("cpu", membership, root):
        with contextlib.suppress(OSError, ValueError):
            if version == 1:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
            else:
                quota, period = (folder / "cpu.max").read_text().split()
            if quota.isdecimal():  # not max or -1, no limit
                yield int(quota) / int(period)


def cores(membership=MEMBERSHIP, root=ROOT):
    """How many threads this process can keep busy: the cores it may run on, or fewer where its control group or one
    above it limits the processor time (docker run --cpus), rounded up. torch counts those of the machine."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, math.ceil(min(_processors(membership, root), default=allowed))))


def memory_total():
    """Bytes of memory that this process can have: the machine's, or its control group's limit; inf where the system
    does not say."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf
    return min(physical, group_limit())


def group_limit(membership=MEMBERSHIP, root=ROOT):
    """The least memory limit of this process's control group and those above it, in bytes; inf where there is none."""
    return min((limit for limit, _, _ in _memory_groups(membership, root)), default=math.inf)


def group_used(membership=MEMBERSHIP, root=ROOT):
    """Bytes that count against group_limit(), without the file pages that the kernel takes back first; None where
    there is no limit or the group does not say."""
    groups = list(_memory_groups(membership, root))
    if not groups:
        return None
    _, folder, version = min(groups)
    used, pages = ("memory.usage_in_bytes", "total_inactive_file") if version == 1 else ("memory.current",
                                                                                         "inactive_file")
    try:
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, int((folder / used).read_text()) - int(statistics.get(pages, 0)))
    except (OSError, ValueError):
        return None
