"""What a machine measures of itself: real processes and counters, recorded GPUs, and sensors that are missing."""

import collections
import contextlib
import dataclasses
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import psutil
import pytest

from aura import cgroup, dashboard, processes, sensors
from aura import gpus as cards
from aura.errors import UserError
from tests.support import ROOT, environment

GIB = 2**30
BURN = "while True: pass"
REST = "import time; time.sleep(60)"


@contextlib.contextmanager
def child(*command):
    """A process that is killed, with its group, when the block ends."""
    process = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                               start_new_session=True, env=environment())
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_watched_process_is_the_one_that_was_meant_until_it_ends():
    with child(sys.executable, "-c", REST) as other:
        assert processes.watch(other.pid, "otro arranque 17") is None
        watched = processes.watch(other.pid, processes.start_of(other.pid))
        try:
            assert not processes.has_ended(watched)
            other.kill()
            assert until(lambda: processes.has_ended(watched))
        finally:
            os.close(watched)


def python(*arguments):
    return child(sys.executable, "-S", *arguments)


def until(test, limit=20):
    """The first true result of `test`."""
    end = time.monotonic() + limit
    while not (found := test()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


@pytest.fixture
def no_psutil(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)


@pytest.fixture
def no_gpus(monkeypatch):
    """A machine without NVML, without nvidia-smi and without a card, but for the files that are put into the list."""
    exists, shown = os.path.exists, []
    monkeypatch.setattr(os.path, "exists", lambda path: path in shown or (path not in cards.SIGNS and exists(path)))
    monkeypatch.setattr(cards, "PCI_DEVICES", Path("/nowhere"))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", "/nowhere")
    return shown


# ---- GPUs -----------------------------------------------------------------------------------------------------------


class NVMLError(Exception):
    def __init__(self, value):
        super().__init__({3: "Not Supported", 9: "Driver Not Loaded", 15: "GPU is lost"}[value])
        self.value = value


CARDS = [("NVIDIA H100 80GB HBM3", 80, 1980, 700)] * 4 + [("NVIDIA A100-SXM4-80GB", 80, 1410, 400)] * 4


class Nvml(types.ModuleType):
    """A module pynvml of a node with eight cards, a handle being the card's number. lost: cards off the bus. absent:
    functions this version does not have. unsupported: those the cards answer with an error."""

    def __init__(self, lost=(), absent=(), unsupported=(), driver=True):
        super().__init__("pynvml")
        self.lost, self.driver, self.NVMLError = lost, driver, NVMLError
        answers = {
            "nvmlDeviceGetName": lambda i: CARDS[i][0].encode() if i % 2 else CARDS[i][0],
            "nvmlDeviceGetUUID": lambda i: f"GPU-{i}",
            "nvmlDeviceGetUtilizationRates": lambda i: types.SimpleNamespace(gpu=90 + i, memory=40),
            "nvmlDeviceGetMemoryInfo": lambda i: types.SimpleNamespace(used=i * GIB, total=CARDS[i][1] * GIB, free=0),
            "nvmlDeviceGetTemperature": lambda i, sensor: 50 + i + 100 * sensor,
            "nvmlDeviceGetTemperatureV": lambda i, sensor: 50 + i + 100 * sensor,
            "nvmlDeviceGetPowerUsage": lambda i: 350_500,
            "nvmlDeviceGetEnforcedPowerLimit": lambda i: CARDS[i][3] * 1000,
            "nvmlDeviceGetPowerManagementLimit": lambda i: CARDS[i][3] * 1000,
            "nvmlDeviceGetClockInfo": lambda i, kind: {0: 1, 1: 1200, 2: 2}[kind],
            "nvmlDeviceGetMaxClockInfo": lambda i, kind: {0: 1, 1: CARDS[i][2], 2: 2}[kind],
            "nvmlDeviceGetCurrentClocksEventReasons": lambda i: 0x44 if i == 2 else 0,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda i: 0x44 if i == 2 else 0,
            "nvmlDeviceGetComputeRunningProcesses": self.running,
            "nvmlDeviceGetComputeRunningProcesses_v2": self.running,
        }
        for name, answer in answers.items():
            if name not in absent:
                setattr(self, name, self.guarded(answer, name in unsupported))

    def running(self, i):
        return [types.SimpleNamespace(pid=1000 + i, usedGpuMemory=None if i == 3 else i * GIB)]

    def guarded(self, answer, unsupported):
        def call(i, *arguments):
            if i in self.lost or unsupported:
                raise NVMLError(15 if i in self.lost else 3)
            return answer(i, *arguments)
        return call

    def nvmlInit(self):
        if not self.driver:
            raise NVMLError(9)

    def nvmlDeviceGetCount(self):
        return len(CARDS)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index


def test_eight_cards_by_nvml():
    gpus, notes = cards.read_nvml(Nvml())
    assert notes == [] and [gpu.index for gpu in gpus] == list(range(8))
    assert gpus[2] == cards.Gpu(2, "GPU-2", "NVIDIA H100 80GB HBM3", 92, 2 * GIB, 80 * GIB, 52, 350.5, 700.0, 1200,
                                  1980, ["sw_power_cap", "hw_thermal"], {1002: 2 * GIB})
    assert gpus[5].name == "NVIDIA A100-SXM4-80GB" and gpus[5].throttle == []
    assert gpus[3].processes == {1003: None}
    assert [gpu.index for gpu in cards.read_nvml(Nvml(), [1, 6])[0]] == [1, 6]


def test_an_older_pynvml_says_the_same():
    older = Nvml(absent=("nvmlDeviceGetTemperatureV", "nvmlDeviceGetCurrentClocksEventReasons",
                         "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetComputeRunningProcesses"))
    assert cards.read_nvml(older) == cards.read_nvml(Nvml())


def test_every_sensor_of_a_card_may_be_missing():
    every = [name for name in vars(Nvml()) if name.startswith("nvmlDeviceGet")]
    assert len(every) == 15
    for lack in ("absent", "unsupported"):
        gpus, notes = cards.read_nvml(Nvml(**{lack: every}))
        assert notes == [] and gpus[7] == cards.Gpu(7, "?", "?", *[None] * 8)


def test_a_lost_card_is_named_and_the_others_are_read():
    gpus, notes = cards.read_nvml(Nvml(lost=[4]))
    assert [gpu.index for gpu in gpus] == [0, 1, 2, 3, 5, 6, 7]
    [note] = notes
    assert note.startswith("GPU 4: se ha perdido")


SMI = """0, GPU-a, NVIDIA H100 80GB HBM3, 98, 71234, 81559, 64, 612.34, 700.00, 1755, 1980, 0x0000000000000004
1, GPU-b, NVIDIA GeForce RTX 3060, [N/A], 10, 12288, 41, [Not Supported], ERR!, 210, [Unknown Error], 0x0000000000000001
2, GPU-c, NVIDIA A100-SXM4-80GB MIG, [N/A], [N/A], [N/A], 30, 60.1, 400.00, 210, 1410, [N/A]
Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the system to recover this GPU
"""
SMI_APPS = "GPU-a, 4242, 71000\nGPU-b, 77, [N/A]\nNo running processes found\n"


def test_cards_by_nvidia_smi():
    gpus, notes = cards.parse_smi(SMI, SMI_APPS)
    assert gpus == [
        cards.Gpu(0, "GPU-a", "NVIDIA H100 80GB HBM3", 98, 71234 * 2**20, 81559 * 2**20, 64, 612.34, 700, 1755, 1980,
                    ["sw_power_cap"], {4242: 71000 * 2**20}),
        cards.Gpu(1, "GPU-b", "NVIDIA GeForce RTX 3060", None, 10 * 2**20, 12288 * 2**20, 41, None, None, 210, None,
                    ["idle"], {77: None}),
        cards.Gpu(2, "GPU-c", "NVIDIA A100-SXM4-80GB MIG", None, None, None, 30, 60.1, 400, 210, 1410)]
    [note] = notes
    assert "GPU is lost" in note


def program(folder, text):
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_nvidia_smi_where_nvml_has_no_driver(tmp_path, monkeypatch):
    """An older one: it does not know the newer name of a field."""
    program(tmp_path, f'[ "$2" = --format=csv,noheader,nounits ] || exit 1\n'
                      f'case "$1" in *event*) echo "Field is not a valid field to query."; exit 2;;\n'
                      f'*compute*) echo "{SMI_APPS.strip()}";;\n*) echo "{SMI.strip()}"; exit 15;; esac')
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(driver=False))
    monkeypatch.setattr(sensors, "pids_apart", lambda: False)
    sample = sensors.Sensors(gpus=[0, 2]).sample()
    assert [(gpu.index, gpu.processes) for gpu in sample.gpus] == [(0, {4242: 71000 * 2**20}), (2, {})]
    assert "nvidia-smi" in sample.notes[0] and "Driver Not Loaded" in sample.notes[0] and "lost" in sample.notes[1]


