"""`PreemptionGuard` at work: signals, the grace period, saves on demand, requeues, leaving with a code."""
