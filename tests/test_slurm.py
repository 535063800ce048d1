"""distributed.slurm on a real cluster of two nodes: both strategies, the time limit, how a job comes back or not."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from aura import checkpoint, pretrained, wordpiece
from aura.models import bert
from tests import slurm
from tests.support import ROOT, environment, run

JOB = ROOT / "distributed.slurm"
STEPS = 200  # so many that a signal arrives before the last one
# A script without torch, for what does not depend on training: it takes its time, and saves for a while on a signal.
WAITING = """
import os, signal, sys, time
def stop(number, _):
    time.sleep(int(os.environ["SLURM_PROCID"]))
    print("guardado", number, flush=True)
    sys.exit(128 + number)
signal.signal(signal.SIGUSR1, stop)
signal.signal(signal.SIGTERM, stop)
print("listo", sys.argv[1:], os.environ["AURA_JOB"], os.environ.get("RANK"), flush=True)
while True: time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def cluster():
    if reason := slurm.missing():
        pytest.skip(reason)
    with slurm.cluster() as running:
        yield running


@pytest.fixture(scope="module")
def overdue(cluster, tmp_path_factory):
    """A job of one minute that is on while the other tests run: (its number, its log). The script to run, and the
    environment's python, stand beside the Slurm file, both in a folder with a space in its name."""
    code, work = tmp_path_factory.mktemp("el código"), tmp_path_factory.mktemp("el trabajo")
    shutil.copy(JOB, code)
    (code / "espera.py").write_text(WAITING)
    (code / ".venv").symlink_to(sys.prefix)
    job = cluster.submit("--nodelist=n1", "--ntasks-per-node=2", "--time=1", "--signal=USR1@20", code / JOB.name,
                         "--a", "b  c", "--resume", "none", cwd=work, SCRIPT="espera.py", MAX_REQUEUES=1, RANK=0,
                         WORLD_SIZE=1)
    return job, work / f"bert-squad-{job}.out"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with a file of questions, more than any test here gets to see, and a model as small as can be."""
    people, places, paragraphs = ["Ana", "Luis", "Marta", "Pedro"], ["la plaza", "su casa", "el mercado"], []
    for number in range(STEPS * 2 + 100):
        who, where = people[number % 4], places[number % 3]
        context = f"El día {number} {who} compró pan en {where}."
        paragraphs.append({"context": context, "qas": [
            {"id": str(number), "question": f"¿Dónde compró {who}?",
             "answers": [{"text": where, "answer_start": context.index(where)}]}]})
    folder = tmp_path_factory.mktemp("datos")
    (folder / "preguntas.json").write_text(json.dumps({"data": [{"title": "pan", "paragraphs": paragraphs}]}))
    vocabulary = wordpiece.learn([part["context"] + part["qas"][0]["question"] for part in paragraphs], 200)
    config = bert.BertConfig(vocab_size=len(vocabulary), n_layer=1, n_head=1, n_embd=16, n_ff=16)
    weights = bert.QuestionAnswering(config).init_weights(0).state_dict()
    pretrained.save_folder(folder / "modelo", weights, config, "\n".join(vocabulary).encode(), True)
    return folder


def train(cluster, folder, data, strategy, *words, nodes=2):
    """Submit a training; (its number, its log)."""
    folder.mkdir(exist_ok=True)
    job = cluster.submit(f"--nodes={nodes}", "--cpus-per-task=1", JOB, "--model", data / "modelo", "--dataset",
                         data / "preguntas.json", "--max-val-examples", 4, "--batch-size", 1, "--max-steps", STEPS,
                         "--log-interval", 1, "--strategy", strategy, *words, cwd=folder, PYTHON=sys.executable,
                         AURA_EXTENSION="off")
    return job, folder / f"bert-squad-{job}.out"


def wait_for(log, pattern, limit=slurm.LIMIT):
    """Wait until a job's log has what the regular expression describes; returns the match."""
    deadline = time.monotonic() + limit
    while not (match := re.search(pattern, log.read_text() if log.exists() else "")):
        assert time.monotonic() < deadline, f"no {pattern!r} in:\n{log.read_text() if log.exists() else ''}"
        time.sleep(0.05)
    return match


def stopped_and_resumed(log):
    """Wait until a job that stopped has come back and done a step; returns the step where it goes on."""
    step = int(wait_for(log, r"Detenido por una señal en el paso (\d+)").group(1))
    wait_for(log, rf"arranque 2[^$]*Se reanuda en el paso {step} [^$]*paso {step + 1}/")
    return step


