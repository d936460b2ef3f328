"""A deterministic simulator: real programs on one run, under many schedules with faults. A failure is replayed by its seed.

    PYTHONPATH=tests python -m simulation prune-faults --schedules 10000
    PYTHONPATH=tests python -m simulation --module my_scenarios --switches 2

A *scenario* (``scenarios.py``) starts some processes on one run: trainers, evaluators, and verbs that delete and pin. They
run the code of t5ckpt unchanged, in threads. Their storage, clocks, threads and sleeps are simulated. Every operation on these
is a point, at which the schedule chooses the next task, and whether a process crashes, is paused, or an operation fails. After
each change of the storage the *observer* (``world.py``) checks that

- each listed step is complete, until a process that may delete it does so;
- a step has one writer, and a save returns a checkpoint only if it is listed;
- a reader that a reader holds finds its step, and all of its chunks;
- a pinned step stays;
- a save that has returned survives every crash;
- the next save leaves no leftovers;
- no process waits forever, and no process of a job waits longer than its time-out for one that has died.

A failure prints its seed and the shortest schedule that still fails.

To test a storage of your own, write a module whose ``SCENARIOS`` are those that ``any_storage.scenarios_of`` returns.
``own_scenarios.py`` is an example.

The modules: ``scheduler`` (the next task), ``tasks``, ``choosers`` (random, PCT, exhaustive, replay), ``virtual`` (the loader of
the package), ``primitives`` (threads and locks), ``posix`` and ``disk`` (a file system, with power cuts), ``bucket``,
``own_storage``, ``any_storage``, ``coordination``, ``arrays`` (TensorStore's arrays), ``programs``, ``jobs``, ``verbs``,
``tiers``, ``world``, ``explore`` (many schedules, and the shortest that fails), ``report`` and ``campaign`` (many processes).
Tests call :func:`~simulation.campaign.simulate`, which starts processes, because a simulated world needs a process
of its own.
"""
