"""Every rule of the detector on samples built for it: the trouble, and the healthy machine beside it."""

from dataclasses import replace

import pytest

from aura import diagnosis, heartbeat, sensors
from aura.diagnosis import diagnose
from aura.gpus import THROTTLES, Gpu
from aura.processes import Activity

NOW, GB = 1_800_000_000.0, 10**9
PID = 4000  # of rank 0; the others follow


def windows(compute=0.5, data=0.01, communication=0.05, save=0.0, count=8):
    seconds = compute + data + (communication or 0) + save
    return [heartbeat.Window(10 * (place + 1), 10, seconds, compute, data, communication, save, 1000.0)
            for place in range(count)]


def beat(rank=0, world=4, host="nodo1", heard=0.3, **values):
    """A Beat that was heard `heard` seconds ago; of another machine, through rank 0, where host is not nodo1."""
    remote = host != "nodo1"
    defaults = {
        "run": "a", "local_rank": 0, "address": "10.0.0." + host[-1], "pid": PID + rank, "device": "cpu",
        "gpu_uuid": None, "number": 90, "time": NOW - heard + 7200 * remote, "step": 80, "steps": 300,
        "phase": "compute", "phase_s": 0.1, "cpu_s": 100.0, "loss": 2.5, "memory": GB, "memory_total": 64 * GB,
        "windows": windows(), "received": NOW - heard if remote else None}  # the other machine's clock is wrong
    return heartbeat.Beat(rank=rank, world_size=world, host=host, **{**defaults, **values})


def activity(pid, name="train.py", cpu=95.0, status="running", ours=True):
    return Activity(pid, name, cpu, GB, status, ours)


def gpu(index=0, **values):
    defaults = {"uuid": f"GPU-{index}", "name": "NVIDIA H200", "utilisation": 97.0, "memory_used": 60 * GB,
                "memory_total": 140 * GB, "temperature": 60.0, "power": 500.0, "power_cap": 700.0, "clock": 1800.0,
                "clock_max": 1980.0, "throttle": [], "processes": {PID + index: 60 * GB}}
    return Gpu(index=index, **{**defaults, **values})


def sample(place=7, **values):
    """The sample `place` of eight, the last of which is now."""
    defaults = {"time": NOW - 5 * (7 - place), "host": "nodo1", "cores": 8, "cpu": 60.0, "load": 4.0,
                "memory_used": 20 * GB, "memory_total": 64 * GB, "swap_used": 0, "swap_total": 0, "disk": "checkpoints",
                "disk_free": 400 * GB, "disk_total": 1000 * GB,
                "processes": [activity(PID + rank) for rank in range(8)]}
    return sensors.Sample(**{**defaults, **values})


def eight(**values):
    return [sample(place, **values) for place in range(8)]


def judge(beats=(), samples=None, **values):
    """Findings of eight equal readings."""
    samples = samples or eight(**values)
    return diagnose(samples, [list(beats)] * len(samples), NOW)


def only(found, kind, *pieces):
    """There is just one finding; it is of that kind, and its line holds the pieces."""
    assert [finding.kind for finding in found] == [kind], found
    for piece in pieces:
        assert piece in found[0].line(), found[0].line()
    return found[0]


def cluster(**values):
    """Four healthy ranks, two on each of two machines; values: {rank: values of its beat} as rank1={...}."""
    return [beat(rank, host="nodo1" if rank < 2 else "nodo2", **values.get(f"rank{rank}", {})) for rank in range(4)]


def cards(**values):
    """The ranks 0-3 of one machine with a card each."""
    return [beat(rank, **{"device": f"cuda:{rank}", "gpu_uuid": f"GPU-{rank}", "memory": 60 * GB,
                          "memory_total": 140 * GB} | values.get(f"rank{rank}", {})) for rank in range(4)]


def test_a_healthy_run_and_a_machine_without_one():
    assert judge(cluster()) == judge() == judge(cards(), gpus=[gpu(index) for index in range(4)]) == []
    assert diagnose([sample()], [[]], NOW) == []
    unknown = sample(cpu=None, load=None, memory_used=None, memory_total=None, disk_free=None, disk_total=None,
                     processes=[], gpus=[gpu(**dict.fromkeys(("utilisation", "memory_used", "memory_total", "power",
                                                              "power_cap", "clock", "clock_max", "temperature")))])
    assert judge(cards(), [unknown] * 8) == []


# --- slow ------------------------------------------------------------------------------------------------------------
def mixed(slow, count=8):
    """Windows of which the first `slow` take 0.84 s and the others as long as everybody's."""
    return (windows(0.84, count=slow) + windows(0.51, count=8 - slow))[-count:]


