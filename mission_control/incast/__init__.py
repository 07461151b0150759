"""Incast: many senders answer one receiver at once. Predicts it, measures it, and says what cures it.

- :mod:`.quantities`: ranges and lists as people type them.
- :mod:`.reads`: synchronized reads over real sockets, between hosts or in a lab.
"""
