"""A small suite as pytest runs it: many quick tests, fixtures, parameters, a standard library that is imported on the way."""
import decimal
import json
import random
import statistics

import pytest


def total(order):
    return sum(order["items"])


@pytest.mark.parametrize("number", range(150))
def test_total(orders, number):
    assert total(orders[number]) >= 0


def test_sorted(sorted_orders):
    sums = [total(order) for order in sorted_orders]
    assert sums == sorted(sums)


@pytest.mark.parametrize("count", [1_000, 5_000, 20_000])
def test_statistics(count):
    random.seed(count)
    numbers = [random.random() for _ in range(count)]
    assert 0 < statistics.stdev(numbers) < 1
    assert json.loads(json.dumps(numbers)) == numbers


@pytest.mark.parametrize("digits", range(5, 40))
def test_decimals(digits, tmp_path):
    with decimal.localcontext() as context:
        context.prec = digits
        root = decimal.Decimal(2).sqrt()
    (tmp_path / "root").write_text(str(root))
    assert abs(float((tmp_path / "root").read_text()) - 2 ** 0.5) < 1e-4


def test_raises(orders):
    for order in orders:
        with pytest.raises(KeyError):
            order["none"]
