"""From other formats and to them, and copies with changes.

A reader gives a table of LazyArrays, a writer takes one; ``_stream.py`` is the writer of T5X's format. So every conversion
reads one tensor, or a piece of one, at a time. What an optional dependency is needed for is imported when it is called.
"""