def usual(**values):
    return cluster(**{f"rank{rank}": {"windows": windows(0.51)} for rank in range(4)} | values)


def test_straggler():
    found = only(judge(usual(rank3={"windows": mixed(7)})), "straggler", "rango 3 (nodo2)", "en 7 de 8 ventanas")
    assert found.text.startswith("calcula en 0.84 s por paso; la mediana es 0.51 s (1.65 veces)")


@pytest.mark.parametrize("slow, count, is_slow", [(5, 8, True), (4, 8, False), (7, 7, False)])
def test_straggler_needs_five_windows_of_eight(slow, count, is_slow):
    assert bool(judge(usual(rank3={"windows": mixed(slow, count)}))) == is_slow


def test_stragglers_are_above_1_15_times_the_median():
    assert diagnosis.stragglers({0: [1.0] * 8, 1: [1.0] * 8, 2: [1.14] * 8}) == set()
    assert diagnosis.stragglers({0: [1.0] * 8, 1: [1.0] * 8, 2: [1.16] * 8}) == {2}
    assert diagnosis.stragglers({0: [1.0] * 9, 1: [9.0] * 5 + [1.0] * 8}) == set()  # only the last eight count
    assert diagnosis.stragglers({0: [1.0] * 8, 1: [2.0] * 8}) == {1}
    assert diagnosis.stragglers({0: [3.0] * 8}) == diagnosis.stragglers({}) == set()


def test_waiting_does_not_make_a_straggler():
    waits = {"windows": windows(0.51, communication=3.0)}
    assert judge(usual(rank0=waits, rank1=waits, rank2=waits)) == []


def test_data_bound():
    slow = {"windows": windows(0.5, data=0.31)}
    only(judge(cluster(rank1=slow)), "data-bound", "rango 1 (nodo1)", "0.31 s de cada paso de 0.86 s (36 %)", "8 de 8")
    only(judge(cluster(rank1=slow, rank2=slow)), "data-bound", "rangos 1-2 (nodo1, nodo2)")
    everybody = {f"rank{rank}": slow for rank in range(4)}
    only(judge(cluster(**everybody)), "data-bound", "todos los rangos: ")
    assert judge(cluster(rank1={"windows": windows(0.5, data=0.12)})) == []
    assert judge(cluster(rank1={"windows": windows(data=0.31, count=7)})) == []


# --- hung ------------------------------------------------------------------------------------------------------------
def stuck(seconds=41.0, **values):
    """Four ranks of which none has got any further."""
    return cluster(**{f"rank{rank}": {"phase_s": seconds, "phase": "communication", **values.get(f"rank{rank}", {})}
                      for rank in range(4)})


def test_hung_in_a_phase_that_is_not_waiting():
    found = only(judge(stuck(rank2={"phase": "data"})), "hung", "rango 2 (nodo2)", "sin avanzar desde hace 41 s",
                 "paso 80 de 300, fase datos", "los demás esperan", f"py-spy dump --pid {PID + 2} en nodo2")
    assert "desde las " in found.text
    only(judge(stuck(rank2={"phase": "compute"})), "hung", "rango 2", "fase cálculo", "los demás esperan en la comunic")


def test_hung_behind_the_others():
    only(judge(stuck(rank1={"step": 79})), "hung", "rango 1 (nodo1)", "paso 79 de 300", "los demás están en el paso 80")


def test_hung_while_it_burns_the_processor():
    before = [replace(one, cpu_s=one.cpu_s - (19.5 if one.rank == 3 else 0.2), time=one.time - 20) for one in stuck()]
    samples = eight()
    beats = [before] * 4 + [stuck()] * 4
    only(diagnose(samples, beats, NOW), "hung", "rango 3 (nodo2)", "es quien usa el procesador")
    moved = [replace(one, step=79) for one in before]  # what it used before it got stuck says nothing
    other = [replace(one, run="b") for one in before]  # nor what another process did that had come as far
    for earlier in (moved, other):
        only(diagnose(samples, [earlier] * 4 + [stuck()] * 4, NOW), "hung", "rangos 0-3", "todos esperan")


def test_hung_all_of_them():
    only(judge(stuck()), "hung", "rangos 0-3 (nodo1, nodo2)", "todos esperan, y nada distingue")
    alone = [beat(0, world=1, phase="data", phase_s=41)]
    only(judge(alone), "hung", "rango 0 (nodo1): sin avanzar desde hace 41 s", "fase datos; para ver")
    only(judge(stuck()[:2]), "hung", "rangos 0-1", "un rango de otra máquina", "--cluster")
    left = stuck(rank2={"ended": "CUDA out of memory", "phase": "end"})
    only(judge(left), "hung", "rangos 0-1, 3", "el rango 2 terminó (CUDA out of memory)")


