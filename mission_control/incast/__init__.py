"""Incast: many senders answer one receiver at once. Predicts it, measures it, and recommends mitigations.

- :mod:`.quantities`: ranges and lists on the command line.
- :mod:`.reads`: synchronized reads over real sockets, between hosts or in a lab.
"""
