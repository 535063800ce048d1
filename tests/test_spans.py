"""Windows of questions and contexts, and the spans that answer them, against plain definitions of each."""

import unicodedata

import numpy as np
import pytest

from aura import spans, squad, wordpiece
from aura.errors import UserError

SMALL = {"max_len": 40, "stride": 14, "question_len": 8}  # several windows for each context of the sample


@pytest.fixture(scope="module")
def examples():
    return squad.read(squad.SAMPLE)[0]


@pytest.fixture(scope="module")
def tokenizer(examples):
    return wordpiece.WordPiece(wordpiece.learn([text for e in examples for text in (e.context, e.question)], 700))


@pytest.fixture(scope="module")
def found(examples, tokenizer):
    return spans.features(examples, tokenizer, **SMALL)


def windows_by_definition(example, tokenizer, max_len, stride, question_len):
    """(ids, context_at, start, end, [(first, after) character of each context token], [whether the maximum context])"""
    asked = tokenizer.encode(example.question)[0].tolist()[:question_len]
    ids, starts, ends = (array.tolist() for array in tokenizer.encode(example.context))
    room, parts, begin = max_len - len(asked) - 3, [], 0
    while True:
        parts.append((begin, min(begin + room, len(ids))))
        if begin + room >= len(ids):
            break
        begin += stride
    text, place = example.answers[0]
    answer = [n for n in range(len(ids)) if starts[n] < place + len(text) and ends[n] > place]

    def context_score(token, span):
        return min(token - span[0], span[1] - 1 - token) + 0.01 * (span[1] - span[0])

    for low, high in parts:
        at = len(asked) + 2
        inside = answer and low <= answer[0] and answer[-1] < high
        most = []
        for token in range(low, high):
            scores = [(context_score(token, span), -span[0]) for span in parts if span[0] <= token < span[1]]
            most.append(max(scores)[1] == -low)
        yield ([tokenizer.cls_id, *asked, tokenizer.sep_id, *ids[low:high], tokenizer.sep_id], at,
               at + answer[0] - low if inside else 0, at + answer[-1] - low if inside else 0,
               list(zip(starts[low:high], ends[low:high], strict=True)), most)


@pytest.mark.parametrize("sizes", [SMALL, {"max_len": 24, "stride": 13, "question_len": 8},
                                   {"max_len": 384, "stride": 128, "question_len": 64},
                                   {"max_len": 384, "stride": 250, "question_len": 64}])
def test_windows(examples, tokenizer, sizes):
    long = " ".join(dict.fromkeys(example.context for example in examples[:40]))
    examples = [*examples, squad.Example("long", "¿Qué?", long, [("Ebro", 3)])]
    found = spans.features(examples, tokenizer, **sizes)
    expected = [(number, *window) for number, example in enumerate(examples)
                for window in windows_by_definition(example, tokenizer, **sizes)]
    assert len(found) == len(expected) and found.lengths.sum() == len(found.ids) == found.offsets[-1]
    assert found.lengths.max() <= sizes["max_len"]
    for i, (number, ids, at, start, end, characters, most) in enumerate(expected):
        assert found.ids[found.offsets[i]:found.offsets[i + 1]].tolist() == ids
        assert (found.example[i], found.context_at[i], found.start[i], found.end[i]) == (number, at, start, end)
        part = slice(found.first_token[i], found.first_token[i] + len(characters))
        pairs = zip(found.char_starts[part].tolist(), found.char_ends[part].tolist(), strict=True)
        assert list(pairs) == characters
        assert [found.max_from[i] <= at + n < found.max_to[i] for n in range(len(most))] == most
    wide = {name for name, array in vars(found).items() if array.dtype == np.int64}
    assert wide == {"offsets", "first_token"}
    assert {array.dtype for array in vars(found).values()} == {np.dtype("int32"), np.dtype("int64")}
    assert (found.start > 0).sum() >= (len(examples) if sizes["max_len"] > 24 else 40)


def test_windows_of_the_unusual(tokenizer):
    several = [squad.Example("no context", "¿Qué?", "", [("x", -1)]),
               squad.Example("no question", "", "La Luna", [("La", 0)]),
               squad.Example("between signs", "¿Qué?", "(Ebro)", [("Ebro", 1)]),
               squad.Example("part of a word", "¿Qué?", "El Ebro nace", [("bro", 4)]),
               squad.Example("not a token", "¿Qué?", "El \u200b Ebro", [("\u200b", 3)]),
               squad.Example("nowhere", "¿Qué?", "El Ebro", [("Tajo", -1), ("Ebro", 3)])]
    found = spans.features(several, tokenizer)
    assert found.example.tolist() == list(range(6)) and found.lengths[0] == found.context_at[0] + 1
    assert found.context_at[1] == 2
    assert [start > 0 for start in found.start] == [False, True, True, True, False, True]
    answers, _ = spans.predict(several, found, *gold(found))
    assert answers["no context"] == "" and answers["no question"] == "La" and answers["nowhere"] == "Ebro"
    assert answers["between signs"] == "Ebro"
    assert "bro" in answers["part of a word"]
    nothing = spans.features([], tokenizer)
    assert len(nothing) == len(nothing.ids) == 0 and nothing.offsets.tolist() == [0]
    assert spans.predict([], nothing, [], []) == ({}, {})


