"""Spanish morphology: conjugation, agreement, plurals, number words. Pure functions, standard library only.

Persons are 0..5: yo, tú, él/ella/usted, nosotros, vosotros, ellos/ustedes. Tenses have short names:
pres pret imp fut cond subj subi (imperfecto de subjuntivo) imv (imperative) inf ger part, and the compound
perf plus fperf cperf sperf splus (haber in pres, imp, fut, cond, subj, subi).
"""

import re
from functools import cache
from typing import NamedTuple

# ---------------------------------------------------------------- accents and stress

_ACUTE = dict(zip("aeiou", "áéíóú", strict=True))
_PLAIN = str.maketrans("áéíóú", "aeiou")
# A syllable's vowels. The u of que, qui, gue, gui is silent and masked before this is used.
_NUCLEUS = re.compile(r"[íú]|[iuü]?[aeoáéó](?:[iuy](?![aeoáéíóú]))?|[iuü]+(?:y(?![aeoáéó]))?")


def _nuclei(word: str) -> list[tuple[int, int]]:
    masked = re.sub(r"(?<=[qg])u(?=[eéií])", "#", word)
    return [match.span() for match in _NUCLEUS.finditer(masked)]


def _stressed(word: str, nuclei: list[tuple[int, int]]) -> int:
    """Index of the stressed syllable: the written accent, else the general rule."""
    for k, (start, end) in enumerate(nuclei):
        if any(c in "áéíóú" for c in word[start:end]):
            return k
    return max(len(nuclei) - (2 if word[-1] in "aeiouns" else 1), 0)


def _accent(word: str, span: tuple[int, int]) -> str:
    start, end = span
    core = word[start:end]
    at = next((i for i, c in enumerate(core) if c in "aeo"), len(core.rstrip("y")) - 1)
    return word[:start] + core[:at] + _ACUTE[core[at]] + core[at + 1:] + word[end:]


@cache
def enclitic(form: str, pronouns: str) -> str:
    """Attach pronouns to an infinitive, gerund or imperative without moving the stress: mirando + lo = mirándolo."""
    if re.search(r"[aeo][íú]|[íú][aeo]", form):  # the accent of a hiatus stays whatever follows: oír, oírlo
        return form + pronouns
    stress = _stressed(form, _nuclei(form))
    word = form.translate(_PLAIN) + pronouns
    nuclei = _nuclei(word)
    return word if _stressed(word, nuclei) == stress else _accent(word, nuclei[stress])


# ---------------------------------------------------------------- verbs

_ENDINGS = {
    ("pres", "a"): "o as a amos áis an", ("pres", "e"): "o es e emos éis en", ("pres", "i"): "o es e imos ís en",
    ("pret", "a"): "é aste ó amos asteis aron", ("pret", "e"): "í iste ió imos isteis ieron",
    ("imp", "a"): "aba abas aba ábamos abais aban", ("imp", "e"): "ía ías ía íamos íais ían",
    ("subj", "a"): "e es e emos éis en", ("subj", "e"): "a as a amos áis an",
}
_ENDINGS = {key: tuple(text.split()) for key, text in _ENDINGS.items()}
_ENDINGS |= {(tense, "i"): _ENDINGS[tense, "e"] for tense in ("pret", "imp", "subj")}
_FUTURE = ("é", "ás", "á", "emos", "éis", "án")
_CONDITIONAL = _ENDINGS["imp", "e"]
_STRONG = ("e", "iste", "o", "imos", "isteis", "ieron")
_COMPOUND = {"perf": "pres", "plus": "imp", "fperf": "fut", "cperf": "cond", "sperf": "subj", "splus": "subi"}
_REFLEXIVE = ("me", "te", "se", "nos", "os", "se")

