"""Wrong programs, and what their errors must say."""
