"""The built-in corpus: known-right Spanish forms, determinism, and invariants over generated text."""

import os
import re
import subprocess
import sys
from hashlib import sha256
from itertools import islice
from pathlib import Path

import pytest

from aura.muestra import spanish
from aura.muestra import text as muestra
from aura.muestra.spanish import (
    agree,
    before_noun,
    cardinal,
    clock,
    conjugate,
    count,
    determiner,
    enclitic,
    figure,
    noun,
    plural,
)

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def text() -> str:
    return "\n\n".join(muestra.documents(7, 300_000))


# ---------------------------------------------------------------- verbs

SIX = {
    ("hablar", "pres"): "hablo hablas habla hablamos habláis hablan",
    ("comer", "pret"): "comí comiste comió comimos comisteis comieron",
    ("vivir", "pres"): "vivo vives vive vivimos vivís viven",
    ("buscar", "pret"): "busqué buscaste buscó buscamos buscasteis buscaron",
    ("llegar", "subj"): "llegue llegues llegue lleguemos lleguéis lleguen",
    ("empezar", "pres"): "empiezo empiezas empieza empezamos empezáis empiezan",
    ("dormir", "subj"): "duerma duermas duerma durmamos durmáis duerman",
    ("sentir", "pret"): "sentí sentiste sintió sentimos sentisteis sintieron",
    ("pedir", "pres"): "pido pides pide pedimos pedís piden",
    ("seguir", "pres"): "sigo sigues sigue seguimos seguís siguen",
    ("seguir", "pret"): "seguí seguiste siguió seguimos seguisteis siguieron",
    ("jugar", "pres"): "juego juegas juega jugamos jugáis juegan",
    ("construir", "pres"): "construyo construyes construye construimos construís construyen",
    ("conocer", "pres"): "conozco conoces conoce conocemos conocéis conocen",
    ("conducir", "pret"): "conduje condujiste condujo condujimos condujisteis condujeron",
    ("oír", "pres"): "oigo oyes oye oímos oís oyen",
    ("reír", "pret"): "reí reíste rio reímos reísteis rieron",
    ("ser", "imp"): "era eras era éramos erais eran",
    ("ir", "pres"): "voy vas va vamos vais van",
    ("ver", "imp"): "veía veías veía veíamos veíais veían",
    ("tener", "cond"): "tendría tendrías tendría tendríamos tendríais tendrían",
    ("haber", "subj"): "haya hayas haya hayamos hayáis hayan",
    ("dar", "subj"): "dé des dé demos deis den",
    ("estar", "subi"): "estuviera estuvieras estuviera estuviéramos estuvierais estuvieran",
    ("enviar", "pres"): "envío envías envía enviamos enviáis envían",
    ("continuar", "subj"): "continúe continúes continúe continuemos continuéis continúen",
    ("levantarse", "imv"): "- levántate levántese levantémonos levantaos levántense",
}
ONE = {
    ("llegar", "pret", 0): "llegué",
    ("empezar", "pret", 0): "empecé",
    ("dormir", "pret", 2): "durmió",
    ("pedir", "pret", 2): "pidió",
    ("oír", "pret", 2): "oyó",
    ("leer", "pret", 5): "leyeron",
    ("caer", "pret", 1): "caíste",
    ("hacer", "pret", 2): "hizo",
    ("decir", "pret", 5): "dijeron",
    ("reñir", "pret", 2): "riñó",
    ("ver", "pret", 2): "vio",
    ("poner", "fut", 2): "pondrá",
    ("querer", "cond", 0): "querría",
    ("saber", "subj", 2): "sepa",
    ("ir", "subj", 3): "vayamos",
    ("caber", "pres", 0): "quepo",
    ("coger", "pres", 0): "cojo",
    ("elegir", "subj", 2): "elija",
    ("averiguar", "subj", 2): "averigüe",
    ("reunir", "pres", 2): "reúne",
    ("sonreír", "pret", 2): "sonrió",
    ("sonreír", "pres", 2): "sonríe",
    ("torcer", "subj", 2): "tuerza",
    ("mantener", "imv", 1): "mantén",
    ("deshacer", "imv", 1): "deshaz",
    ("decir", "imv", 1): "di",
    ("vestirse", "imv", 4): "vestíos",
    ("irse", "imv", 4): "idos",
    ("decir", "ger", 2): "diciendo",
    ("ir", "ger", 2): "yendo",
    ("leer", "ger", 2): "leyendo",
    ("poder", "ger", 2): "pudiendo",
    ("sentarse", "ger", 0): "sentándome",
    ("abrir", "part", 2): "abierto",
    ("ir", "part", 2): "ido",
    ("devolver", "perf", 3): "hemos devuelto",
    ("describir", "plus", 2): "había descrito",
    ("freír", "part", 2): "frito",
    ("romper", "sperf", 1): "hayas roto",
    ("irse", "perf", 0): "me he ido",
    ("creer", "part", 2): "creído",
    ("acostarse", "pres", 0): "me acuesto",
    ("volver", "cperf", 2): "habría vuelto",
    ("remendar", "pres", 2): "remienda",
    ("verter", "imv", 1): "vierte",
    ("espiar", "pres", 5): "espían",
    ("traer", "subi", 3): "trajéramos",
}


