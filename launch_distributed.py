"""One command for torchrun, on one machine or on several.

    python launch_distributed.py --gpus 8 -- --dataset c4                    # the 100M model on the eight cards here
    python launch_distributed.py --cpu 2 -- --preset demo                    # the same without GPUs, as a rehearsal
    python launch_distributed.py --gpus 8 --nodes 2 --node-rank 0 --master-addr 192.168.1.10    # and on the other
    python launch_distributed.py --gpus 8 --nodes 2 --node-rank 1 --master-addr 192.168.1.10    # machine
    python launch_distributed.py --script train_gpt2_spanish.py --gpus 2 --max-restarts 3 -- --batch-size 8

What follows -- goes to the script untouched. Exit code: that of the script; 2 for what is wrong before it starts.
"""

import difflib
import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

from aura import cgroup, cli, launch, placement, waiting
from aura.errors import EXIT_OK, UserError
from aura.files import path_called
from aura.words import counted

ROOT = Path(__file__).resolve().parent
AS_RANK = "--as-rank"


def build_parser():
    """The arguments of this launcher."""
    parser = cli.Parser(prog="launch_distributed.py", description="Lanza un script con torchrun en una o varias "
                        "máquinas. Lo que va detrás de -- es para el script.")
    parser.add_argument("--script", type=cli.path, default="hrm_training_small_100m.py", help="qué se ejecuta")
    parser.add_argument("--gpus", type=cli.number(int, low=1), metavar="N",
                        help="procesos en esta máquina, uno por GPU (por defecto: las que haya)")
    parser.add_argument("--cpu", type=cli.number(int, low=1), metavar="N", help="N procesos sin GPU, para ensayar")
    parser.add_argument("--nodes", type=cli.number(int, low=1), default=1, metavar="N", help="cuántas máquinas")
    parser.add_argument("--node-rank", type=cli.number(int, low=0), default=0, metavar="N",
                        help="número de esta máquina, desde 0")
    parser.add_argument("--master-addr", help="dirección de la máquina 0 (por defecto, con una sola: 127.0.0.1)")
    parser.add_argument("--master-port", type=cli.number(int, low=1, high=65535), default=placement.DEFAULT_PORT,
                        help="puerto libre en la máquina 0")
    parser.add_argument("--backend", type=cli.choice("auto", "nccl", "gloo"), help="se pasa al script")
    parser.add_argument("--max-restarts", type=cli.number(int, low=0), default=0, metavar="N",
                        help="cuántas veces se reinicia el grupo si un proceso muere")
    parser.add_argument("--verbose", action="store_true", help="explica cada variable y muestra lo que dice torchrun")
    parser.add_argument("--dry-run", action="store_true", help="muestra la orden y termina")
    return parser


def parse(words):
    """(arguments of the launcher, arguments of the script)."""
    cut = words.index("--") if "--" in words else len(words)
    try:
        return build_parser().parse_args(words[:cut]), words[cut + 1:]
    except UserError as problem:
        hint = "; lo que es para el script va detrás de --" if "argumento desconocido" in str(problem) else ""
        raise UserError(f"{problem}{hint}") from problem


def find_script(name):
    """The script's path as seen from here, or beside this launcher. Raises UserError with the names that are near."""
    for path in (path_called(each, f"--script {name!r}") for each in (name, ROOT / name)):
        if path.is_file():
            if not os.access(path, os.R_OK):  # Python would say so in English, once a rank
                raise UserError(f"--script {name!r}: no se puede leer (permiso denegado); compruebe sus permisos")
            return str(path)
        if path.is_dir():
            raise UserError(f"--script {name!r}: es una carpeta; indique la ruta de un script de Python")
    known = sorted({path.name for folder in (Path(name).parent, ROOT) for path in folder.glob("*.py")})
    near = difflib.get_close_matches(Path(name).name, known, n=3)
    raise UserError(f"--script {name!r}: no existe ese fichero; " + (
        f"¿quiso decir {' o '.join(near)}?" if near else "indique la ruta de un script de Python"))


def check_arguments(args):
    """Raise UserError for what no machine could run."""
    several = f"con --nodes {args.nodes}"
    checks = [
        (args.gpus and args.cpu, f"--gpus {args.gpus} y --cpu {args.cpu} se excluyen: indique uno de los dos"),
        (args.node_rank >= args.nodes, f"--node-rank {args.node_rank} no existe {several} (desde 0)"),
        (args.nodes > 1 and "node_rank" not in args.given,
         f"falta --node-rank {several}: 0 en la máquina de --master-addr, 1 en la siguiente..."),
        (args.nodes > 1 and not args.master_addr,
         f"falta --master-addr {several}: la dirección de la máquina 0, la misma en todas"),
        (importlib.util.find_spec("torch") is None,
         f"{sys.executable} no tiene torch, y sin él no hay torchrun: pip install -r requirements.txt")]
    if problems := [text for wrong, text in checks if wrong]:
        raise UserError("; ".join(problems))