def test_hung_only_after_a_while():
    assert judge(stuck(29)) == []
    slow = {"windows": windows(4.0)}  # 10 steps of 4.06 s
    everybody = {f"rank{rank}": slow for rank in range(4)}
    assert judge(stuck(40, **everybody)) == []
    assert judge(stuck(40.7, **everybody))
    assert judge(stuck(rank1={"phase_s": 3.0})) == []  # one of them goes on
    assert judge(stuck(rank0={"phase": "save"})) == judge(stuck(1700, rank0={"phase": "evaluate"})) == []
    only(judge(stuck(301, rank0={"phase": "save"})), "hung", "rango 0", "fase guardado")
    new = {f"rank{rank}": {"windows": [], "phase": "start"} for rank in range(4)}
    assert judge(stuck(599, **new)) == []
    only(judge(stuck(601, **new)), "hung", "fase inicio")
    first = {f"rank{rank}": {"windows": []} for rank in range(4)}  # a first step compiles
    again = {f"rank{rank}": {"phase": "start"} for rank in range(4)}  # after a NaN
    assert judge(stuck(599, **first)) == judge(stuck(599, **again)) == []


def test_a_run_that_hangs_is_not_slow_too():
    only(judge(stuck(rank3={"windows": windows(2.0), "phase": "data"})), "hung", "rango 3")


def test_hung_stopped_process():
    processes = [activity(PID), activity(PID + 1, status="stopped")]
    waiting = cluster(rank1={"time": NOW - 12.0})
    found = only(judge(waiting, processes=processes), "hung", "rango 1 (nodo1)", "está detenido", "hace 12 s",
                 f"kill -CONT {PID + 1}", "paso 80 de 300")
    assert str(PID + 1) in found.text
    assert judge(cluster(rank1={"time": NOW - 2.0}), processes=processes) == []


def test_hung_process_that_no_longer_beats():
    """Its process is there, and not even its heartbeat's thread gets the interpreter."""
    silent = stuck(rank1={"time": NOW - 35.0, "phase_s": 3.0})
    only(judge(silent), "hung", "rango 1", "no da señales", "hace 38 s")
    full = [beat(rank, world=2, time=NOW - 35.0, phase=phase) for rank, phase in enumerate(("data", "compute"))]
    only(judge(full), "hung", "rangos 0-1", "no escriben sus latidos", "¿está lleno el disco")


# --- gone ------------------------------------------------------------------------------------------------------------
def test_gone_machine():
    lost = {"received": NOW - 14.0}
    only(judge(cluster(rank2=lost, rank3=lost)), "gone", "rangos 2-3 (nodo2)", "sin noticias desde hace 14 s",
         "la máquina está apagada, sin red o su proceso ha muerto", "ping 10.0.0.2")
    late = {"received": NOW - 9.0}
    assert judge(cluster(rank2=late, rank3=late)) == []


def test_gone_rank_of_a_machine_that_is_there():
    found = only(judge(cluster(rank3={"received": NOW - 14.0})), "gone", "rango 3 (nodo2)", "muerto o está detenido")
    assert "apagada" not in found.text


def test_who_waits_for_the_lost_is_not_hung():
    lost = {"received": NOW - 300.0}
    only(judge(stuck(300, rank2=lost, rank3=lost)), "gone", "rangos 2-3 (nodo2)")


def test_gone_process_of_this_machine():
    processes = [activity(PID)]
    only(judge(cluster(rank1={"time": NOW - 8.0}), processes=processes), "gone", "rango 1 (nodo1)",
         f"su proceso ha muerto (pid {PID + 1})", "hace 8 s")
    zombie = [activity(PID), activity(PID + 1, status="zombie")]
    only(judge(cluster(rank1={"time": NOW - 8.0}), processes=zombie), "gone", "su proceso ha muerto")
    assert judge(cluster(rank1={"time": NOW - 1.0}), processes=processes) == []  # it died between two sensors, or not
    only(judge(cluster(rank1={"time": NOW + 3600.0}), processes=processes), "gone", "ha muerto")  # clock set back


def test_another_process_with_the_pid_of_a_dead_one_is_not_taken_for_it():
    late = {"rank1": {"time": NOW - 8.0, "started": "boot 17"}}
    for started, dead in (("boot 17", False), (None, False), ("boot 99", True), ("reboot 17", True)):
        there = [activity(PID), replace(activity(PID + 1), started=started)]
        found = judge(cluster(**late), processes=there)
        assert [finding.kind for finding in found] == ["gone"] * dead, (started, found)
    assert "su proceso ha muerto" in found[0].line()


