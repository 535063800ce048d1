"""What a run tells: console in Spanish, train.csv, TensorBoard, the loss curve as a picture."""

import array
import contextlib
import csv
import logging
import math
import os
import re
import threading
import time
import warnings
from pathlib import Path

from aura.bar import bar, tqdm
from aura.console import harmless
from aura.errors import UserError
from aura.files import atomic_write, explain, regular, remove_partials, set_aside, sync_to_disk
from aura.words import duration

# epoch_loss: mean training loss of the epoch that ends with this row. stall_s: time that training stood still for
# checkpoints since the row before. memory_gb: peak of this process. seconds: of this run; total_seconds: of all.
# communication, efficiency: shares, against what --benchmark measured (scaling.py).
COLUMNS = ("step", "epoch", "tokens", "samples", "loss", "epoch_loss", "val_loss", "bits_per_byte", "exact_match", "f1",
           "lr", "grad_norm", "tokens_per_s", "samples_per_s", "mfu", "communication", "efficiency", "memory_gb",
           "stall_s", "seconds", "total_seconds")
CURVE = "loss.png"  # in --log-dir
# Dense bf16 peak in FLOP/s by the exact name the driver gives, from NVIDIA's data sheets and, for GeForce and the RTX
# A6000, the white papers on GA102, Ada and RTX Blackwell (FP16 tensor cores with FP32 accumulate); a card that is not
# here has no MFU rather than a wrong one.
PEAK_FLOPS = {
    "NVIDIA A100-SXM4-40GB": 312e12, "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12, "NVIDIA H100 80GB HBM3": 989.4e12, "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835.5e12, "NVIDIA H200": 989.4e12, "NVIDIA H200 NVL": 835.5e12, "NVIDIA B200": 2250e12,
    "NVIDIA L4": 121e12, "NVIDIA L40S": 362e12, "NVIDIA A10": 125e12, "NVIDIA A30": 165e12, "NVIDIA A40": 149.7e12,
    "NVIDIA RTX A6000": 154.8e12, "NVIDIA GeForce RTX 3080": 59.5e12, "NVIDIA GeForce RTX 3090": 71e12,
    "NVIDIA GeForce RTX 4080": 97.5e12, "NVIDIA GeForce RTX 4090": 165.2e12, "NVIDIA GeForce RTX 5090": 209.5e12,
}


def peak_flops(device_name, dtype):
    """Peak FLOP/s of the device for bf16 or fp16, or None when it is not known for certain."""
    return PEAK_FLOPS.get(device_name) if dtype in ("bf16", "fp16") else None


