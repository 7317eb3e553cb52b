"""A local cluster of dask with two worker processes, which is given work for ever."""
import collections


def count(part):
    words = collections.Counter()
    for n in range(20_000):
        words[f"word {(n * part) % 301}"] += 1
    return words


def added(counters):
    total = collections.Counter()
    for counter in counters:
        total.update(counter)
    return total


def main():
    from dask.distributed import Client, LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None, host="127.0.0.1") as cluster, Client(cluster) as client:
        said = False
        while True:
            parts = client.map(count, range(1, 17), pure=False)
            client.submit(added, parts, pure=False).result()
            if not said:
                said = True
                print("ready", flush=True)


if __name__ == "__main__":
    main()