# Vowel changes of the stem under stress. For -ir verbs "ie" and "ue" also give e>i, o>u where the ending is
# unstressed (sintió, durmamos).
_CHANGES = {
    "ie": "cerrar empezar comenzar pensar despertar sentar calentar atravesar gobernar recomendar merendar temblar "
          "perder entender encender querer defender tender extender atender regar fregar negar quebrar apretar "
          "confesar nevar helar enterrar sembrar tropezar acertar alentar sentir preferir sugerir divertir mentir "
          "hervir referir convertir advertir requerir arrepentir invertir "
          "consentir remendar verter tener venir descender",
    "ue": "contar encontrar recordar mostrar volar costar almorzar acostar probar soñar rodar colgar sonar acordar "
          "rogar apostar renovar demostrar tostar colar volver mover resolver devolver envolver llover doler soler "
          "morder poder cocer torcer remover revolver conmover esforzar consolar soltar comprobar dormir morir "
          "aprobar reforzar jugar",
    "i": "pedir servir repetir seguir conseguir perseguir vestir despedir medir elegir corregir impedir teñir "
         "competir rendir reñir derretir decir",
    "í": "enviar guiar confiar vaciar variar ampliar desviar fotografiar criar enfriar esquiar espiar fiar "
         "prohibir aislar",
    "ú": "continuar actuar situar graduar evaluar acentuar reunir aullar",
}
_CHANGE = {verb: change for change, verbs in _CHANGES.items() for verb in verbs.split()}
_WEAKENED = {"ie": ("e", "i"), "ue": ("o", "u"), "i": ("e", "i")}
_STRESSED = {"ie": ("e", "ie"), "ue": ("o", "ue"), "i": ("e", "i"), "í": ("i", "í"), "ú": ("u", "ú")}

# yo: first person of the present (gives the subjunctive too); pret: strong stem; fut: stem; imv: tú.
_IRREGULAR = {
    "tener": {"yo": "tengo", "pret": "tuv", "fut": "tendr", "imv": "ten"},
    "venir": {"yo": "vengo", "pret": "vin", "fut": "vendr", "imv": "ven"},
    "poner": {"yo": "pongo", "pret": "pus", "fut": "pondr", "imv": "pon", "part": "puesto"},
    "salir": {"yo": "salgo", "fut": "saldr", "imv": "sal"},
    "valer": {"yo": "valgo", "fut": "valdr"},
    "hacer": {"yo": "hago", "pret": "hic", "fut": "har", "imv": "haz", "part": "hecho"},
    "decir": {"yo": "digo", "pret": "dij", "fut": "dir", "imv": "di", "part": "dicho"},
    "traer": {"yo": "traigo", "pret": "traj"},
    "caer": {"yo": "caigo"},
    "poder": {"pret": "pud", "fut": "podr", "ger": "pudiendo"},
    "querer": {"pret": "quis", "fut": "querr"},
    "saber": {"yo": "sé", "subj": "sep", "pret": "sup", "fut": "sabr"},
    "caber": {"yo": "quepo", "pret": "cup", "fut": "cabr"},
    "andar": {"pret": "anduv"},
    "oír": {"pres": "oigo oyes oye oímos oís oyen", "yo": "oigo", "fut": "oir", "imv": "oye"},
    "reír": {"pres": "río ríes ríe reímos reís ríen", "subj": "ría rías ría riamos riais rían", "fut": "reir",
             "pret": "reí reíste rió reímos reísteis rieron", "ger": "riendo", "part": "reído", "imv": "ríe"},
    "haber": {"pres": "he has ha hemos habéis han", "subj": "hay", "pret": "hub", "fut": "habr"},
    "ser": {"pres": "soy eres es somos sois son", "imp": "era eras era éramos erais eran", "subj": "se",
            "pret": "fui fuiste fue fuimos fuisteis fueron", "imv": "sé"},
    "ir": {"pres": "voy vas va vamos vais van", "imp": "iba ibas iba íbamos ibais iban", "subj": "vay",
           "pret": "fui fuiste fue fuimos fuisteis fueron", "imv": "ve", "ger": "yendo"},
    "estar": {"pres": "estoy estás está estamos estáis están", "subj": "esté estés esté estemos estéis estén",
              "pret": "estuv"},
    "dar": {"pres": "doy das da damos dais dan", "subj": "dé des dé demos deis den",
            "pret": "di diste dio dimos disteis dieron"},
    "ver": {"yo": "veo", "pres": "veo ves ve vemos veis ven", "part": "visto",
            "imp": "veía veías veía veíamos veíais veían", "pret": "vi viste vio vimos visteis vieron"},
    "abrir": {"part": "abierto"}, "cubrir": {"part": "cubierto"}, "escribir": {"part": "escrito"},
    "freír": {"part": "frito"}, "morir": {"part": "muerto"}, "romper": {"part": "roto"}, "volver": {"part": "vuelto"},
    "resolver": {"part": "resuelto"}, "imprimir": {"part": "impreso"},
}
_COMPOUNDS = {
    "tener": "mantener contener detener obtener sostener entretener retener", "venir": "convenir prevenir intervenir",
    "poner": "proponer componer suponer disponer exponer oponer reponer", "hacer": "deshacer rehacer",
    "traer": "atraer distraer extraer", "volver": "devolver envolver revolver", "reír": "sonreír freír",
    "cubrir": "descubrir", "escribir": "describir inscribir", "salir": "sobresalir", "caer": "recaer",
}
_BASE = {verb: base for base, verbs in _COMPOUNDS.items() for verb in verbs.split()}
_MONOSYLLABLES = {"rió": "rio", "huí": "hui", "huís": "huis", "guié": "guie", "guió": "guio", "guiáis": "guiais",
                  "crié": "crie", "crió": "crio", "fié": "fie", "fió": "fio"}