def test_a_question_that_is_only_asked_has_no_place(tokenizer):
    asked, known = (squad.Example(name, "¿Dónde?", "Ana vive en Soria.", answers)
                    for name, answers in (("a", []), ("b", [("Soria", 12)])))
    found = spans.features([asked, known], tokenizer)
    assert found.start[0] == found.end[0] == spans.UNKNOWN and found.start[1] > 0 and found.asked.tolist() == [0]


@pytest.mark.parametrize("sizes", [(40, 30, 8), (40, 0, 8), (12, 1, 9), (40, 5, 0)])
def test_windows_that_leave_gaps_are_refused(examples, tokenizer, sizes):
    with pytest.raises(UserError, match="dejarían contexto sin leer"):
        spans.features(examples, tokenizer, *sizes)


# ---- Answers --------------------------------------------------------------------------------------------------------


def by_window(found, logits):
    """Logits in the order of the tokens, cut for predict()."""
    return [np.split(row, found.offsets[1:-1]) for row in logits]


def gold(found):
    """Logits of a model that knows the answers."""
    logits = np.zeros((2, len(found.ids)))
    logits[0, found.offsets[:-1] + found.start] = logits[1, found.offsets[:-1] + found.end] = 9
    return by_window(found, logits)


def test_right_logits_give_right_answers(examples, tokenizer):
    found = spans.features(examples, tokenizer)
    answers, lists = spans.predict(examples, found, *gold(found))
    assert squad.evaluate(examples, answers) == {"exact_match": 100, "f1": 100, "total": len(examples), "missing": 0}
    assert all(answers[name] == entries[0]["text"] for name, entries in lists.items())


def predicted_by_definition(example, windows, n_best, longest):
    """run_squad's n-best, in plain loops. windows: (characters, most, start logits, end logits) of context tokens."""
    candidates = []
    for characters, most, starts, ends in windows:
        tokens = range(len(characters))
        best_ends = sorted(tokens, key=lambda n: -ends[n])[:n_best]  # noqa: B023
        for first in sorted((n for n in tokens if most[n]), key=lambda n: -starts[n])[:n_best]:  # noqa: B023
            candidates += [(starts[first] + ends[last], example.context[characters[first][0]:characters[last][1]])
                           for last in best_ends if first <= last < first + longest]
    kept = {}
    for score, text in sorted(candidates, key=lambda candidate: -candidate[0]):
        kept.setdefault(text, score)
    kept = list(kept.items())[:n_best]
    total = sum(np.exp(score) for _, score in kept)
    return [(text, pytest.approx(np.exp(score) / total)) for text, score in kept]


@pytest.mark.parametrize(("n_best", "longest"), [(20, 30), (3, 4)])
def test_answers_are_run_squads(examples, tokenizer, found, n_best, longest):
    logits = np.random.default_rng(0).integers(-12, 12, size=(2, len(found.ids))) / 4  # many are equal
    answers, lists = spans.predict(examples, found, *by_window(found, logits), n_best=n_best, longest=longest)
    i = 0
    for example in examples:
        windows = []
        for _, at, _, _, characters, most in windows_by_definition(example, tokenizer, **SMALL):
            rows = logits[:, found.offsets[i] + at:found.offsets[i + 1] - 1].tolist()
            windows.append((characters, most, *rows))
            i += 1
        expected = predicted_by_definition(example, windows, n_best, longest)
        assert [(entry["text"], entry["probability"]) for entry in lists[example.id]] == expected
        assert answers[example.id] == expected[0][0]
    padded = np.full((2, len(found), 50), 99.0, np.float32)  # what stands behind a window must not count
    inside = np.arange(50) < found.lengths[:, None]
    padded[:, inside] = logits
    assert spans.predict(examples, found, *padded, n_best=n_best, longest=longest)[0] == answers
    far = spans.predict(examples, found, *by_window(found, logits + 1000), n_best=n_best, longest=longest)[1]
    assert [[entry["probability"] for entry in far[name]] for name in far] == \
        [[entry["probability"] for entry in lists[name]] for name in far]  # only differences count, however large


def test_logits_that_are_no_numbers(examples, found):
    logits = np.full((2, len(found.ids)), np.nan)
    answers, lists = spans.predict(examples, found, *by_window(found, logits))
    assert set(answers.values()) == {""}
    assert lists[examples[0].id] == [{"text": "", "probability": 1.0, "start_logit": 0.0, "end_logit": 0.0}]


@pytest.mark.parametrize("mark", ["\u0301", "\ufe0f", "\u0940\u0941"])
def test_an_answer_keeps_the_marks_of_its_last_letter(tokenizer, mark):
    """An accent, one that chooses how an emoji looks, and a vowel of Hindi: all that normalisation takes away."""
    marks = "".join(letter for letter in mark if unicodedata.category(letter) == "Mn")
    context = f"La region{marks} mas alta{marks}."
    example = squad.Example("a", "¿Qué?", context, [(f"region{marks}", 3)])
    found = spans.features([example], tokenizer)
    assert spans.predict([example], found, *gold(found))[0] == {"a": f"region{marks}"}
