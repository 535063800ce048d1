"""What monitor.py shows: samples, beats and findings as lines that fit a width, as a row of CSV, as JSON."""

import contextlib
import csv
import dataclasses
import io
import json
import math
import os
import select
import shutil
import signal
import socket
import sys
import time
import unicodedata
from pathlib import Path

from aura import diagnosis
from aura.errors import UserError
from aura.files import explain
from aura.words import ago, counted, span

MOST_PROCESSES = 10  # rows of processes; those that use most
SILENT_SECONDS, STILL_SECONDS = 5, 15  # after which a row says that a rank is silent, or stays where it is
STATUSES = {"running": "activo", "sleeping": "en espera", "disk-sleep": "espera al disco", "idle": "en espera",
            "stopped": "detenido", "tracing-stop": "detenido", "zombie": "zombi", "dead": "muerto"}
STYLES = {"": "", "title": "\x1b[1m", "bad": "\x1b[1;31m", "dim": "\x1b[2m"}
RESET = "\x1b[0m"
NOTHING, BETWEEN = "-", "  "  # for what was not measured, and between two columns
MOST_NAME, MOST_STATE = 16, 19  # cells of a machine's name and of a rank's state in a table


# --- text of a given width -------------------------------------------------------------------------------------------
def width_of(text):
    """Cells that `text` takes on a terminal."""
    return sum(0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
               for letter in text)