def _swap(stem: str, old: str, new: str) -> str:
    at = stem.rfind(old)
    stem = stem[:at] + new + stem[at + 1:]
    return "h" + stem if stem.startswith("ue") else stem


def _change(verb: str, stem: str, which: dict[str, tuple[str, str]]) -> str:
    """The stem with its vowel changed, as stressed or as weakened; unchanged for verbs that do not."""
    change = _CHANGE.get(verb)
    if change not in which:
        return stem
    if verb == "jugar":
        return "jueg"
    return _swap(stem, *which[change])


def _spell(verb: str, stem: str, ending: str) -> str:
    """Join stem and ending keeping the sound of the stem's last consonant (busqué, llegué, empecé, cojo, sigo)."""
    front = ending[0] in "eéií"
    if verb[-2] == "a" and front:
        for old, new in (("gu", "gü"), ("c", "qu"), ("g", "gu"), ("z", "c")):
            if stem.endswith(old):
                return stem[:-len(old)] + new + ending
    elif verb[-2] != "a" and not front:
        if stem.endswith("c"):
            after_vowel = stem[-2] in "aeiou" and verb not in ("cocer", "mecer")
            return stem[:-1] + ("zc" if after_vowel else "z") + ending
        for old, new in (("gu", "g"), ("qu", "c"), ("g", "j")):
            if stem.endswith(old):
                return stem[:-len(old)] + new + ending
    return stem + ending


def _soften(stem: str, ending: str) -> str:
    """Endings in -i- after a vowel (leyó, leíste), ñ or ll (riñó)."""
    if stem[-1] in "aeiou" and not stem.endswith(("gu", "qu")) and re.match("i[óe]", ending):
        return stem + "y" + ending[1:]
    if stem[-1] in "aeo" and ending[0] == "i":
        return stem + "í" + ending[1:]
    if re.search("(ñ|ll)$", stem) and re.match("i[óe]", ending):
        return stem + ending[1:]
    return stem + ending


def _in_uir(verb: str) -> bool:
    return verb.endswith("uir") and not verb.endswith(("guir", "quir"))


def _present(verb: str, person: int, irregular: dict, stem: str, theme: str) -> str:
    if "pres" in irregular:
        return irregular["pres"].split()[person]
    if person == 0 and "yo" in irregular:
        return irregular["yo"]
    if person in (0, 1, 2, 5):
        stem = stem + "y" if _in_uir(verb) else _change(verb, stem, _STRESSED)
    return _spell(verb, stem, _ENDINGS["pres", theme][person])


def _subjunctive(verb: str, person: int, irregular: dict, stem: str, theme: str) -> str:
    ending = _ENDINGS["subj", theme][person]
    if "subj" in irregular:
        forms = irregular["subj"].split()
        return forms[person] if len(forms) == 6 else forms[0] + ending
    if "yo" in irregular:
        return irregular["yo"][:-1] + ending
    if _in_uir(verb):
        return stem + "y" + ending
    if person in (0, 1, 2, 5) or _CHANGE.get(verb) == "i":
        stem = _change(verb, stem, _STRESSED)
    elif theme == "i":
        stem = _change(verb, stem, _WEAKENED)
    return _spell(verb, stem, ending)


def _preterite(verb: str, person: int, irregular: dict, stem: str, theme: str) -> str:
    strong = irregular.get("pret", stem[:-1] + "j" if verb.endswith("ducir") else "")
    if " " in strong:
        return strong.split()[person]
    if strong:
        if person == 2 and strong == "hic":
            return "hizo"
        ending = _STRONG[person]
        return strong + (ending[1:] if strong[-1] == "j" and person == 5 else ending)
    if theme == "a":
        return _spell(verb, stem, _ENDINGS["pret", "a"][person])
    if theme == "i" and person in (2, 5):
        stem = _change(verb, stem, _WEAKENED)
    return _soften(stem, _ENDINGS["pret", theme][person])


