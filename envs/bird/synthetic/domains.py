"""The made-up domains: tables, columns and the values they are filled from.

A :class:`Domain` is one database. Ten are defined: eight in :data:`TRAIN_DOMAINS`, two in :data:`HELD_OUT_DOMAINS`,
whose tables combine words of the training domains in ways that no training domain does.
A column's name, read with spaces for underscores, is also how questions speak of it.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["id", "reference", "label", "category", "integer", "real", "date"]


@dataclass(frozen=True)
class Column:
    name: str
    """Column name, unique in its table."""
    kind: Kind
    """Decides the SQL type and the values drawn."""
    values: tuple = ()
    """label: (first words, second words); category: the choices; numbers: (lowest, highest, step of thresholds)."""
    target: str = ""
    """reference only: the table pointed at."""
    null_share: float = 0.0
    """Expected share of NULLs."""

    @property
    def phrase(self) -> str:
        return self.name.replace("_", " ")


@dataclass(frozen=True)
class Table:
    name: str
    """Table name: a plural noun."""
    singular: str
    """The noun for one row."""
    rows: int
    """Number of rows."""
    columns: tuple[Column, ...]
    """Columns in order, the id first."""

    def of_kind(self, *kinds: Kind) -> list[Column]:
        return [column for column in self.columns if column.kind in kinds]

    @property
    def id(self) -> Column:
        return self.columns[0]


@dataclass(frozen=True)
class Domain:
    name: str
    """Database id (BIRD's ``db_id``)."""
    tables: tuple[Table, ...]
    """Tables in order of creation: a reference points to an earlier one."""

    def table(self, name: str) -> Table:
        return next(table for table in self.tables if table.name == name)


def _table(singular: str, rows: int, *columns: Column, plural: str | None = None) -> Table:
    return Table(plural or f"{singular}s", singular, rows, (Column(f"{singular}_id", "id"), *columns))


def _to(singular: str, null_share: float = 0.0, *, plural: str | None = None) -> Column:
    return Column(f"{singular}_id", "reference", target=plural or f"{singular}s", null_share=null_share)


def _label(name: str, words: tuple[tuple[str, ...], tuple[str, ...]]) -> Column:
    return Column(name, "label", words)


def _category(name: str, values: tuple[str, ...], null_share: float = 0.0) -> Column:
    return Column(name, "category", values, null_share=null_share)


def _integer(name: str, low: int, high: int, step: int, null_share: float = 0.0) -> Column:
    return Column(name, "integer", (low, high, step), null_share=null_share)


def _real(name: str, low: int, high: int, step: int, null_share: float = 0.0) -> Column:
    return Column(name, "real", (low, high, step), null_share=null_share)


def _date(name: str, first_year: int, last_year: int, null_share: float = 0.0) -> Column:
    return Column(name, "date", (first_year, last_year), null_share=null_share)


COUNTRIES = ("Brazil", "Côte d'Ivoire", "Denmark", "Japan", "México", "Türkiye")
CITIES = ("Coeur d'Alene", "Kyoto", "Lagos", "Malmö", "São Paulo", "Zürich")
PEOPLE = (
    ("Ana", "Björn", "Chloé", "Dmitri", "Emeka", "Fatma", "Greta", "Hugo", "Inês", "Jürgen", "Keiko", "Luz"),
    ("Álvarez", "Brandt", "D'Angelo", "Eriksson", "Fontaine", "Gómez", "Ito", "O'Brien", "Okafor", "Şahin", "Weiß"),
)
PLACES = (
    ("Old", "North", "Grand", "Blue", "Saint-Exupéry", "King's", "Little", "Silver", "Åse", "Golden"),
    ("Harbour", "Garden", "Mill", "Hill", "Bridge", "Café", "Quarter", "Field", "Tower", '"Annexe"'),
)
WORKS = (
    ("The Last", "A Quiet", "Winter's", "Señor", "Midnight", "The Other", "Paper", "Über", "Seven", "Hidden"),
    ("River", "Letter", "Orchard", "Déjà Vu", "Voyage", "Mirror", '"Echo"', "Lighthouse", "Clock", "Stranger"),
)

TRAIN_DOMAINS = (
    Domain(
        "bookshop",
        (
            _table(
                "author", 40, _label("name", PEOPLE), _category("country", COUNTRIES), _integer("age", 25, 90, 5, 0.1)
            ),
            _table(
                "book",
                120,
                _to("author"),
                _label("title", WORKS),
                _category("genre", ("Children's", "Crime", "Essay", "Poetry", "Travel"), 0.1),
                _real("price", 5, 60, 5),
                _integer("pages", 80, 900, 50, 0.1),
            ),
            _table("sale", 240, _to("book"), _integer("copies", 1, 40, 5), _date("sold_on", 2014, 2023)),
        ),
    ),
    Domain(
        "airline",
        (
            _table(
                "airport",
                40,
                _label("name", PLACES),
                _category("city", CITIES),
                _integer("elevation", 0, 2000, 100, 0.1),
            ),
            _table(
                "flight",
                120,
                _to("airport"),
                _label("pilot", PEOPLE),
                _category("aircraft", ("A320", "ATR 72", "B737", "Dash-8", "E190")),
                _integer("distance", 100, 3000, 200),
                _date("departed", 2012, 2021, 0.1),
            ),
            _table(
                "ticket",
                240,
                _to("flight"),
                _category("cabin", ("business", "economy", "première"), 0.1),
                _real("fare", 40, 900, 50),
            ),
        ),
    ),
    Domain(
        "hospital",
        (
            _table(
                "doctor",
                40,
                _label("name", PEOPLE),
                _category("specialty", ("Cardiology", "Neurology", "Paediatrics", "Surgery")),
                _integer("salary", 3000, 12000, 500, 0.1),
            ),
            _table(
                "patient",
                100,
                _label("name", PEOPLE),
                _category("city", CITIES, 0.1),
                _date("born", 1940, 2010),
                _integer("weight", 40, 120, 5, 0.1),
            ),
            _table(
                "visit",
                240,
                _to("doctor"),
                _to("patient"),
                _category("diagnosis", ("asthma", "fracture", "Ménière's", "migraine", "sprain"), 0.1),
                _real("cost", 20, 600, 50),
            ),
        ),
    ),
    Domain(
        "football",
        (
            _table(
                "team", 30, _label("name", PLACES), _category("city", CITIES), _integer("founded", 1880, 2000, 10, 0.1)
            ),
            _table(
                "player",
                150,
                _to("team", 0.1),
                _label("name", PEOPLE),
                _category("position", ("defender", "forward", "keeper", "midfielder")),
                _integer("height", 160, 205, 5, 0.1),
                _date("born", 1985, 2005),
            ),
            _table(
                "match",
                220,
                _to("team"),
                _integer("goals", 0, 9, 1),
                _integer("crowd", 500, 9000, 500),
                plural="matches",
            ),
        ),
    ),
    Domain(
        "college",
        (
            _table(
                "teacher",
                40,
                _label("name", PEOPLE),
                _category("faculty", ("Arts", "Law", "Medicine", "Physics")),
                _date("hired", 1990, 2020, 0.1),
            ),
            _table(
                "course",
                100,
                _to("teacher"),
                _label("title", WORKS),
                _category("level", ("advanced", "beginner", "maître"), 0.1),
                _integer("credits", 2, 20, 2),
                _integer("seats", 10, 200, 10, 0.1),
            ),
            _table(
                "exam", 240, _to("course"), _category("room", ("A1", "B2", "C3", "D'4")), _real("grade", 10, 100, 5)
            ),
        ),
    ),
    Domain(
        "restaurant",
        (
            _table(
                "kitchen", 40, _label("name", PLACES), _category("city", CITIES), _integer("tables", 4, 60, 5, 0.1)
            ),
            _table(
                "dish",
                120,
                _to("kitchen"),
                _label("title", WORKS),
                _category("cuisine", ("Basque", "Chef's", "Thai", "Provençal"), 0.1),
                _real("price", 4, 50, 5),
                _integer("calories", 100, 1200, 100),
                plural="dishes",
            ),
            _table("review", 240, _to("kitchen"), _integer("score", 1, 20, 1, 0.1), _date("written", 2013, 2022)),
        ),
    ),
    Domain(
        "museum",
        (
            _table(
                "artist", 40, _label("name", PEOPLE), _category("country", COUNTRIES), _date("born", 1800, 1980, 0.1)
            ),
            _table(
                "painting",
                150,
                _to("artist"),
                _label("title", WORKS),
                _category("style", ("abstract", "baroque", "naïve", "realist"), 0.1),
                _integer("height", 20, 300, 20),
                _integer("width", 20, 300, 20, 0.1),
            ),
            _table("loan", 200, _to("painting"), _category("city", CITIES), _real("fee", 100, 5000, 250)),
        ),
    ),
    Domain(
        "bank",
        (
            _table(
                "branch",
                30,
                _label("name", PLACES),
                _category("city", CITIES),
                _date("opened", 1950, 2015),
                plural="branches",
            ),
            _table(
                "client",
                120,
                _to("branch", 0.1, plural="branches"),
                _label("name", PEOPLE),
                _category("country", COUNTRIES, 0.1),
                _integer("income", 1000, 9000, 500, 0.1),
            ),
            _table(
                "credit",
                240,
                _to("client"),
                _category("purpose", ("car", "children's", "house", "café", "studies")),
                _integer("amount", 500, 20000, 1000),
                _real("rate", 1, 15, 1),
            ),
        ),
    ),
)

HELD_OUT_DOMAINS = (
    Domain(
        "library",
        (
            _table(
                "author",
                40,
                _label("name", PEOPLE),
                _category("city", CITIES),
                _integer("salary", 3000, 12000, 500, 0.1),
            ),
            _table(
                "book",
                120,
                _to("author", 0.1),
                _label("title", WORKS),
                _category("style", ("abstract", "baroque", "naïve", "realist"), 0.1),
                _integer("height", 20, 300, 20),
                _date("written", 1990, 2022, 0.1),
            ),
            _table("loan", 240, _to("book"), _category("room", ("A1", "B2", "C3", "D'4")), _real("cost", 20, 600, 50)),
        ),
    ),
    Domain(
        "stadium",
        (
            _table(
                "team",
                40,
                _label("name", PLACES),
                _category("country", COUNTRIES),
                _integer("income", 1000, 9000, 500),
            ),
            _table(
                "match",
                150,
                _to("team"),
                _label("title", WORKS),
                _category("level", ("advanced", "beginner", "maître"), 0.1),
                _integer("score", 1, 20, 1, 0.1),
                _date("sold_on", 2000, 2022),
                plural="matches",
            ),
            _table("ticket", 240, _to("match", plural="matches"), _label("name", PEOPLE), _real("price", 5, 60, 5)),
        ),
    ),
)
