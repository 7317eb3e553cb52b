"""Jobs of dramatiq, whose worker has threads: the broker is in the same process, so no other program is needed."""
import dramatiq
from dramatiq.brokers.stub import StubBroker

from shop import ORDERS, as_html, totals

broker = StubBroker()
dramatiq.set_broker(broker)


@dramatiq.actor
def summarize(first):
    for _ in range(10):
        totals(ORDERS[first:])


@dramatiq.actor
def render(first):
    for _ in range(10):
        as_html(ORDERS[first:])


def main():
    worker = dramatiq.Worker(broker, worker_threads=4)
    worker.start()
    print("ready", flush=True)
    while True:
        for first in range(100):
            (summarize if first % 2 else render).send(first)
        broker.join(summarize.queue_name)


main()
