"""Random training loops of several compiled blocks, drawn from a seed: what a step of many regions has to cope with.

A loop calls blocks (random tensor programs, see `tensor_programs.py`) in any order, one of them several times, with
compiled sums and eager code between; some of it checkpointed, some of it under no_grad, some of it dropped without a
backward. A step has one or more micro-batches, whose backwards run after each forward or after all of them. Some steps
are broken off, in a forward or in a backward.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from tensor_programs import COLS, INSTRUCTIONS, OF_THE_MODEL, ROWS, Interpreted, Program, Values
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Block = Callable[..., Values]
Wrap = Callable[[nn.Module], Block]

WRITING = ("written", "row_written", "noted", "summed")
READING = sorted({*INSTRUCTIONS, *OF_THE_MODEL} - set(WRITING))
EAGER = sorted(INSTRUCTIONS.keys() - set(WRITING))
"""What may stand between regions: autograd refuses writes to what they have saved."""


_REMEMBERED = 3  # values


class BrokenOffError(Exception):
    """A step ends here."""


@dataclass(frozen=True)
class Action:
    """One thing that a micro-batch does to two values, by their places from the end: results are values, too.

    `kind` is "call", "checkpoint", "evaluate", "drop", "join", or the name of an instruction that runs without a
    compiler.
    """

    kind: str
    block: int
    places: tuple[int, int]


@dataclass(frozen=True)
class MicroBatch:
    """What is done to two inputs and noise; of the values at `read` from the end there is a loss, compiled or not."""

    actions: tuple[Action, ...]
    read: tuple[int, ...]
    compiles_loss: bool


@dataclass(frozen=True)
class StepKind:
    """One way of a step; `order` says of backwards whether each comes at once, or all at the end, or the last first."""

    batches: tuple[MicroBatch, ...]
    order: str


@dataclass(frozen=True)
class Loop:
    """Blocks, ways of a step, and the steps: each its way, and where it breaks off, if it does.

    That is the number of actions of its first micro-batch that are done, or -1 for its backward. With `learns` there
    is an update after each step.
    """

    seed: int
    blocks: tuple[Program, ...]
    kinds: tuple[StepKind, ...]
    steps: tuple[tuple[int, int | None], ...]
    with_grad: tuple[bool, bool]
    learns: bool


def draw_loop(seed: int) -> Loop:
    """Return the loop of this seed."""
    rng = random.Random(seed)
    blocks = tuple(_draw_block(rng) for _ in range(rng.choice((2, 2, 3, 3, 4, 5, 6))))
    kinds = tuple(_draw_kind(rng, blocks) for _ in range(rng.choice((1, 1, 2))))
    steps: list[tuple[int, int | None]] = []
    for number in range(5):
        kind = 0 if number in (0, 1) else rng.randrange(len(kinds))
        breaks = kind in (known for known, _ in steps) and rng.random() < 0.2
        count = len(kinds[kind].batches[0].actions)
        steps.append((kind, rng.randint(-1, count - 1) if breaks else None))
    return Loop(
        seed=seed,
        blocks=blocks,
        kinds=kinds,
        steps=tuple(steps),
        with_grad=(rng.random() < 0.5, rng.random() < 0.3),
        learns=rng.random() < 0.5,
    )


def _draw_block(rng: random.Random) -> Program:
    count = rng.randint(2, 6)
    names = [rng.choice(WRITING if rng.random() < 0.08 else READING) for _ in range(count - 1)]
    instructions = [(name, rng.randint(0, 4), rng.randint(0, 4)) for name in names]
    instructions.insert(
        rng.choice((count - 1, rng.randrange(count))), ("weighted", rng.randint(0, 2), rng.randint(0, 2))
    )
    outputs = [rng.randint(0, 4) for _ in range(rng.choice((0, 0, 0, 1, 2)))]
    return Program(instructions=instructions, outputs=outputs, with_grad=(False, False), given_twice=False)


def _draw_kind(rng: random.Random, blocks: tuple[Program, ...]) -> StepKind:
    batches = [_draw_batch(rng, blocks)]
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        batches.append(rng.choice((batches[0], _draw_batch(rng, blocks))))
    return StepKind(batches=tuple(batches), order=rng.choice(("at once", "at the end", "last first")))


def _draw_batch(rng: random.Random, blocks: tuple[Program, ...]) -> MicroBatch:
    often, actions = rng.randrange(len(blocks)), []
    for _ in range(rng.randint(5, 14)):
        kind = rng.choices(
            ("call", "checkpoint", "evaluate", "drop", "join", rng.choice(EAGER)), weights=(60, 6, 4, 4, 6, 12), k=1
        )[0]
        block = often if rng.random() < 0.4 else rng.randrange(len(blocks))
        if kind == "checkpoint" and any(name in WRITING for name, _, _ in blocks[block].instructions):
            kind = "call"  # what runs again writes again
        actions.append(Action(kind, block, (rng.choice((0, 0, 0, 0, 1)), rng.randint(0, 2))))
    read = (0, *(rng.randint(0, 5) for _ in range(rng.choice((0, 1, 2)))))
    return MicroBatch(actions=tuple(actions), read=read, compiles_loss=rng.random() < 0.4)


def _break_off(gradient: Tensor) -> None:
    raise BrokenOffError


class Join(nn.Module):
    """The sum of two values: its backward has no step, and hands on the gradient."""

    def forward(self, x: Tensor, y: Tensor) -> Values:
        return [x + y]


class WeightedLoss(nn.Module):
    """The sum of two or more values, each by fixed weights."""

    def forward(self, *values: Tensor) -> Values:
        rows = torch.linspace(-1, 1, ROWS).unsqueeze(1)
        return [torch.stack([(value.tanh() * rows * (k + 1)).sum() for k, value in enumerate(values)]).sum()]


class Trainer:
    """A loop with its parameters: what it leaves is the same whoever compiles its blocks."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.blocks = [Interpreted(program) for program in loop.blocks]
        self.join, self.loss = Join(), WeightedLoss()
        for number, block in enumerate(self.blocks):
            with torch.no_grad():
                block.weight.mul_(1 + number / 10)
        self._begin = [{name: t.clone() for name, t in block.state_dict().items()} for block in self.blocks]
        self._run: list[Block] = list(self.blocks)
        self._run_join: Block = self.join
        self._run_loss: Block = self.loss

    def compile(self, wrap: Wrap) -> None:
        """Run each block, joins, and the loss, as `wrap` makes them from now on."""
        self._run = [wrap(block) for block in self.blocks]
        self._run_join, self._run_loss = wrap(self.join), wrap(self.loss)

    def train(self) -> Iterator[list[Tensor]]:
        """Yield what each step leaves, from the first parameters on: results, inputs, gradients, parameters, buffers.

        A step that is broken off leaves what it has changed so far.
        """
        for block, begin in zip(self.blocks, self._begin, strict=True):
            block.load_state_dict(begin)
        torch.manual_seed(self.loop.seed)
        for number, (kind, breaks) in enumerate(self.loop.steps):
            for block in self.blocks:
                block.zero_grad()
            left: list[Tensor] = []
            try:
                self._step(self.loop.kinds[kind], breaks, number, left)
            except BrokenOffError:
                assert breaks is not None
            parameters = [p for block in self.blocks for p in block.parameters()]
            if self.loop.learns and breaks is None:
                with torch.no_grad():
                    for p in parameters:
                        if p.grad is not None:
                            p.sub_(p.grad.clamp(-1, 1), alpha=1e-3)
            left += [tensor for p in parameters for tensor in (p.grad, p) if tensor is not None]
            yield [tensor.detach().clone() for tensor in (*left, *(block.total for block in self.blocks))]

    def _step(self, kind: StepKind, breaks: int | None, number: int, left: list[Tensor]) -> None:
        losses: list[Tensor] = []
        for place, batch in enumerate(kind.batches):
            loss = self._forward(batch, breaks if place == 0 else None, 10 * number + place, left)
            if kind.order == "at once":
                loss.backward()
            else:
                losses.append(loss)
            del loss
        while losses:
            losses.pop(0 if kind.order == "at the end" else -1).backward()

    def _forward(self, batch: MicroBatch, breaks: int | None, seed: int, left: list[Tensor]) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        inputs = [torch.randn(ROWS, COLS, generator=generator) for _ in range(2)]
        leaves = [x.requires_grad_(needed) for x, needed in zip(inputs, self.loop.with_grad, strict=True)]
        first = leaves[0] + self.blocks[0].bias
        values: list[Tensor] = [*leaves, first]
        for done, action in enumerate(batch.actions):
            if done == breaks:
                raise BrokenOffError
            x, y = (values[-1 - place % len(values)] for place in action.places)
            values += self._act(action, x, y, torch.randn(ROWS, COLS, generator=generator), left)
            del values[:-_REMEMBERED], x, y
            if breaks == -1 and done == len(batch.actions) // 2 and values[-1].requires_grad:
                values[-1].register_hook(_break_off)
        read = [values[-1 - place % len(values)] for place in batch.read]
        del values
        (loss,) = self._run_loss(*read, first) if batch.compiles_loss else self.loss(*read, first)
        left.append(loss.detach().clone())
        return loss

    def _act(self, action: Action, x: Tensor, y: Tensor, noise: Tensor, left: list[Tensor]) -> Values:
        """Return the results of one action; what is not differentiated is only `left`."""
        if action.kind in INSTRUCTIONS:
            return [INSTRUCTIONS[action.kind](x, y)]
        if action.kind == "join":
            return self._run_join(x, y)
        run = self._run[action.block]
        if action.kind == "checkpoint":
            results = checkpoint(run, x, y, noise, use_reentrant=False)
        else:
            with torch.set_grad_enabled(action.kind != "evaluate"):
                results = run(x, y, noise)
        left.append(noise.detach().clone())
        if action.kind in ("evaluate", "drop"):
            left += [result.detach().clone() for result in results]
            return []
        return list(reversed(results))  # the last instruction's is the next to be read