def clean(text):
    """`text` without what would move the cursor: a process may call itself anything."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text))


def clip(text, width):
    """`text`, or as much of it as fits with '…' at its end."""
    if width_of(text) <= width:
        return text
    kept, room = "", width - 1
    for letter in text:
        room -= width_of(letter)
        if room < 0:
            break
        kept += letter
    return kept + "…" if width > 0 else ""


def pad(text, width, right):
    """`text` filled with blanks to `width` cells."""
    blanks = " " * (width - width_of(text))
    return blanks + text if right else text + blanks


def flow(pieces, width):
    """Lines of at most `width` cells that hold the pieces in order, broken between them only; a piece that is wider
    than a line is clipped."""
    lines = []
    for piece in pieces:
        longer = f"{lines[-1]} | {piece}" if lines else ""
        if lines and width_of(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(piece)
    return [clip(line.rstrip(), width) for line in lines]


def wrap(text, width):
    """`text` in lines of at most `width` cells, broken at blanks, the later ones indented."""
    lines = []
    for word in text.split():
        if lines and width_of(lines[-1]) + 1 + width_of(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(("  " if lines else "") + word)
    return [clip(line, width) for line in lines]


def table(columns, rows, width):
    """Lines of a table with a header, of as many columns as fit, the important ones first, without empty ones.
    columns: (header, importance, whether numbers) each; rows: tuples of str."""
    rows = [[column[0] for column in columns], *([clean(cell) for cell in row] for row in rows)]
    sizes, room = {}, width + len(BETWEEN)
    for place in sorted(range(len(columns)), key=lambda place: -columns[place][1]):
        size = max(width_of(row[place]) for row in rows)
        filled = any(row[place] not in ("", NOTHING) for row in rows[1:])
        if filled and (size + len(BETWEEN) <= room or not sizes):
            sizes[place] = size
            room -= size + len(BETWEEN)
    return [clip(BETWEEN.join(pad(row[place], sizes[place], columns[place][2]) for place in sorted(sizes)).rstrip(),
                 width) for row in rows]


# --- figures ---------------------------------------------------------------------------------------------------------
def figure(value, form="{:.0f}", unit=""):
    """A number with its unit; '-' where it was not measured."""
    return NOTHING if value is None else form.format(value) + unit


def size(value):
    """Bytes in GB, below a tenth of one in MB."""
    return NOTHING if value is None else diagnosis.gigabytes(value) if value >= 1e8 else f"{value / 1e6:.0f} MB"


def part(used, total, noun="de"):
    """'12.3 GB de 62.8 GB (20 %)'."""
    return NOTHING if used is None or not total else f"{size(used)} {noun} {size(total)} ({100 * used / total:.0f} %)"


def rate(value):
    """Bytes per second in MB/s."""
    return figure(value / 1e6, "{:.1f}", " MB/s")


def seconds(value):
    """A duration; '-' where it was not measured."""
    return NOTHING if value is None else span(value)


# --- the lines -------------------------------------------------------------------------------------------------------
def lines(sample, beats, found, width=math.inf, cluster=False, run=None):
    """(lines, lines of the findings) of one moment, both as [(text, style)]. width: cells of a line.

    cluster: whether to show the ranks of all machines, not of this one alone. run: the folder that is watched, or None.
    """
    body = _machine(sample, width) + _cards(sample, width) + _processes(sample, width)
    if run is not None:
        body += _ranks(sample, beats, width, cluster, run)
    told = [(line, "bad") for finding in found for line in wrap(clean(f"AVISO: {finding.line()}"), width)]
    told += [(line, "dim") for note in sample.notes for line in wrap(clean(f"Nota: {note}"), width)]
    return body + [("", "")] * bool(told), told


def _machine(sample, width):
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(sample.time))
    load = f", carga {sample.load:.1f}" if sample.load is not None else ""
    facts = [f"CPU {figure(sample.cpu, unit=' %')} de {counted(sample.cores, 'núcleo')}{load}",
             f"RAM {part(sample.memory_used, sample.memory_total)}"]
    if sample.swap_total:
        facts.append(f"swap {part(sample.swap_used, sample.swap_total)}")
    facts.append(f"disco {sample.disk}: {part(sample.disk_free, sample.disk_total, 'libres de')}")
    facts += [f"red {link.interface}: recibe {rate(link.received)}, envía {rate(link.sent)}" for link in sample.links]
    return [(clip(clean(f"{clock}  {sample.host}"), width), "title"),
            *((line, "") for line in flow([clean(fact) for fact in facts], width))]


def _cards(sample, width):
    columns = (("GPU", 9, True), ("nombre", 1, False), ("uso", 8, True), ("memoria", 7, True), ("temp.", 6, True),
               ("potencia", 5, True), ("reloj", 3, True), ("freno", 4, False), ("procesos", 2, False))
    rows = []
    for gpu in sample.gpus:
        cap = f" de {gpu.power_cap:.0f}" if gpu.power_cap is not None else ""
        top = f" de {gpu.clock_max:.0f}" if gpu.clock_max is not None else ""
        of = f" de {gpu.memory_total / 1e9:.1f}" if gpu.memory_total is not None else ""
        rows.append((
            str(gpu.index), gpu.name, figure(gpu.utilisation, unit=" %"),
            NOTHING if gpu.memory_used is None else f"{gpu.memory_used / 1e9:.1f}{of} GB",
            figure(gpu.temperature, unit=" °C"), figure(gpu.power, unit=f"{cap} W"),
            figure(gpu.clock, unit=f"{top} MHz"), ", ".join(diagnosis.brakes(gpu)),
            ", ".join(f"{pid} ({size(used)})" for pid, used in gpu.processes.items())))
    return _titled(columns, rows, width)


def _processes(sample, width):
    columns = (("proceso", 9, True), ("nombre", 6, False), ("CPU", 8, True), ("memoria", 7, True),
               ("estado", 4, False), ("nuestro", 5, False))
    shown = sorted(sample.processes, key=lambda process: (not process.ours, -(process.cpu or 0)))[:MOST_PROCESSES]
    rows = [(str(process.pid), process.name, figure(process.cpu, unit=" %"), size(process.memory),
             STATUSES.get(process.status, process.status), "sí" if process.ours else "no") for process in shown]
    more = len(sample.processes) - len(shown)
    return _titled(columns, rows, width) + [(clip(f"y {counted(more, 'proceso')} más", width), "dim")] * bool(more)


def _titled(columns, rows, width):
    """A table below an empty line; nothing where there are no rows."""
    if not rows:
        return []
    head, *others = table(columns, rows, width)
    return [("", ""), (head, "title"), *((line, "") for line in others)]


def _ranks(sample, beats, width, cluster, run):
    shown = [beat for beat in beats if cluster or diagnosis.is_local(beat, sample)]
    names = diagnosis.machine_names(beats)
    if not shown:
        why = f"Sin noticias de ningún rango en {run!r}: ¿es el --log-dir de la ejecución?"
        if beats:
            why = (f"Ningún rango de {run!r} está en esta máquina, sino en {', '.join(dict.fromkeys(names.values()))}: "
                   "--cluster los enseña.")
        return [("", ""), *((line, "dim") for line in wrap(why, width))]
    columns = (("rango", 20, True), ("máquina", 14 if cluster else 2, False), ("paso", 15, True), ("fase", 13, False),
               ("cálculo", 12, True), ("datos", 8, True), ("comunic.", 9, True), ("guardado", 4, True),
               (f"{shown[0].unit}/s", 10, True), ("pérdida", 7, True), ("memoria", 5, True), ("estado", 19, False))
    rows = []
    for beat in shown:
        last = beat.windows[-1] if beat.windows else None
        times = [getattr(last, name, None) for name in ("compute", "data", "communication", "save")]
        rows.append((str(beat.rank), clip(names[beat.rank], MOST_NAME), f"{beat.step}/{beat.steps}",
                     diagnosis.PHASES.get(beat.phase, beat.phase), *map(seconds, times),
                     figure(last and last.tokens_per_s), figure(beat.loss, "{:.4f}"), size(beat.memory),
                     clip(clean(state(beat, sample.time)), MOST_STATE)))
    made = _titled(columns, rows, width)
    bad = {place for place, row in enumerate(rows) if row[-1].startswith("sin noticias")}
    return made[:2] + [(text, "bad" if place in bad else style) for place, (text, style) in enumerate(made[2:])]


def state(beat, now):
    """How a rank is, in a few words."""
    if beat.ended is not None:
        return beat.ended or "terminado"
    silent = beat.age(now)
    if silent > SILENT_SECONDS:
        return f"sin noticias {ago(silent)}"
    still = beat.phase_s + silent
    return f"quieto {ago(still)}" if still > STILL_SECONDS else "en marcha"


# --- machines that read ----------------------------------------------------------------------------------------------
def record(sample, beats, found):
    """One line of JSON: {"sample": ..., "beats": [...], "findings": [...]}."""
    beats = [dataclasses.asdict(beat) for beat in beats]
    for beat in beats:
        if beat["loss"] is not None and not math.isfinite(beat["loss"]):
            beat["loss"] = None  # JSON has no NaN
    return json.dumps({"sample": dataclasses.asdict(sample), "beats": beats,
                       "findings": [dataclasses.asdict(one) for one in found]}, ensure_ascii=False)


def csv_row(sample, beats, found):
    """{column: value} of one sample; bytes, percent, degrees Celsius, watts, MHz, bytes and tokens per second."""
    row = {"time": f"{sample.time:.3f}", "host": sample.host}
    row |= {name: getattr(sample, name) for name in ("cpu", "load", "memory_used", "memory_total", "swap_used",
                                                     "disk_free", "disk_total")}
    row["net_received"] = sum(link.received for link in sample.links)
    row["net_sent"] = sum(link.sent for link in sample.links)
    for gpu in sample.gpus:
        for name in ("utilisation", "memory_used", "temperature", "power", "clock"):
            row[f"gpu{gpu.index}_{name}"] = getattr(gpu, name)
        row[f"gpu{gpu.index}_throttle"] = " ".join(gpu.throttle)
    alive = [beat for beat in beats if beat.ended is None]
    row["ranks"] = len(alive)
    row["step"] = min((beat.step for beat in alive), default=None)
    row["loss"] = next((beat.loss for beat in alive if beat.loss is not None), None)
    row["tokens_per_s"] = sum(beat.windows[-1].tokens_per_s for beat in alive if beat.windows) if alive else None
    row["findings"] = " ".join(dict.fromkeys(finding.kind for finding in found))
    return row


class CsvFile:
    """A CSV file with a row a sample, each of them written at once.

    Raises UserError where the file has other columns or cannot be written.
    """

    def __init__(self, path):
        self.path, self.columns = Path(path), None

    def add(self, row):
        """Append `row`; the first one decides the columns."""
        try:
            if self.columns is None:
                self._begin(list(row))
            self._write([row.get(column) for column in self.columns])
        except OSError as problem:
            raise UserError(f"--csv {str(self.path)!r}: no se puede escribir ({explain(problem)}); indique otro"
                            ) from problem

    def _begin(self, columns):
        self.columns = columns
        if self.path.exists() and not self.path.is_file():  # a device or a pipe may have no end to read to
            raise UserError(f"--csv {str(self.path)!r}: no es un fichero; indique otro")
        old = self.path.read_bytes() if self.path.exists() else b""
        if not old:
            self._write(columns)
        elif old.split(b"\n")[0].rstrip(b"\r") != _row(columns).encode().rstrip(b"\n"):
            raise UserError(f"--csv {str(self.path)!r}: ya existe con otras columnas; indique otro fichero")
        elif not old.endswith(b"\n"):  # a monitor that was killed left half a row
            with open(self.path, "ab") as file:
                file.write(b"\n")

    def _write(self, cells):
        with open(self.path, "ab", buffering=0) as file:
            before, rest = file.tell(), _row(cells).encode()
            try:
                while rest:
                    rest = rest[file.write(rest):]
            except OSError:  # a full disk takes a part: half a number is another one
                file.truncate(before)
                raise


def _row(cells):
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow("" if cell is None else cell for cell in cells)
    return text.getvalue()


# --- where it is shown -----------------------------------------------------------------------------------------------
class Pipe:
    """Plain lines, a block a sample."""

    def __init__(self, color):
        self.color, self.first = color, True

    def show(self, draw):
        """Print what draw(width) gives."""
        body, told = draw(math.inf if not sys.stdout.isatty() else shutil.get_terminal_size().columns)
        text = "\n".join(paint(line, style, self.color) for line, style in [*body, *told])
        print(("" if self.first else "\n") + text)
        self.first = False

    def wait(self, seconds):
        """Wait until the next sample."""
        time.sleep(seconds)


class Screen:
    """A terminal that is drawn over in place, in its alternate screen and without wrapping or cursor."""

    def __init__(self, color):
        self.color, self.draw = color, None
        # A signal just before a plain sleep would be seen when that ends; here it leaves a byte that ends the wait.
        self.reader, self.writer = socket.socketpair()
        self.writer.setblocking(False)

    def __enter__(self):
        self.before = signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)
        if hasattr(signal, "SIGWINCH"):
            for number in (signal.SIGWINCH, signal.SIGTSTP):  # only signals with a handler leave their byte
                signal.signal(number, lambda *_: None)
        self._begin()
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):  # a terminal that was closed
            self._end()
        signal.set_wakeup_fd(self.before)
        if hasattr(signal, "SIGWINCH"):
            signal.signal(signal.SIGWINCH, signal.SIG_DFL)
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        self.reader.close()
        self.writer.close()

    def _begin(self):
        sys.stdout.write("\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J")
        sys.stdout.flush()

    def _end(self):
        sys.stdout.write("\x1b[?7h\x1b[?25h\x1b[?1049l")
        if self.draw:  # the last figures stay to be read
            Pipe(self.color).show(self.draw)
        sys.stdout.flush()

    def _pause(self):
        """Ctrl+Z: leave the terminal to the shell until it says fg. Not in the signal's handler, which may come in the
        middle of a drawing."""
        self._end()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._begin()

    def show(self, draw):
        """Draw what draw(width) gives, as much as there is room for, the findings rather than the rest."""
        self.draw = draw
        columns, rows = os.get_terminal_size(sys.stdout.fileno())
        columns, rows = columns or 80, rows or 24  # a serial line does not say
        body, told = draw(columns)
        told = told[:max(1, rows // 2)]
        if len(body) + len(told) > rows:
            room = max(0, rows - len(told) - 1)
            more = len(body) - room
            body = [*body[:room], (clip(f"… {more} líneas más: agrande la ventana", columns), "dim")]
        text = "\x1b[K\n".join(paint(line, style, self.color) for line, style in [*body, *told][:rows])
        sys.stdout.write(f"\x1b[H{text}\x1b[K\x1b[J")
        sys.stdout.flush()

    def wait(self, seconds):
        """Wait until the next sample; draw again when the window changes."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([self.reader], [], [], left)[0]:
                told = self.reader.recv(4096)
                if hasattr(signal, "SIGTSTP") and signal.SIGTSTP in told:
                    self._pause()
                if self.draw:
                    self.show(self.draw)


def paint(text, style, color):
    """`text` in its style, where colours are wanted."""
    text = clean(text)
    return f"{STYLES[style]}{text}{RESET}" if color and style and text else text