def _past_subjunctive(verb: str, person: int) -> str:
    stem = conjugate(verb, "pret", 5)[:-3]
    if person == 3:
        stem = stem[:-1] + _ACUTE[stem[-1]]
    return stem + ("ra", "ras", "ra", "ramos", "rais", "ran")[person]


def _imperative(verb: str, person: int, irregular: dict) -> str:
    if person == 1:
        return irregular.get("imv") or conjugate(verb, "pres", 2)
    return verb[:-1] + "d" if person == 4 else conjugate(verb, "subj", person)


def _gerund(verb: str, irregular: dict, stem: str, theme: str) -> str:
    if "ger" in irregular:
        return irregular["ger"]
    if theme == "a":
        return stem + "ando"
    return _soften(_change(verb, stem, _WEAKENED) if theme == "i" else stem, "iendo")


def _participle(irregular: dict, stem: str, theme: str) -> str:
    return irregular.get("part") or (stem + "ado" if theme == "a" else _soften(stem, "ido") if stem else "ido")


def _of_compound(verb: str, base: str, tense: str, person: int) -> str:
    """mantener from tener; what is a monosyllable in the base takes its accent here (mantén, sonrió)."""
    if verb in _IRREGULAR and tense in _IRREGULAR[verb]:
        return _IRREGULAR[verb][tense]
    prefix, form = verb[:-len(base)], _simple(base, tense, person)
    if tense == "imv" and person == 1 and form in ("ten", "pon", "ven"):
        form = _accent(form, _nuclei(form)[0])
    return prefix + form


def _simple(verb: str, tense: str, person: int) -> str:
    if verb in _BASE:
        return _of_compound(verb, _BASE[verb], tense, person)
    irregular = _IRREGULAR.get(verb, {})
    stem, theme = verb[:-2], verb[-2].translate(_PLAIN)
    if tense in ("fut", "cond"):
        return irregular.get("fut", verb) + (_FUTURE if tense == "fut" else _CONDITIONAL)[person]
    if tense == "imp":
        return irregular["imp"].split()[person] if "imp" in irregular else stem + _ENDINGS["imp", theme][person]
    if tense == "subi":
        return _past_subjunctive(verb, person)
    if tense == "imv":
        return _imperative(verb, person, irregular)
    if tense == "inf":
        return verb
    if tense == "ger":
        return _gerund(verb, irregular, stem, theme)
    if tense == "part":
        return _participle(irregular, stem, theme)
    return {"pres": _present, "subj": _subjunctive, "pret": _preterite}[tense](verb, person, irregular, stem, theme)


def _reflexive(verb: str, tense: str, person: int) -> str:
    pronoun = _REFLEXIVE[person]
    form = conjugate(verb, tense, person)
    if tense == "imv" and person == 4:  # levantad + os = levantaos, vestíos; only idos keeps its d
        return "idos" if verb == "ir" else verb[:-2] + verb[-2].replace("i", "í") + pronoun
    if tense == "imv":  # levantemos + nos = levantémonos
        return enclitic(form[:-1] if person == 3 else form, pronoun)
    return enclitic(form, pronoun) if tense in ("inf", "ger") else f"{pronoun} {form}"


@cache
def conjugate(verb: str, tense: str, person: int = 2) -> str:
    """One form of a verb; an infinitive in -se gives it with its pronoun (me levanto, levantándote)."""
    if verb.endswith("se"):
        return conjugate(verb[:-2], tense, person) if tense == "part" else _reflexive(verb[:-2], tense, person)
    if tense in _COMPOUND:
        return f"{conjugate('haber', _COMPOUND[tense], person)} {conjugate(verb, 'part')}"
    form = _simple(verb, tense, person)
    return _MONOSYLLABLES.get(form, form)


# ---------------------------------------------------------------- nouns and adjectives

_PLURALS = {"joven": "jóvenes", "examen": "exámenes", "imagen": "imágenes", "orden": "órdenes", "volumen": "volúmenes",
            "origen": "orígenes", "margen": "márgenes", "carácter": "caracteres", "sofá": "sofás", "café": "cafés",
            "mamá": "mamás", "papá": "papás", "té": "tés", "bebé": "bebés", "menú": "menús", "pie": "pies"}
