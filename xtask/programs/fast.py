"""The shop with FastAPI and pydantic (`fast:app`)."""
from fastapi import FastAPI
from pydantic import BaseModel

from shop import ORDERS, totals


class Order(BaseModel):
    id: int
    customer: str
    items: list[int]


app = FastAPI()


@app.get("/orders", response_model=list[Order])
async def orders(first: int = 0, count: int = 20):
    return [Order(**order) for order in ORDERS[first:first + count]]


@app.get("/")
def summary() -> dict[str, int]:
    return totals(ORDERS)
