"""Kernels written by hand with PTX records only, as an emitter would write them: one source each.

Used without a GPU (they compile, their resources) and on one (their results).
"""

from __future__ import annotations

from dataclasses import dataclass

HEAD = """\
from tessera.tile.cuda import use
from tessera.tile.cuda.intrinsics import fragments, shared_memory
from tessera.tile.cuda.numba_gate import f32, i32, i64
from tessera.tile.cuda.ptx import atomics, barriers, convert, copy_async, matrix, memory, mma
from tessera.tile.cuda.ptx import tma, warp, wgmma
tid, block, blocks = use("tid_x"), use("ctaid_x"), use("nctaid_x")
"""


@dataclass(frozen=True)
class Source:
    """A kernel's source and how it is built. needs: the oldest target that has it."""

    name: str
    text: str
    parameters: tuple[str, ...]
    threads: int
    needs: str
    shared_bytes: int = 0
    cluster: tuple[int, ...] = ()

    def build(self, target: str | None = None):
        """For a target, or for the GPU of this machine."""
        from tessera.runtime.target import parse_target
        from tessera.tile.cuda.build import build

        return build(self.text, self.name, self.parameters,
                     None if target is None else parse_target(target),
                     needs=parse_target(self.needs), threads=self.threads,
                     shared_bytes=self.shared_bytes, cluster=self.cluster)

    def oldest(self):
        """For the oldest target that has it; no GPU is needed."""
        return self.build(self.needs)


COPY = Source("copy", HEAD + """
load = use(memory.ld("global", "b32", 4, cache="nc"))
store = use(memory.st("global", "b32", 4))
def copy(source, target, n):
    i = i64(block()) * 256 + tid()
    while i < n:
        store(target + 16 * i, load(source + 16 * i))
        i += i64(blocks()) * 256
""", ("i64", "i64", "i64"), 256, "sm_75")

NOTHING = Source("nothing", HEAD + """
store = use(memory.st("global", "f32"))
def nothing(x, y, z, n):
    if n < 0:
        store(x, f32(0)); store(y, f32(0)); store(z, f32(0))
""", ("i64", "i64", "i64", "i32"), 32, "sm_75")


# --- C[128, 128] = A[128, K] B[128, K]^T, bf16, through cp.async, ldmatrix and mma.sync -----------


def mma_gemm() -> Source:
    """8 warps as 4 x 2, each 32 x 64; k-blocks of 32 (64-byte rows, swizzled), two stages."""
    body = [HEAD, """
copy16 = use(copy_async.cp_async(16))
commit, drain = use("cp_async_commit"), use(copy_async.cp_async_wait(1))
fragment = use(matrix.ldmatrix(4))
dot = use(mma.mma("bf16"))
zeros = use(fragments.full("f32", 4))
low, high = use(fragments.pick((0, 1))), use(fragments.pick((2, 3)))
store2 = use(memory.st("global", "f32", 2))
base, swizzled = use(shared_memory.address()), use(shared_memory.swizzled(64))
sync = use("sync_threads")
def mma_gemm(a, b, c, K):
    t = tid()
    lane, warp = t & 31, t >> 5
    row, column = (warp & 3) * 32, (warp >> 2) * 64
    to = base() + swizzled((t >> 2) * 64 + (t & 3) * 16)
    from_a = a + 2 * (i64(t >> 2) * K + (t & 3) * 8)
    from_b = b + 2 * (i64(t >> 2) * K + (t & 3) * 8)
    at_a = (row + (lane & 15)) * 64 + (lane >> 4) * 16
    at_b = 8192 + (column + (lane & 7) + ((lane >> 4) << 3)) * 64 + ((lane >> 3) & 1) * 16
"""]
    put = body.append
    for m in range(2):
        for n in range(8):
            put(f"    c{m}{n} = zeros(0.0)\n")
    fill = "".join(
        f"{{0}}copy16({{1}} + {8192 * o + 4096 * h}, "
        f"from_{x} + {128 * h} * i64(K) + 2 * i64({{2}}))\n"
        for o, x in enumerate("ab") for h in range(2))
    put(fill.format("    ", "to", "0") + "    commit()\n    k, stage = i32(0), i32(0)\n")
    put("    while k < K:\n        if k + 32 < K:\n"
        + fill.format(" " * 12, "to + (16384 - stage)", "k + 32"))
    put("        commit()\n        drain()\n        sync()\n        tile = base() + stage\n")
    for step in range(2):
        for m in range(2):
            put(f"        a{m} = fragment(tile + swizzled(at_a + {m * 1024 + step * 32}))\n")
        for pair in range(4):
            put(f"        b = fragment(tile + swizzled(at_b + {pair * 1024 + step * 32}))\n")
            for half, part in enumerate(("low", "high")):
                for m in range(2):
                    n = 2 * pair + half
                    put(f"        c{m}{n} = dot(a{m}, {part}(b), c{m}{n})\n")
    put("        sync()\n        k, stage = i32(k + 32), i32(16384 - stage)\n")
    for m in range(2):
        for n in range(8):
            put(f"    at = c + 4 * (i64(row + {16 * m} + (lane >> 2)) * 128 + column + {8 * n} "
                f"+ 2 * (lane & 3))\n    store2(at, low(c{m}{n}))\n"
                f"    store2(at + 4096, high(c{m}{n}))\n")
    return Source("mma_gemm", "".join(body), ("i64", "i64", "i64", "i32"), 256, "sm_80", 32768)


