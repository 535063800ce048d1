"""What is wrong with a machine or a run, judged from what was measured: no clock, no file and no sensor in here."""

import statistics
import time
from dataclasses import dataclass

from aura.clock import WINDOWS
from aura.findings import Finding
from aura.words import ago, counted, span

PHASES = {"start": "inicio", "compute": "cálculo", "data": "datos", "communication": "comunicación",
          "save": "guardado", "evaluate": "validación", "end": "fin"}
WAITING = ("compute", "communication")  # the phases in which a rank waits for the others
BRAKES = {"sw_power_cap": "límite de potencia", "hw_slowdown": "freno del hardware", "sw_thermal": "temperatura",
          "hw_thermal": "temperatura", "hw_power_brake": "alimentación", "board_limit": "límite de la placa",
          "reliability": "tensión"}  # what holds a clock down against its will, of gpus.THROTTLES
STOPPED, DEAD = ("stopped", "tracing-stop"), ("", "zombie", "dead")  # psutil's words; "": there is no such process


@dataclass(frozen=True)
class Limits:
    """Every threshold of the rules below."""

    windows: int = WINDOWS  # windows or samples that are looked at
    hits: int = 5  # of them that must show a trouble that comes and goes: more than half
    straggler: float = 1.15  # times the median compute time; less is the difference between two cards of one model
    data_share: float = 0.20  # of a step spent waiting for data; a loader that keeps up is near 0
    hang_seconds: float = 30.0  # without progress; shorter pauses come from a disk or a network that catches its breath
    hang_steps: float = 10.0  # the same in steps, for models whose step takes many seconds
    save_seconds: float = 300.0  # the same while saving: 30 GB at 100 MB/s
    evaluate_seconds: float = 1800.0  # the same while validating, which on a CPU takes long and reports nothing
    start_seconds: float = 600.0  # the same before the first window: data are prepared, kernels compiled
    silent_seconds: float = 5.0  # without a beat, which comes every second, until a process of this machine is examined
    gone_seconds: float = 10.0  # without a beat of another machine, whose beats travel
    imbalance: float = 1.25  # times the median of the ranks' GPU memory
    imbalance_share: float = 0.10  # of the card that it must be above the median; small models differ by chance
    vram: float = 0.95  # of the card; the rest is for fragments of the allocator's cache and a longer batch
    ram: float = 0.05  # of the machine still available; below, the kernel ends processes
    disk_bytes: float = 5e9  # free for checkpoints. Full is below this and below the share: a large array with 2 % free
    disk_share: float = 0.02  # has room for years, a small volume is half empty with less than 5 GB
    clock: float = 0.70  # of the highest, under the power cap; a card under load always runs above that
    idle: float = 10.0  # percent of utilisation; a card that computes or waits for others shows 100
    foreign_cpu: float = 50.0  # percent of a core that somebody else's program takes
    busy_cpu: float = 90.0  # percent of all cores; from there on, what such a program takes is missing elsewhere


LIMITS = Limits()


def diagnose(samples, beats, now):
    """[Finding] of the machine and the run as they are at `now` (Unix time), the gravest first.

    samples: the last Samples of this machine, oldest first; at least one. beats: for each of them the list of Beats
    read then, [] where no run is watched.
    """
    samples, beats = samples[-LIMITS.windows:], beats[-LIMITS.windows:]
    run = Run(samples[-1], beats[-1], now)
    blocked = [*_gone(run), *_stopped(run)] or _hung(run, beats)
    # A run that stands still has no pace, and its cards are idle for that reason.
    pace = [] if blocked else [*_stragglers(run), *_data_bound(run), *_idle(run, samples, beats)]
    return [*_failed(run), *blocked, *pace, *_foreign(run, samples), *_throttled(run, samples),
            *_full_cards(run), *_imbalance(run), *_full_machine(run.sample)]


def is_local(beat, sample):
    """Whether the rank runs on the machine of `sample`, so that its cards are those seen there."""
    return beat.received is None and beat.host == sample.host


