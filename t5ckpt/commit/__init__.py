"""From a temporary directory to a visible checkpoint and back: transaction, holds, markers, garbage collection, retention."""