def test_a_pid_of_a_container_is_not_looked_for_among_those_of_the_machine():
    apart = {"pids": "pid:[4026532201]", "time": NOW - 8.0}
    assert judge(cluster(rank1=apart), processes=[activity(PID)]) == []
    assert judge(cluster(rank1=apart), processes=[activity(PID), activity(PID + 1, status="stopped")]) == []
    late = {**apart, "time": NOW - 14.0}
    only(judge(cluster(rank1=late), processes=[activity(PID)]), "gone", "rango 1 (nodo1)", "ha muerto o está detenido")
    only(judge(cluster(rank1={"time": NOW - 8.0}), processes=[activity(PID)]), "gone", "su proceso ha muerto")


def test_gone_where_processes_cannot_be_listed():
    only(judge(cluster(rank1={"time": NOW - 14.0}), processes=[]), "gone", "rango 1", "ha muerto o está detenido")


def test_without_rank_0_nothing_is_said_of_other_machines():
    old = {"received": NOW - 61.0}
    found = judge(cluster(rank0={"time": NOW - 60.0}, rank2=old, rank3=old), processes=[activity(PID + 1)])
    only(found, "gone", "rango 0 (nodo1)", "su proceso ha muerto")


def test_who_has_ended_is_no_trouble():
    over = {"ended": "completo", "phase": "end", "time": NOW - 5000, "received": None}
    assert judge(cluster(**{f"rank{rank}": over for rank in range(4)}), processes=[]) == []
    assert judge(cluster(rank3={**over, "received": NOW - 5000})) == []


def test_an_error_that_ended_ranks_is_told_once():
    over = {"ended": "se acabó el disco", "failed": True, "phase": "end", "time": NOW - 5000, "received": None}
    found = judge(cluster(**{f"rank{rank}": over for rank in range(4)}), processes=[])
    # The same order is of no use before the cause is gone, as where a folder holds another model.
    only(found, "failed", "rangos 0-3 (nodo1, nodo2)", "se acabó el disco", "corrija")


def test_two_machines_of_one_name():
    beats = [beat(0), beat(1, host="nodo2")]
    beats[1] = replace(beats[1], host="nodo1", received=NOW - 20)
    only(judge(beats), "gone", "rango 1 (nodo1, 10.0.0.2)")


# --- the machine -----------------------------------------------------------------------------------------------------
def test_memory_imbalance():
    found = judge(cards(rank2={"memory": 90 * GB}), gpus=[gpu(index) for index in range(4)])
    only(found, "memory-imbalance", "rango 2", "90.0 GB", "la mediana de los rangos es 60.0 GB")
    assert judge(cards(rank2={"memory": 74.9 * GB})) == []
    small = {f"rank{rank}": {"memory": (1 + rank % 2) * GB} for rank in range(4)}
    assert judge(cards(**small)) == []
    assert judge(cluster(rank2={"memory": 30 * GB})) == []  # of processes on processors


def test_vram_full():
    full = [gpu(index, memory_used=(134 if index == 1 else 60) * GB) for index in range(4)]
    only(judge(cards(), gpus=full), "vram-full", "GPU 1 (nodo1, rango 1)", "134.0 GB de 140.0 GB", "(96 %)")
    only(judge(gpus=full), "vram-full", "GPU 1 (nodo1)")
    assert judge(cards()[:1] + [beat(1)], gpus=full) == []  # somebody else's card
    away = [*cards()[:3], replace(cards()[3], host="nodo2", received=NOW, memory=134 * GB)]
    assert [(finding.kind, finding.who) for finding in judge(away)] == [
        ("vram-full", "rango 3 (nodo2)"), ("memory-imbalance", "rango 3 (nodo2)")]


@pytest.mark.parametrize("values, kind", [
    ({"memory_used": 61 * GB}, "ram-full"), ({"memory_used": 60 * GB}, None),
    ({"disk_free": 4 * GB}, "disk-full"), ({"disk_free": 6 * GB}, None),
    ({"disk_free": 40 * GB, "disk_total": 20_000 * GB}, None),  # less than 2 % of a large array
    ({"disk_free": 2 * GB, "disk_total": 8 * GB}, None), ({"disk_free": 0, "disk_total": 8 * GB}, "disk-full")])
def test_full_machine(values, kind):
    found = judge(**values)
    assert [finding.kind for finding in found] == [kind] * bool(kind)
    if kind == "disk-full":
        assert "'checkpoints'" in found[0].text


