import sqlite3
from pathlib import Path

import pytest

from envs.bird.cache import RESULTS
from envs.bird.handles import HANDLES


@pytest.fixture(autouse=True)
def fresh_caches():
    RESULTS.clear()
    yield
    RESULTS.clear()
    HANDLES.clear()


@pytest.fixture(scope="session")
def shop_db(tmp_path_factory) -> Path:
    """t: 6000 rows; e: a text cell that is not UTF-8; fruit: duplicates; mixed: NULL, BLOB, numbers."""
    path = tmp_path_factory.mktemp("shop") / "shop.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(
        """
        CREATE TABLE t(id INTEGER PRIMARY KEY, name TEXT, speed_limit INTEGER, x REAL);
        CREATE TABLE e(id INTEGER, s TEXT);
        INSERT INTO e VALUES (1, 'ok'), (2, CAST(x'E96C' AS TEXT)), (3, CAST(x'6C' AS TEXT));
        CREATE TABLE fruit(name TEXT, price REAL);
        INSERT INTO fruit VALUES ('apple', 1.0), ('apple', 1.0), ('pear', 2.5);
        CREATE TABLE mixed(v);
        INSERT INTO mixed VALUES (NULL), (1), (1.5), ('a'), (x'00FF');
        """
    )
    connection.executemany(
        "INSERT INTO t VALUES (?, ?, ?, ?)", [(i, f"n{i % 7}", i % 100, i / 3) for i in range(6000)]
    )
    connection.commit()
    connection.close()
    return path
