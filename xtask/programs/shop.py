"""One small shop, as a WSGI and as an ASGI application: it reads orders, adds them up and writes JSON and HTML.

What gunicorn, gevent's own server and uvicorn serve (`shop:wsgi`, `shop:asgi`).
"""
import html
import json
import random

random.seed(1)
ORDERS = [{"id": n, "customer": f"customer {n % 40}", "items": [random.randrange(1, 900) for _ in range(n % 9)]}
          for n in range(200)]


def totals(orders):
    found = {}
    for order in orders:
        found[order["customer"]] = found.get(order["customer"], 0) + sum(order["items"])
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def as_json(orders):
    return json.dumps({"totals": totals(orders), "orders": orders[:20]})


def as_html(orders):
    rows = "".join(f"<tr><td>{html.escape(name)}</td><td>{total}</td></tr>" for name, total in totals(orders).items())
    return f"<table>{rows}</table>"


def answer(path):
    if path.startswith("/orders"):
        return "application/json", as_json(ORDERS)
    return "text/html", as_html(ORDERS)


def wsgi(environ, start_response):
    kind, body = answer(environ["PATH_INFO"])
    body = body.encode()
    start_response("200 OK", [("Content-Type", kind), ("Content-Length", str(len(body)))])
    return [body]


async def read(receive):
    while (await receive()).get("more_body"):
        pass


async def asgi(scope, receive, send):
    if scope["type"] != "http":
        return
    await read(receive)
    kind, body = answer(scope["path"])
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind.encode())]})
    await send({"type": "http.response.body", "body": body.encode()})