def test_an_nvidia_smi_that_hangs_or_breaks_is_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr(cards, "SMI_SECONDS", 0.1)
    program(tmp_path, "exec sleep 60")
    assert cards.read_smi(str(tmp_path / "nvidia-smi"), "x") == ([], ["nvidia-smi: no respondió en 0.1 s"])
    assert cards.read_smi(str(tmp_path), "x")[0] == []


def test_a_card_that_cannot_be_read_is_a_note_and_a_machine_without_one_is_not(no_gpus):
    assert cards.gpu_reader()[1] == []
    no_gpus.append("/dev/nvidia0")
    read, [note] = cards.gpu_reader()
    assert read(None) == ([], []) and "nvidia-ml-py" in note


@pytest.mark.parametrize("vendor, kind, found", [
    ("0x10de", "0x030200", True), ("0x10de", "0x030000", True), ("0x10de", "0x040300", False),
    ("0x1002", "0x030000", False), ("0x10de", None, False)])
def test_a_card_without_a_driver_is_seen_on_the_bus_and_its_sound_or_another_s_is_none(no_gpus, monkeypatch, tmp_path,
                                                                                    vendor, kind, found):
    for name, written in (("vendor", vendor), ("class", kind)):
        (tmp_path / "0000:01:00.0").mkdir(exist_ok=True)
        if written:
            (tmp_path / "0000:01:00.0" / name).write_text(f"{written}\n")
    monkeypatch.setattr(cards, "PCI_DEVICES", tmp_path)
    assert cards.present() == found and bool(cards.gpu_reader()[1]) == found
    no_gpus.append("/usr/lib/wsl/lib/libcuda.so.1")
    assert cards.present()


