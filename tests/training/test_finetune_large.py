"""A long run can be stopped anywhere and goes on as if it had not been, beside plain torch and in its formats."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import tencache_fx

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 280
STEPS = 6
TINY = (
    "--device", "cpu", "--layers", "2", "--hidden", "128", "--heads", "4", "--kv-heads", "2", "--ffn", "256", "--vocab",
    "256", "--seq", "32", "--batch", "2", "--text", str(ROOT / "LICENSE"), "--steps", str(STEPS), "--accumulate", "2",
    "--clip", "1.0", "--warm-up", "2", "--freeze-layers", "1", "--lr", "3e-3", "--compiler", "eager",
)  # fmt: skip


@pytest.fixture(scope="module")
def finetune() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        yield importlib.import_module("finetune_large")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sums are the same in every process."""
    monkeypatch.setenv("TENCACHE_CALIBRATE", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    torch.set_float32_matmul_precision(before[1])


def read_losses(path: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in map(json.loads, path.read_text().splitlines())}


def run(finetune: ModuleType, folder: Path, *more: str) -> dict[int, float]:
    """Train in this process; return the losses."""
    (folder / "losses").unlink(missing_ok=True)
    finetune.main([*TINY, "--json", str(folder / "losses"), *more])
    torch.compiler.reset()
    tencache_fx.configure(reset=True)
    return read_losses(folder / "losses")


@pytest.fixture(scope="module")
def uninterrupted(finetune: ModuleType, measured_rates: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the losses of a whole run, its checkpoint and its export."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setenv("TENCACHE_CALIBRATE", "0")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        run(finetune, folder, "--checkpoint", str(folder / "run.pt"), "--export", str(folder / "weights"))
        torch.set_num_threads(threads)
    return folder


class Plain:
    """The same training in plain torch, eager: fp32 masters on the device, and nothing of ours."""

    def __init__(self, finetune: ModuleType, *more: str) -> None:
        self.finetune, self.args = finetune, finetune.parse_arguments([*TINY, *more])
        self.tokens = finetune.read_tokens(self.args.text, 256)
        torch.manual_seed(self.args.seed)
        self.model: nn.Module = finetune.build(self.args)
        for module in self.model.modules():
            if hasattr(module, "reset_parameters"):
                module.to_empty(device="cpu", recurse=False)
                module.reset_parameters()
        self.weights = sorted(self.model.parameters(), key=lambda p: p.dim() <= 1)  # matrices first
        self.masters = [nn.Parameter(p.detach().float().clone(), p.requires_grad) for p in self.weights]
        groups = [
            {"params": [p for p in self.masters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in self.masters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=self.args.lr, betas=(0.9, 0.95))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.share)
        self.done = 0

    def share(self, step: int) -> float:
        """Return the schedule, by torch's own parts."""
        probe = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        if step < self.args.warm_up:
            return (step + 1) / self.args.warm_up
        rest = self.args.steps - self.args.warm_up
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(probe, T_max=rest, eta_min=0.1)
        for _ in range(step - self.args.warm_up):
            probe.step()
            cosine.step()
        return cosine.get_last_lr()[0]

    def loss(self) -> float:
        """Return the loss of the next step's text, as the weights are."""
        with torch.no_grad():
            texts = list(self.finetune.batches(self.tokens, self.done, self.args))
            return sum(self.model(text).item() for text in texts) / len(texts)

    def step(self) -> float:
        total = 0.0
        for text in self.finetune.batches(self.tokens, self.done, self.args):
            loss = self.model(text) / self.args.accumulate
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.weights, self.args.clip)
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        self.optimizer.step()
        self.scheduler.step()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.masters)
        self.model.zero_grad()
        self.done += 1
        return total

    def state(self) -> dict[str, object]:
        return {
            "step": self.done,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }


def assert_close(found: dict[int, float], expected: dict[int, float], rel: float) -> None:
    assert found.keys() == expected.keys()
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=rel), f"step {step}"


def test_clipping_accumulation_schedule_and_frozen_blocks_are_those_of_plain_torch(
    finetune: ModuleType, uninterrupted: Path
) -> None:
    plain = Plain(finetune)
    fresh = {name: value.clone() for name, value in plain.model.state_dict().items()}
    assert_close(read_losses(uninterrupted / "losses"), {step: plain.step() for step in range(1, STEPS + 1)}, rel=1e-5)
    after: dict[str, Tensor] = torch.load(uninterrupted / "run.pt")["model"]
    torch.testing.assert_close(after, dict(plain.model.state_dict()), rtol=1e-3, atol=1e-4)
    kept = {name for name, value in after.items() if torch.equal(value, fresh[name])}
    assert kept == {name for name in fresh if name.startswith("blocks.0.")}


