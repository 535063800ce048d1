"""Extractive question answering in the formats of SQuAD v1.1 (Rajpurkar et al. 2016): questions, and EM and F1.

    train, validation, problems = open_data("squad")       or a file, a folder, the built-in sample
    evaluate(validation, answers)                          {"exact_match": 81.2, "f1": 88.5, ...}
"""

import contextlib
import json
import random
import re
import string
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from aura import formats, hub
from aura.corpus import SAMPLE_NAME, find
from aura.errors import UserError
from aura.files import explain
from aura.words import first_of

SAMPLE = Path(__file__).with_name("squad_sample.json")
HUB = {"squad": ("rajpurkar/squad", None)}
SUFFIXES = (".json", ".jsonl")
NOWHERE = -1  # start of an answer that is not where its file says
MOST_VALIDATION = 5  # of examples that are split, at most one in 5 goes to validation
BLANK = re.compile(r"[ \t\n\r]*")  # what may stand between values (RFC 8259)
PUNCTUATION = str.maketrans("", "", string.punctuation)
KINDS = {list: "una lista", str: "un texto", int: "un número entero"}


@dataclass
class Example:
    """A question about a context. answers: (text, number of its first character in the context or NOWHERE); none where
    it is only asked."""

    id: str
    question: str
    context: str
    answers: list[tuple[str, int]]

    def place(self):
        """(start, end) of the first answer that is where it says, as characters of the context, or None."""
        return next(((start, start + len(text)) for text, start in self.answers if start != NOWHERE), None)


@dataclass
class Problems:
    """What was wrong with a source of questions: how often for each reason, and where first. unread: names of the files
    of a folder that are of neither part."""

    counts: Counter = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)

    def __bool__(self):
        return bool(self.counts)

    def add(self, reason, where):
        """Count what was left out at `where`, and remember the first of each reason."""
        self.counts[reason] += 1
        self.first.setdefault(reason, where)

    @contextlib.contextmanager
    def noting(self, where):
        """Leave out what the block finds unusable, and count it."""
        try:
            yield
        except _Unusable as problem:
            self.add(str(problem), where)

    def lines(self):
        """One line of Spanish for each reason, the most frequent first, and one for the files that are not read."""
        found = [f"{count} {'vez' if count == 1 else 'veces'}: {reason} (la primera, {self.first[reason]})"
                 for reason, count in self.counts.most_common()]
        if self.unread:
            found.append(f"de la carpeta no se usa {first_of(self.unread, 4)}: se entrena con train*.json, y se valida "
                         "con dev*.json o val*.json (o .jsonl)")
        return found


class _Unusable(Exception):
    """A record that cannot be used; the message says why."""


# ---- Data -----------------------------------------------------------------------------------------------------------


def open_data(name, unanswered=False):
    """(training examples, validation examples or None, Problems) of what is called `name`.

    name: a file, a folder with train*.json and dev*.json (or val*.json; or .jsonl), 'muestra' for the built-in sample,
    'squad' or owner/name[:configuration] on the Hub. unanswered: questions without answers are wanted too, to be asked.
    Where there are validation examples, and answers are needed, training examples whose answer cannot be found are left
    out; otherwise split() does that. Raises UserError for what cannot be read, and where no question is left.
    """
    named = f"--dataset {name!r}"
    path, on_hub = find(name, named)
    if name == SAMPLE_NAME:
        train, problems = read(SAMPLE)
        return train, None, problems
    problems = Problems()
    if path.is_dir():
        try:
            files = [_only(path, "train"), _only(path, "dev", "val")]
            problems.unread = sorted(file.name for file in path.glob("[!.]*.json*")
                                     if file.suffix in SUFFIXES and file not in files)
        except OSError as problem:
            raise UserError(f"{named}: no se puede leer {problem.filename!r} ({explain(problem)}); corrija sus "
                            "permisos") from problem
        if files[0] is None:
            raise UserError(f"{named}: la carpeta no contiene ningún train*.json con las preguntas; "
                            "cópielo ahí, o indique el fichero o la carpeta que lo tiene")
        parts = [file and _examples(_from_file(file, problems), problems, file, unanswered) for file in files]
    elif path.exists():
        parts = [_examples(_from_file(path, problems), problems, path, unanswered), None]
    elif name in HUB or on_hub:
        parts = _from_hub(*(HUB.get(name) or on_hub.groups()), problems, unanswered)
    else:
        raise UserError(f"{named}: no existe; use {SAMPLE_NAME}, {', '.join(HUB)}, otro nombre del Hub como "
                        "propietario/nombre, o la ruta de un .json de SQuAD v1.1 o de una carpeta con train*.json y "
                        "dev*.json")
    train, validation = parts
    if validation is not None and not unanswered:
        train = _trainable(train, name)
    return train, validation, problems


def read(path):
    """(examples, Problems) of a file in the format of SQuAD v1.1, or of questions with their context beside them: the
    elements of "data" or of a list, or one a line.

    Left out and counted: records without what they should have, repeated ids, questions without answers (v2's too).
    Only counted: answers that are not where they say; they remain for evaluation. Raises UserError for a file that
    cannot be read, is not JSON, has no such elements, or in which no question is left.
    """
    problems = Problems()
    return _examples(_from_file(Path(path), problems), problems, path), problems


