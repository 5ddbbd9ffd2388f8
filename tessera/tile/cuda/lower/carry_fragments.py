"""A ring whose fragments are read one step of k ahead, across the barrier too.

A loop with one matmul of what its ring holds is, per iteration and step j of k,

    operands of step j + 1 -> registers;   some of the copies of the iteration `stages` - 1 ahead
    matmuls of step j

and the last step reads the first operands of the next iteration, after the wait and the barrier for
it, before it multiplies. So no matmul waits for what was read just before it, and the tensor cores
have work while the warps meet. What the last iteration reads ahead is zeros, or was copied for
nobody. """

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera.lazy_dataclass import dataclass
from tessera.numerics import i32
from tessera.tile.cuda.intrinsics.matmul import STEP_BYTES
from tessera.tile.cuda.lower.choose_matmul_unit import format_of
from tessera.tile.cuda.lower.find_staged_loads import Feed
from tessera.tile.cuda.lower.next_iteration import made_in
from tessera.tile.ir.ir import Const, Def, For, Node, Op, Operand, SSAValue
from tessera.tile.ir.types import Buffer, TileType

if TYPE_CHECKING:
    from tessera.tile.cuda.lower.stage_loads import _Stager

STEP_BITS = 8 * STEP_BYTES  # of k in one instruction of the tensor cores


@dataclass(frozen=True)
class FragmentPlan:
    """op: the matmul.  a, b: its operands' feeds, each with whether it is read transposed.

    formats: of the tensor cores.  steps: instructions along k.  sums: the loop's accumulator and
    what that begins with.
    """

    op: Op
    a: tuple[Feed, bool]
    b: tuple[Feed, bool]
    formats: tuple[str, str]
    steps: int
    sums: tuple[SSAValue, SSAValue]

    @property
    def depth(self) -> int:
        """Elements of k in a step."""
        return STEP_BITS // self.a[0].dtype.bits


