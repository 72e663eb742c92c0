"""Problems to plan: random small ones (hypothesis), and a transformer's training step with its real sizes and times."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from tencache_fx.planning.evaluation import Candidate, Evaluator, Names
from tencache_fx.planning.liveness import earliest_offload, inactive_intervals, is_candidate, live_bytes, minimal_swaps
from tencache_fx.planning.plan import CopyIn, CopyOut, Transfer
from tencache_fx.planning.planner import floor_bytes
from tencache_fx.planning.problem import (
    Budgets,
    Collective,
    CollectiveKind,
    Kind,
    Links,
    Op,
    Problem,
    Recipe,
    Step,
    Storage,
    Tier,
)
from tencache_fx.planning.recompute_search import RecomputeSearch
from tencache_fx.planning.tuning import TUNING

GIB = 1 << 30
PLENTY = 1 << 52


def links(rate: int = 10**9, **changes: int) -> Links:
    """Links of `rate` bytes per second each way, solo and duplex, without latency; one byte per ns by default."""
    rates = {
        "d2h_bytes_per_s": rate,
        "h2d_bytes_per_s": rate,
        "d2h_duplex_bytes_per_s": rate,
        "h2d_duplex_bytes_per_s": rate,
        "disk_write_bytes_per_s": rate // 2,
        "disk_read_bytes_per_s": rate // 2,
        "copy_latency_ns": 0,
        "disk_latency_ns": 0,
    }
    return Links(**{**rates, **changes})


def make_swap(
    *, name: str, nbytes: int, tier: Tier, copy_out_after: Step, freed_at: Step, prefetch_at: Step, needed_at: Step
) -> Transfer:
    """Return a transfer out and back."""
    out, back = CopyOut(after=copy_out_after, freed_at=freed_at), CopyIn(prefetch_at=prefetch_at, needed_at=needed_at)
    return Transfer(name=name, nbytes=nbytes, tier=tier, out=out, back=back)


def make_storage(name: str, nbytes: int, uses: Sequence[int], **changes: Any) -> Storage:
    """Return an activation that lives from its first use to its last, and may not be offloaded."""
    first, last = uses[0], uses[-1]
    fields = {"kind": Kind.ACTIVATION, "birth": Step(first), "death": Step(last + 1), "spillable": False, **changes}
    return Storage(name=name, nbytes=nbytes, uses=tuple(map(Step, uses)), **fields)


def make_region(durations_ns: Sequence[int], boundary: int, *storages: Storage, **changes: Any) -> Problem:
    """Return a region of ops that take so long; without links, a device budget, and host memory."""
    fields = {"links": links(0), "budgets": Budgets(device_bytes=None, host_bytes=0), **changes}
    ops = tuple(Op(name=f"op_{step}", duration_ns=duration) for step, duration in enumerate(durations_ns))
    return Problem(ops=ops, boundary=Step(boundary), storages=storages, **fields)


def boundary_bytes(problem: Problem, step: int) -> int:
    """Return what counts at a step beside what it holds, because it stands for the time between the graphs, too.

    Counted moment by moment: between the graphs there are the storages of before, and parameters that were prefetched;
    while the step runs there are those that it makes, and its scratch memory.
    """
    if step != problem.boundary:
        return 0
    there = [s for s in problem.storages if s.birth <= step < s.death]
    before = [s for s in there if s.birth < step or s.kind is Kind.FETCHED]
    waiting_bytes = sum(s.nbytes for s in before) + problem.boundary_bytes
    running_bytes = sum(s.nbytes for s in there) + problem.ops[step].scratch_bytes
    return max(waiting_bytes, running_bytes) - running_bytes


@st.composite
def problems(draw: st.DrawFn, *, most_steps: int = 24, most_storages: int = 14) -> Problem:
    """Regions of a few steps with any lifetimes; mostly over their device budget, and mostly above their floor."""
    steps = draw(st.one_of(st.integers(10, most_steps), st.integers(1, most_steps)))
    durations = st.integers(0, 20)
    ops = tuple(
        Op(name=f"op_{k}", duration_ns=draw(durations), scratch_bytes=draw(st.sampled_from((0, 0, 0, 2))))
        for k in range(steps)
    )
    storages = tuple(draw(_storages(f"s{index}", steps)) for index in range(draw(st.integers(0, most_storages)) or 6))
    boundary = Step(draw(st.integers(0, steps)))
    # Of some that cross the boundary the caller is done at it only.
    storages = tuple(
        replace(s, caller_frees_at=boundary) if s.birth < boundary < s.death and not draw(st.integers(0, 4)) else s
        for s in storages
    )
    problem = Problem(
        ops=ops,
        boundary=boundary,
        storages=storages,
        links=links(),
        budgets=Budgets(device_bytes=None, host_bytes=PLENTY),
        external_bytes=draw(st.integers(0, 3)),
        boundary_bytes=draw(st.sampled_from((0, 0, 4, 9))),
        min_spill_bytes=draw(st.sampled_from((0, 0, 0, 3))),
        barriers=tuple(map(Step, sorted(draw(st.one_of(st.just(set()), st.sets(st.integers(0, steps - 1))))))),
    )
    most = int(live_bytes(problem).max())
    least = int(live_bytes(problem, minimal_swaps(problem)).max())
    over = st.integers(least, max(least, most - 1))
    device_bytes = draw(st.one_of(over, over, over, over, over, st.none(), st.integers(least // 2, most)))
    host_pages, disk_pages = draw(st.sampled_from(((1 << 40, 0), (1 << 40, 64), (4, 64), (1, 64), (2, 2), (0, 9))))
    budgets = Budgets(device_bytes=device_bytes, host_bytes=host_pages * 4096, disk_bytes=disk_pages * 4096)
    return replace(problem, budgets=budgets)


@st.composite
def _storages(draw: st.DrawFn, name: str, steps: int) -> Storage:
    if draw(st.integers(0, 2)):  # saved in the first part, used again in the last
        birth = draw(st.integers(0, (steps - 1) // 2))
        death = steps - draw(st.integers(0, (steps - birth - 1) // 2))
    else:
        birth = draw(st.integers(0, steps - 1))
        death = draw(st.integers(birth + 1, steps))
    uses = draw(st.sets(st.integers(birth, death - 1), max_size=3)) | {death - 1}
    if draw(st.integers(0, 5)):  # else it existed before its first use
        uses |= {birth}
    return Storage(
        name=name,
        nbytes=draw(st.integers(1, 12)),
        kind=draw(st.sampled_from([kind for kind in Kind if kind not in (Kind.FETCHED, Kind.STORED)])),
        birth=Step(birth),
        death=Step(death),
        uses=tuple(Step(use) for use in sorted(uses)),
        spillable=draw(st.integers(0, 5)) > 0,
    )


@st.composite
def moving_problems(draw: st.DrawFn) -> Problem:
    """As `problems`, with parameters that come from home in one graph or in both, and gradients that leave.

    The second parameter, if there is one, is on disk.
    """
    problem = draw(problems())
    steps, boundary = len(problem.ops), problem.boundary
    storages = list(problem.storages)
    for index in range(draw(st.integers(1, 4))):
        nbytes = draw(st.integers(1, 8))
        for graph, (first, end) in enumerate(((0, boundary), (boundary, steps))):
            if first < end and draw(st.integers(0, 3)):
                birth = draw(st.integers(first, end - 1))
                uses = {birth} | draw(st.sets(st.integers(birth, end - 1), max_size=2))
                moving = _moving(f"w{index}_{graph}", nbytes, Kind.FETCHED, sorted(uses), f"w{index}")
                storages.append(replace(moving, tier=Tier.NVME if index == 1 else Tier.HOST))
        if boundary < steps and draw(st.booleans()):
            birth = draw(st.integers(boundary, steps - 1))
            uses = {birth} | draw(st.sets(st.integers(birth, steps - 1), max_size=2))
            storages.append(_moving(f"g{index}", nbytes, Kind.STORED, sorted(uses), f"w{index}"))
    problem = replace(problem, storages=tuple(storages), recipes=())
    if (old := problem.budgets.device_bytes) is None:
        return problem
    floor, most = floor_bytes(problem), int(live_bytes(problem).max())
    over = st.integers(floor, max(floor, most - 1))
    return problem.within(device_bytes=draw(st.one_of(over, over, over, over, st.just(old))))


def _moving(name: str, nbytes: int, kind: Kind, uses: list[int], parameter: str) -> Storage:
    steps = tuple(map(Step, uses))
    death = Step(uses[-1] + 1)
    return Storage(
        name=name,
        nbytes=nbytes,
        kind=kind,
        birth=steps[0],
        death=death,
        uses=steps,
        spillable=False,
        parameter=parameter,
    )


def crowded_region(seed: int) -> Problem:
    """Return a larger region, over its device budget and above its floor; the tiers may be too small."""
    rng = random.Random(seed)
    steps = rng.randint(6, 80)
    storages = []
    for index in range(rng.randint(1, 60)):
        birth = rng.randrange(steps // 2) if rng.random() < 0.6 else rng.randrange(steps)
        death = rng.randint(max(birth + 1, steps // 2), steps)
        uses = {death - 1, *(rng.randrange(birth, death) for _ in range(rng.randint(0, 3)))}
        storages.append(
            Storage(
                name=f"s{index}",
                nbytes=rng.choice((rng.randint(1, 60), rng.randint(1, 20_000))),
                kind=Kind.ACTIVATION,
                birth=Step(birth),
                death=Step(death),
                uses=tuple(Step(use) for use in sorted(uses | {birth} if rng.random() < 0.8 else uses)),
                spillable=rng.random() < 0.9,
            )
        )
    problem = Problem(
        ops=tuple(Op(name=f"op_{k}", duration_ns=rng.choice((0, 5, rng.randint(0, 40)))) for k in range(steps)),
        boundary=Step(rng.randint(0, steps)),
        storages=tuple(storages),
        links=links(rng.choice((10**9, 10**12)), copy_latency_ns=rng.choice((0, 3))),
        budgets=Budgets(device_bytes=None, host_bytes=PLENTY),
    )
    most, least = (int(live_bytes(problem, transfers).max()) for transfers in ((), minimal_swaps(problem)))
    budgets = Budgets(
        device_bytes=rng.randint(least, max(least, most - 1)),
        host_bytes=rng.choice((PLENTY, PLENTY, rng.randint(0, 200) * 4096)),
        disk_bytes=rng.choice((0, PLENTY, rng.randint(0, 300) * 4096)),
    )
    return replace(problem, budgets=budgets)


@st.composite
def problems_with_swaps(draw: st.DrawFn) -> tuple[Problem, tuple[Transfer, ...]]:
    """A region and swaps that keep every rule of a swap, with any slack; the budgets are not looked at."""
    problem = draw(problems())
    transfers = []
    for storage in problem.storages:
        intervals = inactive_intervals(storage)
        if not (is_candidate(problem, storage) and intervals and draw(st.booleans())):
            continue
        u, v = draw(st.sampled_from(intervals))
        crossing = u < problem.boundary <= v
        offload = draw(st.integers(max(storage.birth, problem.boundary) if u >= problem.boundary else storage.birth, u))
        gone = draw(st.integers(u + 1, min(v, problem.boundary) if crossing else v))
        fetch = draw(st.integers(max(gone, problem.boundary) if crossing else gone, v))
        tier = draw(st.sampled_from((Tier.HOST, Tier.NVME)))
        times = {"copy_out_after": Step(offload), "freed_at": Step(gone), "prefetch_at": Step(fetch), "needed_at": v}
        transfers.append(make_swap(name=storage.name, nbytes=storage.nbytes, tier=tier, **times))
    return problem, tuple(transfers)


@st.composite
def with_collectives(draw: st.DrawFn, problem: Problem) -> Problem:
    """Return `problem` with collectives at any steps; of those over two ranks one byte takes half a ns, or one."""
    steps = len(problem.ops)
    begins = sorted(draw(st.lists(st.integers(0, steps - 1), max_size=5)))
    collectives = (
        Collective(
            name=f"c{place}",
            kind=draw(st.sampled_from(CollectiveKind)),
            nbytes=draw(st.integers(0, 60)),
            ranks=draw(st.integers(1, 3)),
            begin=Step(begin),
            needed_at=Step(draw(st.integers(begin + 1, steps))),
            latency_ns=draw(st.integers(0, 5)),
            bytes_per_s=10**9,
        )
        for place, begin in enumerate(begins)
    )
    return replace(problem, collectives=tuple(collectives))


@st.composite
def using_collectives(draw: st.DrawFn, problem: Problem) -> Problem:
    """Return `problem` with collectives that use its storages, which then live as `measure_lifetimes` has it.

    What one reads is in use until its wait, and what it writes may not leave before that.
    """
    steps, storages = len(problem.ops), {storage.name: storage for storage in problem.storages}
    found = []
    for number in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from(sorted(storages)))
        storage = storages[name]
        writes = storage.kind is Kind.ACTIVATION and storage.birth in storage.uses and draw(st.booleans())
        begin = storage.birth if writes else draw(st.integers(storage.birth, storage.death - 1))
        needed_at = draw(st.integers(begin + 1, steps))
        end = min(needed_at + 1, steps)
        uses = {*storage.uses, *((begin, end - 1) if writes else range(begin, end))}
        storages[name] = replace(
            storage,
            uses=tuple(map(Step, sorted(uses))),
            death=Step(max(storage.death, end)),
            ready=Step(max(storage.ready, min(needed_at, steps - 1) if writes else 0)),
            spillable=storage.spillable and not (writes and needed_at == steps),
        )
        used = {"writes": (name,)} if writes else {"reads": (name,)}
        times = {"begin": Step(begin), "needed_at": Step(needed_at), "latency_ns": 2, "bytes_per_s": 10**9}
        kind = draw(st.sampled_from(CollectiveKind))
        found.append(Collective(name=f"c{number}", kind=kind, nbytes=storage.nbytes, ranks=2, **times, **used))
    collectives = tuple(sorted(found, key=lambda each: each.begin))
    return replace(problem, storages=tuple(storages.values()), collectives=collectives)


@dataclass
class _Model:
    """A Llama-like model's training step, written down op by op: what each touches and how long it takes."""

    layers: int
    hidden: int
    inner: int
    tokens: int
    sequence: int
    vocabulary: int
    split: int
    ops: list[Op] = field(default_factory=list)
    sizes: dict[str, tuple[int, Kind]] = field(default_factory=dict)
    uses: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        h, f = self.hidden, self.inner
        self.shapes = {"qkv": (h, 3 * h), "o": (h, h), "gate": (h, f), "up": (h, f), "down": (f, h)}
        self.act_bytes, self.inner_bytes = 2 * self.tokens * h, 2 * self.tokens * f
        self.attention_flops = 2.0 * self.tokens * self.sequence * h  # causal
        for n in range(self.layers):
            for name, (rows, columns) in self.shapes.items():
                self.new(f"w_{name}_{n}", 2 * rows * columns, Kind.PARAMETER)
        for name in ("w_head", "w_embedding"):
            self.new(name, 2 * h * self.vocabulary, Kind.PARAMETER)

    def new(self, name: str, nbytes: int, kind: Kind = Kind.ACTIVATION) -> str:
        self.sizes[name], self.uses[name] = (nbytes, kind), []
        return name

    def act(self, name: str) -> str:
        return self.new(name, self.act_bytes)

    def wide(self, name: str) -> str:
        return self.new(name, self.inner_bytes)

    def run(self, name: str, *touched: str, flops: float = 0.0) -> None:
        """Append an op that takes as long as its arithmetic or its memory traffic, whichever is more."""
        seconds = max(flops / 720e12, sum(self.sizes[t][0] for t in touched) / 4e12)
        for storage in touched:
            self.uses[storage] += [len(self.ops), len(self.ops) + self.split - 1]
        self.ops += [Op(name=name, duration_ns=round(seconds * 1e9) // self.split)] * self.split

    def matmul(self, name: str, n: int, *touched: str) -> None:
        rows, columns = self.shapes[name]
        self.run(f"{name}_mm_{n}", f"w_{name}_{n}", *touched, flops=2.0 * self.tokens * rows * columns)

    def matmul_backward(self, name: str, n: int, grad_in: str, value: str, grad_out: str) -> None:
        self.matmul(name, n, grad_in, grad_out)
        rows, columns = self.shapes[name]
        gradient = self.new(f"g_{name}_{n}", 2 * rows * columns, Kind.GRADIENT)
        self.run(f"g_{name}_mm_{n}", grad_in, value, gradient, flops=2.0 * self.tokens * rows * columns)

    def forward(self, n: int) -> None:
        x, n1, qkv = f"x_{n}", self.act(f"n1_{n}"), self.new(f"qkv_{n}", 3 * self.act_bytes)
        self.run(f"norm1_{n}", x, n1)
        self.matmul("qkv", n, n1, qkv)
        a, lse = self.act(f"a_{n}"), self.new(f"lse_{n}", 4 * 32 * self.tokens)
        self.run(f"attention_{n}", qkv, a, lse, flops=self.attention_flops)
        x1, n2 = self.act(f"x1_{n}"), self.act(f"n2_{n}")
        self.matmul("o", n, a, x, x1)
        self.run(f"norm2_{n}", x1, n2)
        gate, up, product = self.wide(f"gate_{n}"), self.wide(f"up_{n}"), self.wide(f"product_{n}")
        self.matmul("gate", n, n2, gate)
        self.matmul("up", n, n2, up)
        self.run(f"swiglu_{n}", gate, up, product)
        self.matmul("down", n, product, x1, self.act(f"x_{n + 1}"))

    def loss(self) -> int:
        """Append head and loss, forward and backward; return where the backward starts."""
        head_flops = 2.0 * self.tokens * self.hidden * self.vocabulary
        last, size = f"x_{self.layers}", self.tokens * self.vocabulary
        logits, log_softmax = self.new("logits", 2 * size), self.new("log_softmax", 4 * size)
        self.run("head_mm", last, "w_head", logits, flops=head_flops)
        self.run("log_softmax", logits, log_softmax)
        self.run("nll_loss", log_softmax)
        boundary = len(self.ops)
        dlogits = self.new("dlogits", 2 * size)
        self.run("dlog_softmax", log_softmax, dlogits)
        self.run("dhead_mm", dlogits, "w_head", self.act(f"dx_{self.layers}"), flops=head_flops)
        gradient = self.new("g_head", 2 * self.hidden * self.vocabulary, Kind.GRADIENT)
        self.run("g_head_mm", dlogits, last, gradient, flops=head_flops)
        return boundary

    def backward(self, n: int) -> None:
        dx, again = f"dx_{n + 1}", self.wide(f"product_again_{n}")
        dproduct, dgate, dup = self.wide(f"dproduct_{n}"), self.wide(f"dgate_{n}"), self.wide(f"dup_{n}")
        self.run(f"swiglu_again_{n}", f"gate_{n}", f"up_{n}", again)
        self.matmul_backward("down", n, dx, again, dproduct)
        self.run(f"dswiglu_{n}", dproduct, f"gate_{n}", f"up_{n}", dgate, dup)
        dn2, more, dx1 = self.act(f"dn2_{n}"), self.act(f"dn2_more_{n}"), self.act(f"dx1_{n}")
        self.matmul_backward("gate", n, dgate, f"n2_{n}", dn2)
        self.matmul_backward("up", n, dup, f"n2_{n}", more)
        self.run(f"dnorm2_{n}", dn2, more, dx, f"x1_{n}", dx1)
        da, dqkv, dn1 = self.act(f"da_{n}"), self.new(f"dqkv_{n}", 3 * self.act_bytes), self.act(f"dn1_{n}")
        self.matmul_backward("o", n, dx1, f"a_{n}", da)
        touched = da, f"qkv_{n}", f"a_{n}", f"lse_{n}", dqkv
        self.run(f"dattention_{n}", *touched, flops=2.5 * self.attention_flops)
        self.matmul_backward("qkv", n, dqkv, f"n1_{n}", dn1)
        self.run(f"dnorm1_{n}", dn1, dx1, f"x_{n}", self.act(f"dx_{n}"))

    def storages(self) -> tuple[Storage, ...]:
        """Parameters live all the time, gradients to the end, all others from first to last use."""
        last = len(self.ops)
        storages = []
        for name, (nbytes, kind) in self.sizes.items():
            uses = sorted(set(self.uses[name]))
            stays = kind is Kind.PARAMETER
            storages.append(
                Storage(
                    name=name,
                    nbytes=nbytes,
                    kind=kind,
                    birth=Step(0 if stays else uses[0]),
                    death=Step(last if stays or kind is Kind.GRADIENT else uses[-1] + 1),
                    uses=tuple(Step(use) for use in uses),
                    spillable=kind is Kind.ACTIVATION,
                )
            )
        return tuple(storages)


def transformer(
    *, layers: int = 8, split: int = 1, device_bytes: int | None = None, host_bytes: int = 64 * GIB, disk_bytes: int = 0
) -> Problem:
    """Return the training step of a bf16 model of 4 x 4096 tokens on a GPU of 720 TFLOP/s, 4 TB/s and 48 GB/s links.

    Norms are saved, the SwiGLU product is computed again; `split` makes every op several.
    """
    model = _Model(
        layers=layers, hidden=4096, inner=12288, tokens=4 * 4096, sequence=4096, vocabulary=32000, split=split
    )
    model.run("embedding", "w_embedding", model.act("x_0"))
    for n in range(layers):
        model.forward(n)
    boundary = model.loss()
    for n in reversed(range(layers)):
        model.backward(n)
    model.run("dembedding", "dx_0", model.new("g_embedding", 2 * 4096 * 32000, Kind.GRADIENT))
    disk = 3 * 10**9
    return Problem(
        ops=tuple(model.ops),
        boundary=Step(boundary),
        storages=model.storages(),
        links=links(
            48 * 10**9,
            d2h_duplex_bytes_per_s=40 * 10**9,
            h2d_duplex_bytes_per_s=40 * 10**9,
            disk_write_bytes_per_s=disk,
            disk_read_bytes_per_s=disk,
            copy_latency_ns=10_000,
            disk_latency_ns=200_000,
        ),
        budgets=Budgets(device_bytes=device_bytes, host_bytes=host_bytes, disk_bytes=disk_bytes),
        min_spill_bytes=1 << 20,
    )


def recipes_of_matmuls(problem: Problem) -> tuple[Recipe, ...]:
    """Every saved activation that a single forward step makes, from what the step reads besides."""
    kept = (s for s in problem.storages if s.kind is Kind.ACTIVATION and s.spillable)
    saved = (s for s in kept if s.birth < problem.boundary <= s.uses[-1])
    return tuple(Recipe(name=s.name, steps=(s.birth,)) for s in saved)


def offloaded_weights(problem: Problem) -> Problem:
    """Return `problem` with its parameters, frozen, fetched anew by each graph that reads them."""
    storages: list[Storage] = []
    for storage in problem.storages:
        if storage.kind is Kind.PARAMETER:
            early = [use for use in storage.uses if use < problem.boundary]
            late = [use for use in storage.uses if use >= problem.boundary]
            storages += [
                _moving(f"{storage.name}_{graph}", storage.nbytes, Kind.FETCHED, uses, storage.name)
                for graph, uses in enumerate((early, late))
                if uses
            ]
        elif storage.kind is not Kind.GRADIENT:
            storages.append(storage)
    return replace(problem, storages=tuple(storages))


def trained_offloaded(count: int, nbytes: int = 16) -> Problem:
    """Return a region with `count` equal offloaded parameters, read in order and back again, and their state.

    The host's memory takes longer for its updates than the device does for all else.
    """
    ops = tuple(Op(name=f"op_{k}", duration_ns=100, scratch_bytes=0) for k in range(2 * count))
    storages = []
    for index in range(count):
        back = 2 * count - 1 - index
        storages += [
            _moving(f"w{index}_0", nbytes, Kind.FETCHED, [index], f"w{index}"),
            _moving(f"w{index}_1", nbytes, Kind.FETCHED, [back], f"w{index}"),
            replace(_moving(f"g{index}", nbytes, Kind.STORED, [back], f"w{index}"), state_bytes=6 * nbytes),
        ]
    return Problem(
        ops=ops,
        boundary=Step(count),
        storages=tuple(storages),
        links=links(host_bytes_per_s=10**8),
        budgets=Budgets(device_bytes=None, host_bytes=PLENTY),
    )


def legal_swap(
    problem: Problem, storage: Storage, interval: tuple[Step, Step], between: Callable[[int, int], int]
) -> Transfer:
    """Return a swap in an inactive interval of `storage`; `between` draws each step, as freely as a policy may."""
    u, v = interval
    crossing = u < problem.boundary <= v
    offload = between(earliest_offload(problem, storage, u), u)
    gone = between(u + 1, min(v, problem.boundary) if crossing else v)
    fetch = between(max(gone, problem.boundary) if crossing else gone, v)
    return make_swap(
        name=storage.name,
        nbytes=storage.nbytes,
        tier=Tier.HOST,
        copy_out_after=Step(offload),
        freed_at=Step(gone),
        prefetch_at=Step(fetch),
        needed_at=v,
    )


def choose_recomputed(problem: Problem) -> Names:
    """Return what the search recomputes beside parameters that are all copied: one of its levels, and that alone."""
    return RecomputeSearch(Evaluator(problem), Candidate(policy="teraio", lead=TUNING.compared_lead)).run()