# --- C[M, N] = A[M, K] B[N, K]^T, bf16, through TMA, mbarriers and wgmma --------------------------

STAGES, STAGE_BYTES = 4, 49152  # A 128 x 64 and B 256 x 64 of bf16

WGMMA_GEMM = Source("wgmma_gemm", HEAD + f"""
STAGE = {STAGE_BYTES}
BARRIERS = {STAGES * STAGE_BYTES}
base, uniform = use(shared_memory.address()), use(warp.shfl("idx"))
describe = use(shared_memory.descriptor(16, 1024))
init, expect = use("mbarrier_init"), use("mbarrier_arrive_expect")
wait_barrier, release = use("mbarrier_wait"), use("mbarrier_arrive_if")
ready, sync, prefetch = use("fence_mbarrier_init"), use("sync_threads"), use("prefetch_map")
fewer, more = use(barriers.set_registers(40, "dec")), use(barriers.set_registers(232, "inc"))
load = use(tma.load(2))
STEPS = shared_memory.steps(64, 16)
dot = use(wgmma.matmul(256, "bf16", a_offsets=STEPS, b_offsets=STEPS, accumulate="flag", wait=1))
finish = use(wgmma.wait(0, 128))
empty = use(fragments.undefined("f32", 128))
packed = use(fragments.packed(convert.pack_half("bf16")))
store = use(memory.st("global", "b32"))
""" + "".join(f"pick{i} = use(fragments.pick({i}))\n" for i in range(64)) + f"""
def wgmma_gemm(map_a, map_b, c, M, N, K):
    t = tid()
    full = base() + BARRIERS
    free = base() + BARRIERS + {8 * STAGES}
    if t == 0:
        prefetch(map_a)
        prefetch(map_b)
        s = i32(0)
        while s < {STAGES}:
            init(full + 8 * s, 1)
            init(free + 8 * s, 8)
            s = i32(s + 1)
        ready()
    sync()
    tiles = i32(N // 256)
    row, column = i32(block() // tiles) * 128, i32(block() % tiles) * 256
    group = uniform(t >> 7, 0)
    if group == 0:
        fewer()
        if t == 0:
            k, slot, phase = i32(0), i32(0), i32(1)
            while k < K:
                wait_barrier(free + 8 * slot, phase)
                expect(full + 8 * slot, STAGE)
                at = base() + slot * STAGE
                load(at, map_a, k, row, full + 8 * slot)
                load(at + 16384, map_b, k, column, full + 8 * slot)
                k, slot = i32(k + 64), i32(slot + 1)
                if slot == {STAGES}:
                    slot, phase = i32(0), i32(phase ^ 1)
    else:
        more()
        lead = i32((t & 31) == 0)  # a wait holds for its own warp only: each one releases
        acc = empty()
        k, slot, phase, before = i32(0), i32(0), i32(0), i32(0)
        while k < K:
            wait_barrier(full + 8 * slot, phase)
            at = base() + slot * STAGE
            acc = dot(acc, describe(at + (group - 1) * 8192), describe(at + 16384), i32(k > 0))
            release(free + 8 * before, lead * i32(k > 0))
            before = slot
            k, slot = i32(k + 64), i32(slot + 1)
            if slot == {STAGES}:
                slot, phase = i32(0), i32(phase ^ 1)
        acc = finish(acc)
        half = packed(acc)
        lane = t & 31
        line = row + (group - 1) * 64 + ((t >> 5) & 3) * 16 + (lane >> 2)
        at0 = c + 2 * (i64(line) * N + column + 2 * (lane & 3))
        at8 = at0 + 16 * i64(N)
""" + "".join(f"        store(at{8 * (i % 2)} + {i // 2 * 16}, pick{i}(half))\n"
             for i in range(64)),
    ("i64", "i64", "i64", "i32", "i32", "i32"), 384, "sm_90a", STAGES * STAGE_BYTES + 16 * STAGES)