@pytest.mark.usefixtures("overdue")
def test_two_nodes_train_with_both_strategies_and_come_back(cluster, data, tmp_path):
    """DDP: the time limit's signal, then to its end. FSDP: requeued by an administrator, then a rank is killed. What is
    done to a job is done as soon as it trains, as it is over in seconds. One may queue while the other trains.
    """
    ddp, ddp_log = train(cluster, tmp_path / "ddp", data, "ddp")
    wait_for(ddp_log, "paso 1/")
    cluster.scancel("--signal=USR1", ddp)
    wait_for(ddp_log, r"pide volver a la cola \(1 de 10\)")

    fsdp, fsdp_log = train(cluster, tmp_path / "fsdp", data, "fsdp", "--max-steps", 100_000)
    wait_for(fsdp_log, "paso 1/")
    cluster.scontrol("requeue", fsdp)
    assert stopped_and_resumed(fsdp_log) >= 1
    (victim,) = cluster.pids(SLURM_JOB_ID=fsdp, SLURM_PROCID=1)
    os.kill(victim, signal.SIGKILL)
    shown, output = cluster.wait(fsdp, "COMPLETED", "FAILED"), fsdp_log.read_text()
    assert (shown["JobState"], shown["ExitCode"], shown["Restarts"]) == ("FAILED", "137:0", "1"), output
    assert "se ha perdido la comunicación con otro proceso" in output and "estrategia fsdp" in output
    assert "pide volver" not in output and not cluster.pids(SLURM_JOB_ID=fsdp)

    assert 1 <= stopped_and_resumed(ddp_log) < STEPS
    shown, output = cluster.wait(ddp, "COMPLETED", "FAILED"), ddp_log.read_text()
    assert (shown["ExitCode"], shown["Restarts"]) == ("0:0", "1") and "Al final: EM " in output, output
    for rank, node in enumerate(("n1", "n2")):
        assert f"[{node}] SLURM_JOB_ID={ddp} SLURM_JOB_NODELIST=n[1-2] SLURM_NTASKS=2" in output
        assert re.search(rf"\[{node}\] en .*, Python .* torch ", output)
        assert f"[rango {rank}] rank={rank} local_rank=0 world_size=2 backend=gloo" in output


def test_resume_counts_for_the_first_start_of_a_job_that_gets_as_far(cluster, data, tmp_path):
    """Put back into the queue before it has begun, in a folder with a run that is complete, it begins all the same;
    later it goes on from its own."""
    before = run([ROOT / "train_distributed.py", "--model", data / "modelo", "--dataset", data / "preguntas.json",
                  "--max-val-examples", 4, "--batch-size", 1, "--max-steps", 2], tmp_path)
    assert before[0] == 0 and checkpoint.found(tmp_path / "checkpoints"), before[1]
    job, log = train(cluster, tmp_path, data, "ddp", "--resume", "none", "--max-steps", 100_000, nodes=1)
    wait_for(log, "arranque 1")
    cluster.scontrol("requeue", job)
    wait_for(log, "arranque 2[^$]*Los puntos de control anteriores se han movido a [^$]*paso 1/")
    cluster.scancel("--signal=USR1", job)
    step = wait_for(log, r"Detenido por una señal en el paso (\d+)").group(1)
    wait_for(log, f"arranque 3[^$]*Se reanuda en el paso {step} desde ")
    cluster.scancel(job)
    cluster.wait(job, "CANCELLED", "COMPLETED")


def test_without_srun_it_is_told_at_once(cluster, tmp_path):
    """And a job of several tasks may train in one process all the same."""
    command = f"'{sys.executable}' '{ROOT / 'test_ddp.py'}'"
    for before, code, told in (("", "2:0", "SLURM_NTASKS=2 son las tareas de este trabajo, y a este proceso no lo"),
                               ("SLURM_NTASKS=1 ", "0:0", "un solo proceso")):
        job = cluster.submit("--ntasks=2", f"--wrap={before}{command}", f"--output={tmp_path}/log", cwd=tmp_path)
        shown = cluster.wait(job, "COMPLETED", "FAILED")
        log = (tmp_path / "log").read_text()
        assert shown["ExitCode"] == code and told in log, log


