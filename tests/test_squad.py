"""Questions from files and from the Hub, and scores of answers against their plain definition."""

import collections
import gzip
import importlib.util
import json
import os
import random
import re
import string
import subprocess
from pathlib import Path

import pytest

from aura import squad
from aura.errors import UserError
from tests.hub import Hub
from tests.support import Process


@pytest.fixture(scope="module")
def examples():
    return squad.read(squad.SAMPLE)[0]


# ---- Data -----------------------------------------------------------------------------------------------------------


def test_the_sample_is_what_it_says():
    examples, problems = squad.read(squad.SAMPLE)
    assert not problems and problems.lines() == []
    assert len(examples) >= 80 and len({example.id for example in examples}) == len(examples)
    counts = collections.Counter(example.context for example in examples)
    assert len(counts) >= 12 and min(counts.values()) >= 5
    assert all(60 <= len(context.split()) <= 110 for context in counts)
    for example in examples:
        [(text, start)] = example.answers
        assert example.context[start:start + len(text)] == text
        assert example.context.count(text) == 1 or start != example.context.find(text) or len(text) < 12
    train, validation, problems = squad.open_data("muestra")
    assert (train, validation, problems.lines()) == (examples, None, [])


CONTEXT = "Ana vive en Soria."


def question(name, text="Soria", start=12, **other):
    return {"id": name, "question": "¿Dónde?", "answers": [{"text": text, "answer_start": start}], **other}


def document(*questions, context=CONTEXT):
    return {"version": "1.1", "data": [{"title": "Ana", "paragraphs": [{"context": context, "qas": list(questions)}]}]}


def write(path, content, encoding="utf-8"):
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding=encoding)
    return path


def test_what_cannot_be_used_is_named_and_counted(tmp_path):
    content = document(
        question("good"), question("moved", start=11), question("moved too", start=-6), question("good"),
        question("v2", is_impossible=True), question("none", answers=[]), question("empty", " ", 3),
        question("true", start=True), question("no text", text=None), question(7), question("half", "\ud800"), "text",
        question("two", answers=[{"text": "en", "answer_start": 0}, {"text": "Ana", "answer_start": 0}]))
    content["data"] += [{"title": "no paragraphs"}, None, {"paragraphs": [{"qas": []}, {"context": CONTEXT, "qas": 3}]}]
    examples, problems = squad.read(write(tmp_path / "mal.json", content, "utf-8-sig"))
    assert [(e.id, e.answers) for e in examples] == [
        ("good", [("Soria", 12)]), ("moved", [("Soria", -1)]), ("moved too", [("Soria", -1)]),
        ("two", [("en", -1), ("Ana", 0)])]
    assert [example.place() for example in examples] == [(12, 17), None, None, (0, 3)]
    qas = "mal.json: data[0].paragraphs[0].qas"
    assert problems.lines()[0] == (
        f"3 veces: una respuesta no está donde dice answer_start: no se entrena con ella (la primera, {qas}[1])")
    assert sorted(problems.counts.values()) == [1] * 9 + [2, 2, 3]
    lines = "\n".join(problems.lines())
    for part in (f"el id ya es de otra pregunta: esta no se usa (la primera, {qas}[3])",
                 f"pregunta sin respuesta posible (SQuAD v2), que no se admite: no se usa (la primera, {qas}[4])",
                 f"pregunta sin respuestas: no se usa (la primera, {qas}[5])", "respuesta vacía",
                 "falta «answer_start», o no es un número entero", "falta «text», o no es un texto",
                 f"2 veces: falta «id», o no es un texto: no se usa (la primera, {qas}[9])", "medio carácter",
                 "2 veces: falta «paragraphs», o no es una lista: no se usa (la primera, mal.json: data[1])",
                 "falta «context»", "falta «qas», o no es una lista: no se usa (la primera, mal.json: "
                 "data[3].paragraphs[1])"):
        assert part in lines


