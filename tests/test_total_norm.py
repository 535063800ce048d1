"""The norm of all gradients: what carries it out, and that the GPU's kernel is exact."""

import math

import pytest
import torch

from aura import extension, ops

CHUNK = 2**14  # of a block of the kernel


def check_total_norm(device="cpu"):
    """The kernel against float64: tensors without and with whole chunks, ends that fill no vector, one that does not
    begin on 16 bytes, more tensors than a launch takes, and values that are not finite."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape, start=0):
        values = torch.randn(start + math.prod(shape), generator=generator).to(device)
        return values[start:].view(shape)

    some = [drawn(0), drawn(1), drawn(3, 5), drawn(CHUNK), drawn(3, CHUNK), drawn(2 * CHUNK + 7), drawn(1000, start=1)]
    for tensors in (*([each] for each in some), some, [drawn(n % 7, 3) for n in range(350)],
                    [drawn(2, 4) for _ in range(160)], [drawn() for _ in range(161)]):
        norm = torch.ops.aura.total_norm(tensors)
        exact = torch.cat([x.double().flatten() for x in tensors]).norm()
        assert norm.shape == () and norm.dtype == torch.float32 and norm.device == tensors[0].device
        torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0)
        assert torch.equal(norm, torch.ops.aura.total_norm(tensors))
    for value in (math.nan, math.inf, 1e30):
        some[4][2, 5] = value
        assert str(torch.ops.aura.total_norm(some).item()) == ("nan" if math.isnan(value) else "inf")
    for tensors in ([drawn(3).double()], [drawn(3), drawn(4, 2).t()]):
        with pytest.raises(RuntimeError, match="contiguous and float32"):
            torch.ops.aura.total_norm(tensors)


def test_on_the_cpu_it_is_torchs():
    for tensors in ([], [torch.ones(3, 4), torch.full((), 2.0)]):
        assert torch.equal(ops.total_norm(tensors), torch.nn.utils.get_total_norm(tensors))


def test_the_kernel_is_for_a_gpu():
    if not extension.has_ops(extension.load()):
        pytest.skip(extension.status())
    with pytest.raises(RuntimeError, match="only for tensors on a GPU"):
        torch.ops.aura.total_norm([torch.ones(3)])


class Cut(torch.Tensor):
    """Of another class, as gradients are that fully_shard has cut."""


@pytest.mark.parametrize(("tensor", "plain"), [
    (torch.ones(3, 2), True), (torch.ones(()), True), (torch.ones(3).double(), False), (torch.ones(3, 2).t(), False),
    (torch.ones(3).as_subclass(Cut), False)])
def test_which_gradients_the_kernel_takes(tensor, plain):
    assert ops._plain(tensor) is plain
