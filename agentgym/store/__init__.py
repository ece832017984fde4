"""Storage of commits: the RunStore, its back ends, leases, and the keys of steps."""