def test_questions_may_be_flat_and_stand_among_articles(tmp_path):
    """As transformers' run_qa reads one's own files: each with its context, answers as the Hub's columns."""
    flat = {"id": "a", "title": "Ana", "context": CONTEXT, "question": "¿Dónde?",
            "answers": {"text": ["Soria", "Ana"], "answer_start": [12, 1]}}
    content = {"data": [flat, {**flat, "id": "b", "answers": {"text": [], "answer_start": []}},
                        {**flat, "id": "c", "answers": {"text": "Soria"}}, {**flat, "id": "d", "context": 3},
                        *document(question("e"))["data"],
                        {**flat, "id": "f", "answers": {"text": ["Soria", "Ana"], "answer_start": [12]}}]}
    examples, problems = squad.read(write(tmp_path / "mías.json", content))
    assert [(e.id, e.question, e.context, e.answers) for e in examples] == [
        ("a", "¿Dónde?", CONTEXT, [("Soria", 12), ("Ana", -1)]), ("e", "¿Dónde?", CONTEXT, [("Soria", 12)])]
    assert sorted(problems.lines()) == [
        "1 vez: falta «context», o no es un texto: no se usa (la primera, mías.json: data[3])",
        "1 vez: falta «text», o no es una lista: no se usa (la primera, mías.json: data[2])",
        "1 vez: pregunta sin respuestas: no se usa (la primera, mías.json: data[1])",
        "1 vez: una respuesta no está donde dice answer_start: no se entrena con ella (la primera, mías.json: data[0])",
        "1 vez: «text» y «answer_start» no tienen tantos elementos el uno como el otro: no se usa (la primera, "
        "mías.json: data[5])"]
    # As datasets' to_json writes them, and as a list.
    rows = [flat, {**flat, "id": "b", "answers": [{"text": "Ana", "answer_start": 0}]},
            *document(question("c"))["data"]]
    for text in ("\n".join(map(json.dumps, rows)), json.dumps(rows, indent=1)):
        examples, problems = squad.read(write(tmp_path / "mías.json", text))
        assert [(e.id, e.answers) for e in examples] == [
            ("a", [("Soria", 12), ("Ana", -1)]), ("b", [("Ana", 0)]), ("c", [("Soria", 12)])]
        assert [line[-20:] for line in problems.lines()] == ["primera, mías.json[0])"[-20:]]
    (example,), _ = squad.read(write(tmp_path / "una.jsonl", json.dumps(flat)))
    assert example.id == "a"


def test_questions_may_be_asked_that_nobody_has_answered(tmp_path):
    """Where they are not trained on; they count in no figure."""
    flat = {"context": CONTEXT, "question": "¿Dónde?"}
    rows = [{"id": "a", **flat}, {"id": "b", **flat, "answers": {"text": [], "answer_start": []}},
            {"id": "c", **flat, "answers": {"text": ["Soria"], "answer_start": [12]}},
            {"id": "d", **flat, "answers": 3}]
    path = write(tmp_path / "mías.jsonl", "\n".join(map(json.dumps, rows)))
    examples, validation, problems = squad.open_data(str(path), unanswered=True)
    assert [e.id for e in examples] == ["a", "b", "c"] and validation is None
    assert problems.lines() == ["1 vez: falta «answers», o no es una lista: no se usa (la primera, mías.jsonl[3])"]
    assert squad.evaluate(examples, {"a": "x", "b": "y", "c": "Soria"}) == {
        "exact_match": 100, "f1": 100, "total": 1, "missing": 0}
    (tmp_path / "mías.jsonl").rename(tmp_path / "dev.jsonl")
    write(tmp_path / "train.jsonl", json.dumps(rows[0]))
    train, validation, _ = squad.open_data(str(tmp_path), unanswered=True)
    assert len(train) == 1 and len(validation) == 3
    with pytest.raises(UserError, match="train.jsonl': ninguna pregunta .* falta «answers»"):
        squad.open_data(str(tmp_path))