def cards_like(text):
    """Names of the known cards that `text` may mean, as 'A100' does; [] where it is itself the full name of one."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    return [] if text in PEAK_FLOPS else [name for name in PEAK_FLOPS if all(word in name.lower() for word in words)]


class Reporter:
    """Shows and stores the progress of a run. Only rank 0 does anything; the others may call it all the same.

    steps: length of the run. flops_per_token and peak: for MFU, None where unknown. name: the table's. target_hours:
    how long the whole training may take, resumes included; each line says whether it will. ideal: tokens/s of as many
    processes that never wait for each other; unexchanged: of these if they exchanged no gradients; None: not measured.
    unit: what loop.train counts, tokens or samples; then every rate here is one of samples.
    """

    def __init__(self, log_dir, main, steps, flops_per_token=None, peak=None, *, name="train.csv", target_hours=None,
                 ideal=None, unexchanged=None, unit="tokens"):
        self.log_dir, self.main, self.steps = Path(log_dir), main, steps
        self.flops_per_token, self.peak = flops_per_token, peak
        self.table, self.target_hours = self.log_dir / name, target_hours
        self.ideal, self.unexchanged, self.unit = ideal, unexchanged, unit
        self.counted = self.seconds = 0.0
        self.step_times = array.array("d")  # of a million steps, 8 MB
        self.bar = self.board = self.again = None
        self.lost = False  # the log could not be written

    def start(self, step, last=None, *, again=False):
        """Begin at `step`: 0 sets old logs aside, a later one drops the rows after the checkpoint's step. last: what
        log() returned for the last row before the checkpoint, None where that does not say; a table without this row is
        another run's, and is set aside as well. again: the row of `step` will be logged once more. Raises UserError
        when --log-dir cannot be written."""
        if not self.main:
            return
        try:
            self._begin_table(step, last, again)
            if step and (self.log_dir / "events.log").exists():
                self._note(step, "se reanuda aquí: lo anotado antes sobre pasos posteriores ya no cuenta")
            from torch.utils.tensorboard import SummaryWriter  # takes a second to import, and only rank 0 needs it

            threading.excepthook = _without_tensorboard
            self.board = SummaryWriter(str(self.log_dir), purge_step=step + 1 - again if step else None)
        except OSError as problem:
            raise UserError(f"--log-dir {str(self.log_dir)!r}: no se puede escribir el registro ({explain(problem)}); "
                            "haga sitio o indique otra carpeta") from problem
        self.bar = bar(total=self.steps, initial=step, unit="paso", desc="Entrenando", disable=None,
                       dynamic_ncols=True)
        self.started, self.first = time.monotonic(), step

    def _begin_table(self, step, last, again):
        rows, blank = [], False
        with contextlib.suppress(OSError, csv.Error):
            rows = read_table(self.table)
            # A run that was cut short in its first steps had written no row, and its checkpoint knows of none.
            blank = last is None and self.table.read_bytes().strip() == ",".join(COLUMNS).encode()
        ours = rows if last is None else [row for row in rows if [row["step"], row["loss"]] == last]
        if step == 0 or not ours and not blank:
            old = [self.table, self.log_dir / CURVE, self.log_dir / "events.log"]
            folder = set_aside([*old, *self.log_dir.glob("events.out.tfevents.*")], self.log_dir)
            if folder:
                why = f"Aviso: {self.table} es de otra ejecución o no se puede leer: el" if step else "El"
                self.say(f"{why} registro que había se ha movido a {folder}.")
            rows = []
        for name in (self.table.name, CURVE):
            remove_partials(self.log_dir, name)
        self.again = step if again else None  # its row stays until the new one replaces it: the table is known by it
        self._write_table(row for row in rows if int(row["step"]) <= step)

    def _write_table(self, rows):
        with atomic_write(self.table, "w") as file:
            writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)

    def count(self, count, seconds):
        """Add the tokens or samples and the time of one training step."""
        self.counted += count
        self.seconds += seconds
        self.step_times.append(seconds)
        if self.bar is not None:
            self.bar.update(1)

    def log(self, step, **values):
        """Report one step: a console line, a row of train.csv, TensorBoard. values: any of COLUMNS. Returns [step,
        loss] as they stand in the row, None on other ranks and where it could not be written."""
        if not self.main:
            return None
        if "tokens" in values:
            values[self.unit] = values.pop("tokens")
        if self.seconds:
            rate = values[f"{self.unit}_per_s"] = self.counted / self.seconds
            if self.peak and self.flops_per_token:
                values["mfu"] = rate * self.flops_per_token / self.peak
            if self.ideal:
                values["efficiency"] = rate / self.ideal
            if self.unexchanged:
                values["communication"] = max(0.0, 1 - rate / self.unexchanged)
        values["seconds"] = time.monotonic() - self.started
        self.counted = self.seconds = 0.0
        row = {"step": str(step), **{key: repr(value) for key, value in values.items()}}

        def write():
            if step == self.again:
                rows = read_table(self.table)
                before = next((old for old in rows if old["step"] == row["step"]), {})  # what was measured then stays
                row.update({key: text for key, text in before.items() if text})
                self._write_table([*(old for old in rows if int(old["step"]) < step), row])
            else:
                with open(self.table, "a", newline="", encoding="utf-8") as file:
                    writer = csv.DictWriter(file, COLUMNS)
                    if not file.tell():  # somebody removed it while the run is on
                        writer.writeheader()
                    writer.writerow(row)
            for key in row.keys() - {"step"}:
                self.board.add_scalar(key, float(row[key]), step)

        written = self._write(write)
        self.say(self._line(step, values))
        return [row["step"], row.get("loss", "")] if written else None

    def keep(self):
        """Flush the table's rows to disk before a checkpoint is written: after a power cut, a table without the row
        that the checkpoint remembers would pass for another run's."""
        if self.main:
            self._write(lambda: sync_to_disk(self.table))

    def _write(self, work):
        """Call work(), which writes to the log; returns whether the log is whole. A log that cannot be written does not
        end the training: that is said once, and nothing more is written after a row that may be incomplete."""
        if not self.lost:
            try:
                work()
            except OSError as problem:
                self.lost = True
                self.say(f"Aviso: no se puede escribir en --log-dir {str(self.log_dir)!r} ({explain(problem)}): el "
                         "entrenamiento sigue, sin registro hasta que se reanude.")
        return not self.lost

    def _line(self, step, values):
        shown = [f"paso {step}/{self.steps}"]
        for key, label, form in (("loss", "pérdida", "{:.4f}"), ("val_loss", "validación", "{:.4f}"),
                                 ("bits_per_byte", "bits/byte", "{:.4f}"), ("exact_match", "EM", "{:.1f}"),
                                 ("f1", "F1", "{:.1f}"), ("epoch_loss", "época", "{:.4f}"),
                                 ("lr", "lr", "{:.2e}"), ("grad_norm", "gradiente", "{:.2f}"),
                                 ("tokens_per_s", "tokens/s", "{:.0f}"), ("samples_per_s", "muestras/s", "{:.1f}"),
                                 ("memory_gb", "memoria", "{:.1f} GB")):
            if key in values:
                shown.append(f"{label} {form.format(values[key])}")
        for key, label in (("mfu", "MFU"), ("communication", "comunicación"), ("efficiency", "eficiencia")):
            if key in values:
                shown.append(f"{label} {100 * values[key]:.1f} %")
        done = step - self.first
        if done and step < self.steps:
            left = (time.monotonic() - self.started) / done * (self.steps - step)
            shown.append(f"faltan {duration(left)}")
            if self.target_hours:
                hours = (values.get("total_seconds", values["seconds"]) + left) / 3600
                verdict = "cumple" if hours <= self.target_hours else "NO cumple"
                shown.append(f"{verdict} las {self.target_hours:g} h (total {duration(3600 * hours)})")
        return " | ".join(shown)

    def say(self, text):
        """Print a line without breaking the progress bar."""
        if self.main:
            tqdm.write(harmless(text))

    def sample(self, step, text):
        """Show a generated text."""
        if self.main:
            self.say(f"--- muestra del paso {step} ---\n{text}\n---")
            self._write(lambda: self.board.add_text("muestra", text, step))

    def event(self, step, text):
        """Tell of something out of the ordinary, on the console and in events.log."""
        if self.main:
            self.say(f"AVISO, paso {step}: {text}")
            self._write(lambda: self._note(step, text))

    def fault(self, step, text):
        """Leave in events.log why a run ends, where that can be written; whoever ends it says so on the console."""
        if self.main:
            with contextlib.suppress(OSError):
                self._note(step, f"se interrumpe: {text}")

    def _note(self, step, text):
        with open(self.log_dir / "events.log", "a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} paso {step}: {text}\n")

    def close(self):
        """Draw the curve and close what is open."""
        if not self.main or self.bar is None:
            return
        self.bar.close()
        try:
            if not self.lost:
                self.board.close()
            draw_curve(read_table(self.table), self.log_dir / CURVE, self.unit)
        except OSError as problem:  # a full disk must not hide how the run itself ended
            self.say(f"Aviso: no se pudo guardar la curva de pérdida ({explain(problem)}).")
        except Exception as problem:  # and a picture must not cost the model, whatever is wrong
            self.say(f"Aviso: no se pudo dibujar la curva de pérdida ({type(problem).__name__}: {problem}).")


