"""How a graph is run: fusion groups, the memory plan and its proof, and the Schedule IR.

    fuse.py                which nodes run in one loop; epilogues.py: behind one matmul
    memory_plan.py         where every value lies; check_memory_plan.py: the proof
    offload.py             what waits on the host, and which copy a kernel waits for
    build_schedule.py      the Schedule IR (ir.py): names, operands, buffers; describe.py: in short

All of it for every target; what a target can do is a record, target.py. graph/cpu and graph/cuda
give theirs, and spell and launch the groups.
"""