_STOPS = {"de", "del", "con", "sin", "para", "en", "a", "al", "por", "como"}
_ADVERBS = {"muy", "bastante", "algo", "poco", "casi", "recién", "bien", "más", "mal", "medio", "tan",
            "demasiado"}
_FEMININE = re.compile("(a|ción|sión|dad|tad|tud|umbre|xión)$")
_SHORT = {"grande": "gran", "bueno": "buen", "malo": "mal", "primero": "primer", "tercero": "tercer"}


@cache
def plural(noun: str) -> str:
    """Plural of a noun or noun group; what follows a preposition stays (tazas de café, máquinas de coser)."""
    words = noun.split(" ")
    stop = next((i for i, word in enumerate(words) if word in _STOPS), len(words))
    return " ".join([_plural(word) for word in words[:stop]] + words[stop:])


def _plural(word: str) -> str:
    if word in _PLURALS:
        return _PLURALS[word]
    nuclei = _nuclei(word)
    if word[-1] in "aeiouáéó":
        return word + "s"
    if word[-1] in "íú":
        return word + "es"
    if word[-1] in "sx" and _stressed(word, nuclei) < len(nuclei) - 1:
        return word  # lunes, paraguas, crisis
    if word[-1] == "z":
        return word[:-1] + "ces"
    start, end = nuclei[-1]
    hiatus = word[start:end] in "íú" and start and word[start - 1] in "aeo"  # país keeps it: países
    return (word if hiatus else word[:start] + word[start:end].translate(_PLAIN) + word[end:]) + "es"


@cache
def agree(adjective: str, feminine: bool = False, many: bool = False) -> str:
    """Inflect an adjective, participle or noun of a trade. Adverbs before it and complements after it stay."""
    words = adjective.split(" ")
    at = next((i for i, word in enumerate(words) if word not in _ADVERBS), 0)
    if words[at] in _STOPS:
        return adjective
    if feminine:
        words[at] = _feminine(words[at])
    if many:
        words[at] = _plural(words[at])
    return " ".join(words)


def _feminine(word: str) -> str:
    if word.endswith("o"):
        return word[:-1] + "a"
    if word in ("mayor", "menor", "mejor", "peor", "superior", "inferior", "exterior", "interior"):
        return word
    if re.search("[aeio]dor$|[st]or$|ñol$", word):
        return word + "a"
    if re.search("[áéó]n$|és$", word) and word not in ("marrón", "cortés"):
        start, end = _nuclei(word)[-1]
        return word[:start] + word[start:end].translate(_PLAIN) + word[end:] + "a"
    return word


@cache
def before_noun(adjective: str, feminine: bool, many: bool) -> str:
    """The form that stands before its noun: gran casa, buen libro, primer día, buena mesa."""
    if not many and adjective in _SHORT and (not feminine or adjective == "grande"):
        return _SHORT[adjective]
    return agree(adjective, feminine, many)


class Noun(NamedTuple):
    """A noun with what its neighbours must know. takes_el: feminine, but el agua, un arma."""

    singular: str
    plural: str
    feminine: bool
    takes_el: bool


def noun(text: str) -> Noun:
    """Read 'mesa', 'mano:f', 'mapa:m' or 'agua:F' (feminine that takes el). Gender is guessed where not given."""
    word, _, mark = text.partition(":")
    feminine = mark in ("f", "F") or (mark != "m" and bool(_FEMININE.search(word.split(" ")[0])))
    return Noun(word, plural(word), feminine, mark == "F")


_DETERMINERS = {
    "un": "un una unos unas", "el": "el la los las", "este": "este esta estos estas", "ese": "ese esa esos esas",
    "aquel": "aquel aquella aquellos aquellas", "otro": "otro otra otros otras",
    "cierto": "cierto cierta ciertos ciertas",
    "algún": "algún alguna algunos algunas", "ningún": "ningún ninguna ningunos ningunas", "mi": "mi mi mis mis",
    "tu": "tu tu tus tus", "su": "su su sus sus", "nuestro": "nuestro nuestra nuestros nuestras",
    "vuestro": "vuestro vuestra vuestros vuestras", "mucho": "mucho mucha muchos muchas", "cada": "cada cada cada cada",
    "tanto": "tanto tanta tantos tantas", "vario": "_ _ varios varias", "todo": "todo_el toda_la todos_los todas_las",
    "poco": "poco poca pocos pocas", "cuánto": "cuánto cuánta cuántos cuántas", "-": "_ _ _ _",
    "mismo": "el_mismo la_misma los_mismos las_mismas", "ambo": "_ _ ambos ambas", "qué": "qué qué qué qué",
}
_DETERMINERS = {key: [form.strip("_").replace("_", " ") for form in forms.split()]
                for key, forms in _DETERMINERS.items()}