@pytest.mark.slow
def test_bf16_weights_with_fp32_masters_are_those_of_plain_torch(finetune: ModuleType, tmp_path: Path) -> None:
    plain = Plain(finetune, "--dtype", "bfloat16")
    expected = {step: plain.step() for step in range(1, STEPS + 1)}
    assert_close(run(finetune, tmp_path, "--dtype", "bfloat16"), expected, rel=5e-3)


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.slow
def test_a_run_that_is_killed_while_it_saves_goes_on_as_if_it_had_not_been(
    finetune: ModuleType, uninterrupted: Path, tmp_path: Path
) -> None:
    expected = read_losses(uninterrupted / "losses")
    saved, part = tmp_path / "run.pt", tmp_path / "run.pt.part"
    command = [
        sys.executable, ROOT / "examples" / "finetune_large.py", *TINY, "--checkpoint", saved, "--save-every", "1",
        "--json", tmp_path / "losses",
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    killed = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + LIMIT_S / 2
    while not (saved.exists() and part.exists()):  # the second save, or a later one
        assert killed.poll() is None, "it was to be killed"
        assert time.monotonic() < until
        time.sleep(0.0002)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    first = read_losses(tmp_path / "losses")
    assert first == {step: expected[step] for step in first}

    state = torch.load(saved, weights_only=True)
    step = state["step"]
    assert 1 <= step <= len(first) < STEPS
    plain = Plain(finetune)
    plain.model.load_state_dict(state["model"])
    plain.done = step
    assert plain.loss() == pytest.approx(expected[step + 1], rel=1e-5)

    done = subprocess.run(
        [*command, "--resume"], env=environment, capture_output=True, text=True, timeout=LIMIT_S / 2, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"resumed {saved}: step {step}" in done.stdout
    assert read_losses(tmp_path / "losses") == expected
    lines = (tmp_path / "losses").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines[len(first) :]] == list(range(step + 1, STEPS + 1))
    assert not part.exists()
    assert all(
        torch.equal(value, torch.load(uninterrupted / "run.pt")["model"][name])
        for name, value in torch.load(saved)["model"].items()
    )


@pytest.mark.slow
def test_what_plain_torch_has_saved_is_gone_on_with(finetune: ModuleType, tmp_path: Path) -> None:
    plain = Plain(finetune)
    for _ in range(3):
        plain.step()
    torch.save(plain.state(), tmp_path / "run.pt")
    resumed = run(finetune, tmp_path, "--checkpoint", str(tmp_path / "run.pt"), "--resume", "--stop-after", "2")
    assert_close(resumed, {4: plain.step(), 5: plain.step()}, rel=1e-5)
    again = Plain(finetune)
    state = torch.load(tmp_path / "run.pt")
    again.model.load_state_dict(state["model"])
    again.optimizer.load_state_dict(state["optimizer"])
    again.scheduler.load_state_dict(state["scheduler"])
    again.done = state["step"]
    with torch.no_grad():
        torch._foreach_copy_(again.masters, again.weights)
    assert again.step() == pytest.approx(plain.step(), rel=1e-5)


def test_the_export_is_a_plain_state_dict_to_begin_with(finetune: ModuleType, uninterrupted: Path) -> None:
    state = finetune.read_weights(uninterrupted / "weights")
    after = torch.load(uninterrupted / "run.pt")["model"]
    assert state.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in state.items())
    plain = Plain(finetune)
    plain.model.load_state_dict(state)
    shown = torch.nn.Linear(128, 256, bias=False)
    shown.load_state_dict({"weight": state["head.weight"]})
    assert torch.equal(plain.model.head.weight, shown.weight)


@pytest.mark.slow
def test_other_settings_are_refused_and_a_missing_checkpoint_is_a_new_run(
    finetune: ModuleType, uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = str(uninterrupted / "run.pt")
    with pytest.raises(SystemExit, match=r"was made with seed 0, now 1; give the same"):
        finetune.main([*TINY, "--checkpoint", saved, "--resume", "--seed", "1"])
    tencache_fx.close()
    finetune.main([*TINY, "--checkpoint", saved, "--resume"])  # nothing is left to do
    assert f"resumed {saved}: step {STEPS}" in capsys.readouterr().out
    missing = tmp_path / "none.pt"
    weights = str(uninterrupted / "weights")
    losses = run(
        finetune, tmp_path, "--checkpoint", str(missing), "--resume", "--stop-after", "1", "--weights", weights
    )
    assert f"there is no {missing} yet: a new run begins" in capsys.readouterr().out
    assert losses == {1: read_losses(uninterrupted / "losses")[1]}
    for wrong in (["--resume"], ["--step-in-backward", "--clip", "1"], ["--step-in-backward", "--accumulate", "2"]):
        with pytest.raises(SystemExit):
            finetune.parse_arguments(wrong)


def test_a_write_that_fails_leaves_the_file_before(finetune: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    path.write_text("before")

    def fail(part: Path) -> None:
        part.write_text("half")
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        finetune.write_whole(path, fail)
    assert path.read_text() == "before"
    finetune.write_whole(path, lambda part: part.write_text("after"))
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]
