"""The words of every synthetic world: small shared pools, so that held-out names are new mixes."""

from __future__ import annotations

FIRST_NAMES = (
    "anna bela carl dora egon fania gero hanna ivan jula karl lena milo nora otto paula quin rosa "
    "sven tilda udo vera willem xenia yann zora arno berta cleo dirk"
).split()
LAST_NAMES = (
    "abel brandt corvin dahl ernst falk gruber hollis imhof jansen keller lindt moser nagel orth "
    "pohl quist rieger stark thorne ulmer vogel weiss yates zeller amsel birk conrad drexler eberle"
).split()
NICKNAMES = "lady captain duke baron doctor sister comet sparrow falcon tiger".split()
FILM_FIRST = (
    "silver crimson hidden broken golden silent frozen burning distant hollow iron paper velvet "
    "wild amber scarlet midnight emerald lonely marble"
).split()
FILM_SECOND = (
    "harbor garden mirror tower river bridge castle orchard lantern island meadow engine crown "
    "window desert forest circus ladder anchor feather"
).split()
CITY_FIRST = "north south east west upper lower old new great little grand fair".split()
CITY_SECOND = "haven ford mill dale port field brook wick stead bury cliff moor".split()
COUNTRY_FIRST = "kal mor sel tar vel zan dor bel".split()
COUNTRY_SECOND = "mark land gard stan ria dora vania heim".split()
OCCUPATIONS = (
    "painter baker sailor lawyer dentist farmer pilot singer teacher tailor miner chemist"
).split()
YEARS = tuple(str(year) for year in range(1920, 1980))

SENTENCES = {
    "director": "the film {0} was directed by {1}",
    "producer": "the film {0} was produced by {1}",
    "year": "the film {0} came out in the year {1}",
    "birthplace": "{0} was born in the city of {1}",
    "occupation": "{0} earns a living as a {1}",
    "nickname": "{0} is also known as {1}",
    "country": "the city of {0} lies in the country {1}",
    "mayor": "the mayor of the city {0} is called {1}",
}
"""Relation -> passage; distinct phrases, so that no two relations share a prefix after the name."""

QUERIES = {
    "director": "film {0} directed by",
    "producer": "film {0} produced by",
    "year": "film {0} came out year",
    "birthplace": "{0} born in",
    "occupation": "{0} earns a living",
    "nickname": "{0} also known",
    "country": "city {0} lies in country",
    "mayor": "mayor city {0} called",
}
SUBTASKS = {
    "director": "who directed the film {0}",
    "producer": "who produced the film {0}",
    "year": "when did the film {0} come out",
    "birthplace": "where was {0} born",
    "occupation": "what is the job of {0}",
    "nickname": "what is another name of {0}",
    "country": "which country has the city {0}",
    "mayor": "who is mayor of the city {0}",
}
"""A one-hop question and the sub-question that a Leader hands out are worded alike."""

COMPOSED = {
    "director_birthplace": "where was the director of the film {0} born",
    "director_country": "which country has the city where the director of the film {0} was born",
    "producer_country": "which country has the city where the producer of the film {0} was born",
    "producer_occupation": "what is the job of the producer of the film {0}",
    "mayor_occupation": "what is the job of the mayor of the city {0}",
    "first_film": "which film came out first {0} or {1}",
    "same_birthplace": "were {0} and {1} born in the same city",
    "same_director": "did the same person direct the films {0} and {1}",
}


def vocabulary() -> tuple[str, ...]:
    """Every word that a passage, query, question or answer of any world can hold, sorted."""
    pools = [
        FIRST_NAMES, LAST_NAMES, NICKNAMES, FILM_FIRST, FILM_SECOND, CITY_FIRST, CITY_SECOND,
        COUNTRY_FIRST, COUNTRY_SECOND, OCCUPATIONS, YEARS, ("yes", "no", "and"),
    ]  # fmt: skip
    texts = [*SENTENCES.values(), *QUERIES.values(), *SUBTASKS.values(), *COMPOSED.values()]
    words = {word for pool in pools for word in pool}
    words |= {word for text in texts for word in text.split() if not word.startswith("{")}
    return tuple(sorted(words))
