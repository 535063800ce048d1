"""What is wrong with a machine or a rank, in one line with the way out: what monitor.py and test_ddp.py tell."""

from dataclasses import dataclass

from aura.words import listed


@dataclass(frozen=True)
class Finding:
    """kind: a short English word for machines (straggler, hung, clock...). who: the ranks, machines or cards it is
    about, in words. text: what was found, with its figures. remedy: what to do. Both in Spanish."""

    kind: str
    who: str
    text: str
    remedy: str

    def line(self):
        """All of it in one line."""
        return f"{self.who}: {self.text}; {self.remedy}"


def named(ranks, peers):
    """'rango 1 (pc2, 10.0.0.2)': ranks by number, with host and address, as several hosts may share a name."""
    machines = {}
    for rank in sorted(ranks):
        peer = peers[rank]
        name = peer["host"] if peer["address"] in (None, peer["host"]) else f"{peer['host']}, {peer['address']}"
        machines.setdefault(name, []).append(str(rank))
    return listed([f"{'rango' if len(numbers) == 1 else 'rangos'} {', '.join(numbers)} ({name})"
                   for name, numbers in machines.items()])
