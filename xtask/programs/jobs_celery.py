"""Jobs of celery (`-A jobs_celery`), which a directory hands over: `JOBS_DIRECTORY`."""
import os

from celery import Celery

from shop import ORDERS, as_html, totals

directory = os.environ["JOBS_DIRECTORY"]
app = Celery("jobs", broker="filesystem://")
app.conf.broker_transport_options = {"data_folder_in": directory, "data_folder_out": directory,
                                     "control_folder": os.path.join(directory, "control")}
app.conf.worker_prefetch_multiplier = 8
app.conf.task_ignore_result = True


@app.task
def summarize(first):
    for _ in range(30):
        totals(ORDERS[first:])


@app.task
def render(first):
    for _ in range(30):
        as_html(ORDERS[first:])


def feed():
    """Sends jobs for ever, no faster than they are done. A worker that finds one half written ends: so they are written elsewhere."""
    import time

    written = os.path.join(directory, "written")
    os.makedirs(written, exist_ok=True)
    app.conf.broker_transport_options["data_folder_out"] = written
    while True:
        if len(os.listdir(directory)) < 100:
            for first in range(50):
                (summarize if first % 2 else render).delay(first)
            for job in os.listdir(written):
                os.rename(os.path.join(written, job), os.path.join(directory, job))
        else:
            time.sleep(0.05)


if __name__ == "__main__":
    feed()
