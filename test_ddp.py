"""Does the cluster work? A real all_reduce over all processes, checked value by value; with --full, everything else.

    python test_ddp.py --backend auto
    torchrun --nproc_per_node=2 test_ddp.py --backend gloo
    RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=192.168.1.10 MASTER_PORT=29500 python test_ddp.py
    torchrun --nnodes=2 ... test_ddp.py --full --checkpoint-dir checkpoints --data-dir Data

--full compares versions, sources, data, cards, disks and interfaces of all ranks, measures network, clocks and speeds,
and says what they mean for training; rank 0 prints one line per problem with the way out.
Exit code 0 only when every rank got the right sum (--full: and nothing else is wrong); 2 for bad values or machines
that cannot be reached in time; 3 when a process is lost, a sum is wrong or --full has found a problem.
"""

from aura import backend, cli, distributed
from aura.errors import EXIT_OK, TrainingFault, UserError, agreed

__test__ = False  # a script with a test's name: pytest must leave it alone


def build_parser():
    """The arguments of this script."""
    parser = cli.Parser(prog="test_ddp.py", description="Comprueba que todos los procesos se ven y suman bien.")
    parser.add_argument("--backend", type=cli.choice("auto", "nccl", "gloo"), default="auto",
                        help="auto: NCCL con GPU, gloo sin ella")
    parser.add_argument("--timeout", type=cli.number(float, above=0, high=1e6), default=60.0, dest="dist_timeout",
                        metavar="SEGUNDOS", help="cuánto se espera a los demás procesos")
    full = parser.add_argument_group("examen completo")
    full.add_argument("--full", action="store_true",
                      help="compara todas las máquinas (versiones, código, datos, GPU, discos, interfaces), mide red, "
                           "relojes y cálculo, y dice qué falla y cómo arreglarlo")
    full.add_argument("--json", action="store_true", help="con --full: un objeto JSON en la salida del rango 0")
    full.add_argument("--checkpoint-dir", type=cli.path, default="./checkpoints",
                      help="carpeta de los puntos de control")
    full.add_argument("--data-dir", type=cli.path, default="./Data", help="carpeta de los datos preparados")
    cli.add_placement(parser.add_argument_group("proceso lanzado a mano"))
    return parser


def main():
    """Run the check; returns the exit code."""
    args = build_parser().parse_args()
    args.distributed = True
    if args.full:
        from aura import doctor  # brings the models and the data, which the plain check does without
        return doctor.examine(args)
    if args.json:
        raise agreed(UserError, "--json solo sirve con --full: añádalo")
    with distributed.session(args) as dist:
        try:
            total = backend.check_all_reduce(dist.rank, dist.world_size, dist.device)
        except RuntimeError as problem:
            if distributed.is_communication_error(problem):
                raise
            raise TrainingFault(f"[rango {dist.rank}] {problem}: la red o el backend {dist.backend} corrompen los "
                                "datos; pruebe con --backend gloo") from problem
        dist.print_each(f"all_reduce correcto con backend={dist.backend}: suma={total:g}, "
                        f"procesos={dist.world_size}")
        dist.barrier()
        dist.print("Todo correcto: los procesos se ven y suman bien.")
    return EXIT_OK


if __name__ == "__main__":
    cli.run(main)
