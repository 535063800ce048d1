"""A Python that has imported torch and what else is slow to import, and forks itself for each run that a test asks for.

Imports are four of the five seconds of a short run. A fork is a process like any other, with a session, folder,
environment and pipe of its own, that imports aura and the script itself and ends as Python ends; what it has in common
with its siblings is what was imported for it, and the order of sets of str. On the command line: the descriptor of the
socket on which requests come.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys

SLOW = ("torch", "torch._dynamo", "torch.distributed.nn.functional", "torch.utils.tensorboard", "matplotlib.pyplot",
        "matplotlib.backends.backend_agg", "sentencepiece.sentencepiece_model_pb2", "tqdm")


def serve(requests):
    """Fork a pair for each request: a child that returns it, and its parent, which tells the pid and the exit code.

    Returns None when nobody can ask any more. A request is JSON (command, cwd, env, host) with two descriptors: where
    output goes, and a socket for pid and exit code. Until that is closed an ended child is a zombie, its pid its own.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the parents of such pairs
    while True:
        message, (*descriptors,), *_ = socket.recv_fds(requests, 1 << 20, 2)
        if not message:
            return None
        if not os.fork():
            break
        for descriptor in descriptors:
            os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    requests.close()
    output, status = descriptors[0], socket.socket(fileno=descriptors[1])
    if pid := os.fork():
        os.close(output)
        status.send(str(exit_code(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT))).encode())
        status.recv(1)
        os.waitpid(pid, 0)
        os._exit(0)
    os.setsid()
    status.send(str(os.getpid()).encode())
    status.close()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    return json.loads(message)


def exit_code(ended):
    """As subprocess gives it: -signal for a process that a signal ended."""
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def become(command, cwd, env, host):
    """Run `command` as python would, in the network namespace `host`. command: a script, -m and a module, or -c and a
    program; then arguments."""
    if host:
        with open(f"/run/netns/{host}") as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), 0) == 0, f"no network namespace {host}"
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    how = command[0]
    sys.argv = {"-m": command[1:], "-c": ["-c", *command[2:]]}.get(how, command)
    sys.path[0] = {"-m": cwd, "-c": ""}.get(how, os.path.dirname(how))
    if how == "-m":
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    elif how == "-c":
        exec(command[1], vars(sys.modules["__main__"]))
    else:
        runpy.run_path(how, run_name="__main__")


if __name__ == "__main__":
    for name in SLOW:
        importlib.import_module(name)
    if "triton" not in sys.modules:  # else torch 2.15's bindings of it report at the end that what is frozen leaks
        gc.freeze()
    if request := serve(socket.socket(fileno=int(sys.argv[1]))):
        become(**request)
