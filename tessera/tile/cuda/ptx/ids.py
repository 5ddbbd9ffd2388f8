"""Special registers: who a lane is, and what time it is."""

from __future__ import annotations

from ..instruction import Instruction

for _axis in "xyz":
    for _name in ("tid", "ntid", "ctaid", "nctaid"):
        Instruction(f"{_name}_{_axis}", "d:i32 <- ", f"mov.u32 $d, %{_name}.{_axis};",
                    isa=f"10 %{_name}", effect="pure")
    for _name in ("clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid"):
        Instruction(f"{_name}_{_axis}", "d:i32 <- ", f"mov.u32 $d, %{_name}.{_axis};",
                    isa=f"10 %{_name}", effect="pure", cc="90")

for _name in ("laneid", "smid", "nsmid", "lanemask_lt", "lanemask_le", "lanemask_eq",
              "total_smem_size", "dynamic_smem_size"):
    Instruction(_name, "d:i32 <- ", f"mov.u32 $d, %{_name};", isa=f"10 %{_name}", effect="pure")

for _name in ("cluster_ctarank", "cluster_nctarank"):
    Instruction(_name, "d:i32 <- ", f"mov.u32 $d, %{_name};", isa=f"10 %{_name}", effect="pure",
                cc="90")

# Read as often as written: each reading is another time. %globaltimer counts nanoseconds in steps
# of about a microsecond; %clock counts cycles of one multiprocessor.
Instruction("clock", "d:i32 <- ", "mov.u32 $d, %clock;", isa="10 %clock", effect="volatile")
Instruction("clock64", "d:i64 <- ", "mov.u64 $d, %clock64;", isa="10 %clock64", effect="volatile")
Instruction("globaltimer", "d:i64 <- ", "mov.u64 $d, %globaltimer;", isa="10 %globaltimer",
            effect="volatile")
