import pytest


@pytest.fixture(scope="session")
def orders():
    return [{"id": n, "items": [n * k % 97 for k in range(n % 11)]} for n in range(300)]


@pytest.fixture
def sorted_orders(orders):
    return sorted(orders, key=lambda order: sum(order["items"]))
