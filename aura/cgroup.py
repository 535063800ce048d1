"""Control groups: what a container, a job of a scheduler or a service may use of its machine; no torch needed."""

import math
from pathlib import Path

MEMBERSHIP, ROOT = "/proc/self/cgroup", "/sys/fs/cgroup"


def _memory_groups(membership, root):
    """Yield (limit in bytes, folder, version) of this process's control group and those above it that have a limit.

    Lines of `membership` are number:controllers:path, with no controllers in version 2 (cgroups(7)).
    """
    try:
        lines = Path(membership).read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, name = (Path(root, "memory"), "memory.limit_in_bytes") if controllers else (Path(root), "memory.max")
        inside = Path(path.lstrip("/"))
        for folder in (inside, *inside.parents):  # a container sees its own group at the top, whatever its path says
            try:
                text = (top / folder / name).read_text().strip()
            except OSError:
                continue
            if text.isdecimal():
                yield int(text), top / folder, 1 if controllers else 2


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
