"""Shipping notes and their translation by rule: numbers in words, agreement, another word order, and free synonyms.

A note has many right translations: some words have two forms, of which one is chosen by chance. `canonical` maps every
right translation to one text, so a translation is right exactly if that text is the reference's.
"""

from __future__ import annotations

import random
from typing import NamedTuple

ONES = ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf"]
TENS = ["_", "zehn", "zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig"]
NOUNS = {"ship": ("Schiff", "n"), "truck": ("Lastwagen", "m"), "ferry": ("Fähre", "f"), "train": ("Zug", "m"),
         "van": ("Auto", "n"), "plane": ("Maschine", "f")}  # fmt: skip
ADJECTIVES = {"red": "rot", "old": "alt", "fast": "schnell", "small": "klein", "new": "neu", "slow": "langsam"}
CARGO = {"boxes": "Kisten", "barrels": "Fässer", "letters": "Briefe", "books": "Bücher", "lamps": "Lampen"}
CITIES = {"vienna": "Wien", "cologne": "Köln", "rome": "Rom", "prague": "Prag", "athens": "Athen", "oslo": "Oslo"}
DAYS = {"monday": "Montag", "tuesday": "Dienstag", "friday": "Freitag", "sunday": "Sonntag"}
VERBS = {"carries": ("bringt", "befördert"), "loses": ("verliert", "vermisst"), "needs": ("braucht", "benötigt")}
THEN = ("dann", "danach")
ARTICLE = {"m": "der", "f": "die", "n": "das"}

SYNONYMS = {second: first for first, second in (*VERBS.values(), THEN)}


class Pair(NamedTuple):
    """A note, and one of its right translations."""

    source: str
    target: str


def number_words(number: int) -> list[str]:
    """A number below 10,000 in words, its parts apart: the ones stand before the tens."""
    words: list[str] = []
    for size, name in ((1000, "tausend"), (100, "hundert")):
        if number >= size:
            words += [ONES[number // size].removesuffix("s") if number // size == 1 else ONES[number // size], name]
            number %= size
    if number > 12:
        ones, tens = number % 10, TENS[number // 10]
        words += [*([ONES[ones].removesuffix("s") if ones == 1 else ONES[ones]] if ones else []),
                  *(["und"] if ones and number > 20 else []), tens]  # fmt: skip
    elif number:
        words.append(ONES[number])
    return words


def pair(seed: int) -> Pair:
    """The note of a seed, one to three sentences long."""
    choose = random.Random(seed)
    sentences = [_sentence(choose, first=place == 0) for place in range(choose.randint(1, 3))]
    return Pair(" . ".join(one.source for one in sentences), " . ".join(one.target for one in sentences))


def canonical(text: str) -> str:
    """A translation with the first form of every word that has two."""
    return " ".join(SYNONYMS.get(word, word) for word in text.split())


def words() -> tuple[list[str], list[str]]:
    """All words of notes, and all words of translations."""
    notes = ["then", "the", "to", "on", ".", *map(str, range(10)), *NOUNS, *ADJECTIVES, *CARGO, *CITIES, *DAYS, *VERBS]
    named = [german for german, _ in NOUNS.values()]
    described = [f"{word}e" for word in ADJECTIVES.values()]
    forms = [form for both in VERBS.values() for form in both]
    counted = ["ein", "und", "hundert", "tausend", *ONES, *TENS[1:]]
    places = [*CARGO.values(), *CITIES.values(), *DAYS.values()]
    return notes, [".", "am", "nach", *THEN, *ARTICLE.values(), *named, *described, *forms, *counted, *places]


def _sentence(choose: random.Random, *, first: bool) -> Pair:
    noun, adjective, cargo, city, day, verb = (
        choose.choice(sorted(words)) for words in (NOUNS, ADJECTIVES, CARGO, CITIES, DAYS, VERBS)
    )
    number = choose.choice((choose.randint(2, 99), choose.randint(100, 9999)))
    (german, gender), dated = NOUNS[noun], choose.random() < 0.5
    source = ["the", adjective, noun, verb, *str(number), cargo, "to", city, *(["on", day] if dated else [])]
    target = [
        *(["am", DAYS[day]] if dated else []), choose.choice(VERBS[verb]), ARTICLE[gender], f"{ADJECTIVES[adjective]}e",
        german, *number_words(number), CARGO[cargo], "nach", CITIES[city],
    ]  # fmt: skip
    linked = ([], []) if first else (["then"], [choose.choice(THEN)])
    return Pair(" ".join([*linked[0], *source]), " ".join([*linked[1], *target]))
