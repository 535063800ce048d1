"""Words that follow a number."""

import pytest

from aura.words import counted, listed


@pytest.mark.parametrize("number, text", [(0, "0 pasos"), (1, "1 paso"), (2, "2 pasos")])
def test_one_is_singular(number, text):
    assert counted(number, "paso") == text


def test_the_last_of_a_list_is_joined_by_y():
    assert [listed(items) for items in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a y b", "a, b y c"]