def test_a_card_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(lost=[3]))
    assert [gpu.index for gpu in sensors.Sensors(gpus=[2, 5]).sample().gpus] == [2, 5]
    with pytest.raises(UserError, match="no hay GPU 8: indique alguna de 0, 1, 2, 4"):
        sensors.Sensors(gpus=[1, 8])
    with pytest.raises(UserError, match="no hay GPU 3: .*GPU 3: se ha perdido"):
        sensors.Sensors(gpus=[3])


def test_in_a_container_pids_that_are_not_seen_here_are_left_out(monkeypatch):
    nvml = Nvml()
    nvml.running = lambda i: []
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda i: [
        types.SimpleNamespace(pid=pid, usedGpuMemory=1) for pid in (os.getpid(), 2**22 + 1)]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    for apart, seen in ((True, {os.getpid(): 1}), (False, {os.getpid(): 1, 2**22 + 1: 1})):
        monkeypatch.setattr(sensors, "pids_apart", lambda apart=apart: apart)
        assert sensors.Sensors(gpus=[0]).sample().gpus[0].processes == seen


# ---- The machine ----------------------------------------------------------------------------------------------------


def check_machine(sample):
    assert sample.cores == os.cpu_count() and sample.load >= 0
    assert 0 < sample.memory_used < sample.memory_total and 0 <= sample.swap_used <= sample.swap_total
    assert 0 < sample.disk_free <= sample.disk_total


def test_this_machine_and_the_round_trip(no_gpus, tmp_path):
    watch = sensors.Sensors(disk=tmp_path / "not" / "yet")
    first = watch.sample()
    assert first.cpu is None and first.links == [] and not any(process.cpu for process in first.processes)
    time.sleep(0.1)
    second = watch.sample(ours=[os.getpid()])
    check_machine(second)
    assert 0 <= second.cpu <= 100 and second.time - first.time >= 0.1 and second.notes == []
    assert [process for process in second.processes if process.pid == os.getpid()][0].ours
    assert all(link.received >= 0 and link.interface != "lo" for link in second.links)
    full = dataclasses.replace(second, gpus=cards.read_nvml(Nvml())[0], notes=["ñ"])
    line = dashboard.record(full, [], [])
    assert "\n" not in line and sensors.typed(json.loads(line)["sample"], sensors.Sample) == full