def test_bad_input_is_said_and_does_not_come_back(cluster, tmp_path):
    """The reason is in the log, the exit code is the script's, and nothing is queued again."""
    reasons = {"--strategy: 'dpp'": {"PYTHON": sys.executable}, 'MAX_REQUEUES="muchas"': {"MAX_REQUEUES": "muchas"},
               'SCRIPT="no.py" no existe': {"SCRIPT": "no.py"}, '"/no/python" no existe': {"PYTHON": "/no/python"}}
    jobs = [cluster.submit(JOB, "--strategy", "dpp", cwd=tmp_path, **variables) for variables in reasons.values()]
    for reason, job in zip(reasons, jobs, strict=True):
        shown, output = cluster.wait(job, "COMPLETED", "FAILED"), (tmp_path / f"bert-squad-{job}.out").read_text()
        assert (shown["ExitCode"], shown["Restarts"]) == ("2:0", "0"), output
        assert output.count("\nerror: ") <= 1 and reason in output


def test_a_node_that_fails_brings_the_job_back_and_scancel_does_not(cluster, tmp_path):
    """The script hears of either, and has time to save."""
    (tmp_path / "espera.py").write_text(WAITING)
    job = cluster.submit("--nodes=2", "--gpus-per-node=2", JOB, cwd=tmp_path, SCRIPT="espera.py", PYTHON=sys.executable)
    log = tmp_path / f"bert-squad-{job}.out"
    wait_for(log, "hay 2 GPU por nodo[^$]*listo[^$]*listo")
    cluster.scontrol("update", "NodeName=n2", "State=DOWN", "Reason=prueba")  # until its slurmd, which is well, reports
    wait_for(log, "guardado 15[^$]*arranque 2[^$]*listo[^$]*listo")
    cluster.scancel(job)
    cluster.wait(job, "CANCELLED")
    wait_for(log, "arranque 2[^$]*guardado 15[^$]*guardado 15")
    assert cluster.shown(job)["Restarts"] == "1" and "pide volver" not in log.read_text()


def test_the_time_limit_and_no_more_requeues_than_asked_for(cluster, overdue):
    job, log = overdue
    wait_for(log, r"pide volver a la cola \(1 de 1\)")
    wait_for(log, rf"arranque 2[^$]*(listo \['--a', 'b  c', '--resume', 'none'\] prueba-{job} None\n[^$]*){{2}}")
    cluster.scancel("--signal=USR1", job)  # the limit itself comes twice where the tests before this one took long
    shown, output = cluster.wait(job, "COMPLETED", "FAILED"), log.read_text()
    assert (shown["ExitCode"], shown["Restarts"]) == ("138:0", "1"), output
    assert "no puede volver más veces a la cola (MAX_REQUEUES=1)" in output
    assert "envíe otra vez la misma orden, sin --resume." in output
    assert output.count("guardado 10") == 4, output  # each process as long as it takes, though another left before


def test_a_task_of_an_array_comes_back_alone(cluster, tmp_path):
    """Slurm takes the number of an array's last task for that of the array."""
    code = tmp_path / "código"  # the script lies beside the job's file alone, which the job's record leads to
    code.mkdir()
    shutil.copy(JOB, code)
    (code / "tarea.py").write_text("""
import os, sys
again, last = "SLURM_RESTART_COUNT" in os.environ, os.environ["SLURM_ARRAY_TASK_ID"] == "1"
sys.exit(138 * (last and not again))
""")
    job = cluster.submit("--array=0-1%1", code / JOB.name, "--a", "b", cwd=tmp_path, SCRIPT="tarea.py",  # one by one
                         PYTHON=sys.executable)
    cluster.wait(f"{job}_1", "COMPLETED", "FAILED")
    shown = [cluster.shown(f"{job}_{task}") for task in (0, 1)]
    log = "".join(path.read_text() for path in tmp_path.glob("*.out"))
    assert [(task["JobState"], task["Restarts"]) for task in shown] == [("COMPLETED", "0"), ("COMPLETED", "1")], log
    assert len(re.findall(r"Aviso: la señal llegó a los \d+ s de arrancar, y faltaban 1\d{4} s", log)) == 1, log


def test_without_sbatch(tmp_path):
    done = subprocess.run([JOB], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=20)
    assert done.returncode == 2 and done.stderr.startswith("error: este fichero se envía con sbatch"), done.stderr


def test_a_job_of_several_parts_is_refused(tmp_path):
    done = subprocess.run([JOB], cwd=tmp_path, env=environment(SLURM_JOB_ID=7, SLURM_HET_SIZE=2), capture_output=True,
                          text=True, timeout=20)
    assert done.returncode == 2 and done.stderr.startswith("error: un trabajo en partes («:» en la orden)"), done.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck():
    done = subprocess.run(["shellcheck", str(JOB)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
