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
        if request.device != "cuda":
            return []
        return only(request, dtypes=("bfloat16", "float16", "float32"), max_head_dim=256)

    def installed_limits(self, request: AttentionRequest) -> list[Reason]:
        """Refuse what came with later versions of flash-kernel."""
        module, found = import_module(PLACE), []
        fix = f"update flash-kernel, or {USE_ANOTHER}"
        if request.window is not None and not request.ragged and not module.HAS_WINDOW:
            text = f"flash-kernel {self.probe().version} has no sliding window"
            found.append(Reason("window", text, fix))
        if request.ragged and not module.HAS_MASK:
            text = f"flash-kernel {self.probe().version} has no mask, which key lengths need"
            found.append(Reason("key_lengths", text, fix))
        if request.packed and not module.HAS_VARLEN:
            text = f"flash-kernel {self.probe().version} has no varlen attention"
            found.append(Reason("documents", text, fix))
        return found

    def traits(self, request: AttentionRequest) -> Traits:
        """Fused: no implementation but the dense ones stores the scores."""
        return Traits(forward="fused", backward="fused", deterministic=None)


class MockBackend(FlashBackend):
    """The mock: the plain algorithm, and a package of its own that it needs."""

    def version(self) -> str | None:
        """Import what the mock needs, too."""
        version = super().version()
        import_module("flash_kernel.mock")
        return version

    def limits(self, request: AttentionRequest) -> list[Reason]:
        """Refuse all but the plain algorithm; shared heads are repeated."""
        found = []
        if request.window is not None:
            found.append(Reason("window", "the mock has no sliding window", "use 'flash'"))
        if request.ragged:
            text = "the mock takes no lengths of the keys of each sequence"
            found.append(Reason("key_lengths", text, "use 'flash'"))
        if request.packed:
            found.append(Reason("documents", "the mock has no packed sequences", "use 'flash'"))
        return found

    def installed_limits(self, request: AttentionRequest) -> list[Reason]:
        """Any version will do."""
        return []


FLASH = FlashBackend("flash", f"{PLACE}:flash_attention")
MOCK = MockBackend("flash-mock", f"{PLACE}:flash_mock_attention")