# --- one warp, one instruction: the documented layouts --------------------------------------------


def one_mma(a: str, d: str, b: str = "", k: int = 0) -> Source:
    """Each lane loads its registers of A, B and C, and stores its registers of D."""
    from tessera.tile.cuda.ptx import mma

    record = mma.mma(a, d, b=b, k=k)
    count = [o.registers for o in record.args]
    kind = record.results[0].kind
    element = "f32" if kind == "f32" else "b32"
    lines = [HEAD, f"dot = use({record.name!r})\n"]
    for name, n, e in zip("abc", count, ("b32", "b32", element), strict=True):
        lines.append(f"load_{name} = use(memory.ld('global', {e!r}, {n}))\n")
    lines.append(f"store = use(memory.st('global', {element!r}, {count[2]}))\n")
    loads = ", ".join(f"load_{x}({x} + {4 * n} * t)" for x, n in zip("abc", count, strict=True))
    lines.append("def one_mma(a, b, c, d):\n    t = tid()\n"
                 f"    store(d + {4 * count[2]} * t, dot({loads}))\n")
    return Source("one_mma", "".join(lines), ("i64",) * 4, 32, str(record.target))


def one_wgmma(a: str, d: str, n: int, k: int, majors: str = "KK") -> Source:
    """D[64, n] = A[64, k] B[n, k]^T of one warpgroup; tiles of 128-byte rows come by TMA.

    M-major operands are given as [k, 64] and [k, 64] (n = 64).
    """
    item_bits = {"bf16": 16, "f16": 16, "tf32": 32}.get(a, 8)
    step = 256 // item_bits
    a_steps, b_steps = (
        f"shared_memory.steps({k}, {item_bits}, major={m!r}, instruction_k={step})" for m in majors)
    count = n // 2 if d != "f16" else n // 4
    kind, element = ("f32", "f32") if d == "f32" else ("i32", "b32")
    rows = [64 if majors[0] == "K" else k, n if majors[1] == "K" else k]
    text = f"""
base, describe = use(shared_memory.address()), use(shared_memory.descriptor(16, 1024))
init, expect, wait = use("mbarrier_init"), use("mbarrier_arrive_expect"), use("mbarrier_wait")
ready, sync = use("fence_mbarrier_init"), use("sync_threads")
load = use(tma.load(2))
dot = use(wgmma.matmul({n}, {a!r}, {d!r}, a_offsets={a_steps}, b_offsets={b_steps},
                        majors={majors!r}, accumulate="no", wait=0))
store = use(memory.st("global", {element!r}))
{"".join(f"pick{i} = use(fragments.pick({i})){chr(10)}" for i in range(count))}
def one_wgmma(map_a, map_b, d):
    t = tid()
    at, barrier = base(), base() + 65536
    if t == 0:
        init(barrier, 1)
        ready()
    sync()
    if t == 0:
        expect(barrier, {128 * sum(rows)})
        load(at, map_a, 0, 0, barrier)
        load(at + 32768, map_b, 0, 0, barrier)
    wait(barrier, 0)
    r = dot(describe(at), describe(at + 32768))
"""
    text += "".join(f"    store(d + 4 * ({count} * i64(t) + {i}), pick{i}(r))\n"
                    for i in range(count))
    return Source("one_wgmma", HEAD + text, ("i64", "i64", "i64"), 128, "sm_90a", 65536 + 64)