def plan(stager: _Stager, node: For, feeds: list[Feed]) -> FragmentPlan | None:
    """How to carry a ring's fragments; None where its loop is of another form."""
    matmuls = [n for n in node.body if isinstance(n, Op) and n.name == "matmul"]
    if len(matmuls) != 1 or len(matmuls[0].args) != 3 or len(feeds) != 2:
        return None
    (op,) = matmuls
    found = [_fed(node, feeds, x) for x in op.args[:2]]
    a, b = found
    if a is None or b is None or a[0] is b[0] or any(f.users != {id(op)} for f in feeds):
        return None
    x, y = (stager.types[v] for v in op.args[:2])  # type: ignore[index]
    assert isinstance(x, TileType) and isinstance(y, TileType)
    formats = format_of(x.dtype, y.dtype, op.attr, stager.generation)
    bits = x.shape[1] * x.dtype.bits
    # Where the tensor cores lose bits of long sums, those are begun anew inside of a matmul.
    short = stager.generation.warp_matmul.short_sums
    plain = formats is not None and formats[0] not in short and op.attr["dtype"].bits >= 32
    sums = next(((d.value, v) for d, v in zip(node.carried, node.inits, strict=True)
                 if d.value == op.args[2] and isinstance(v, SSAValue)), None)
    if not plain or formats is None or bits % STEP_BITS or bits < 2 * STEP_BITS or sums is None:
        return None
    return FragmentPlan(op, a, b, formats, bits // STEP_BITS, sums)


def _fed(node: For, feeds: list[Feed], x: Operand) -> tuple[Feed, bool] | None:
    """The feed that an operand is, and whether it is read otherwise than it lies."""
    turned, made = False, made_in(node)
    while isinstance(x, SSAValue) and x in made and made[x].name == "transpose":
        x, turned = made[x].args[0], not turned
    return next(((f, f.turned != turned) for f in feeds if f.value == x), None)


class Carrier:
    """Builds such a loop with the stager's means."""

    def __init__(self, stager: _Stager, node: For, feeds: list[Feed], plan: FragmentPlan):
        self.stager, self.node, self.feeds, self.plan = stager, node, feeds, plan
        self.buffers = {f.value: stager.buffer(f, stager.stages) for f in feeds}
        self.heads: list[Operand] = []  # of the iteration that comes
        self.slot, self.free = (stager.counter(hint) for hint in ("slot", "free"))

    def run(self, out: list[Node]) -> None:
        s, node, plan = self.stager, self.node, self.plan
        for iteration in range(s.stages - 1):
            at = s.moved(out, node.lo, node.step, iteration)
            self.copies(out, at, Const(iteration, i32), self.feeds)
            s.act(out, "cp_commit_group")
        first = self.arrived(out, Const(0, i32), plan.sums[1])
        carried = [Def(s.names.fresh(x.name), s.made[x]) for x in first]
        self.heads = [d.value for d in carried]
        body: list[Node] = []
        for f in self.feeds:
            s.hold(f, self.staged(body, f, self.slot.value))
        s.carrier = self
        s.rest(node, self.feeds, body)
        s.carrier = None
        added = (self.slot, self.free, *carried)
        inits = (Const(0, i32), Const(s.stages - 1, i32), *first)
        yields = (self.next_slot, s.following(body, self.free.value), *self.heads)
        out.append(For(node.var, node.lo, node.hi, node.step, (*node.carried, *added),
                       (*node.inits, *inits), tuple(body), (*node.yields, *yields), node.over,
                       node.where))

    def matmul(self, out: list[Node]) -> None:
        """The iteration's matmul, with everything that goes on beside it."""
        s, plan, (made,) = self.stager, self.plan, self.plan.op.outs
        later = s.moved(out, self.node.var.value, self.node.step, s.stages - 1)
        sums: Operand = plan.sums[0]
        for step in range(plan.steps):
            heads, last = self.heads, step + 1 == plan.steps
            if last:
                s.act(out, "cp_commit_group")
                self.next_slot = s.following(out, self.slot.value)
                self.heads = list(self.arrived(out, self.next_slot, plan.sums[0]))
            else:
                places = [self.staged(out, f, self.slot.value) for f, _ in (plan.a, plan.b)]
                self.heads = list(self.taken(out, places, step + 1, plan.sums[0]))
                self.copies(out, later, self.free.value, self.share(step))
            d = made if last else Def(s.names.fresh(made.value.name), made.type)
            attrs = tuple(sorted((plan.op.attr | {"taken": True}).items()))
            out.append(Op("matmul", (*heads, sums), (d,), attrs, plan.op.where))
            sums = d.value

    def share(self, step: int) -> list[Feed]:
        """What is copied in a step: all is spread over the steps before the last."""
        each = self.plan.steps - 1
        return [f for i, f in enumerate(self.feeds) if i * each // len(self.feeds) == step]

    def arrived(self, out: list[Node], slot: Operand, sums: SSAValue) -> tuple[SSAValue, SSAValue]:
        """The first operands of the iteration that lies in a slot, once its copies are there."""
        s = self.stager
        s.act(out, "cp_wait_group", pending=s.stages - 2)
        s.act(out, "barrier")
        places = [self.staged(out, f, slot) for f, _ in (self.plan.a, self.plan.b)]
        return self.taken(out, places, 0, sums)

    def staged(self, out: list[Node], feed: Feed, slot: Operand) -> SSAValue:
        return self.stager.op(out, "stage", (self.buffers[feed.value], slot), feed.tensor.name,
                              Buffer(feed.dtype, feed.shape, "shared", 1, "chunks", 128))

    def taken(self, out: list[Node], places: list[SSAValue], step: int,
              sums: SSAValue) -> tuple[SSAValue, SSAValue]:
        """Both operands of a step of k in registers."""
        s, plan, depth = self.stager, self.plan, self.plan.depth
        found = []
        for side, (feed, turned), place, kind in zip("AB", (plan.a, plan.b), places, plan.formats,
                                                     strict=True):
            box = s.part(out, place, feed.dtype, feed.shape, turned, "AB".index(side) ^ 1,
                         step * depth, depth)
            shape = s.made[box].shape
            found.append(s.op(out, "take_operand", (box, sums), f"{side}_ahead",
                              TileType(feed.dtype, shape), side=side, format=kind))
        return found[0], found[1]

    def copies(self, out: list[Node], at: Operand, slot: Operand, feeds: list[Feed]) -> None:
        """The copies of some loads for the iteration whose loop variable is `at`, if there is
        one."""
        if feeds:
            inside = self.stager.inside(out, at, self.node)
            self.stager.copy_iteration(out, self.node, feeds, self.buffers, at, slot, inside)


__all__ = ["Carrier", "FragmentPlan", "plan"]