@pytest.mark.parametrize(("verb", "tense"), SIX)
def test_whole_tense(verb, tense):
    for person, form in enumerate(SIX[verb, tense].split()):
        assert form == "-" or conjugate(verb, tense, person) == form


def test_single_forms():
    assert {key: conjugate(*key) for key in ONE} == ONE


@pytest.mark.parametrize(
    ("form", "pronouns", "whole"),
    [
        ("mirando", "lo", "mirándolo"),
        ("da", "me", "dame"),
        ("dé", "me", "deme"),
        ("corta", "las", "córtalas"),
        ("oír", "lo", "oírlo"),
        ("comer", "la", "comerla"),
        ("añade", "las", "añádelas"),
        ("distribuye", "los", "distribúyelos"),
        ("mezclemos", "lo", "mezclémoslo"),
        ("traiga", "selo", "tráigaselo"),
        ("enfría", "lo", "enfríalo"),
        ("cuece", "los", "cuécelos"),
    ],
)
def test_enclitic(form, pronouns, whole):
    assert enclitic(form, pronouns) == whole


def test_every_verb_of_the_lexicon_conjugates():
    for phrases in muestra.ACTIONS.values():
        for phrase in phrases:
            for tense in ("pres", "pret", "imp", "fut", "cond", "subj", "subi", "perf", "ger", "inf"):
                assert conjugate(phrase.split()[0], tense, 2)


# ---------------------------------------------------------------- nouns, adjectives, numbers


@pytest.mark.parametrize(
    ("one", "many"),
    [
        ("limón", "limones"),
        ("jardín", "jardines"),
        ("joven", "jóvenes"),
        ("lápiz", "lápices"),
        ("autobús", "autobuses"),
        ("mes", "meses"),
        ("lunes", "lunes"),
        ("paraguas", "paraguas"),
        ("país", "países"),
        ("café", "cafés"),
        ("ley", "leyes"),
        ("colibrí", "colibríes"),
        ("baúl", "baúles"),
        ("taza de café", "tazas de café"),
        ("cabra montés", "cabras monteses"),
    ],
)
def test_plural(one, many):
    assert plural(one) == many


@pytest.mark.parametrize(
    ("adjective", "feminine", "many", "form"),
    [
        ("rojo", True, True, "rojas"),
        ("verde", True, False, "verde"),
        ("azul", False, True, "azules"),
        ("feliz", True, True, "felices"),
        ("trabajador", True, False, "trabajadora"),
        ("español", True, True, "españolas"),
        ("alemán", True, False, "alemana"),
        ("marrón", True, True, "marrones"),
        ("muy viejo", True, False, "muy vieja"),
        ("lleno de polvo", True, True, "llenas de polvo"),
        ("de madera", True, True, "de madera"),
        ("cortés", True, False, "cortés"),
        ("demasiado grande", False, True, "demasiado grandes"),
        ("pescador", True, False, "pescadora"),
        ("periodista", True, False, "periodista"),
        ("mayor", True, False, "mayor"),
    ],
)
def test_agreement(adjective, feminine, many, form):
    assert agree(adjective, feminine, many) == form