def is_seen(beat, sample):
    """Whether the rank's pid is the one seen at `sample`: it runs on that machine, and in the same pid namespace."""
    return is_local(beat, sample) and beat.pids == sample.pids


def machine_names(beats):
    """{rank: host}, with the address where two machines have one name."""
    addresses = {}
    for beat in beats:
        addresses.setdefault(beat.host, set()).add(beat.address)
    return {beat.rank: beat.host if len(addresses[beat.host]) == 1 else f"{beat.host}, {beat.address}"
            for beat in beats}


class Rank:
    """One rank that has not ended. silent, stuck: seconds since it was heard of and since it got any further. status:
    of its process in psutil's words, "" when there is none, None where it cannot be seen."""

    def __init__(self, beat, local, silent, status):
        self.beat, self.local, self.silent, self.status = beat, local, silent, status
        self.stuck = beat.phase_s + silent


class Run:
    """What the beats say at one moment. ranks: those that have not ended; ended: beats of the others; lost: ranks of
    which nothing is known any more; alive: the rest."""

    def __init__(self, sample, beats, now):
        self.sample, self.now, self.names = sample, now, machine_names(beats)
        self.ended = [beat for beat in beats if beat.ended is not None]
        processes = {process.pid: process for process in sample.processes}
        # Rank 0 collects the beats of other machines: while it is silent itself, their silence means nothing.
        collected = next((beat.time for beat in beats if beat.rank == 0 and is_local(beat, sample)), now)
        self.ranks = []
        for beat in beats:
            if beat.ended is None:
                local = is_local(beat, sample)
                silent = max(0.0, beat.age(min(now, collected) if beat.received is not None else now))
                known = processes and is_seen(beat, sample)
                self.ranks.append(Rank(beat, local, silent, _status(beat, processes) if known else None))
        self.lost = [rank for rank in self.ranks if self._is_lost(rank)]
        self.alive = [rank for rank in self.ranks if rank not in self.lost]
        self.whole = bool(beats) and len(beats) == beats[0].world_size

    def _is_lost(self, rank):
        if rank.status is not None:
            return rank.status in DEAD and rank.silent > LIMITS.silent_seconds
        return rank.silent > LIMITS.gone_seconds

    def who(self, ranks):
        """'rango 3 (nodo2)', 'rangos 0-2, 5 (nodo1, nodo2)'."""
        numbers = sorted(rank.beat.rank for rank in ranks)
        places = dict.fromkeys(self.names[number] for number in numbers)
        noun = "rango" if len(numbers) == 1 else "rangos"
        return f"{noun} {_ranges(numbers)} ({', '.join(places)})"

    def since(self, seconds):
        """'hace 41 s (desde las 23:10:05)'."""
        clock = time.strftime("%H:%M:%S", time.localtime(self.now - seconds))
        return f"hace {ago(seconds)} (desde las {clock})"


def _status(beat, processes):
    """The status of the rank's process, "" where it is gone. processes: {pid: Activity} of its machine; one of its
    pid that began at another time is another process."""
    process = processes.get(beat.pid)
    if process is None or None not in (beat.started, process.started) and beat.started != process.started:
        return ""
    return process.status


def _ranges(numbers):
    """'0-2, 5' for [0, 1, 2, 5]."""
    runs = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


# --- the run: who is missing, who keeps the others waiting -----------------------------------------------------------
def _at(beat):
    return f"paso {beat.step} de {beat.steps}, fase {PHASES.get(beat.phase, beat.phase)}"


def _failed(run):
    """One finding for each error with which ranks have ended."""
    found = {}
    for beat in run.ended:
        if beat.failed:
            found.setdefault(beat.ended, []).append(Rank(beat, False, 0.0, None))
    return [Finding("failed", run.who(ranks), f"fin con un error en el paso {ranks[0].beat.step}: {text}",
                    "corrija lo que diga el final de su registro y repita la orden, que sigue donde estaba")
            for text, ranks in found.items()]