@pytest.mark.parametrize(("content", "message"), [
    ("", "el fichero está vacío"),
    ('{"data": [}', "línea 1, columna 11: no es JSON válido"),
    ('{"data":\n [1,\n', "línea 3, columna 1: no es JSON válido"),
    ('{"data":\n []}\nx', "línea 3, columna 1: no es JSON válido"),
    ('{"data": []}}', "línea 1, columna 13: no es JSON válido"),
    ('{"id": "a"}\n\n {"id": \n', "línea 4, columna 1: no es JSON válido"),
    ('{"id": "a"}\n[]\n', "ninguna pregunta que se pueda usar .1 vez: falta «context», .* .la primera, mal.json.0.."),
    ("[]", "ninguna pregunta que se pueda usar .está vacío"),
    ("7", "no tiene el formato de SQuAD v1.1, un objeto con una lista «data», ni una pregunta por línea; conviértalo"),
    ('{"data": {}}', "no tiene el formato de SQuAD v1.1"),
    ('{"data": []}', "ninguna pregunta que se pueda usar .está vacío"),
    ("[" * 100_000, "no es JSON que se pueda leer .demasiados niveles.; corríjalo"),
    ('{"data": ' + "9" * 5000 + "}", "no es JSON que se pueda leer .un número de miles de cifras.; corríjalo"),
    (document(question("a"), context=" "), "ninguna pregunta que se pueda usar .1 vez: párrafo vacío"),
    (document(question("a", answers=[])), "ninguna pregunta que se pueda usar .1 vez: pregunta sin respuestas"),
])
def test_files_that_cannot_be_read(tmp_path, content, message):
    path = write(tmp_path / "mal.json", content)
    with pytest.raises(UserError, match=f"mal.json'(, |: ){message}"):
        squad.open_data(str(path))


def test_files_that_are_not_text(tmp_path):
    for encoding, escaped, told in (
            ("latin-1", False, "no es UTF-8 válido .byte [0-9]+.; conviértalo a UTF-8; si viene de Windows: "),
            ("utf-16", False, "está en UTF-16; conviértalo: "),
            ("utf-16-le", True, "está en UTF-16LE; conviértalo: ")):  # ASCII with NULs, which is valid UTF-8
        path = tmp_path / f"{encoding}.json"
        path.write_bytes(json.dumps(document(question("a", author="Iñaki")), ensure_ascii=escaped).encode(encoding))
        with pytest.raises(UserError, match=f"{path}': {told}iconv") as problem:
            squad.read(path)
        subprocess.run(problem.value.args[0].rpartition(": ")[2], shell=True, check=True, timeout=60)
        assert squad.read(path)
    (tmp_path / "train.json").write_bytes(gzip.compress(b'{"data": []}'))
    with pytest.raises(UserError, match="es un fichero gzip con otro nombre; dele uno que acabe en .gz"):
        squad.read(tmp_path / "train.json")
    for name, command in (("train.json.gz", "gzip -dc < "), ("t.zip", "unzip ")):
        path = tmp_path / name
        path.write_bytes(gzip.compress(b"[]") if name.endswith("gz") else b"PK\x03\x04\xff")
        with pytest.raises(UserError, match=f"{name}': es un [a-z ]+; descomprímalo.*: {command}{path}"):
            squad.open_data(str(path))
    with pytest.raises(UserError, match="no se puede leer .no existe."):
        squad.read(tmp_path / "nada.json")


def test_a_folder_and_names_that_are_not(tmp_path):
    with pytest.raises(UserError, match=r"--dataset .*no contiene ningún train\*.json con las preguntas; cópielo ahí"):
        squad.open_data(str(tmp_path))
    write(tmp_path / "train-v1.1.json", document(question("a"), question("moved", start=3)))
    train, validation, problems = squad.open_data(str(tmp_path))
    assert ([e.id for e in train], validation) == (["a", "moved"], None)  # split leaves it out
    write(tmp_path / "dev-v1.1.json", document(question("b"), question("moved", start=3)))
    train, validation, problems = squad.open_data(str(tmp_path))
    assert ([e.id for e in train], [e.id for e in validation]) == (["a"], ["b", "moved"])
    assert problems.lines()[0].startswith("2 veces: una respuesta no está donde dice answer_start")
    assert "train-v1.1.json: data[0].paragraphs[0].qas[1]" in problems.lines()[0]
    write(tmp_path / "validation.json", document(question("b")))
    with pytest.raises(UserError, match="deje solo uno de dev-v1.1.json, validation.json"):
        squad.open_data(str(tmp_path))
    (tmp_path / "validation.json").unlink()
    write(tmp_path / "train-v1.1.json", document(question("moved", start=3)))
    with pytest.raises(UserError, match="ninguna respuesta de entrenamiento está donde dice"):
        squad.open_data(str(tmp_path))
    with pytest.raises(UserError, match="--dataset '.*/nada.json': no existe; use muestra, squad, otro nombre del Hub"):
        squad.open_data(str(tmp_path / "nada.json"))
    os.mkfifo(tmp_path / "tubería.json")  # nobody writes into it
    with pytest.raises(UserError, match="--dataset '.*/tubería.json': no es un fichero ni una carpeta"):
        squad.open_data(str(tmp_path / "tubería.json"))