def determiner(kind: str, feminine: bool, many: bool, takes_el: bool = False) -> str:
    """The form of a determiner; takes_el says that a feminine noun in stressed a- follows at once."""
    if takes_el and not many and kind in ("el", "un", "algún", "ningún", "todo"):
        return "toda el" if kind == "todo" else _DETERMINERS[kind][0]
    return _DETERMINERS[kind][feminine + 2 * many]


# ---------------------------------------------------------------- numbers

_UNITS = ("cero uno dos tres cuatro cinco seis siete ocho nueve diez once doce trece catorce quince dieciséis "
          "diecisiete dieciocho diecinueve veinte veintiuno veintidós veintitrés veinticuatro veinticinco veintiséis "
          "veintisiete veintiocho veintinueve").split()
_TENS = "treinta cuarenta cincuenta sesenta setenta ochenta noventa".split()
_HUNDREDS = ("ciento doscientos trescientos cuatrocientos quinientos seiscientos setecientos ochocientos "
             "novecientos").split()


@cache
def cardinal(n: int, feminine: bool = False, short: bool = False) -> str:
    """Number in words up to a thousand million; short before a masculine noun (veintiún, un), feminine: veintiuna."""
    if n >= 1_000_000:
        millions, rest = divmod(n, 1_000_000)
        head = f"{cardinal(millions, short=True)} {'millón' if millions == 1 else 'millones'}"
        return f"{head} {cardinal(rest, feminine, short)}" if rest else head
    if n >= 1000:
        thousands, rest = divmod(n, 1000)
        head = "mil" if thousands == 1 else f"{_below_thousand(thousands, feminine, True, before_mil=True)} mil"
        return f"{head} {_below_thousand(rest, feminine, short)}" if rest else head
    return _below_thousand(n, feminine, short)


def _below_thousand(n: int, feminine: bool, short: bool, before_mil: bool = False) -> str:
    hundreds, rest = divmod(n, 100)
    if n == 100:
        return "cien"
    words = []
    if hundreds:
        word = _HUNDREDS[hundreds - 1]
        words.append(word[:-2] + "as" if feminine and hundreds > 1 else word)
    if rest or not hundreds:
        words.append(_below_hundred(rest, feminine and not before_mil, short))
    return " ".join(words)


def _below_hundred(n: int, feminine: bool, short: bool) -> str:
    word = _UNITS[n] if n < 30 else _TENS[n // 10 - 3] + (f" y {_UNITS[n % 10]}" if n % 10 else "")
    if not word.endswith("uno"):
        return word
    if feminine:
        return word[:-1] + "a"
    if not short:
        return word
    return "veintiún" if n == 21 else word[:-1]


def count(n: int, thing: Noun, figures: bool = False) -> str:
    """A number and what it counts: veintiuna casas, un libro, dos millones de pesos."""
    number = figure(n) if figures else cardinal(n, thing.feminine, short=not thing.feminine)
    if n == 1 and thing.takes_el and not figures:
        number = "un"
    link = " de " if n >= 1_000_000 and n % 1_000_000 == 0 else " "
    return number + link + (thing.singular if n == 1 else thing.plural)


def figure(n: int) -> str:
    """A number in figures: thousands parted by a space from five digits on."""
    return f"{n:,}".replace(",", " ") if n >= 10_000 else str(n)


def clock(hour: int, minute: int = 0) -> str:
    """The time with its article: la una y cuarto, las ocho menos diez."""
    to_next = minute > 30
    hour = (hour + to_next - 1) % 12 + 1
    minute = 60 - minute if to_next else minute
    words = {0: "", 15: "cuarto", 30: "media"}.get(minute, cardinal(minute))
    link = " menos " if to_next else " y "
    return f"{'la' if hour == 1 else 'las'} {cardinal(hour, feminine=True)}" + (link + words if words else "")
