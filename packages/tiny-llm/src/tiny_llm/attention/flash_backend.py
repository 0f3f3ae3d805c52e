"""What flash-kernel can do for attention, known without importing it."""

from importlib import import_module

from tiny_llm.attention.backend import (
    USE_ANOTHER,
    AttentionBackend,
    Reason,
    Traits,
    only,
)
from tiny_llm.attention.request import AttentionRequest
from tiny_llm.errors import MissingExtraError

PLACE = "tiny_llm.attention.flash"
INSTALL = "install tiny-llm[flash]"


class FlashBackend(AttentionBackend):
    """flash-kernel's kernels, or the mock that shows what they do."""

    def version(self) -> str | None:
        """Return flash-kernel's version."""
        self.load()
        version: str = import_module("flash_kernel").__version__
        return version

    def explain_failure(self, error: Exception) -> Reason:
        """Tell an absent package from a broken one."""
        if not isinstance(error, MissingExtraError):
            return super().explain_failure(error)
        code = "missing" if INSTALL in str(error) else "broken"
        return Reason(code, str(error).removesuffix(f": {INSTALL}"), INSTALL)

    def limits(self, request: AttentionRequest) -> list[Reason]:
        """On CUDA what the kernels take; elsewhere torch computes."""
        found = []
        if request.device == "cuda" and self.name == "flash":
            found += only(request, dtypes=("bfloat16", "float16", "float32"), max_head_dim=256)
        if request.ragged:
            text = "it takes no lengths of the keys of each sequence"
            found.append(Reason("key_lengths", text, "use 'sdpa', or prompts of one length"))
        return found

    def installed_limits(self, request: AttentionRequest) -> list[Reason]:
        """Refuse a window that the installed version does not have."""
        if request.window is None or import_module(PLACE).HAS_WINDOW:
            return []
        text = f"flash-kernel {self.probe().version} has no sliding window"
        return [Reason("window", text, f"update flash-kernel, or {USE_ANOTHER}")]

    def traits(self, request: AttentionRequest) -> Traits:
        """Fused: no implementation but the dense ones stores the scores."""
        return Traits(forward="fused", backward="fused", deterministic=None)


class MockBackend(FlashBackend):
    """The mock, which needs a package that the kernels do not."""

    def version(self) -> str | None:
        """Import what the mock needs, too."""
        version = super().version()
        import_module("flash_kernel.mock")
        return version


FLASH = FlashBackend("flash", f"{PLACE}:flash_attention")
MOCK = MockBackend("flash-mock", f"{PLACE}:flash_mock_attention")
