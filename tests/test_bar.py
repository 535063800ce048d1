"""aura/bar.py: a bar that needs no thread."""

import io
import threading

import tqdm.auto

from aura.bar import bar


def test_no_bar_starts_a_thread():
    before = threading.enumerate()
    with bar(total=2, file=io.StringIO()), tqdm.auto.tqdm(total=2, disable=True):  # a library's
        assert threading.enumerate() == before


def test_a_bar_is_redrawn_by_time_however_fast_it_was():
    now, file = [0.0], io.StringIO()
    with bar(total=10_000, file=file, mininterval=1.0) as fast:
        fast._time = lambda: now[0]
        fast.last_print_t = fast.start_t = 0.0
        for _ in range(5000):  # a thousand a second
            now[0] += 1e-3
            fast.update()
        now[0] += 1.5
        fast.update()
        assert "5001/" in file.getvalue().split("\r")[-1]