def split(examples, validation, seed=0, problems=None):
    """(training examples, validation examples): about `validation` questions are set aside, at most a fifth of all.

    The questions about one context stay together, which are set aside depends on `seed` alone, and the order remains.
    Training examples without an answer that can be found are left out. Raises UserError when one part would be empty;
    its message tells the Problems for which other questions were left out.
    """
    sizes = Counter(example.context for example in examples)
    contexts = sorted(sizes)
    random.Random(seed).shuffle(contexts)
    room = max(1, min(validation, len(examples) // MOST_VALIDATION))
    chosen = set()
    for context in contexts:
        if sizes[context] <= room or not chosen:
            chosen.add(context)
            room -= sizes[context]
        if room <= 0:
            break
    train = [example for example in examples if example.context not in chosen]
    if not train:
        why = "solo se puede usar una" if len(examples) == 1 else "todas son del mismo párrafo"
        others = f" ({'; '.join(problems.lines())}); corríjalo," if problems else ";"
        raise UserError(f"no quedan preguntas para entrenar: {why}{others} dé más datos, o una carpeta con "
                        "train*.json y dev*.json")
    return _trainable(train), [example for example in examples if example.context in chosen]


def some(examples, limit, seed=0):
    """`limit` of the examples, chosen by chance, in their order; all of them for 0."""
    chosen = np.random.RandomState(seed).permutation(len(examples))[:limit or None]
    return [examples[number] for number in np.sort(chosen)]


def _trainable(examples, source="los datos"):
    usable = [example for example in examples if example.place()]
    if not usable:
        raise UserError(f"{source}: ninguna respuesta de entrenamiento está donde dice answer_start; "
                        "corrija esas posiciones")
    return usable


def _only(folder, *beginnings):
    """The file of `folder` whose name begins so, None where there is none; raises UserError where there are several."""
    found = sorted(file for file in folder.iterdir()  # glob would pass over a folder that may not be read
                   if file.name.startswith(beginnings) and file.suffix in SUFFIXES and file.is_file())
    if len(found) > 1:
        raise UserError(f"la carpeta {str(folder)!r} tiene más de un {beginnings[0]}*.json: deje solo uno de "
                        f"{', '.join(file.name for file in found)}")
    return found[0] if found else None


def _examples(records, problems, source, unanswered=False):
    """The usable ones of `records`, (where, context, question) each, in order. unanswered: those to be asked too."""
    examples = {}
    for where, context, record in records:
        with problems.noting(where):
            example = _example(context, record, lambda where=where: problems.add(
                "una respuesta no está donde dice answer_start: no se entrena con ella", where), unanswered)
            if example.id in examples:
                raise _Unusable("el id ya es de otra pregunta: esta no se usa")
            examples[example.id] = example
    if not examples:
        reasons = "; ".join(problems.lines()) or "está vacío"
        raise UserError(f"{str(source)!r}: ninguna pregunta que se pueda usar ({reasons}); corríjalo o indique "
                        "otro")
    return list(examples.values())


def _example(context, record, misplaced, unanswered):
    """The Example of one element of "qas"; calls `misplaced` for each answer that is not where it says. unanswered: it
    may be without any."""
    if isinstance(record, dict) and record.get("is_impossible"):
        raise _Unusable("pregunta sin respuesta posible (SQuAD v2), que no se admite: no se usa")
    if not context.strip():
        raise _Unusable("párrafo vacío: la pregunta no se usa")
    name, question = _take(record, "id", str), _take(record, "question", str)
    answers = []
    for answer in [] if unanswered and record.get("answers") is None else _take(record, "answers", list):
        text, start = _take(answer, "text", str), _take(answer, "answer_start", int)
        if not text.strip():
            raise _Unusable("respuesta vacía: la pregunta no se usa")
        if start < 0 or not context.startswith(text, start):
            misplaced()
            start = NOWHERE
        answers.append((text, start))
    if not answers and not unanswered:
        raise _Unusable("pregunta sin respuestas: no se usa")
    return Example(name, question, context, answers)


def _take(record, key, kind):
    """record[key], which must be of this type."""
    value = record.get(key) if isinstance(record, dict) else None
    if type(value) is not kind:  # True is an int, and no place in a text
        raise _Unusable(f"falta «{key}», o no es {KINDS[kind]}: no se usa")
    if kind is str and not _encodable(value):
        raise _Unusable(f"«{key}» contiene medio carácter (sustituto suelto): no se usa")
    return value


def _encodable(text):
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # "\ud800" is valid JSON and not a character
        return False
    return True


def _from_file(path, problems):
    """Yield (where, context, element of "qas") for each question of a file, in paragraphs of articles or flat."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        if not text.strip():
            raise UserError(f"{str(path)!r}: el fichero está vacío; vuelva a descargarlo")
        place, articles = _articles(text, path.name)
    except OSError as problem:
        raise UserError(f"{str(path)!r}: no se puede leer ({explain(problem)}); compruebe la ruta y sus permisos"
                        ) from problem
    except UnicodeDecodeError as problem:
        head = problem.object[:formats.HEAD_BYTES]
        raise formats.misnamed(path, head) or formats.other_unicode(path, head) or UserError(
            f"{str(path)!r}: no es UTF-8 válido (byte {problem.start}); conviértalo a UTF-8; si viene de Windows: "
            f"{formats.in_place(path, 'iconv -f CP1252 -t UTF-8')}") from problem
    except json.JSONDecodeError as problem:
        head = problem.doc[:formats.HEAD_BYTES].encode()  # ASCII in UTF-16 passes for valid UTF-8
        raise formats.other_unicode(path, head) or UserError(
            f"{str(path)!r}, línea {problem.lineno}, columna {problem.colno}: no es JSON válido; corríjalo o vuelva a "
            "descargarlo") from problem
    except (ValueError, RecursionError) as problem:
        why = "demasiados niveles" if isinstance(problem, RecursionError) else "un número de miles de cifras"
        raise UserError(f"{str(path)!r}: no es JSON que se pueda leer ({why}); corríjalo o vuelva a descargarlo"
                        ) from problem
    except _Unusable as problem:
        raise UserError(f"{str(path)!r}: no tiene el formato de SQuAD v1.1, un objeto con una lista «data», ni una "
                        "pregunta por línea; conviértalo o indique otro") from problem
    for a, article in enumerate(articles):
        with problems.noting(f"{place}[{a}]"):
            if isinstance(article, dict) and (
                    "context" in article or place == path.name and "paragraphs" not in article):
                yield f"{place}[{a}]", *_from_row(article)
                continue
            for p, paragraph in enumerate(_take(article, "paragraphs", list)):
                where = f"{place}[{a}].paragraphs[{p}]"
                with problems.noting(where):
                    context = _take(paragraph, "context", str)
                    for q, record in enumerate(_take(paragraph, "qas", list)):
                        yield f"{where}.qas[{q}]", context, record


def _articles(text, name):
    """(what they are called, the elements of "data") of a text of JSON. Questions in a list, or one after another as
    JSON Lines has them, are such elements too, called as the file is."""
    values, at = [], 0
    while (at := BLANK.match(text, at).end()) < len(text):
        value, at = json.JSONDecoder().raw_decode(text, at)
        values.append(value)
    if len(values) > 1 or isinstance(values[0], dict) and "context" in values[0]:
        return name, values
    (whole,) = values
    return (name, whole) if isinstance(whole, list) else (f"{name}: data", _take(whole, "data", list))


def _from_hub(repository, configuration, problems, unanswered):
    """[training, validation or None] examples of a data set on the Hub with the columns of `rajpurkar/squad`."""
    with hub.reading(repository, "preguntas", "un .json de SQuAD v1.1") as datasets:
        tables = dict(datasets.load_dataset(repository, configuration))
    names = ["train", "validation"] if "train" in tables else sorted(tables)[:1]
    parts = [_examples(_from_table(tables[name], f"{repository}: {name}", problems), problems, repository, unanswered)
             for name in names if name in tables]
    return [*parts, None][:2]


def _from_table(table, name, problems):
    """Yield (where, context, question as an element of "qas") for each row."""
    for number, row in enumerate(table):
        where = f"{name}[{number}]"
        with problems.noting(where):
            yield where, *_from_row(row)


def _from_row(row):
    """(context, question as an element of "qas") of one with its context beside it, as the Hub's tables have it and the
    files of one's own that transformers' run_qa reads."""
    context, answers = _take(row, "context", str), row.get("answers")
    if isinstance(answers, dict):
        texts, starts = _take(answers, "text", list), _take(answers, "answer_start", list)
        if len(texts) != len(starts):
            raise _Unusable("«text» y «answer_start» no tienen tantos elementos el uno como el otro: no se usa")
        row = {**row, "answers": [{"text": text, "answer_start": start}
                                  for text, start in zip(texts, starts, strict=True)]}
    return context, row


# ---- Evaluation -----------------------------------------------------------------------------------------------------


def evaluate(examples, answers):
    """{"exact_match", "f1": percentages, "total": questions, "missing": those without an answer, which count as 0}.

    answers: {id: text}. Questions with nothing to compare with do not count. As SQuAD v1.1's official script: texts are
    compared in lower case, without ASCII punctuation and without the English articles, in Spanish too; of several right
    answers the best match counts.
    """
    exact, f1, missing = 0.0, 0.0, 0
    examples = [example for example in examples if example.answers]
    for example in examples:
        if example.id not in answers:
            missing += 1
            continue
        words = _normal_words(answers[example.id])
        truths = [_normal_words(text) for text, _ in example.answers]
        exact += words in truths
        f1 += max(_f1(words, truth) for truth in truths)
    total = max(1, len(examples))
    return {"exact_match": 100 * exact / total, "f1": 100 * f1 / total, "total": len(examples), "missing": missing}


def _normal_words(text):
    text = text.lower().translate(PUNCTUATION)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def _f1(words, truth):
    common = (Counter(words) & Counter(truth)).total()
    return 2 * common / (len(words) + len(truth)) if common else 0.0
