"""A greenlet that waits for half a second, and is gone for more than a second: nothing else waits."""
import time

import greenlet
import handshake


def query():
    main.switch()


main = greenlet.getcurrent()
handshake.ready()
while True:
    made = greenlet.greenlet(query)
    made.switch()
    time.sleep(0.5)
    made.switch()
    del made
    time.sleep(1.2)
