"""A real Slurm cluster on this machine: munged, one slurmctld and two slurmd, alive for as long as the block.

    with cluster() as slurm:
        job = slurm.submit("distributed.slurm", "--epochs", 1, nodes=2)
        slurm.wait(job, "COMPLETED")

Every daemon is our child, in the foreground, with its files in one short-named folder (a socket's path has at most 107
characters); nothing of the system's own Slurm is read or changed.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from tests.support import environment, free_port

NODES = ("n1", "n2")
DAEMONS = ("munged", "slurmctld", "slurmd")
LIMIT = 120
# config_overrides: the nodes have the processors that are declared, not this machine's. cred_expire: how long a
# requeued job waits before it may start again, 120 s by default. The others: decide and notice within a second.
CONFIG = """
ClusterName=prueba
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
FirstJobId={first_job}
ReturnToService=2
KillWait=60
CompleteWait=0
SlurmdTimeout=30
GresTypes=gpu
{nodes}
PartitionName=todo Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing():
    """Why there can be no cluster here, or None."""
    if os.geteuid() != 0:
        return "a Slurm cluster of our own needs root"
    absent = [name for name in (*DAEMONS, "sbatch", "srun", "scontrol") if not shutil.which(name)]
    return f"not installed: {', '.join(absent)} (apt-get install slurm-wlm munge)" if absent else None


@contextlib.contextmanager
def cluster():
    """Start the daemons, yield the Cluster when both nodes are idle, and leave no process of its behind."""
    folder = Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))
    slurm = Cluster(folder)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.end()
        shutil.rmtree(folder, ignore_errors=True)


class Cluster:
    """Two nodes with sixteen processors and two cards each, in which only Slurm believes. folder: where all files
    are."""

    def __init__(self, folder):
        self.folder, self.daemons = folder, {}

    def start(self):
        """Start every daemon and wait until both nodes are idle."""
        self._configure()
        self._daemon("munged", "--foreground", f"--socket={self.folder}/munge.socket",
                     f"--key-file={self.folder}/munge.key", f"--pid-file={self.folder}/munged.pid",
                     f"--log-file={self.folder}/munged.log", f"--seed-file={self.folder}/munged.seed")
        self._until(lambda: (self.folder / "munge.socket").exists(), "munged has no socket")
        self._daemon("slurmctld", "-D", "-i")
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node, name=node)
        self._until(lambda: self._command("sinfo", "-h", "-o", "%D %T", check=False).split() == ["2", "idle"],
                    "the nodes are not idle")

    def _configure(self):
        self.folder.chmod(0o755)  # munged accepts no other
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o600)
        nodes = "\n".join(f"NodeName={node} NodeAddr=127.0.0.1 Port={free_port()} CPUs=16 Gres=gpu:2" for node in NODES)
        (self.folder / "slurm.conf").write_text(CONFIG.format(
            host=socket.gethostname().split(".")[0], port=free_port(), folder=self.folder, nodes=nodes,
            first_job=random.randrange(1000, 12000)))  # a job's port follows from its number: no neighbour has the same
        (self.folder / "gres.conf").write_text("AutoDetect=off\nName=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def _environment(self, **extra):
        return environment(SLURM_CONF=self.folder / "slurm.conf", PYTHONPATH="", **extra)

    def _daemon(self, program, *words, name=None):
        name = name or program
        with open(self.folder / f"{name}.out", "wb") as log:
            self.daemons[name] = subprocess.Popen([shutil.which(program), *words], env=self._environment(), stdout=log,
                                                  stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)

    def _until(self, done, problem, limit=LIMIT):
        deadline = time.monotonic() + limit
        while not done():
            dead = [name for name, daemon in self.daemons.items() if daemon.poll() is not None]
            if dead or time.monotonic() > deadline:
                logs = "\n".join(f"{path.name}: {path.read_text(errors='replace')[-2000:]}"
                                 for path in self.folder.glob("*.out"))
                raise AssertionError(f"{problem} (ended: {dead})\n{logs}")
            time.sleep(0.1)

    def _command(self, *words, cwd=None, check=True, **extra):
        done = subprocess.run([str(word) for word in words], cwd=cwd, env=self._environment(**extra), text=True,
                              capture_output=True, timeout=LIMIT)
        assert done.returncode == 0 or not check, done.stderr
        return done.stdout

    def submit(self, *words, cwd, **variables):
        """sbatch with these words in the folder `cwd`; returns the job's number as a string."""
        return self._command("sbatch", "--parsable", *words, cwd=cwd, **variables).strip()

    def scontrol(self, *words):
        """Its output."""
        return self._command("scontrol", *words)

    def scancel(self, *words):
        """Cancel or signal a job; one that is over already stays as it is."""
        self._command("scancel", *words, check=False)

    def shown(self, job):
        """What Slurm knows about a job, as a dict of its fields' texts ('JobState', 'ExitCode', 'Restarts'...)."""
        return dict(re.findall(r"(\w+)=(\S*)", self.scontrol("show", "job", "-o", job)))

    def wait(self, job, *states, limit=LIMIT):
        """Wait until the job is in one of these states; returns what is shown of it then."""
        self._until(lambda: self.shown(job)["JobState"] in states, f"job {job} is not {states}", limit)
        return self.shown(job)

    def pids(self, **variables):
        """Every process that was started with this cluster's configuration, and with these variables: daemons, steps
        and what jobs run."""
        variables |= {"SLURM_CONF": self.folder / "slurm.conf"}
        wanted, found = {f"{name}={value}".encode() for name, value in variables.items()}, []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if wanted <= set((folder / "environ").read_bytes().split(b"\0")):
                    found.append(int(folder.name))
        return found

    def end(self):
        """Kill all there is, again until nothing is left: a process may start another just before it dies."""
        deadline = time.monotonic() + LIMIT
        while pids := self.pids():
            assert time.monotonic() < deadline, pids
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for daemon in self.daemons.values():
                daemon.poll()
            time.sleep(0.05)
        for daemon in self.daemons.values():
            daemon.wait(LIMIT)
