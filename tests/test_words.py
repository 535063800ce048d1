"""Words that follow a number, how much there is of something and how long it lasts."""

import pytest

from aura.words import amount, counted, duration, listed, span


@pytest.mark.parametrize("number, text", [(0, "0 pasos"), (1, "1 paso"), (2, "2 pasos")])
def test_one_is_singular(number, text):
    assert counted(number, "paso") == text


def test_the_last_of_a_list_is_joined_by_y():
    assert [listed(items) for items in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a y b", "a, b y c"]


@pytest.mark.parametrize("seconds, text", [(0.0, "0.0 ms"), (0.0042, "4.2 ms"), (0.085, "85 ms"), (0.84, "0.84 s"),
                                           (12.3, "12 s"), (150.0, "2 min"), (9000.0, "2.5 h")])
def test_a_duration_has_the_figures_that_matter(seconds, text):
    assert span(seconds) == text


@pytest.mark.parametrize("seconds, text", [(45, "45 s"), (60, "1 min 00 s"), (200, "3 min 20 s"), (3600, "1 h 00 min"),
                                           (7500, "2 h 05 min")])
def test_how_long_a_run_takes(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize("count, told", [(0, "0 kB"), (999_499, "999 kB"), (1e6, "1.00 MB"), (4.5e6, "4.50 MB"),
                                         (1e9, "1.00 GB"), (2.07e12, "2070.00 GB")])
def test_bytes_have_the_unit_that_tells_something(count, told):
    assert amount(count) == told
