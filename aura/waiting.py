"""Machines that wait for one another say so, and for what: torchrun says nothing for a quarter of an hour.

    python -m aura.waiting 192.168.1.10 29500        # returns as soon as machine 0 listens there; ddp_launch.sh asks
"""

import os
import signal
import socket
import sys
import time

from aura.errors import EXIT_OK, UserError
from aura.signals import die_with_parent

FIRST_SECONDS = 10.0  # before the first word: starting a process takes some of them
AGAIN_SECONDS = 60.0
ANSWER_SECONDS = 2.0  # for a port to be open
POLL_SECONDS = 0.2  # a rank 0 that finds something wrong is there for a second or two
TORCHRUN_SECONDS = 900  # how long torchrun waits for the other machines
REFUSED = ("en ese puerto no escucha nadie; lance allí la orden, con el mismo puerto, y compruebe que su cortafuegos "
           "lo deja pasar")
UNKNOWN = "ese nombre no se resuelve en esta máquina; ponga la IP de la máquina 0"
NO_WAY = "no hay camino hasta esa dirección; compruebe que es la suya y que las dos máquinas están en la misma red"
MUTE = "no contesta nadie; compruebe que esa es su dirección y que su cortafuegos deja pasar ese puerto"


class Patience:
    """Says what is waited for: after FIRST_SECONDS, then every AGAIN_SECONDS. say: takes a line."""

    def __init__(self, say):
        self.say, self.began, self.due = say, time.monotonic(), FIRST_SECONDS

    def waited(self):
        """Seconds since this was made."""
        return time.monotonic() - self.began

    def wait(self, pause, text):
        """Sleep for `pause` seconds, and say `text` if it is time to."""
        if self.waited() >= self.due:
            self.due = self.waited() + AGAIN_SECONDS
            self.say(f"Esperando desde hace {self.waited():.0f} s {text}")
        time.sleep(pause)


def until_open(host, port, limit, who, say):
    """Wait until somebody listens at host:port; returns None or, after `limit` seconds, why nobody does, in Spanish.
    who: Spanish for whom ("a la máquina 0"). say: as Patience takes it."""
    patience = Patience(say)
    while True:
        reason = closed(host, port)
        if reason is None or patience.waited() >= limit:
            return reason
        patience.wait(POLL_SECONDS, f"{who} en {host}:{port}: {reason}.")


def closed(host, port):
    """None where somebody listens at host:port, else why not, as a phrase with the way out."""
    try:
        socket.create_connection((host, port), ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        return REFUSED
    except TimeoutError:
        return MUTE
    except (socket.gaierror, UnicodeError):  # UnicodeError: two dots side by side
        return UNKNOWN
    except OSError:  # EHOSTUNREACH, ENETUNREACH
        return NO_WAY
    return None


def for_machine_0(host, port):
    """Wait until torchrun can meet machine 0. Raises UserError when it does not come."""
    def say(line):
        print(line, file=sys.stderr, flush=True)

    if reason := until_open(host, port, TORCHRUN_SECONDS, "a la máquina 0", say):
        raise UserError(f"han pasado {TORCHRUN_SECONDS // 60} minutos sin encontrar la máquina 0 en {host}:{port}: "
                        f"{reason}")


def main():
    """Called by ddp_launch.sh; ends with it."""
    die_with_parent(signal.SIGTERM, os.getppid())()
    for_machine_0(sys.argv[1], int(sys.argv[2]))
    return EXIT_OK


if __name__ == "__main__":
    from aura import cli

    cli.run(main)