def _gone(run):
    """One finding for each machine that lost ranks."""
    found = []
    for name in dict.fromkeys(run.names[rank.beat.rank] for rank in run.lost):
        lost = [rank for rank in run.lost if run.names[rank.beat.rank] == name]
        silent = run.since(min(rank.silent for rank in lost))
        if lost[0].status is not None:
            pids = ", ".join(str(rank.beat.pid) for rank in lost)
            dead = "su proceso ha muerto" if len(lost) == 1 else "sus procesos han muerto"
            text = f"{dead} (pid {pids}): sin noticias desde {silent}, {_at(lost[0].beat)}"
            remedy = ("mire el final de su registro y, si faltó memoria, dmesg; la misma orden sigue desde el último "
                      "punto de control")
        elif lost[0].local or any(run.names[rank.beat.rank] == name for rank in run.alive):
            text = f"sin noticias desde {silent}, {_at(lost[0].beat)}: su proceso ha muerto o está detenido"
            remedy = f"mire en esa máquina qué ha sido del proceso {lost[0].beat.pid}"
        else:
            text = (f"sin noticias desde {silent}, {_at(lost[0].beat)}: la máquina está apagada, sin red o su proceso "
                    "ha muerto o está detenido")
            remedy = f"compruebe desde aquí que responde: ping {lost[0].beat.address or lost[0].beat.host}"
        found.append(Finding("gone", run.who(lost), text, remedy))
    return found


def _stopped(run):
    """One finding for each process of this machine that is suspended, which is certain long before hang_seconds."""
    return [Finding("hung", run.who([rank]), f"su proceso está detenido (pid {rank.beat.pid}) desde "
                    f"{run.since(rank.silent)}, {_at(rank.beat)}", f"reanúdelo con kill -CONT {rank.beat.pid}")
            for rank in run.alive
            if rank.local and rank.status in STOPPED and rank.silent > LIMITS.silent_seconds]


def _hung(run, beats):
    """One finding for the ranks that keep all from going on, none for those that only wait for them."""
    if not run.alive or any(rank.stuck <= _patience(rank) for rank in run.alive):
        return []
    culprits, why = _culprits(run, beats)
    first = culprits[0]
    text = f"sin avanzar desde {run.since(min(rank.stuck for rank in culprits))}, {_at(first.beat)}"
    if len(culprits) > 1 and len({_at(rank.beat) for rank in culprits}) > 1:
        text += " (el primero de ellos)"
    where = f"py-spy dump --pid {first.beat.pid}" + ("" if first.local else f" en {run.names[first.beat.rank]}")
    return [Finding("hung", run.who(culprits), text + why, f"para ver dónde está: {where}")]


def _patience(rank):
    """Seconds without progress after which a rank is taken to hang."""
    if rank.beat.phase == "start" or not rank.beat.windows:
        return LIMITS.start_seconds
    known = LIMITS.hang_steps * statistics.median(window.seconds for window in rank.beat.windows)
    least = {"save": LIMITS.save_seconds, "evaluate": LIMITS.evaluate_seconds}
    return max(least.get(rank.beat.phase, LIMITS.hang_seconds), known)


def _culprits(run, beats):
    """(the ranks that the others wait for, Spanish for why it is they); all ranks where nothing tells them apart."""
    ranks, top = run.alive, max(rank.beat.step for rank in run.alive)
    silent = [rank for rank in ranks if rank.silent > LIMITS.silent_seconds]
    if len(silent) == len(ranks):
        return ranks, "; existen, pero no escriben sus latidos: ¿está lleno el disco de --log-dir?"
    suspects = [
        (silent, "; su proceso existe pero no da señales, y los demás sí"),
        ([rank for rank in ranks if rank.beat.phase not in WAITING], "; los demás esperan"),
        ([rank for rank in ranks if rank.beat.step < top], f"; los demás están en el paso {top} y esperan"),
        ([rank for rank in ranks if rank.beat.phase != "communication"], "; los demás esperan en la comunicación"),
        ([rank for rank in ranks if _burns(rank, beats)], "; es quien usa el procesador, y los demás esperan")]
    for culprits, why in suspects:
        if 0 < len(culprits) < len(ranks):
            return culprits, why
    if run.ended:
        gone = ", ".join(f"el rango {beat.rank} terminó ({beat.ended[:80]})" for beat in run.ended[:3])
        return ranks, f"; esperan a quien ya no está: {gone}"
    if not run.whole:
        return ranks, "; esperan a un rango de otra máquina: mire con --cluster en la del rango 0"
    return ranks, "" if len(ranks) == 1 else "; todos esperan, y nada distingue a uno de otro"


