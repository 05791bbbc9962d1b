"""Tests that all read the same database, on any worker."""

from __future__ import annotations

import sqlite3

import pytest


def test_it_was_made_once(orders: sqlite3.Connection) -> None:
    assert orders.execute("SELECT count(*) FROM made").fetchone() == (1,)


@pytest.mark.parametrize("customer", range(7))
def test_every_customer_has_orders(orders: sqlite3.Connection, customer: int) -> None:
    query = "SELECT count(*) FROM orders WHERE customer = ?"
    (count,) = orders.execute(query, (f"customer {customer}",)).fetchone()
    assert count in (142, 143)


def test_prices_add_up(orders: sqlite3.Connection) -> None:
    assert orders.execute("SELECT sum(cents) FROM orders").fetchone() == (599_500,)


def test_nobody_can_spoil_it_for_the_others(orders: sqlite3.Connection) -> None:
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        orders.execute("DELETE FROM orders")
