"""Machines for tests: network namespaces on one switch, each with its own address; their links can be made slow, lossy,
closed or cut."""

import functools
import os
import shutil
import subprocess

from tests.support import Process

PORT = 29500


def ip(*words):
    """Run iproute2's ip."""
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


class Switch:
    """Hosts 10.77.0.1, .2, ... on one bridge; `unplug(i)` pulls the cable of host i, and
    `plug(i)` puts it back."""

    def __init__(self, hosts):
        self.tag = f"aura{os.getpid() % 100000}"
        self.hosts = [f"{self.tag}h{i}" for i in range(hosts)]

    def __enter__(self):
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _build(self):
        ip("netns", "add", self.tag)
        ip("-n", self.tag, "link", "add", "br0", "type", "bridge")
        ip("-n", self.tag, "link", "set", "br0", "up")
        for i, host in enumerate(self.hosts):
            ip("netns", "add", host)
            ip("link", "add", "eth0", "netns", host, "type", "veth", "peer", "name", f"p{i}", "netns", self.tag)
            ip("-n", self.tag, "link", "set", f"p{i}", "master", "br0")
            ip("-n", self.tag, "link", "set", f"p{i}", "up")
            ip("-n", host, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "eth0")
            ip("-n", host, "link", "set", "eth0", "up")
            ip("-n", host, "link", "set", "lo", "up")

    def __exit__(self, *_):
        try:
            self._remove()
        except BaseException:  # also a signal's, which may come here: all are taken away before it goes on
            self._remove()
            raise

    def _remove(self):
        for name in (*self.hosts, self.tag):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)

    def unplug(self, host):
        """Take the link of `host` down at the switch: no reset, no goodbye, just silence."""
        ip("-n", self.tag, "link", "set", f"p{host}", "down")

    def plug(self, host):
        """Take the link of `host` up again."""
        ip("-n", self.tag, "link", "set", f"p{host}", "up")

    def limit(self, host, mbit, back=None):
        """Let the link of `host` carry `mbit` Mbit/s from it and `back`, by default the same, to it. What waits longer
        than 50 ms is dropped, as in a switch."""
        for name, device, rate in ((self.hosts[host], "eth0", mbit), (self.tag, f"p{host}", back or mbit)):
            burst = max(16_000, round(rate * 1e6 / 8 * 0.001))  # of a millisecond: less, and timers would limit it
            subprocess.run(["ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate",
                            f"{rate}mbit", "burst", str(burst), "latency", "50ms"], check=True, timeout=20)

    def lose(self, host, percent):
        """Drop `percent` of the packets that arrive at `host`."""
        self._rule(host, f"iifname eth0 numgen random mod 100 < {percent} drop")

    def close(self, host, ports, verdict="drop"):
        """Drop, or with verdict "reject with tcp reset" refuse, what arrives at TCP ports of `host`; ports: of nft."""
        self._rule(host, f"iifname eth0 tcp flags & (syn | ack) == syn tcp dport {ports} {verdict}")

    def _rule(self, host, rule):
        rules = f"add table ip test\nadd chain ip test input {{ type filter hook input priority 0; }}\n" \
                f"add rule ip test input {rule}\n"
        subprocess.run(["ip", "netns", "exec", self.hosts[host], "nft", "-f", "-"], check=True, input=rules, text=True,
                       timeout=20)

    def start(self, stack, command, folders):
        """One process a host, each in its folder."""
        return [stack.enter_context(Process(command, folder, host=host, RANK=rank, LOCAL_RANK=0,
                                            WORLD_SIZE=len(folders), MASTER_ADDR="10.77.0.1", MASTER_PORT=PORT))
                for rank, (host, folder) in enumerate(zip(self.hosts, folders, strict=True))]


@functools.cache
def namespaces_work():
    """Whether this process may make network namespaces."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        return False
    try:
        with Switch(1):
            return True
    except subprocess.CalledProcessError:
        return False


@functools.cache
def limits_work():
    """Whether links can be limited too."""
    if not (namespaces_work() and shutil.which("tc") and shutil.which("nft")):
        return False
    try:
        with Switch(1) as switch:
            switch.limit(0, 50)
            switch.lose(0, 2)
            return True
    except subprocess.CalledProcessError:
        return False