def _burns(rank, beats):
    """Whether a rank on a CPU has used more than half a core since it got stuck; one that waits for others sleeps."""
    same = [beat for read in beats for beat in read if beat.rank == rank.beat.rank and beat.run == rank.beat.run
            and (beat.step, beat.phase) == (rank.beat.step, rank.beat.phase)]
    seconds = rank.beat.time - same[0].time
    return rank.beat.device.startswith("cpu") and seconds > 0 and (rank.beat.cpu_s - same[0].cpu_s) / seconds > 0.5


# --- the run: who is slow, and why -----------------------------------------------------------------------------------
def stragglers(times):
    """The ranks that are slower than the others. times: {rank: [seconds of each of the last windows]}; a rank with
    fewer windows than the rule looks at is not judged."""
    return {rank for rank, hits in _slow_windows(times).items() if hits >= LIMITS.hits}


def _slow_windows(times):
    """{rank: in how many of its last windows it took more than LIMITS.straggler times the median}."""
    judged = {rank: list(seconds)[-LIMITS.windows:] for rank, seconds in times.items()
              if len(seconds) >= LIMITS.windows}
    medians = [statistics.median(column) for column in zip(*judged.values(), strict=True)]
    return {rank: sum(own > LIMITS.straggler * middle for own, middle in zip(seconds, medians, strict=True))
            for rank, seconds in judged.items()}


def _stragglers(run):
    by_rank = {rank.beat.rank: rank for rank in run.alive}
    times = {number: [window.compute for window in rank.beat.windows] for number, rank in by_rank.items()}
    hits, windows = _slow_windows(times), LIMITS.windows
    usual = {number: statistics.median(times[number][-windows:]) for number in hits}
    found = []
    for number in sorted(stragglers(times)):
        middle = statistics.median(usual.values())
        ratio = f" ({usual[number] / middle:.2f} veces)" if middle else ""
        found.append(Finding(
            "straggler", run.who([by_rank[number]]),
            f"calcula en {span(usual[number])} por paso; la mediana es {span(middle)}{ratio} en {hits[number]} de "
            f"{windows} ventanas", "mire en su máquina qué más se ejecuta, la temperatura y el reloj; todos tienen "
            "que esperarlo"))
    return found


def _data_bound(run):
    slow = [(*waiting, rank) for rank in run.alive if (waiting := _waits_for_data(rank))]
    if not slow:
        return []
    _, data, step, hits, _ = max(slow, key=lambda one: one[0])
    ranks = [one[-1] for one in slow]
    everyone = len(ranks) > 1 and len(ranks) == len(run.alive) and run.whole
    return [Finding("data-bound", "todos los rangos" if everyone else run.who(ranks),
                    f"en espera de los datos, {span(data)} de cada paso de {span(step)} ({100 * data / step:.0f} %) en "
                    f"{hits} de {LIMITS.windows} ventanas" + (", el que más espera" if len(ranks) > 1 else ""),
                    "ponga los datos en un disco local y mire quién más lo usa")]


def _waits_for_data(rank):
    """(share of a step, seconds of data, seconds of a step, windows above the limit), or None where it keeps up."""
    last = rank.beat.windows[-LIMITS.windows:]
    hits = sum(window.data > LIMITS.data_share * window.seconds for window in last)
    if len(last) < LIMITS.windows or hits < LIMITS.hits:
        return None
    data, step = (statistics.median(getattr(window, name) for window in last) for name in ("data", "seconds"))
    return data / step, data, step, hits


