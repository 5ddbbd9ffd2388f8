"""The source of attention's gradient by pairs of blocks; attention_backward.py puts constants in
front.

Words in capitals on a line of their own stand for the lines below. Matmuls that are on their way
when branches join are in registers of their own (ptx/named_registers.py); dP and the product for
queries share theirs. The wait for dV in the middle of an iteration is for the assembler, which else
wants the registers of all five products at one time (C7512).
"""

from __future__ import annotations

HEAD = '''\
from tessera.tile.cuda import ptx, use
from tessera.tile.cuda.intrinsics import attention_backward, shared_memory
from tessera.tile.cuda.numba_gate import f32, i32, i64
shared_at = use(shared_memory.address(0))
thread_number, cluster_rank = use('tid_x'), use('cluster_ctarank')
take_number, send_word = use(ptx.atomics.atom('add', 'u32')), use('st_async_b32')
read_word = use(ptx.memory.ld('shared', 'b32'))
uniform, far_address, prefetch_map = use(ptx.warp.shfl('idx')), use('mapa'), use('prefetch_map')
init, fence_init = use('mbarrier_init'), use('fence_mbarrier_init')
cluster_begin, cluster_end = use('cluster_arrive_relaxed'), use('cluster_arrive')
cluster_wait = use('cluster_wait')
wait, arrive, expect = use('mbarrier_wait'), use('mbarrier_arrive'), use('mbarrier_arrive_expect')
arrive_if, expect_if = use('mbarrier_arrive_if'), use('mbarrier_arrive_expect_if')
far_arrive_if, send_if = use('mbarrier_arrive_far_if'), use('bulk_send_if')
copy_tile, copy_row = use(ptx.tma.load(3)), use(ptx.tma.bulk_load())
nounroll = use('nounroll')  # the producer has 24 registers
fewer_registers = use(ptx.barriers.set_registers(24, 'dec'))
more_registers = use(ptx.barriers.set_registers(240, 'inc'))
fence_shared, sync_warp = use('fence_async_shared'), use('sync_warp')
fence_gpu, wait_for_word = use(ptx.barriers.fence('gpu')), use('wait_for_word')
store_word = use(ptx.memory.st('global', 'b32', cache='relaxed.gpu'))
declare_k, declare_v, declare_s, declare_x = (
    use(ptx.named_registers.declare_held(x, n))
    for x, n in (('dk', 64), ('dv', 64), ('s', 32), ('x', 32)))
clear_k, clear_v = (use(ptx.named_registers.clear_held(x, 64)) for x in ('dk', 'dv'))
take_k, take_v, take_s, take_x = (
    use(ptx.named_registers.take_held(x, n))
    for x, n in (('dk', 64), ('dv', 64), ('s', 32), ('x', 32)))
matmul_k, matmul_v = (
    use(ptx.named_registers.held_matmul(x, 128, DTYPE, b_offsets=ROWS[:4])) for x in ('dk', 'dv'))
matmul_s, matmul_x = (use(ptx.named_registers.held_product(
    x, 64, DTYPE, a_offsets=COLUMNS_K, b_offsets=COLUMNS_Q)) for x in ('s', 'x'))
matmul_q, matmul_q_more = (use(ptx.named_registers.held_product(
    'x', 64, DTYPE, a_offsets=ROWS, b_offsets=ROWS, majors='MM', accumulate=more))
    for more in (False, True))
wait_0, wait_1, wait_2 = (use(ptx.named_registers.wait_held(i)) for i in range(3))
weights, of_scores = use(attention_backward.weights()), use(attention_backward.of_scores())
packed, put_scores = use(attention_backward.packed(DTYPE)), use(attention_backward.put_scores())
store_sums, add_sums = use(attention_backward.store_sums()), use(attention_backward.add_sums())
whole_sums = use(attention_backward.whole_sums())
store_rows_q, store_rows = (use(attention_backward.store_rows(n, DTYPE, 256)) for n in (32, 64))
'''