def _without_tensorboard(args, hook=threading.excepthook):
    """threading.excepthook, but silent about a disk that fails TensorBoard's thread: our own call raises that too."""
    if not (type(args.thread).__module__.startswith("tensorboard") and isinstance(args.exc_value, OSError)):
        hook(args)


def read_table(path):
    """The rows of a train.csv as dicts of str, without one that a killed run left incomplete; [] when there is no
    file, or a spreadsheet has turned it into something else."""
    if not Path(path).exists():
        return []
    with open(regular(path), newline="", encoding="utf-8-sig", errors="replace") as file:
        return [row for row in csv.DictReader(file)
                if re.fullmatch(r"\d+", row.get("step") or "") and None not in row.values()]


def new_figure(rows=1, columns=1, *, figsize, layout=None, **axes):
    """(a matplotlib Figure, its axes as Figure.subplots gives them) that needs no screen."""
    os.environ["MPLBACKEND"] = "Agg"  # a notebook sets a backend of its own, which this Python may lack
    # It warns in English of a home that it cannot write to, and of letters that its font lacks.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
    from matplotlib.figure import Figure

    figure = Figure(figsize=figsize, layout=layout)
    return figure, figure.subplots(rows, columns, **axes)


def draw_curve(rows, path, unit="tokens"):
    """Draw training and validation loss over the steps into the PNG `path`. unit: as Reporter takes it."""
    figure, axes = new_figure(figsize=(8, 5))
    for column, label, style in (("loss", "entrenamiento", "-"), ("val_loss", "validación", "o-")):
        points = [(int(row["step"]), float(row[column])) for row in rows if row.get(column)]
        points = [point for point in points if math.isfinite(point[1])]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=4)
    counted = "token" if unit == "tokens" else "muestra"
    axes.set(xlabel="paso", ylabel=f"pérdida (nats por {counted})", title="Curva de pérdida")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=100)
