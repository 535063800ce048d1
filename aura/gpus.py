"""What NVIDIA cards say of themselves: NVML through nvidia-ml-py (the module pynvml), or what nvidia-smi prints."""

import contextlib
import functools
import importlib
import math
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

# Why a clock is held down, by the bit of NVML's nvmlClocksEventReason* (nvmlClocksThrottleReason* in older versions).
THROTTLES = {0x1: "idle", 0x2: "clocks_setting", 0x4: "sw_power_cap", 0x8: "hw_slowdown", 0x10: "sync_boost",
             0x20: "sw_thermal", 0x40: "hw_thermal", 0x80: "hw_power_brake", 0x100: "display_clocks",
             0x200: "board_limit", 0x400: "reliability"}
SMI_SECONDS = 10
SMI_FIELDS = ("index", "uuid", "name", "utilization.gpu", "memory.used", "memory.total", "temperature.gpu",
              "power.draw", "enforced.power.limit", "clocks.sm", "clocks.max.sm", "clocks_event_reasons.active")
SMI_PROCESSES = ("gpu_uuid", "pid", "used_gpu_memory")
SMI_OLDER = "clocks_throttle_reasons.active"  # what drivers before 535 call the last of SMI_FIELDS
# Of nvml.h: an error, a sensor of temperature, a kind of clock.
GPU_IS_LOST, TEMPERATURE_GPU, CLOCK_SM = 15, 0, 1
# Of Linux (sysfs-bus-pci): the vendor's number of NVIDIA, and how the class of a display controller begins.
PCI_DEVICES, NVIDIA, DISPLAY = Path("/sys/bus/pci/devices"), "0x10de", "0x03"
# What shows a card where there is no such bus: its device, and in WSL2 the library that Windows's driver lends.
SIGNS = ("/dev/nvidia0", "/usr/lib/wsl/lib/libcuda.so.1")


@dataclass(frozen=True)
class Gpu:
    """One card; None where its driver does not say. utilisation: percent. memory: bytes. temperature: degrees Celsius.
    power, power_cap: watts. clock, clock_max: of the multiprocessors, MHz. throttle: why the clock is held down, out of
    THROTTLES. processes: {pid: bytes or None} of those that compute on it."""

    index: int
    uuid: str
    name: str
    utilisation: float | None
    memory_used: int | None
    memory_total: int | None
    temperature: float | None
    power: float | None
    power_cap: float | None
    clock: float | None
    clock_max: float | None
    throttle: list[str] = field(default_factory=list)
    processes: dict[int, int | None] = field(default_factory=dict)


def optional(name):
    """(module, None), or (None, why it cannot be had)."""
    try:
        return importlib.import_module(name), None
    except Exception as problem:  # a broken installation may raise anything
        return None, problem


def present():
    """Whether this machine has a card of NVIDIA's, with a driver that works or without (Linux; elsewhere False)."""
    for device in PCI_DEVICES.glob("*"):
        with contextlib.suppress(OSError):
            if (device / "vendor").read_text().strip() == NVIDIA and (device / "class").read_text().startswith(DISPLAY):
                return True
    return any(map(os.path.exists, SIGNS))


def gpu_reader():
    """(a function: numbers of the cards wanted, None for all -> ([Gpu], [notes]); [notes] on how they are read)."""
    nvml, problem = optional("pynvml")
    if nvml:
        try:
            nvml.nvmlInit()
            return functools.partial(read_nvml, nvml), []
        except Exception as refused:  # no driver, or another version of it
            problem = refused
    program = shutil.which("nvidia-smi")
    for reasons in (SMI_FIELDS[-1], SMI_OLDER) if program else ():
        reader = functools.partial(read_smi, program, reasons)
        if reader(None)[0]:
            return reader, [f"las GPU se leen con nvidia-smi, que cuesta más ({problem}): pip install nvidia-ml-py"]
    notes = []
    if present():
        notes = [f"hay una GPU de NVIDIA que no se puede leer ({problem}): pip install nvidia-ml-py, y compruebe el "
                 "controlador con nvidia-smi"]
    return lambda _: ([], []), notes


class _Unreadable(Exception):
    """A card does not answer; the message says why, in Spanish."""


def _answer(nvml, names, *arguments):
    """The answer of the first of these functions of NVML that its version and this card have; None if they have none.

    Raises _Unreadable when the card is lost.
    """
    for name in names.split():
        try:
            return getattr(nvml, name)(*arguments)
        except Exception as problem:  # NVMLError and its kin, or a pynvml without that function
            if getattr(problem, "value", None) == GPU_IS_LOST:
                raise _Unreadable("se ha perdido (no responde en el bus): mire dmesg y reinicie la máquina") from None
    return None