def test_files_of_a_folder_that_are_not_read_are_named(tmp_path):
    for name in ("train.json", "test.json", "otro.json"):
        write(tmp_path / name, document(question(name)))
    assert squad.open_data(str(tmp_path))[2].lines() == [
        "de la carpeta no se usa otro.json y test.json: se entrena con train*.json, y se valida con dev*.json o "
        "val*.json (o .jsonl)"]
    (tmp_path / "test.json").rename(tmp_path / "val.json")
    (tmp_path / "otro.json").rename(tmp_path / "LÉEME.md")
    assert squad.open_data(str(tmp_path))[2].lines() == []
    for number in range(6):
        (tmp_path / f"{number}.json").touch()
    assert "no se usa 0.json, 1.json, 2.json, 3.json y 2 más: " in squad.open_data(str(tmp_path))[2].lines()[0]


@pytest.mark.parametrize(("name", "message"), [
    ("x" * 300 + ".json", "no se puede leer .el nombre es demasiado largo"),
    ("~no-hay-tal-usuario/squad.json", "no hay un usuario con esa carpeta personal")])
def test_a_path_that_cannot_be_looked_at_is_named(name, message):
    with pytest.raises(UserError, match=f"--dataset '{name}': {message}"):
        squad.open_data(name)


@pytest.mark.parametrize("how", ["iterdir", "is_file"])
def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch, how):
    write(tmp_path / "train-v1.1.json", document(question("a")))

    def denied(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, how, denied)
    with pytest.raises(UserError, match="--dataset '.*': no se puede leer '.*' .permiso denegado."):
        squad.open_data(str(tmp_path))


READ = """
import sys
from aura import squad
for name in sys.argv[1:]:
    try:
        *parts, problems = squad.open_data(name)
        print([part and [e.id for e in part] for part in parts], problems.lines())
    except squad.UserError as problem:
        print(problem)
"""


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="datasets is not installed")
def test_the_hub(tmp_path):
    rows = [{"id": name, "title": "Ana", "context": CONTEXT, "question": "¿Dónde?",
             "answers": {"text": ["Soria"] * copies, "answer_start": [start] * copies}}
            for name, copies, start in [("a", 1, 12), ("b", 3, 12), ("c", 0, 0), ("d", 1, 9)]]
    for name, splits in {"rajpurkar/squad": ["train", "validation"], "yo/preguntas": ["test"],
                         "yo/train": ["train"]}.items():
        for split in splits:
            path = tmp_path / "hub" / name / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(map(json.dumps, rows)))
    with Hub(tmp_path / "hub") as hub:
        code, out = Process(["-c", READ, "squad", "yo/preguntas", "yo/train", "yo/nada"], tmp_path,
                            **hub.environment(tmp_path / "cache")).finish()
    assert code == 0
    assert "[['a', 'b'], ['a', 'b', 'd']]" in out and "2 veces: pregunta sin respuestas" in out
    assert "(la primera, rajpurkar/squad: train[2])" in out
    assert out.count("[['a', 'b', 'd'], None] ['1 vez: pregunta sin respuestas") == 2  # one split: to be split
    assert "no se puede leer 'yo/nada' de Hugging Face" in out


def test_the_hub_without_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        squad.open_data("squad")