def test_the_processors_share_is_of_the_time_between_two_calls(no_gpus, monkeypatch):
    watch, times = sensors.Sensors(), iter([(10.0, 100.0), (14.0, 110.0), (14.0, 110.0), (15.0, 111.0)])
    monkeypatch.setattr(sensors, "_cpu_times", lambda _: next(times))
    assert [watch.processor() for _ in range(4)] == [None, 40.0, None, 100.0]


def test_waiting_for_disks_is_idle_and_the_time_of_guests_is_counted_once():
    kinds = collections.namedtuple("Times", "user system idle iowait guest guest_nice")
    times = kinds(40.0, 10.0, 30.0, 20.0, 15.0, 5.0)  # those of guests are in user time as well
    assert sensors._cpu_times(types.SimpleNamespace(cpu_times=lambda: times)) == (50.0, 100.0)


def test_without_psutil_the_rest_is_there(no_gpus, no_psutil):
    watch = sensors.Sensors()
    watch.sample()
    sample = watch.sample(ours=[os.getpid()])
    check_machine(sample)
    assert sample.cpu is None and sample.links == [] and [process.pid for process in sample.processes if process.ours]
    [note] = sample.notes
    assert "pip install psutil" in note


def test_bytes_over_loopback_are_counted_and_a_new_interface_is_not_negative(no_gpus, monkeypatch):
    monkeypatch.setattr(sensors, "LOOPBACK", ())
    watch = sensors.Sensors()
    watch.links()
    a, b = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with a, b:
        b.bind(("127.0.0.1", 0))
        for _ in range(100):
            a.sendto(bytes(1000), b.getsockname())
    begin = watch._clock
    [link] = [link for link in watch.links() if link.interface == "lo"]
    assert link.received >= 100_000 / (watch._clock - begin) - 1
    counts = iter([{"eth0": (5, 5)}, {"eth0": (9, 1), "wlan0": (7, 7)}, {"eth0": (10, 2)}])
    monkeypatch.setattr(sensors, "_counters", lambda *_: next(counts))
    watch.links()
    assert watch.links() == [] and [link.interface for link in watch.links()] == ["eth0"]


def test_a_control_group_with_less_memory_is_what_counts(no_gpus, monkeypatch, tmp_path):
    membership, folder = tmp_path / "cgroup", tmp_path / "root" / "job"
    folder.mkdir(parents=True)
    membership.write_text("0::/job\n")
    (folder / "memory.max").write_text("64000000\n")
    (folder / "memory.current").write_text("50000000\n")
    (folder / "memory.stat").write_text("anon 1\ninactive_file 20000000\n")
    for name in ("group_limit", "group_used"):
        answer = getattr(cgroup, name)(membership, tmp_path / "root")
        monkeypatch.setattr(sensors, name, lambda answer=answer: answer)
    assert sensors.Sensors().memory()[:2] == (30_000_000, 64_000_000)
    assert cgroup.group_used(tmp_path / "missing") is None and cgroup.group_limit(tmp_path / "missing") == math.inf
    (folder / "memory.stat").unlink()
    assert cgroup.group_used(membership, tmp_path / "root") is None


@pytest.mark.parametrize("limit", [math.inf, 2**63 - 4096])  # version 1 says the latter where there is none
def test_memory_that_files_hold_is_free_and_a_limit_above_the_machine_s_is_none(no_gpus, monkeypatch, tmp_path, limit):
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 700 kB\nHugePages_Total: 0\n"
                                      "SwapTotal: 50 kB\nSwapFree: 20 kB\n")
    monkeypatch.setattr(sensors, "Path", lambda _: tmp_path / "meminfo")
    monkeypatch.setattr(sensors, "group_limit", lambda: limit)
    assert sensors.Sensors().memory() == (300 * 1024, 1000 * 1024, 30 * 1024, 50 * 1024)