def _text(value):
    return value.decode(errors="replace") if isinstance(value, bytes) else value or "?"


def _scaled(value, factor):
    return None if value is None else value * factor


def _reasons(mask):
    return [name for bit, name in THROTTLES.items() if (mask or 0) & bit]


def nvml_gpu(nvml, index):
    """The Gpu with NVML's number `index`. nvml: the module pynvml, after nvmlInit. Raises _Unreadable."""
    card = _answer(nvml, "nvmlDeviceGetHandleByIndex", index)
    if card is None:
        raise _Unreadable("NVML no la deja leer")
    ask = functools.partial(_answer, nvml)
    rates, memory = ask("nvmlDeviceGetUtilizationRates", card), ask("nvmlDeviceGetMemoryInfo", card)
    # The last name of each pair is what an older driver or an older pynvml has.
    running = ask("nvmlDeviceGetComputeRunningProcesses nvmlDeviceGetComputeRunningProcesses_v2", card)
    power_cap = ask("nvmlDeviceGetEnforcedPowerLimit nvmlDeviceGetPowerManagementLimit", card)
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons nvmlDeviceGetCurrentClocksThrottleReasons", card)
    return Gpu(
        index=index, uuid=_text(ask("nvmlDeviceGetUUID", card)), name=_text(ask("nvmlDeviceGetName", card)),
        utilisation=rates and rates.gpu, memory_used=memory and memory.used, memory_total=memory and memory.total,
        temperature=ask("nvmlDeviceGetTemperatureV nvmlDeviceGetTemperature", card, TEMPERATURE_GPU),
        power=_scaled(ask("nvmlDeviceGetPowerUsage", card), 1e-3), power_cap=_scaled(power_cap, 1e-3),
        clock=ask("nvmlDeviceGetClockInfo", card, CLOCK_SM),
        clock_max=ask("nvmlDeviceGetMaxClockInfo", card, CLOCK_SM), throttle=_reasons(reasons),
        processes={process.pid: process.usedGpuMemory for process in running or ()})


def read_nvml(nvml, wanted=None):
    """([Gpu], [notes]) of the cards wanted (None: all)."""
    try:
        count = nvml.nvmlDeviceGetCount()
    except Exception as problem:
        return [], [f"NVML ya no responde ({problem}): compruebe el controlador con nvidia-smi"]
    gpus, notes = [], []
    for index in range(count):
        if wanted and index not in wanted:
            continue
        try:
            gpus.append(nvml_gpu(nvml, index))
        except _Unreadable as why:
            notes.append(f"GPU {index}: {why}")
    return gpus, notes


def _number(text):
    """The number of a field of nvidia-smi; None for [N/A], [Not Supported], ERR! and whatever else is not a number."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _bytes(text):
    value = _number(text)
    return None if value is None else int(value * 2**20)


def parse_smi(text, processes=""):
    """([Gpu], [notes]) from what nvidia-smi prints of SMI_FIELDS and, for processes, of SMI_PROCESSES."""
    running = {}
    for line in processes.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == len(SMI_PROCESSES) and fields[1].isdecimal():
            running.setdefault(fields[0], {})[int(fields[1])] = _bytes(fields[2])
    gpus, notes = [], []
    for line in filter(None, map(str.strip, text.splitlines())):
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != len(SMI_FIELDS) or not fields[0].isdecimal():
            notes.append(f"nvidia-smi: {line}")
            continue
        index, uuid, name, use, used, total, *others, reasons = fields
        mask = int(reasons, 16) if re.fullmatch("0x[0-9a-fA-F]+", reasons) else 0
        gpus.append(Gpu(int(index), uuid, name, _number(use), _bytes(used), _bytes(total), *map(_number, others),
                        _reasons(mask), running.get(uuid, {})))
    return gpus, notes


def _smi(program, question):
    try:
        child = subprocess.Popen([program, question, "--format=csv,noheader,nounits"], stdin=subprocess.DEVNULL,
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    except OSError as problem:
        return str(problem)
    try:
        return child.communicate(timeout=SMI_SECONDS)[0]
    except subprocess.TimeoutExpired:
        child.kill()  # and do not wait: not even this ends it inside a driver that hangs
        return f"no respondió en {SMI_SECONDS} s"


def read_smi(program, reasons, wanted=None):
    """([Gpu], [notes]) of the cards wanted (None: all). reasons: what this nvidia-smi calls the last of SMI_FIELDS."""
    gpus, notes = parse_smi(_smi(program, "--query-gpu=" + ",".join((*SMI_FIELDS[:-1], reasons))),
                            _smi(program, "--query-compute-apps=" + ",".join(SMI_PROCESSES)))
    return [gpu for gpu in gpus if not wanted or gpu.index in wanted], notes
