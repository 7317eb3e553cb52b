"""gevent's own server with the shop, and greenlets that work in between: `green.py PORT`."""
from gevent import monkey

monkey.patch_all()

import sys

import gevent
from gevent.pool import Pool
from gevent.pywsgi import WSGIServer

from shop import ORDERS, totals, wsgi


def count():
    pool = Pool(8)
    while True:
        pool.map(lambda part: totals(ORDERS[part::8]), range(8))
        gevent.sleep(0.002)


gevent.spawn(count)
WSGIServer(("127.0.0.1", int(sys.argv[1])), wsgi, log=None).serve_forever()
