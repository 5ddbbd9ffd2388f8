"""Who takes part: transports, groups of ranks, their messages, and how all stop when one fails."""