def _imbalance(run):
    """GPU memory that is not the same on all ranks."""
    ranks = [rank for rank in run.alive if rank.beat.device.startswith("cuda") and rank.beat.memory_total]
    if len(ranks) < 2:
        return []
    middle = statistics.median(rank.beat.memory for rank in ranks)
    high = [rank for rank in ranks if rank.beat.memory > LIMITS.imbalance * middle
            and rank.beat.memory - middle > LIMITS.imbalance_share * rank.beat.memory_total]
    return [Finding("memory-imbalance", run.who([rank]), f"su GPU tiene {gigabytes(rank.beat.memory)} ocupados; la "
                    f"mediana de los rangos es {gigabytes(middle)}", "limita el lote de todos: mire qué hay en ella "
                    "que no esté en las demás") for rank in high]


# --- this machine ----------------------------------------------------------------------------------------------------
def gigabytes(size):
    """'12.3 GB' for bytes; '-' for what the driver does not tell."""
    return "-" if size is None else f"{size / 1e9:.1f} GB"


def card_key(uuid):
    """A card's identity, with or without the prefix that the driver writes and torch does not."""
    return (uuid or "").removeprefix("GPU-")


def _owners(run):
    """{card: [its ranks]} on this machine."""
    owners = {}
    for rank in run.alive:
        if rank.local and rank.beat.gpu_uuid:
            owners.setdefault(card_key(rank.beat.gpu_uuid), []).append(rank)
    return owners


def _cards(run, samples):
    """[(name in words, ranks, the card in each of the samples)]: those of the run, or all where there is no run."""
    owners, found = _owners(run), []
    for gpu in samples[-1].gpus:
        ranks = owners.get(card_key(gpu.uuid), [])
        if ranks or not owners:
            owner = f", rango {_ranges([rank.beat.rank for rank in ranks])}" if ranks else ""
            history = [one for sample in samples for one in sample.gpus if one.uuid == gpu.uuid]
            found.append((f"GPU {gpu.index} ({samples[-1].host}{owner})", ranks, history))
    return found


def _often(count):
    """'7 de 8 muestras' where that is often enough, else None."""
    return f"{count} de {LIMITS.windows} muestras" if count >= LIMITS.hits else None


def _throttled(run, samples):
    found = []
    for who, _, history in _cards(run, samples):
        held = [gpu for gpu in history if _held(gpu)]
        often = _often(len(held))
        if often:
            gpu = held[-1]
            facts = [f"{value:.0f}{unit}" for value, unit in ((gpu.temperature, " °C"), (gpu.power, " W"))
                     if value is not None]
            clock = f"{gpu.clock:.0f} de {gpu.clock_max:.0f} MHz" if gpu.clock and gpu.clock_max else None
            found.append(Finding("throttled", who, f"frenada ({', '.join(brakes(gpu))}) en {often}: "
                                 + ", ".join([*facts, *[clock] * bool(clock)]),
                                 "mire ventilación, polvo y alimentación, y su límite de potencia (nvidia-smi -q -d "
                                 "PERFORMANCE)"))
    return found


def brakes(gpu):
    """What holds the clock of a card down, in words."""
    return list(dict.fromkeys(BRAKES[name] for name in gpu.throttle if name in BRAKES))


def _held(gpu):
    if {"hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"} & set(gpu.throttle):
        return True
    return "sw_power_cap" in gpu.throttle and bool(gpu.clock and gpu.clock_max) and (
        gpu.clock < LIMITS.clock * gpu.clock_max)


