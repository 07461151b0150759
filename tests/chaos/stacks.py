"""Preloaded by workers of chaos: SIGUSR1 prints the stacks of all threads, even in a worker that has not started."""

import faulthandler
import signal

faulthandler.register(signal.SIGUSR1, all_threads=True)
