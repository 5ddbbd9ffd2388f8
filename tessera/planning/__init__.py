"""What a program will cost on a machine that is not here: fabrics, work and bytes, search."""