BODY = '''
def attention_fused_backward(map_q, map_k, map_v, map_g, lse, delta, sums, turns, dq_, dk_, dv_,
                             scale):
    base = shared_at()
    tid = thread_number()
    role = uniform(tid >> 7, 0)
    rank = cluster_rank()
    peer = i32(rank ^ 1)
    ticket = i32(0)
    if tid == 0:
        prefetch_map(map_q)
        prefetch_map(map_k)
        prefetch_map(map_v)
        prefetch_map(map_g)
        init(i32(base + K_FULL), 1)
        init(i32(base + V_FULL), 1)
        for i in range(Q_STAGES):
            init(i32(base + Q_FULL + i * 8), 1)
            init(i32(base + Q_EMPTY + i * 8), 8)
        for i in range(G_STAGES):
            init(i32(base + G_FULL + i * 8), 1)
            init(i32(base + G_EMPTY + i * 8), 8)
        for i in range(2):
            init(i32(base + S_FULL + i * 8), 8)
            init(i32(base + S_EMPTY + i * 8), 8)
            init(i32(base + TURN + i * 8), 1)
            init(i32(base + ADDED + i * 8), 4)
            init(i32(base + TOLD + i * 8), 1)
        init(i32(base + NUMBER_FULL), 1)
        fence_init()
        expect(i32(base + NUMBER_FULL), 4)
        if rank == 0:
            ticket = take_number(turns + TICKETS, i32(1))
    cluster_begin()
    cluster_wait()
    if tid == 0 and rank == 0:
        for i in range(2):
            send_word(far_address(i32(base + NUMBER_AT), i32(i)), ticket,
                      far_address(i32(base + NUMBER_FULL), i32(i)))
    wait(i32(base + NUMBER_FULL), 0)
    number = uniform(read_word(i32(base + NUMBER_AT)), 0)
    strip = i32(number // (HEADS * PAIRS))
    rest = i32(number - strip * (HEADS * PAIRS))
    n = i32(rest // HEADS)
    head = i32(strip * HEADS + rest - n * HEADS)
    after = i32(head // SLOTS)
    slot = i32(head - after * SLOTS)
    turn = i32(after * PAIRS + n)
    first = i32((n * 2 + rank) * KEYS)
    if tid == 0:
        expect(i32(base + K_FULL), 2 * K_PANEL)
        copy_tile(i32(base + K_AT), map_k, 0, first, head, i32(base + K_FULL))
        copy_tile(i32(base + K_AT + K_PANEL), map_k, 64, first, head, i32(base + K_FULL))
        row = i64(head) * (BLOCKS * QUERIES)
        full = i32(base + Q_FULL)
        expect(full, TILE + ROW)
        copy_tile(i32(base + Q_AT), map_q, 0, 0, head, full)
        copy_tile(i32(base + Q_AT + Q_PANEL), map_q, 64, 0, head, full)
        copy_row(i32(base + LSE_AT), lse + row * 4, ROW, full)
        full = i32(base + V_FULL)
        expect(full, 3 * K_PANEL)
        copy_tile(i32(base + V_AT), map_v, 0, first, head, full)
        copy_tile(i32(base + V_AT + K_PANEL), map_v, 64, first, head, full)
        full = i32(base + G_FULL)
        expect(full, TILE + ROW)
        copy_tile(i32(base + G_AT), map_g, 0, 0, head, full)
        copy_tile(i32(base + G_AT + Q_PANEL), map_g, 64, 0, head, full)
        copy_row(i32(base + DELTA_AT), delta + row * 4, ROW, full)
        copy_tile(i32(base + FAR_AT), map_k, i32(rank * 64), i32((n * 2 + peer) * KEYS), head,
                  i32(base + V_FULL))
    if role == 0:
        fewer_registers()
        if tid == 0:
            q, q_phase, g, g_phase = i32(1), i32(1), i32(1), i32(1)
            row = i64(head) * (BLOCKS * QUERIES)
            j = i32(1)
            while j < BLOCKS:
                nounroll()
                at = i32(j * QUERIES)
                full = i32(base + Q_FULL + q * 8)
                wait(i32(base + Q_EMPTY + q * 8), q_phase)
                expect(full, TILE + ROW)
                to = i32(base + Q_AT + q * TILE)
                copy_tile(to, map_q, 0, at, head, full)
                copy_tile(i32(to + Q_PANEL), map_q, 64, at, head, full)
                copy_row(i32(base + LSE_AT + q * ROW), lse + (row + at) * 4, ROW, full)
                full = i32(base + G_FULL + g * 8)
                wait(i32(base + G_EMPTY + g * 8), g_phase)
                expect(full, TILE + ROW)
                to = i32(base + G_AT + g * TILE)
                copy_tile(to, map_g, 0, at, head, full)
                copy_tile(i32(to + Q_PANEL), map_g, 64, at, head, full)
                copy_row(i32(base + DELTA_AT + g * ROW), delta + (row + at) * 4, ROW, full)
                q = i32(q + 1)
                if q == Q_STAGES:
                    q, q_phase = i32(0), i32(q_phase ^ 1)
                g = i32(g + 1)
                if g == G_STAGES:
                    g, g_phase = i32(0), i32(g_phase ^ 1)
                j = i32(j + 1)
        elif tid == 32:
            words = turns + (i64(slot) * (BLOCKS * 2) + rank) * 4
            j = i32(0)
            while j < BLOCKS:
                if j > 1:
                    wait(i32(base + TOLD + (j & 1) * 8), i32(((j >> 1) - 1) & 1))
                wait_for_word(words + i64(j) * 8, turn)
                arrive(i32(base + TURN + (j & 1) * 8))
                j = i32(j + 1)
        elif tid == 64:
            words = turns + (i64(slot) * (BLOCKS * 2) + rank) * 4
            j = i32(0)
            while j < BLOCKS:
                wait(i32(base + ADDED + (j & 1) * 8), i32((j >> 1) & 1))
                fence_gpu()
                store_word(words + i64(j) * 8, i32(turn + 1))
                arrive(i32(base + TOLD + (j & 1) * 8))
                j = i32(j + 1)
    else:
        more_registers()
        w = i32(role - 1)
        lane = i32(tid & 31)
        lead = i32(lane == 0)
        warp = i32((tid >> 5) & 3)
        quad = i32(lane & 3)
        k_rows = i64(((base + K_AT + w * 8192) & 0x3FFFF) >> 4) | ALONG
        v_rows = i64(((base + V_AT + w * 8192) & 0x3FFFF) >> 4) | ALONG
        q_rows = i64(((base + Q_AT) & 0x3FFFF) >> 4) | ALONG
        g_rows = i64(((base + G_AT) & 0x3FFFF) >> 4) | ALONG
        q_columns = i64(((base + Q_AT) & 0x3FFFF) >> 4) | ACROSS
        g_columns = i64(((base + G_AT) & 0x3FFFF) >> 4) | ACROSS
        ds_here = i64(((base + S_AT + w * K_PANEL) & 0x3FFFF) >> 4) | ACROSS
        k_here = i64(((base + K_AT + rank * K_PANEL) & 0x3FFFF) >> 4) | ACROSS
        ds_far = i64(((base + S_FAR_AT + w * K_PANEL) & 0x3FFFF) >> 4) | ACROSS
        k_far = i64(((base + FAR_AT) & 0x3FFFF) >> 4) | ACROSS
        logs = i32(base + LSE_AT + quad * 8)
        rows = i32(base + DELTA_AT + quad * 8)
        mine = i32(base + S_AT + w * 8192 + warp * 2048)
        far = far_address(i32(base + S_FAR_AT + w * 8192 + warp * 2048), peer)
        far_full = far_address(i32(base + S_FULL), peer)
        far_empty = far_address(i32(base + S_EMPTY), peer)
        place = sums + (i64(slot) * (BLOCKS * SUMS) + rank * 16384 + warp * 4096 + lane * 16)
        line = dq_ + (i64(head) * (BLOCKS * TILE) + (warp * 16 + (lane >> 2)) * 256 + rank * 128)
        q, q_phase, g, g_phase = i32(0), i32(0), i32(0), i32(0)
        mine_phase, buffer, empty_phase = i32(0), i32(0), i32(1)
        declare_k()
        declare_v()
        declare_s()
        declare_x()
        clear_k()
        clear_v()
        factor = f32(scale * f32(LOG2E))
        wait(i32(base + K_FULL), 0)
        wait(i32(base + Q_FULL), 0)
        matmul_s(k_rows, q_rows)
        wait(i32(base + V_FULL), 0)
        wait(i32(base + G_FULL), 0)
        matmul_x(v_rows, g_rows)
        wait_1()
        s = take_s()
        s = weights(s, logs, factor)
        wait_0()
        x = take_x()
        x = of_scores(x, s, rows)
        p = packed(s)
        ds = packed(x)
        j = i32(1)
        while j < BLOCKS:
            if buffer != w and j > 1:
                wait(i32(base + S_FULL + w * 8), mine_phase)
                matmul_q(ds_here, k_here)
                matmul_q_more(ds_far, k_far)
                EXCHANGE
                wait_1()
                arrive_if(i32(base + S_EMPTY + w * 8), lead)
                far_arrive_if(i32(far_empty + w * 8), lead)
                wait_0()
                NEXT
                x = take_x()
                m = i32(j - 2)
                ADD
                mine_phase = i32(mine_phase ^ 1)
            else:
                EXCHANGE
                wait_0()
                NEXT
            wait(i32(base + G_FULL + g * 8), g_phase)
            matmul_x(v_rows, g_rows + g * (TILE >> 4))
            matmul_k(ds, q_columns + q_before * (TILE >> 4))
            buffer = i32(buffer ^ 1)
            if buffer == 0:
                empty_phase = i32(empty_phase ^ 1)
            wait_2()
            s = take_s()
            arrive_if(i32(base + G_EMPTY + g_before * 8), lead)
            s = weights(s, i32(logs + q * ROW), factor)
            wait_1()
            x = take_x()
            x = of_scores(x, s, i32(rows + g * ROW))
            wait_0()
            arrive_if(i32(base + Q_EMPTY + q_before * 8), lead)
            p = packed(s)
            ds = packed(x)
            j = i32(j + 1)
        EXCHANGE
        matmul_k(ds, q_columns + q * (TILE >> 4))
        wait_0()
        m = i32(BLOCKS - 1 - (buffer ^ w))
        wait(i32(base + S_FULL + w * 8), mine_phase)
        matmul_q(ds_here, k_here)
        matmul_q_more(ds_far, k_far)
        wait_0()
        x = take_x()
        ADD
        at = i64(head) * (PAIRS * 2 * KEYS * 256) + i64(
            first + w * 64 + warp * 16 + (lane >> 2)) * 256
        dv = take_v()
        store_rows(dv, f32(1.0), dv_ + at, quad)
        dk = take_k()
        store_rows(dk, scale, dk_ + at, quad)
    sync_warp(-1)
    cluster_end()
    cluster_wait()
'''