def test_before_a_noun():
    assert [before_noun("grande", True, False), before_noun("bueno", False, False)] == ["gran", "buen"]
    assert [before_noun("bueno", True, False), before_noun("grande", False, True)] == ["buena", "grandes"]
    assert [determiner("un", True, False, takes_el=True), determiner("un", True, True, takes_el=True)] == ["un", "unas"]
    assert determiner("este", True, False, takes_el=True) == "esta"


@pytest.mark.parametrize(
    ("n", "plain"),
    [
        (0, "cero"),
        (1, "uno"),
        (16, "dieciséis"),
        (21, "veintiuno"),
        (22, "veintidós"),
        (23, "veintitrés"),
        (26, "veintiséis"),
        (31, "treinta y uno"),
        (100, "cien"),
        (101, "ciento uno"),
        (500, "quinientos"),
        (777, "setecientos setenta y siete"),
        (1000, "mil"),
        (1021, "mil veintiuno"),
        (21_000, "veintiún mil"),
        (31_001, "treinta y un mil uno"),
        (100_000, "cien mil"),
        (999_999, "novecientos noventa y nueve mil novecientos noventa y nueve"),
        (1_000_000, "un millón"),
        (1_200_000, "un millón doscientos mil"),
        (2_000_000, "dos millones"),
    ],
)
def test_cardinal(n, plain):
    assert cardinal(n) == plain


@pytest.mark.parametrize(
    ("n", "books", "houses"),
    [
        (1, "un libro", "una casa"),
        (21, "veintiún libros", "veintiuna casas"),
        (31, "treinta y un libros", "treinta y una casas"),
        (100, "cien libros", "cien casas"),
        (101, "ciento un libros", "ciento una casas"),
        (200, "doscientos libros", "doscientas casas"),
        (1_001, "mil un libros", "mil una casas"),
        (201_300, "doscientos un mil trescientos libros", "doscientas un mil trescientas casas"),
        (1_000_000, "un millón de libros", "un millón de casas"),
        (1_000_001, "un millón un libros", "un millón una casas"),
        (2_000_000, "dos millones de libros", "dos millones de casas"),
    ],
)
def test_count(n, books, houses):
    assert (count(n, noun("libro")), count(n, noun("casa"))) == (books, houses)


def test_every_number_is_words():
    assert len({cardinal(n) for n in range(0, 2_000_000, 997)}) == len(range(0, 2_000_000, 997))
    assert count(1, noun("hacha:F")) == "un hacha"


def test_figures_and_clock():
    assert [figure(1234), figure(12345), figure(1234567)] == ["1234", "12 345", "1 234 567"]
    assert [clock(13), clock(1, 15), clock(8, 50), clock(12, 35), clock(9, 30)] == [
        "la una",
        "la una y cuarto",
        "las nueve menos diez",
        "la una menos veinticinco",
        "las nueve y media",
    ]


def test_nouns_are_read():
    assert noun("agua:F") == spanish.Noun("agua", "aguas", True, True)
    assert [noun(word).feminine for word in ("mesa", "mano:f", "mapa:m", "canción", "reloj")] == [
        True,
        True,
        False,
        True,
        False,
    ]


# ---------------------------------------------------------------- the stream


def test_same_seed_same_text_in_another_process():
    code = (
        "from hashlib import sha256; from aura.muestra import documents;"
        "print(sha256('|'.join(documents(3, 60000)).encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("0", "1234")
    }
    assert digests == {sha256("|".join(muestra.documents(3, 60000)).encode()).hexdigest()}


def test_a_longer_corpus_begins_with_a_shorter_one():
    short, long = list(muestra.documents(5, 20_000)), list(muestra.documents(5, 80_000))
    assert long[: len(short)] == short
    assert list(islice(muestra.documents(5, 10**12), 5)) == long[:5]


def test_the_document_does_not_depend_on_those_before():
    assert muestra.document(9, 31) == list(islice(muestra.documents(9, 10**9), 32))[31]


