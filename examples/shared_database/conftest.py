"""A database that is created once for all workers of pytest-xdist.

    pytest -n 4 examples/shared_database

Creating a real database is slow, so a fixture that every worker runs would multiply the time. Here
one worker creates it while the others wait, then all read the same file. If this worker is killed,
another one takes over. If it raises, all tests fail with its exception.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

import pytest

from syncprims.testing import once_per_session

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a database with 1,000 orders. The result must be picklable."""
    return once_per_session("orders database", lambda: create(tmp_path_factory.mktemp("database")))


def create(folder: Path) -> Path:
    """Create the database, and return its path."""
    path = folder / "orders.sqlite"
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
    """Yield a read-only connection for this test."""
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    yield connection
    connection.close()
