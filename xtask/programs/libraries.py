"""Works with one library for ever, as its users would: `libraries.py NAME`. Prints a line when it has warmed up.

Each function below is a kind of work: what it yields is called again and again.
"""
import os
import sys


def with_numpy():
    import numpy as np

    rng = np.random.default_rng(1)
    matrix, values = rng.random((300, 300)), rng.random(200_000)

    def normalize(data):
        return (data - data.mean()) / data.std()

    def histogram(data):
        return np.histogram(data, bins=64)

    def spectrum(data):
        return np.abs(np.fft.rfft(data))

    def product():
        return matrix @ matrix.T

    def turn():
        product()
        histogram(normalize(values))
        spectrum(values)
        np.sort(values)

    return turn


def with_pandas():
    import numpy as np
    import pandas as pd

    rng = np.random.default_rng(1)
    orders = pd.DataFrame({
        "customer": rng.integers(0, 500, 20_000),
        "day": pd.to_datetime("2026-01-01") + pd.to_timedelta(rng.integers(0, 300, 20_000), unit="D"),
        "amount": rng.random(20_000) * 100,
        "note": rng.choice(["new", "returned", "paid late", "gift"], 20_000),
    })
    customers = pd.DataFrame({"customer": range(500), "country": rng.choice(list("ABCDE"), 500)})

    def joined():
        return orders.merge(customers, on="customer")

    def by_month(frame):
        return frame.groupby(["country", frame["day"].dt.month])["amount"].agg(["sum", "mean"])

    def notes():
        return orders["note"].str.upper().str.replace(" ", "_").value_counts()

    def turn():
        by_month(joined())
        notes()
        orders.sort_values(["customer", "day"]).apply(lambda column: column.nunique())

    return turn


def with_sklearn():
    from sklearn.datasets import make_classification
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    features, labels = make_classification(2_000, 20, random_state=1)

    def forest():
        RandomForestClassifier(10, max_depth=8, random_state=1).fit(features, labels).predict(features)

    def regression():
        LogisticRegression().fit(StandardScaler().fit_transform(features), labels)

    def turn():
        forest()
        regression()

    return turn


def with_torch():
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters())
    data, target = torch.randn(64, 128), torch.randint(0, 10, (64,))

    def step():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()

    return step


def with_jax():
    import jax
    import jax.numpy as jnp

    data = jnp.linspace(0.0, 1.0, 10_000)

    @jax.jit
    def smooth(values):
        return jnp.convolve(values, jnp.ones(16) / 16, mode="same").sum()

    gradient = jax.grad(lambda values: jnp.sum(jnp.sin(values) ** 2))

    def eager():
        return jnp.tanh(data * 2 + 1).sum()

    def turn():
        smooth(data).block_until_ready()
        gradient(data).block_until_ready()
        eager().block_until_ready()

    return turn


def with_numba():
    import numba
    import numpy as np

    @numba.njit
    def escape(real, imaginary, most):
        x = y = 0.0
        for count in range(most):
            x, y = x * x - y * y + real, 2 * x * y + imaginary
            if x * x + y * y > 4:
                return count
        return most

    @numba.njit
    def image(size, most):
        pixels = np.empty((size, size), np.int32)
        for row in range(size):
            for column in range(size):
                pixels[row, column] = escape(3 * column / size - 2, 2 * row / size - 1, most)
        return pixels

    def in_python(pixels):
        return sum(int(pixel) for pixel in pixels[::16].flat)

    def turn():
        in_python(image(256, 200))

    return turn


def with_polars():
    import numpy as np
    import polars as pl

    rng = np.random.default_rng(1)
    frame = pl.DataFrame({"key": rng.integers(0, 1_000, 200_000), "value": rng.random(200_000)})

    def query():
        return (frame.lazy().filter(pl.col("value") > 0.1).group_by("key")
                .agg(pl.col("value").mean().alias("mean"), pl.len()).sort("mean").collect())

    def rows():
        return [row["key"] for row in frame.head(500).iter_rows(named=True)]

    def turn():
        query()
        rows()

    return turn


def with_pyarrow():
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    rng = np.random.default_rng(1)
    table = pa.table({"key": rng.integers(0, 1_000, 50_000), "value": rng.random(50_000)})
    pa.set_cpu_count(1)

    def stored():
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink)
        return pq.read_table(pa.BufferReader(sink.getvalue()), use_threads=False)

    def turn():
        stored().group_by("key", use_threads=False).aggregate([("value", "sum")])
        pc.sort_indices(table["value"])

    return turn


def with_lxml():
    from lxml import etree, html

    document = "<table>" + "".join(
        f"<tr class='r{row % 7}'><td>{row}</td><td><a href='/item/{row}'>item &amp; {row}</a></td></tr>"
        for row in range(400)) + "</table>"
    sheet = etree.XSLT(etree.XML("""<xsl:stylesheet version="1.0" xmlns:xsl="http://www.w3.org/1999/XSL/Transform">
        <xsl:template match="/"><list><xsl:for-each select="//tr"><xsl:sort select="td[2]" order="descending"/>
        <row><xsl:value-of select="td[1]"/></row></xsl:for-each></list></xsl:template></xsl:stylesheet>"""))

    def links(tree):
        return [link.get("href") for link in tree.xpath("//tr[@class='r3']//a")]

    def texts(tree):
        return [cell.text_content() for cell in tree.iter("td")]

    def turn():
        tree = html.fromstring(document)
        links(tree)
        texts(tree)
        etree.tostring(sheet(tree))

    return turn


def with_pydantic():
    from datetime import datetime

    from pydantic import BaseModel, field_validator

    class Item(BaseModel):
        name: str
        price: float
        tags: list[str]

        @field_validator("name")
        @classmethod
        def stripped(cls, value):
            return value.strip()

    class Order(BaseModel):
        number: int
        at: datetime
        items: list[Item]

    raw = {"number": "7", "at": "2026-01-01T10:00:00", "items": [
        {"name": f" item {n} ", "price": str(n), "tags": ["a", "b"]} for n in range(20)]}

    def turn():
        order = Order.model_validate(raw)
        Order.model_validate_json(order.model_dump_json())

    return turn


def with_everything():
    """torch with its CUDA libraries, jax, pyarrow, pandas, scikit-learn and polars in one process."""
    turns = [with_torch(), with_jax(), with_pyarrow(), with_pandas(), with_sklearn(), with_polars()]

    def turn():
        for one in turns:
            one()

    return turn


def main():
    turn = globals()[f"with_{sys.argv[1]}"]()
    turn()
    turn()
    print("ready", os.getpid(), flush=True)
    while True:
        turn()


main()
