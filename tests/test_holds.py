"""How long what a task's children carry is held."""

import random

from mission_control.dask.holds import Holds


def test_a_hold_ends_with_the_last_task_that_ran_when_it_began():
    holds = Holds()
    for task, worker in (("a", "one"), ("b", "one"), ("c", "two"), ("d", "three")):
        holds.begin(task, worker)
    both, one = holds.hold(["one", "two"]), holds.hold(["one"])
    holds.begin("late", "one")
    assert holds.hold(["nowhere"]) is None
    assert holds.end("b") == [] and holds.end("d") == []
    assert holds.end("a") == [one], "a task that began later holds nothing"
    assert holds.end("c") == [both]
    assert holds.end("late") == [] and holds.end("unknown") == []
    assert not (holds._workers_of or holds._tasks or holds._holds or holds._workers_left)


def test_a_task_that_was_stolen_holds_what_its_new_worker_submitted():
    holds = Holds()
    holds.begin("stolen", "one")
    holds.begin("stolen", "two")
    hold = holds.hold(["two"])
    assert hold is not None and holds.end("stolen") == [hold]
    assert not (holds._workers_of or holds._tasks or holds._holds or holds._workers_left)


def test_every_hold_ends_once_and_never_too_early():
    for seed in range(200):
        draw = random.Random(seed)
        holds, running, waits = Holds(), {}, {}
        for step in range(300):
            if draw.random() < 0.4:
                running[step] = draw.choice("xyz")
                holds.begin(step, running[step])
            elif running and draw.random() < 0.6:
                task = draw.choice(list(running))
                del running[task]
                waits = {hold: tasks - {task} for hold, tasks in waits.items()}
                over = {hold for hold, tasks in waits.items() if not tasks}
                assert sorted(holds.end(task)) == sorted(over), (seed, step)
                waits = {hold: tasks for hold, tasks in waits.items() if tasks}
            else:
                workers = set(draw.sample("xyz", 2))
                beside = {task for task, worker in running.items() if worker in workers}
                hold = holds.hold(workers)
                assert (hold is None) == (not beside)
                if hold is not None:
                    waits[hold] = beside
