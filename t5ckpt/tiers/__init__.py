"""The storages of a run's steps: the run's own, or first a local directory, from which uploads follow in the background.

``intents.py`` decides which steps are uploaded, ``queue.py`` when, ``uploader.py`` makes an attempt and limits its rate,
``upload.py`` copies one step, and ``catalog.py`` decides which step a restore takes. ``shared_choice.py``,
``shared_restore.py`` and ``shared_upload.py`` are for jobs of several processes.
"""
