"""A database that is made once, however many workers pytest-xdist starts.

    pytest -n 4 examples/shared_database

Making it is slow (here it only pretends to be large), so that a fixture of each worker's own would
take as many times as long. One worker makes it while the others wait; then all read the same file.
If the maker is killed another one takes over; if it raises, all tests fail with its exception.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

import pytest

from syncprims.testing import once_per_session

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def remove(path: Path) -> None:
    """Clear away what was made: the last worker calls it."""
    path.unlink()


@once_per_session.fixture("orders database", cleanup=remove)
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a database with 1,000 orders; what a maker returns has to pickle."""
    path = tmp_path_factory.mktemp("database") / "orders.sqlite"
    connection = sqlite3.connect(path)
    with connection:
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT, cents INT)")
        connection.execute("CREATE TABLE made (at TEXT DEFAULT CURRENT_TIMESTAMP)")
        connection.execute("INSERT INTO made DEFAULT VALUES")
        rows = [(number, f"customer {number % 7}", 100 + number) for number in range(1000)]
        connection.executemany("INSERT INTO orders VALUES (?, ?, ?)", rows)
    connection.close()
    return path


@pytest.fixture
def orders(database: Path) -> Iterator[sqlite3.Connection]:
    """Yield a connection of the test's own, which cannot change what the others read."""
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    yield connection
    connection.close()
