"""Models whose training steps are measured, as a user of tessera writes them: one op on a line, so
that a profile tells what a launch is for. Their lines count as a user's."""