# dS of the block before to both of the pair, and its product for values.
EXCHANGE = '''\
wait(i32(base + S_EMPTY + buffer * 8), empty_phase)
put_scores(ds, i32(mine + buffer * K_PANEL), lane)
matmul_v(p, g_columns + g * (TILE >> 4))
fence_shared()
sync_warp(-1)
send_if(i32(far + buffer * K_PANEL), i32(mine + buffer * K_PANEL), 2048,
        i32(far_full + buffer * 8), lead)
expect_if(i32(base + S_FULL + buffer * 8), 2048, lead)
'''

# On to the next block: its scores are on their way while this one's sums are added.
NEXT = '''\
q_before, g_before = q, g
q = i32(q + 1)
if q == Q_STAGES:
    q, q_phase = i32(0), i32(q_phase ^ 1)
g = i32(g + 1)
if g == G_STAGES:
    g, g_phase = i32(0), i32(g_phase ^ 1)
wait(i32(base + Q_FULL + q * 8), q_phase)
matmul_s(k_rows, q_rows + q * (TILE >> 4))
'''

# The product for queries of the block m to the sums, when it is this group's turn there.
ADD = '''\
wait(i32(base + TURN + w * 8), mine_phase)
if n == 0:
    store_sums(x, place + i64(m) * SUMS)
elif n < PAIRS - 1:
    add_sums(x, place + i64(m) * SUMS)
else:
    x = whole_sums(x, place + i64(m) * SUMS)
    store_rows_q(x, scale, line + i64(m) * TILE, quad)
sync_warp(-1)
arrive_if(i32(base + ADDED + w * 8), lead)
'''


def source(constants: dict[str, object]) -> str:
    """The text with its constants and the lines that words stand for."""
    words, lines = {"EXCHANGE": EXCHANGE, "NEXT": NEXT, "ADD": ADD}, []
    for line in BODY.splitlines():
        word = line.strip()
        pad = line[:len(line) - len(word)]
        lines += [pad + x for x in words[word].splitlines()] if word in words else [line]
    named = [f"{name} = {value!r}" for name, value in constants.items()]
    return "\n".join([*named, HEAD, *lines, ""])


__all__ = ["source"]