# --- warps, atomics, conversions, clusters, asserts -----------------------------------------------

# Row r of the result, 32 ints each, by lane l with x = x[l].
SHUFFLES = ("up(x, 3)", "down(x, 5)", "bfly(x, 6)", "idx(x, 7)", "quad(x, 2)", "ballot(x & 1)",
            "any_(i32(x == 5))", "all_(i32(x >= 0))", "match(x >> 2, -1)", "total(x)", "least(x)",
            "largest(x)", "both(x)", "either(x)", "odd(x)")
WARP = Source("warp_ops", HEAD + """
up, down = use(warp.shfl("up")), use(warp.shfl("down"))
bfly, idx = use(warp.shfl("bfly")), use(warp.shfl("idx"))
quad = use(warp.shfl("bfly", width=4))
ballot, any_, all_ = use("vote_ballot"), use("vote_any"), use("vote_all")
match = use("match_any")
total, least, largest = use("redux_add_s32"), use("redux_min_s32"), use("redux_max_s32")
both, either, odd = use("redux_and_b32"), use("redux_or_b32"), use("redux_xor_b32")
load, store = use(memory.ld("global", "b32")), use(memory.st("global", "b32"))
def warp_ops(source, target):
    t = tid()
    x = load(source + 4 * t)
""" + "".join(f"    store(target + {128 * r} + 4 * t, {s})\n" for r, s in enumerate(SHUFFLES)),
    ("i64", "i64"), 32, "sm_80")

# Words of the result: see test_atomics.
ATOMICS = Source("atomic_ops", HEAD + """
count, most = use(atomics.red("add", "u32")), use(atomics.red("max", "s32"))
least, bits = use(atomics.red("min", "u32")), use(atomics.red("or", "b32"))
total, wide = use(atomics.red("add", "f32")), use(atomics.red("add", "u64"))
claim, ticket = use(atomics.atom("cas", "b32")), use(atomics.atom("add", "u32", scope="sys"))
here, take = use(atomics.red("add", "u32", "shared", scope="cta")), use(memory.ld("shared", "b32"))
put, store = use(memory.st("shared", "b32")), use(memory.st("global", "b32"))
quad = use(atomics.red_add_vector(4))
ones = use(fragments.full("f32", 4))
base, sync = use(shared_memory.address()), use("sync_threads")
def atomic_ops(out, tickets):
    t, b = tid(), block()
    i = b * 128 + t
    if t == 0:
        put(base(), 0)
    sync()
    count(out, 1)
    most(out + 4, i - 1000)
    least(out + 8, i + 5)
    bits(out + 12, 1 << (t & 31))
    total(out + 16, f32(0.5))
    wide(out + 24, i64(1) << 33)
    if claim(out + 32, 0, i + 1) == 0:
        count(out + 36, 1)
    store(tickets + 4 * i64(ticket(out + 40, 1)), i)
    here(base(), 1)
    quad(out + 64, ones(0.25))
    sync()
    if t == 0:
        count(out + 44, take(base()))
""", ("i64", "i64"), 128, "sm_90", 16)


