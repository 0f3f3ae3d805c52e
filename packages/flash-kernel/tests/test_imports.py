"""What importing flash_kernel needs; each in a fresh process."""

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest

# None stands for a module that is not installed
BLOCK = """
import sys
sys.modules.update(dict.fromkeys({blocked!r}))
"""


def run(code, *, blocked=(), **environment):
    script = BLOCK.format(blocked=sorted(blocked)) + textwrap.dedent(code)
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=inherited | environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_import_and_gradients_work_without_triton_and_einx():
    out = run(
        """
        import torch, flash_kernel
        q, k, v = (torch.randn(2, 9, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
        o = flash_kernel.FlashAttention.apply(q, k, v, True)
        o.sum().backward()
        expected, lse = flash_kernel.attention_reference(q, k, v, is_causal=True)
        assert torch.allclose(o, expected)
        assert q.grad.abs().max() > 0
        o, lse = flash_kernel.flash_attention(q, k, v, return_lse=True, backward="dense")
        o.sum().backward()
        try:
            flash_kernel.flash_attention(q.float(), k.float(), v.float(), impl="triton")
        except RuntimeError as error:
            assert "Triton, which is not installed. Install flash-kernel[triton]" in str(error)
            print("refused")
        """,
        blocked={"triton", "einx"},
    )
    assert out == ["refused"]


def test_import_loads_neither_triton_nor_einx():
    out = run(
        """
        import torch
        before = set(sys.modules)
        import flash_kernel
        new = {name.partition(".")[0] for name in set(sys.modules) - before}
        print(*sorted(new & {"triton", "einx", "numpy", "sympy"}))
        """
    )
    assert out == []


def test_mock_runs_without_triton():
    out = run(
        """
        import torch
        from flash_kernel import FlashAttentionMock
        q = torch.randn(2, 9, 8, requires_grad=True)
        FlashAttentionMock.apply(q, q, q, True).sum().backward()
        print(q.grad.isfinite().all().item())
        """,
        blocked={"triton"},
    )
    assert out == ["True"]


def test_cpu_call_needs_no_c_compiler(tmp_path):
    out = run(
        """
        import torch, flash_kernel
        q = torch.randn(2, 9, 8, requires_grad=True)
        flash_kernel.flash_attention(q, q, q, is_causal=True).sum().backward()
        print(q.grad.isfinite().all().item())
        """,
        PATH=str(tmp_path),
        CC="",
        CXX="",
    )
    assert out == ["True"]


@pytest.mark.skipif(
    os.environ.get("FLASH_KERNEL_ISOLATED") != "1",
    reason="only an environment made for flash-kernel alone promises this",
)
def test_environment_holds_no_other_package_of_the_workspace():
    assert importlib.util.find_spec("tiny_llm") is None
    assert importlib.util.find_spec("attn_bench") is None
