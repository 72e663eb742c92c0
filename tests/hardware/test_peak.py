import pytest
import torch
from torch import nn

from tencache_fx.hardware.peak import peak_bytes

CPU = torch.device("cpu")
SLACK_BYTES = 4096  # scalars on the way


def floats(count: int) -> torch.Tensor:
    return torch.ones(count)


def check_peak(fn, expected_bytes, device=CPU, **options):
    measured = peak_bytes(fn, device, **options)
    assert expected_bytes <= measured <= expected_bytes + SLACK_BYTES


def test_tensors_held_together_add_up_and_freed_ones_do_not():
    def work():
        first = floats(1_000_000)
        second = floats(500_000)
        del first
        third = floats(750_000)  # after `first` is gone: 2 MB + 3 MB is less than 4 MB + 2 MB
        del second, third

    check_peak(work, 6_000_000)


def test_what_was_held_before_does_not_count():
    held = floats(3_000_000)
    check_peak(lambda: floats(250_000), 1_000_000)
    assert held.numel() == 3_000_000


def test_a_free_of_what_warm_up_made_is_credited():
    held = []

    def swap():
        held.clear()
        held.append(floats(1_000_000))

    check_peak(swap, 0, warm_up=lambda: held.append(floats(1_000_000)))


def test_nothing_allocated_is_zero():
    assert peak_bytes(lambda: None, CPU) == 0


def test_saved_tensors_live_until_backward_reads_them():
    layers = 4
    weight = torch.zeros(1_000_000, requires_grad=True)

    def work():
        value = weight
        for _ in range(layers):
            value = value.exp()  # saves its result, 4 MB
        value.sum().backward()

    # all results saved; then backward holds the gradient going in and the one coming out beside them
    measured = peak_bytes(work, CPU)
    assert (layers + 1) * 4_000_000 <= measured <= (layers + 2) * 4_000_000 + SLACK_BYTES


def test_work_of_a_custom_function_in_backward_is_seen():
    class Greedy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            scratch = floats(5_000_000)
            return gradient + scratch[0]

    weight = torch.zeros(10, requires_grad=True)
    check_peak(lambda: Greedy.apply(weight).sum().backward(), 20_000_000)


@pytest.mark.gpu
def test_cuda_counts_what_the_allocator_counts():
    device = torch.device("cuda")
    layer = nn.Linear(1024, 1024, device=device)
    held = torch.ones(1 << 20, device=device)
    peak = peak_bytes(lambda: torch.ones(1 << 20, device=device) + held, device, warm_up=lambda: layer(held[:1024]))
    assert peak == 2 * 4 * (1 << 20)
