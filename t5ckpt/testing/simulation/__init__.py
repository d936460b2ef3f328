"""A deterministic simulator: real programs on one run, under many schedules with faults. A failure is replayed by its seed.

    python -m t5ckpt.testing.simulation prune-faults --schedules 10000
    python -m t5ckpt.testing.simulation --module my_scenarios --switches 2

A *scenario* (``scenarios.py``) starts some processes on one run: trainers, evaluators, people who delete and pin. They run the
code of t5ckpt unchanged, in threads. Their storage, clocks, threads and sleeps are simulated, and every operation on these is a
point at which the schedule decides who goes on, and whether a process crashes, is paused, or an operation fails. After each
change of the storage the *observer* (``world.py``) checks that

- each step that is listed is whole, and stays so until a process that was meant to delete it does;
- a step has one writer, and a save returns a checkpoint only if that is listed;
- a reader with a read lease finds its step, and all of its chunks;
- a pinned step stays;
- a save that has returned survives every crash;
- the next save leaves no leftovers;
- nobody waits for ever, and no process of a job longer than its time-out for one that has died.

A failure prints its seed and the shortest schedule that still fails.

To test a storage of your own, write a module whose ``SCENARIOS`` are those that ``any_storage.scenarios_of`` returns.
docs/storage.md has an example.

The modules: ``scheduler`` (who is next), ``tasks``, ``choosers`` (random, PCT, exhaustive, replay), ``virtual`` (how the
package is loaded), ``primitives`` (threads and locks), ``posix`` and ``disk`` (a file system, with power cuts), ``bucket``,
``own_storage``, ``any_storage``, ``coordination``, ``arrays`` (what TensorStore opens), ``programs``, ``jobs``, ``verbs``,
``tiers``, ``world``, ``explore`` (many schedules, the shortest), ``report`` and ``campaign`` (many processes). Tests call
:func:`~t5ckpt.testing.simulation.campaign.simulate`, which starts processes, since the simulated world needs one of its own.
"""
