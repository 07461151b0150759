"""Requests of a program in any language to the worker that runs its task: put, fetch, streams, spawn and delegate, over
a local socket (docs/how-to/tasks.md; CIEL's language-neutral executors: paper 001, 4.2.1)."""