def test_of_control_groups_within_each_other_the_one_with_least_memory_counts(tmp_path):
    (tmp_path / "cgroup").write_text("5:memory:/job/step\n")
    for folder, limit, used in (("job", 32_000_000, 31_000_000), ("job/step", 64_000_000, 9_000_000)):
        inside = tmp_path / "memory" / folder
        inside.mkdir(parents=True)
        (inside / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (inside / "memory.usage_in_bytes").write_text(f"{used}\n")
        (inside / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 2000000\n")
    assert cgroup.group_limit(tmp_path / "cgroup", tmp_path) == 32_000_000
    assert cgroup.group_used(tmp_path / "cgroup", tmp_path) == 29_000_000


@pytest.mark.parametrize("line, files, limit", [
    ("0::/job", {"job/cpu.max": "250000 100000"}, 3), ("0::/job", {"job/cpu.max": "20000 100000"}, 1),
    ("0::/job", {"job/cpu.max": "max 100000"}, 64), ("0::/job/step", {"job/cpu.max": "200000 100000"}, 2),
    ("0::/job", {"job/cpu.max": "9900000 100000"}, 64), ("0::/job", {"job/cpu.max": ""}, 64),
    ("4:cpu,cpuacct:/job", {"cpu/job/cpu.cfs_quota_us": "150000", "cpu/job/cpu.cfs_period_us": "50000"}, 3),
    ("4:cpu,cpuacct:/job", {"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "50000"}, 64),
    ("4:cpuset:/job", {"cpu/job/cpu.cfs_quota_us": "1", "cpu/job/cpu.cfs_period_us": "1"}, 64),
    ("4:cpuacct:/job", {"cpuacct/job/cpu.cfs_quota_us": "1", "cpuacct/job/cpu.cfs_period_us": "1"}, 64)])
def test_a_control_group_with_less_processor_time_has_fewer_cores(tmp_path, monkeypatch, line, files, limit):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    (tmp_path / "cgroup").write_text(line + "\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert cgroup.cores(tmp_path / "cgroup", tmp_path) == limit
    assert cgroup.cores(tmp_path / "missing", tmp_path) == 64


@pytest.fixture
def half_a_core():
    """The folder of a control group of this machine that may use one half of a core."""
    folder = Path(cgroup.ROOT, "cpu", f"aura-{os.getpid()}")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("needs root and control groups of version 1")
    try:
        (folder / "cpu.cfs_quota_us").write_text("50000")
        yield folder
    finally:
        folder.rmdir()


def test_threads_of_a_process_with_half_a_core(half_a_core):
    said = "import torch; from aura import backend, cgroup; backend.limit_threads(); " \
           "print(cgroup.cores(), torch.get_num_threads())"
    free = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(["sh", "-c", 'echo $$ > "$1/cgroup.procs"; exec "$2" -c "$3"', "-", half_a_core,
                           sys.executable, said], capture_output=True, text=True, timeout=60, env=free, cwd=ROOT,
                          check=True)
    assert done.stdout.split() == ["1", "1"]


@pytest.mark.parametrize("values", [[], "nada", {}, {"time": 1}, None, 7])
def test_what_is_no_sample_is_refused(values):
    with pytest.raises((TypeError, KeyError, ValueError)):
        sensors.typed(values, sensors.Sample)


def test_a_value_of_another_kind_is_refused(no_gpus):
    values = {**dataclasses.asdict(sensors.Sensors().sample()), "cores": "x"}
    with pytest.raises(TypeError):
        sensors.typed(values, sensors.Sample)


# ---- Processes ------------------------------------------------------------------------------------------------------


def test_processes_of_the_run_and_whoever_is_busy(tmp_path, monkeypatch):
    """A run with its launcher and its child, one of our scripts, a stopped one, a foreign busy one; by both readers."""
    worker = f"import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', {REST!r}]).wait()"
    (tmp_path / "train_tensordock.py").write_text(REST)
    (tmp_path / "torchrun").write_text(f"import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', "
                                       f"{worker!r}]).wait()")
    with (python(tmp_path / "torchrun") as launcher, python(tmp_path / "train_tensordock.py") as script,
          python("-c", BURN) as busy, python("-c", REST) as held, child("sleep", 60) as idle):
        tree = until(lambda: len(found := psutil.Process(launcher.pid).children(recursive=True)) == 2 and found)
        rank = next(each.pid for each in tree if each.ppid() == launcher.pid)
        leaf = next(each.pid for each in tree if each.pid != rank)
        held.send_signal(signal.SIGSTOP)
        until(lambda: psutil.Process(held.pid).status() == "stopped")
        readers = [processes.Processes(psutil)]
        with monkeypatch.context() as patch:
            patch.setattr(os.path, "exists", lambda path: False)
            readers.append(processes.Processes(psutil))
        monkeypatch.setattr(processes, "BUSY", 2)  # on a machine where others compute as well

        def now():
            return sum(psutil.Process(busy.pid).cpu_times()[:2]), time.monotonic()

        begin = now()
        for reader in readers:
            reader.sample()
        after_first = now()
        until(lambda: now()[0] - after_first[0] >= 0.3)
        before_second = now()
        for reader in readers:
            found = {activity.pid: activity for activity in reader.sample(ours=[rank, held.pid, 2**22 + 1])}
            end = now()
            assert idle.pid not in found and os.getpid() not in found and not found[busy.pid].ours
            least, most = before_second[0] - after_first[0] - 0.02, end[0] - begin[0] + 0.02  # two ticks
            assert 100 * least / (end[1] - begin[1]) <= found[busy.pid].cpu
            assert found[busy.pid].cpu <= 100 * most / (before_second[1] - after_first[1])
            assert all(found[pid].ours for pid in (launcher.pid, rank, leaf, script.pid, held.pid))
            assert found[launcher.pid].name == "torchrun" and found[script.pid].name == "train_tensordock.py"
            assert found[held.pid].status == "stopped" and found[held.pid].cpu == 0
            assert found[rank].memory > 2**20
            found = {activity.pid for activity in reader.sample(ours=[launcher.pid, os.getppid()]) if activity.ours}
            assert {launcher.pid, rank, leaf} <= found and os.getpid() not in found


def test_another_process_of_the_same_pid_begins_anew():
    reader = processes.Processes(None)
    stats = iter([processes._Stat(started, 1, "x", "running", cpu, 1) for started, cpu in ((5, 1), (5, 9), (6, 99))])
    reader._pids, reader._read, reader._stat = lambda: [2**22 + 1], lambda pid: next(stats), lambda stat: stat
    rates = [activity.cpu for _ in range(3) for activity in reader.sample(ours=[2**22 + 1])]
    assert rates[0] is None and rates[1] > 0 and rates[2] is None


def test_the_time_of_a_process_is_that_of_its_user_and_of_the_system():
    reader, end = processes.Processes(None), time.process_time() + 0.1
    while time.process_time() < end:
        os.listdir("/proc")
    before = time.process_time()
    reader.sample()
    assert before - 0.03 <= reader.known[os.getpid()].stat.cpu <= time.process_time() + 0.03


def test_only_the_living_are_kept_and_a_new_program_has_a_new_name(tmp_path):
    (tmp_path / "test_ddp.py").write_text(REST)
    reader = processes.Processes(None)
    run = f"while [ ! -e {tmp_path / 'go'} ]; do sleep 0.02; done; exec {sys.executable} -S {tmp_path / 'test_ddp.py'}"
    with child("/bin/sh", "-c", run) as changing:
        until(lambda: reader.sample() is not None and reader.known[changing.pid].name == "sh")
        (tmp_path / "go").touch()
        until(lambda: any(activity.pid == changing.pid and activity.name == "test_ddp.py" and activity.ours
                          for activity in reader.sample()))
    reader.sample()
    assert changing.pid not in reader.known


@pytest.mark.parametrize(("command", "expected"), [
    ("python3 -X dev -u train_gpt2_spanish.py --max-steps 5", ("train_gpt2_spanish.py", True, True)),
    ("/usr/bin/python3.12 -m torch.distributed.run test_ddp.py", ("torch.distributed.run", True, True)),
    ("python -m torch.distributed.run other.py", ("torch.distributed.run", False, True)),
    ("python /opt/bin/torchrun --nproc_per_node 2 other.py", ("torchrun", False, True)),
    ("python -m aura.generate --help", ("aura.generate", True, True)),
    ("python other.py", ("other.py", False, False)),
    ("python", ("comm", False, False)),
    ("vim train_gpt2_spanish.py", ("comm", False, False)),
    ("", ("comm", False, False)),
])
def test_a_command_line_tells_whose_a_process_is(command, expected):
    assert processes.describe(command.split(), b"comm") == expected


def test_the_benchmark_says_what_monitor_costs(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    import monitor_cost

    result = tmp_path / "cost.json"
    monitor_cost.main(["--interval", "0.1", "--samples", "2", "--repeats", "1", "--processes", "20",
                       "--json", str(result)])
    result = json.loads(result.read_text())
    assert {row["what"] for row in result["rows"]} == set(monitor_cost.PARTS)
    assert result["processes"] > 20 and 0 < result["run"]["share"] < 2
    assert 0 < result["run"]["resident_first"] <= result["run"]["resident_most"]