def test_split_keeps_paragraphs_together(examples):
    train, validation = squad.split(examples, 15)
    assert 10 <= len(validation) <= 15 and len(train) + len(validation) == len(examples)
    assert not {e.context for e in train} & {e.context for e in validation}
    order = {example.id: number for number, example in enumerate(examples)}
    for part in (train, validation):
        assert [order[e.id] for e in part] == sorted(order[e.id] for e in part)
    assert squad.split(examples, 15) == (train, validation)
    assert squad.split(list(reversed(examples)), 15)[1] == validation[::-1]
    assert squad.split(examples, 15, seed=1)[1] != validation
    assert len(squad.split(examples, 500)[1]) <= len(examples) // 5
    moved = squad.Example("m", "¿?", examples[0].context, [("nada", -1)])
    parts = [squad.split([*examples, moved], 15, seed) for seed in range(12)]
    assert not any(moved in train for train, _ in parts) and any(moved in validation for _, validation in parts)
    with pytest.raises(UserError, match="todas son del mismo párrafo"):
        squad.split(examples[:3], 1)
    with pytest.raises(UserError, match="solo se puede usar una; dé más datos"):
        squad.split(examples[:1], 1)


def test_some_are_spread_over_all_and_in_their_order():
    numbers = list(range(100))
    chosen = squad.some(numbers, 30)
    assert chosen == sorted(set(chosen)) == squad.some(numbers, 30) and len(chosen) == 30
    assert min(chosen) < 10 and max(chosen) >= 90
    assert squad.some(numbers, 0) == numbers


def test_split_tells_why_the_other_questions_are_not_used(tmp_path):
    only, problems = squad.read(write(tmp_path / "id.json", document(question("a"), question("a"))))
    with pytest.raises(UserError, match="solo se puede usar una .1 vez: el id ya es de otra.*; corríjalo, dé más"):
        squad.split(only, 1, problems=problems)


# ---- Evaluation -----------------------------------------------------------------------------------------------------


def scores_by_definition(prediction, truth):
    """(exact match, F1) of SQuAD v1.1."""
    def normal(text):
        kept = "".join(c for c in text.lower() if c not in string.punctuation)
        return " ".join(re.compile(r"(^|(?<=\W))(a|an|the)(?=\W|$)").sub(" ", kept).split())

    mine, right = normal(prediction).split(), normal(truth).split()
    left, same = list(right), 0
    for word in mine:
        if word in left:
            left.remove(word)
            same += 1
    if not same:
        return normal(prediction) == normal(truth), 0.0
    precision, recall = same / len(mine), same / len(right)
    return normal(prediction) == normal(truth), 2 * precision * recall / (precision + recall)


def test_scores_are_the_official_ones(examples):
    source = random.Random(0)
    several, answers = [], {}
    for example in examples:
        words = example.context.split()
        truths = [text for text, _ in example.answers] + [" ".join(source.sample(words, 3)), "The a-an's"]
        several.append(squad.Example(example.id, "", example.context, [(text, -1) for text in truths]))
        changed = [str.upper, "the {}".format, "«{}».".format, f"{{}} {source.choice(words)}".format, lambda _: ""]
        answers[example.id] = source.choice(changed)(source.choice(truths))
    del answers[examples[3].id]
    scored = [[scores_by_definition(answers[e.id], text) for text, _ in e.answers] for e in several if e.id in answers]
    result = squad.evaluate(several, answers)
    assert result["total"] == len(examples) and result["missing"] == 1
    assert result["exact_match"] == pytest.approx(100 * sum(max(em for em, _ in s) for s in scored) / len(examples))
    assert result["f1"] == pytest.approx(100 * sum(max(f1 for _, f1 in s) for s in scored) / len(examples))
    assert 20 < result["exact_match"] < result["f1"] < 95


@pytest.mark.parametrize(("answer", "truth", "exact_match", "f1"), [
    ("The Romans!", "romans", 100, 100),
    ("the old Romans", "Romans", 0, 200 / 3),
    ("en 1969", "1969", 0, 200 / 3),
    ("theatre", "the atre", 0, 0),
    ("«Soria»", "Soria", 0, 0),  # punctuation of ASCII alone, as the official script has it
    ("la Luna", "Luna", 0, 200 / 3),  # no Spanish articles
    ("", "the", 100, 0),
])
def test_scores_by_hand(answer, truth, exact_match, f1):
    example = squad.Example("a", "", "", [(truth, -1)])
    assert squad.evaluate([example], {"a": answer, "other": "x"}) == {
        "exact_match": exact_match, "f1": pytest.approx(f1), "total": 1, "missing": 0}
    asked = squad.Example("b", "", "", [])
    assert squad.evaluate([asked], {"b": answer}) == {"exact_match": 0, "f1": 0, "total": 0, "missing": 0}