@pytest.mark.parametrize("size", [1, 1000, 50_000])
def test_size_is_reached_and_no_more_than_that(size):
    sizes = [len(document.encode()) for document in muestra.documents(0, size)]
    assert sum(sizes) >= size > sum(sizes[:-1])


def test_seeds_differ():
    assert not set(muestra.documents(1, 50_000)) & set(muestra.documents(2, 50_000))


def test_documents_have_a_title_and_paragraphs():
    for document in muestra.documents(4, 200_000):
        assert 500 <= len(document) <= 4000
        assert document.count("\n\n") >= 2
        assert document == document.strip()


def test_every_template_compiles():
    """Each slot has its name, each verb conjugates: also in what a short corpus never shows."""
    for alternatives in muestra.RULES.values():
        assert alternatives
        for alternative in alternatives:
            muestra.compiled(alternative)


# ---------------------------------------------------------------- invariants of the text


@pytest.mark.parametrize(
    "pattern",
    [
        r"\b[Aa] el\b",
        r"\b[Dd]e el\b",
        r"\b[Ll]a agua\b",
        r"\b[Uu]na (?:agua|águila|hacha|arpa|haya)\b",
        r"  ",
        r" [,.;:?!»]",
        r",,|\.\.|,\.|\.,",
        r"[{}\[\]<>|¶¬_@]",
        r"\b(?:veintiuno|treinta y uno) [a-zé]+s\b",
        r"\by [Ii][^aeo]",
        r"\by hi[^aeo]",
        r"\bo (?:ho|o)",
        r"\b([^\W\d]+) \1\b",
        r"\bNone\b",
        r"\bcon (?:yo|mí|conmigo)\b",
        r"\bde [lL]a el\b",
        r"¿¿|¡¡",
        r"\n— ",
        r"—\s*—",
    ],
)
def test_never(text, pattern):
    found = re.search(pattern, text)
    assert not found, text[max(found.start() - 60, 0) : found.end() + 40]


def test_marks_open_and_close_in_their_paragraph(text):
    for paragraph in text.split("\n\n"):
        assert paragraph.count("¿") == paragraph.count("?"), paragraph
        assert paragraph.count("¡") == paragraph.count("!"), paragraph
        assert paragraph.count("«") == paragraph.count("»"), paragraph
        assert paragraph.count("(") == paragraph.count(")"), paragraph


def test_sentences_start_with_a_capital(text):
    for paragraph in text.split("\n"):
        assert not re.match(r"(?:- )?[—¿¡«]*[a-záéíóúñ]", paragraph), paragraph
        assert not re.search(r"[a-záéíóú»][.?!] [¿¡«]*[a-záéíóúñ]", paragraph), paragraph


def test_paragraphs_end_with_a_mark(text):
    for document in muestra.documents(11, 100_000):
        for paragraph in document.split("\n\n")[1:]:
            last = paragraph.split("\n")[-1]
            assert last[-1] in ".?!:»,…" or len(last) < 60 or "- " in last, last


def test_articles_agree_with_the_nouns_of_the_lexicon(text):
    nouns = {n for _, members in muestra.NOUNS.values() for n in members}
    gender = {}
    for n in nouns:
        gender.setdefault(n.singular, set()).add(n.feminine)
        gender.setdefault(n.plural, set()).add(n.feminine)
    for article, word in re.findall(
        r"\b(un|una|unos|unas|los|las|la|del|al|este|esta|aquel|aquella) ([a-záéíóúñü]+)", text
    ):
        feminine = gender.get(word)
        if feminine and len(feminine) == 1:
            wants = article in ("una", "unas", "las", "la", "esta", "aquella")
            takes_el = any(n.takes_el for n in nouns if n.singular == word)
            assert wants in feminine or takes_el, f"{article} {word}"


def test_the_text_is_varied(text):
    words = re.findall(r"\w+", text.lower())
    grams = [tuple(words[i : i + 8]) for i in range(len(words) - 7)]
    assert len(set(grams)) > 0.75 * len(grams)
    assert len(set(words)) > 4000
