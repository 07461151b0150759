"""Preloaded by workers of chaos: SIGUSR1 prints the stacks of all threads, also of one that has not come up."""

import faulthandler
import signal

faulthandler.register(signal.SIGUSR1, all_threads=True)
