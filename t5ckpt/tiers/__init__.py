"""Where the steps of a run are: in its storage, or first in a local directory, from which uploads follow in the background."""