def gpus_present():
    """(how many GPUs torch sees, why it does not use the one that there is, or "" where it does or there is none).
    Asked in another process, since importing torch takes memory for the whole run."""
    ask = ("import torch; from aura import backend; seen = torch.cuda.is_available() and torch.cuda.device_count(); "
           "print(not seen and backend.unused_card(torch.device('cpu')) or '', int(seen), sep='\\n')")
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": paths})
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["sin explicación"]
        raise UserError(f"{sys.executable} no puede importar torch ({said[-1][:160]}): instálelo otra vez con pip "
                        "install -r requirements.txt")
    *_, why, present = done.stdout.splitlines()
    return int(present), why


def check_machine(args, present, why):
    """What this machine lacks, as phrases that name the way out. present, why: as gpus_present() gives them."""
    problems = []
    if not args.cpu and (args.gpus or 1) > present:
        asked = f"--gpus {args.gpus}: " if args.gpus else ""
        none = f"{why}; o," if why else "no hay ninguna GPU que torch pueda usar;"
        here = f"hay {present}; use --gpus {present}, o" if present else none
        problems.append(f"{asked}aquí {here} para un ensayo sin GPU, --cpu 2")
    problem = (args.master_addr and address_problem(args.master_addr, args.node_rank == 0)) or (
        args.node_rank == 0 and placement.port_problem(args.master_port, "--master-port "))
    return problems + [problem] * bool(problem)


def address_problem(name, own):
    """None when `name` leads to machine 0, else why not. own: whether that is this one."""
    if problem := placement.address_problem(name):
        return f"--master-addr: {problem}"
    problem = placement.name_problem(name, own)
    return problem and f"--master-addr {problem}"


def environment(args, processes):
    """{variable: (value, why)} of what is set for the processes; what the user has set stays."""
    cores = cgroup.cores()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = ",".join((visible.split(",") if visible else [str(card) for card in range(processes)])[:processes])
    wanted = {
        "OMP_NUM_THREADS": (str(max(1, cores // processes)), f"{counted(cores, 'núcleo')} entre "
                            f"{counted(processes, 'proceso')}"),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": (str(launch.SAVE_SECONDS), "segundos para guardar al parar, antes de que "
                                           "torchrun mate los procesos")}
    if args.verbose and not args.cpu:
        wanted["NCCL_DEBUG"] = ("INFO", "NCCL dice qué red usa; si usa InfiniBand y P2P lo decide él")
    wanted = {name: pair for name, pair in wanted.items() if not os.environ.get(name)}
    why = "--cpu: sin GPU" if args.cpu else "las primeras GPU" + (" de las que usted dejó visibles" if visible else "")
    return {**wanted, "CUDA_VISIBLE_DEVICES": ("" if args.cpu else cards, why)}


def torchrun_command(args, script, processes, rest):
    """The command line, as a list of words."""
    backend = ["--backend", args.backend] if args.backend else []
    return [sys.executable, "-m", "torch.distributed.run", f"--nnodes={args.nodes}", f"--node-rank={args.node_rank}",
            f"--nproc-per-node={processes}", "--rdzv-backend=static",
            f"--master-addr={args.master_addr or '127.0.0.1'}", f"--master-port={args.master_port}",
            f"--max-restarts={args.max_restarts}", "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
            str(ROOT / "launch_distributed.py"), AS_RANK, script, *backend, *rest]


def main():
    """Check, show the command, run it; returns the exit code."""
    if sys.argv[1:2] == [AS_RANK]:
        return launch.run_rank(sys.argv[2:])
    args, rest = parse(sys.argv[1:])
    check_arguments(args)
    script = find_script(args.script)
    launch.require_temporary_folder()
    present, why = (0, "") if args.cpu else gpus_present()
    problems = check_machine(args, present, why)
    if problems and not args.dry_run:
        raise UserError("; ".join(problems))
    if args.node_rank == 0 and args.master_addr:
        problems.append(placement.foreign_address(args.master_addr, "--master-addr ", args.nodes > 1))
    for problem in filter(None, problems):
        print(f"Aviso: {problem}", file=sys.stderr)
    processes = args.cpu or args.gpus or present or 1
    settings = environment(args, processes)
    command = torchrun_command(args, script, processes, rest)
    if args.verbose:
        for name, (value, why) in settings.items():
            print(f"{name}={value}: {why}")
    variables = {name: value for name, (value, _) in settings.items()}
    print(" ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items()), shlex.join(command))
    if args.dry_run:
        return EXIT_OK
    others = None
    if args.nodes > 1:
        others = (f"son {args.nodes} en total, esta incluida, todas con --nodes {args.nodes} "
                  f"--master-addr {args.master_addr} --master-port {args.master_port}, y cada una con su --node-rank")
    if args.node_rank > 0:
        waiting.for_machine_0(args.master_addr, args.master_port)
    return launch.Launch(processes, args.max_restarts, args.verbose, others).run(command, variables)


if __name__ == "__main__":
    cli.run(main)
