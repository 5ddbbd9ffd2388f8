"""How a graph is run: fusion groups, the memory plan and its proof, and the Schedule IR."""