def _full_cards(run):
    """Cards of this machine, and those of the other machines as far as their ranks tell."""
    full = [(who, gpu[-1].memory_used, gpu[-1].memory_total) for who, _, gpu in _cards(run, [run.sample])]
    full += [(run.who([rank]), rank.beat.memory, rank.beat.memory_total) for rank in run.alive
             if not rank.local and rank.beat.device.startswith("cuda")]
    return [Finding("vram-full", who, f"{gigabytes(used)} de {gigabytes(total)} de memoria ocupados "
                    f"({100 * used / total:.0f} %)", "baje --batch-size y suba --grad-accum otro tanto")
            for who, used, total in full if used and total and used > LIMITS.vram * total]


def _full_machine(sample):
    who, found = f"máquina {sample.host}", []
    used, total = sample.memory_used, sample.memory_total
    if used is not None and total and total - used < LIMITS.ram * total:
        found.append(Finding("ram-full", who, f"quedan {gigabytes(total - used)} de {gigabytes(total)} de RAM",
                             "cierre otros programas o baje --batch-size: el sistema está a punto de matar procesos"))
    free, total = sample.disk_free, sample.disk_total
    if free is not None and total and free < min(LIMITS.disk_bytes, LIMITS.disk_share * total):
        found.append(Finding("disk-full", who, f"quedan {free / 1e9:.2f} GB de {gigabytes(total)} en {sample.disk!r}",
                             "libere espacio o baje --keep-checkpoints"))
    return found


def _idle(run, samples, beats):
    """Cards that do nothing although their rank says it computes."""
    found = []
    for who, ranks, history in _cards(run, samples):
        numbers = {rank.beat.rank for rank in ranks if not _waits_for_data(rank)}
        computing = [{card_key(beat.gpu_uuid) for beat in read if beat.rank in numbers and beat.phase in WAITING}
                     for read in beats]
        idle = sum(card_key(gpu.uuid) in cards and gpu.utilisation is not None and gpu.utilisation < LIMITS.idle
                   for gpu, cards in zip(history, computing, strict=False))
        if often := _often(idle):
            use = statistics.median(gpu.utilisation or 0 for gpu in history)
            found.append(Finding("idle", who, f"ocupada al {use:.0f} % mientras su rango calcula, en {often}",
                                 "suba --batch-size: la tarjeta espera al procesador"))
    return found


def _foreign(run, samples):
    """Programs of somebody else where a rank of this machine works."""
    if not any(rank.local for rank in run.alive):
        return []
    ours = {process.pid for sample in samples for process in sample.processes if process.ours}
    ours |= {rank.beat.pid for rank in run.ranks if is_seen(rank.beat, run.sample)}
    names = {process.pid: process.name for process in samples[-1].processes}
    found = []
    for who, ranks, history in _cards(run, samples):
        on_card = history[-1].processes
        # Where our own pid is not among them (a container with pids of its own), nobody can say whose they are.
        if ranks and ours & on_card.keys():
            found += [Finding("foreign", who, f"otro programa la usa: {names.get(pid, 'pid')} {pid}, con "
                              f"{gigabytes(size)}", "ciérrelo o entrene en otra tarjeta (CUDA_VISIBLE_DEVICES)")
                      for pid, size in sorted(on_card.items()) if pid not in ours]
    return found + _foreign_programs(run, samples)


def _foreign_programs(run, samples):
    """Somebody else's programs, by name, that take processor time while none is left."""
    seen = {}
    for sample in samples:
        taken = {}
        for process in sample.processes:
            if not process.ours and process.cpu is not None:
                taken[process.name] = taken.get(process.name, 0) + process.cpu
        if sample.cpu is not None and sample.cpu >= LIMITS.busy_cpu:
            for name, cpu in taken.items():
                if cpu > LIMITS.foreign_cpu:
                    seen.setdefault(name, []).append(cpu)
    return [Finding("foreign", f"máquina {run.sample.host}", f"{name} ocupa {statistics.median(used) / 100:.1f} de "
                    f"{counted(run.sample.cores, 'núcleo')} y no queda ninguno libre, en {often}",
                    "ciérrelo o dele menos prioridad (renice)")
            for name, used in seen.items() if (often := _often(len(used)))]
