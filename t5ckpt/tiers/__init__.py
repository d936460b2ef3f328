"""The storages of a run's steps: the run's own, or first a local directory, from which uploads follow in the background.

``tier.py`` is the whole for a checkpointer. ``directory.py`` locks the local directory, ``waiting.py`` decides which steps are
uploaded, ``uploads.py`` uploads them. ``restore.py`` restores the step that ``choice.py`` chooses from what ``disk_step.py``
finds on the disks, and ``exchange.py`` brings arrays from one disk to another process.
"""
