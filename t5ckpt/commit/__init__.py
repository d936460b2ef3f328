"""From a temporary directory to a visible checkpoint and back: transaction, leases, garbage collection, retention."""