def converter(record: str, inputs: int, packed_by: int = 1) -> Source:
    """out[i] = record(x[i]) (packed_by 2: of x[2 i], x[2 i + 1]), `inputs` elements of 4 bytes."""
    from tessera.tile.cuda.instruction_names import find_instruction

    found = find_instruction(record)
    kind, result = found.args[0].kind, found.results[0].kind
    element = {"f32": "f32", "i32": "b32"}
    loads = ", ".join(f"load(x + {4 * packed_by} * i + {4 * j})" for j in range(packed_by))
    return Source("converter", HEAD + f"""
load = use(memory.ld("global", {element[kind]!r}))
store = use(memory.st("global", {element[result]!r}))
convert = use({record!r})
def converter(x, out):
    i = i64(block()) * 256 + tid()
    while i < {inputs // packed_by}:
        store(out + 4 * i, convert({loads}))
        i += i64(blocks()) * 256
""", ("i64", "i64"), 256, str(found.target))


CLUSTER = Source("cluster_ranks", HEAD + """
rank, size = use("cluster_ctarank"), use("cluster_nctarank")
arrive, wait = use("cluster_arrive"), use("cluster_wait")
base, far = use(shared_memory.address()), use("mapa")
put, load = use(memory.st("shared::cluster", "b32")), use(memory.ld("shared", "b32"))
store = use(memory.st("global", "b32"))
def cluster_ranks(out):
    t, me = tid(), rank()
    if t == 0:
        put(far(base(), (me + 1) % size()), 100 + me)
    arrive()
    wait()
    if t == 0:
        store(out + 8 * block(), me)
        store(out + 8 * block() + 4, load(base()))
    arrive()
    wait()
""", ("i64",), 32, "sm_90", 16, (4,))

def tma_copy(rank: int, box_bytes: int, inner: int) -> Source:
    """One tile a block, `inner` elements on along the last axis: in by TMA, out by TMA."""
    rest = ", 0" * (rank - 1)
    return Source("tma_copy", HEAD + f"""
base, init = use(shared_memory.address()), use("mbarrier_init")
expect, wait = use("mbarrier_arrive_expect"), use("mbarrier_wait")
ready, flush = use("fence_mbarrier_init"), use("fence_async_shared")
load, store = use(tma.load({rank})), use(tma.store({rank}))
commit, drain = use("bulk_commit"), use(tma.bulk_wait(0))
def tma_copy(source, target):
    if tid() == 0:
        at, barrier = base(), base() + 65536
        init(barrier, 1)
        ready()
        expect(barrier, {box_bytes})
        load(at, source, block() * {inner}{rest}, barrier)
        wait(barrier, 0)
        flush()
        store(target, block() * {inner}{rest}, at)
        commit()
        drain()
""", ("i64", "i64"), 32, "sm_90", 65536 + 64)


# Checks i < n for each lane, and reports the first failure: claim, then values, then the site.
ASSERT = Source("bounds", HEAD + """
claim = use(atomics.atom("cas", "b32"))
store = use(memory.st("global", "b64"))
publish = use(memory.st("global", "b64", cache="relaxed.sys"))
flush = use(barriers.fence("sys"))
def bounds(claims, report, key, n):
    i = block() * 32 + tid()
    if i >= n:
        if claim(claims, 0, 1) == 0:
            store(report + 8, key)
            store(report + 16, i64(block()))
            store(report + 24, i64(tid()))
            store(report + 32, i64(i))
            store(report + 40, i64(n))
            flush()
            publish(report, i64(1))
""", ("i64", "i64", "i64", "i32"), 32, "sm_75")

KERNELS = {"copy": COPY, "nothing": NOTHING, "mma_gemm": mma_gemm(), "wgmma_gemm": WGMMA_GEMM,
         "warp": WARP, "atomics": ATOMICS, "cluster": CLUSTER, "bounds": ASSERT,
           "tma_copy": tma_copy(3, 4096, 32)}