def held(names, count=8, clock=1800.0, **values):
    """Eight samples of a card that is held down in the last `count`."""
    return [sample(place, gpus=[gpu(throttle=names if place >= 8 - count else [], clock=clock, **values)])
            for place in range(8)]


@pytest.mark.parametrize("names, count, clock, is_bad", [
    (["hw_thermal"], 5, 1800.0, True), (["hw_thermal"], 4, 1800.0, False), (["hw_power_brake"], 8, 1800.0, True),
    (["hw_slowdown"], 8, 1800.0, True), (["sw_power_cap"], 8, 1400.0, False), (["sw_power_cap"], 8, 1300.0, True),
    (["idle", "clocks_setting"], 8, 300.0, False), (["sw_power_cap"], 8, None, False)])
def test_throttled(names, count, clock, is_bad):
    found = judge(samples=held(names, count, clock, temperature=91.0))
    assert [finding.kind for finding in found] == ["throttled"] * is_bad
    if is_bad:
        assert "91 °C" in found[0].text and f"en {count} de 8 muestras" in found[0].text


def test_the_names_of_what_holds_a_clock_are_those_of_the_sensors():
    assert diagnosis.BRAKES.keys() <= set(THROTTLES.values())
    assert all(diagnosis._held(gpu(throttle=[name])) == (name not in ("sw_power_cap", "board_limit",
               "reliability")) for name in diagnosis.BRAKES)


def test_idle():
    lazy = [gpu(index, utilisation=3.0 if index == 2 else 97.0) for index in range(4)]
    only(judge(cards(), gpus=lazy), "idle", "GPU 2 (nodo1, rango 2)", "3 %", "8 de 8 muestras")
    assert judge(gpus=lazy) == []  # nobody trains on it
    assert judge(cards(rank2={"phase": "save"}), gpus=lazy) == []
    samples = [sample(place, gpus=lazy if place < 4 else [gpu(index) for index in range(4)]) for place in range(8)]
    assert judge(cards(), samples) == []
    only(judge(cards(rank2={"windows": windows(data=0.4)}), gpus=lazy), "data-bound", "rango 2")  # that is why
    only(judge([replace(one, phase_s=60, phase="data" if one.rank == 2 else "compute") for one in cards()], gpus=lazy),
         "hung", "rango 2")


def test_the_uuid_with_and_without_its_prefix():
    lazy = [gpu(index, utilisation=3.0 if index == 2 else 97.0) for index in range(4)]
    plain = [replace(one, gpu_uuid=one.gpu_uuid.removeprefix("GPU-")) for one in cards()]
    only(judge(plain, gpus=lazy), "idle", "GPU 2")


def test_foreign_on_a_card():
    shared = [gpu(index, processes={PID + index: 60 * GB} | ({777: 5 * GB, 778: None} if index == 3 else {}))
              for index in range(4)]
    seen = [activity(PID), activity(777, "blender", ours=False)]
    found = judge(cards(), gpus=shared, processes=seen)
    assert [finding.kind for finding in found] == ["foreign", "foreign"]
    assert "blender 777, con 5.0 GB" in found[0].text and found[0].who == "GPU 3 (nodo1, rango 3)"
    assert "pid 778" in found[1].text
    there = beat(4, host="nodo2", pid=777)  # another machine's number is nobody's here
    assert judge([*cards(), there], gpus=shared, processes=seen) == found
    assert judge(gpus=shared) == []
    ours = [activity(PID + rank) for rank in range(4)] + [activity(777), activity(778)]
    assert judge(cards(), gpus=shared, processes=ours) == []
    hidden = [replace(one, processes={90000: 60 * GB}) for one in shared]  # a container numbers its own processes
    assert judge(cards(), gpus=hidden) == []


def neighbour(count=8, cpu=100.0, own=120.0):
    """Eight samples with somebody else's program in the last `count`, by two processes."""
    busy = [activity(900 + place, "cc1plus", own / 2, ours=False) for place in range(2)]
    mine = [activity(PID + rank) for rank in range(4)]
    return [sample(place, cpu=cpu, processes=mine + (busy if place >= 8 - count else [])) for place in range(8)]


def test_foreign_on_the_processor():
    only(judge(cluster(), neighbour(5)), "foreign", "máquina nodo1", "cc1plus ocupa 1.2 de 8 núcleos", "en 5 de 8")
    assert judge(cluster(), neighbour(4)) == judge(cluster(), neighbour(cpu=80.0)) == []
    assert judge(cluster(), neighbour(own=45.0)) == []
    assert judge([], neighbour()) == []  # no run here
    assert judge([one for one in cluster() if one.rank > 1], neighbour()) == []  # nor here
