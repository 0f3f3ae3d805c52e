"""The options of every command, as dataclasses that tyro turns into a command line.

Values come, each over the one before it, from the defaults, a preset (`--preset`), the run to go on
with (`--resume`), a TOML file (`--config`) and the command line itself.
"""

from dataclasses import Field, dataclass, field, fields, make_dataclass
from typing import Any

from tyro.conf import OmitArgPrefixes, Positional

from tiny_llm.config import ModelConfig, RunConfig, TrainingConfig
from tiny_llm.settings import setting

# these follow from the token file and from --seq-len
DERIVED = frozenset({"vocab_size", "max_seq_len"})
DEVICE = setting("auto", "cpu, cuda, cuda:1, mps (auto: cuda if there is one)")
REQUIRED = ""  # an option whose absence `require` reports


def _model_field(item: Field[Any]) -> tuple[str, Any, Any]:
    if item.name == "attention":
        help_text = f"{item.metadata['help']}, as in '0-3=eager;*=flash'"
        return item.name, str, field(default="eager", metadata={"help": help_text})
    return item.name, item.type, field(default=item.default, metadata=dict(item.metadata))


# a ModelConfig without what follows from other options, and with a type for attention that can be
# typed on a command line
ModelOptions: Any = make_dataclass(
    "ModelOptions",
    [_model_field(item) for item in fields(ModelConfig) if item.name not in DERIVED],
    frozen=True,
    namespace={"__doc__": "The shape of a new model."},
)


@dataclass(frozen=True)
class PrepareOptions:
    """Turn text into tokens.

    Takes files, folders, or with --column the rows of .jsonl and .parquet files; without any, the
    sources of this Python's standard library.  Each document is followed by an end-of-text token.
    One token is one byte, unless --tokenizer names a tokenizer or --vocab-size trains one.

    Examples:
      tiny-llm prepare --out tokens.bin
      tiny-llm prepare books/ --out tokens.bin --vocab-size 8192
      tiny-llm prepare data/*.parquet --column text --out tokens --shard-tokens 100000000
    """

    sources: Positional[tuple[str, ...]] = field(
        default=(), metadata={"help": "files and folders to read"}
    )
    out: str = setting(REQUIRED, "token file to write, or with --shard-tokens a folder")
    held_out: str = setting(
        "", "token file to write every 20th file to, which --out then does without"
    )
    column: str = setting("", "column of .jsonl and .parquet files that holds the text")
    tokenizer: str = setting("", "tokenizer to use, made by an earlier prepare")
    vocab_size: int = setting(
        0, "train a byte-level BPE with this many ids on the text, and save it beside --out"
    )
    tokenizer_bytes: int = setting(100_000_000, "text that the tokenizer is trained on, in bytes")
    shard_tokens: int = setting(
        0, "write shards of about this many tokens; a stopped prepare then goes on (0: one file)"
    )
    max_bytes: int = setting(
        0, "take at most this much of the standard library (0: all, about 12 MB)"
    )


@dataclass(frozen=True)
class TrainOptions:
    """Train a model on prepared tokens.

    The run's folder gets its checkpoint, the resolved configuration (config.toml), metrics
    (metrics.jsonl) and a picture of the loss (loss.png).  Killed at any moment, the run goes on
    with `tiny-llm resume --out FOLDER` as if nothing had happened.

    Examples:
      tiny-llm train --tokens tokens.bin --out runs/first --steps 50
      tiny-llm train --config run.toml --learning-rate 3e-4
      torchrun --nproc-per-node 2 -m tiny_llm train --config run.toml --parallel fsdp
    """

    tokens: str = setting(REQUIRED, "token file or folder of shards, made by tiny-llm prepare")
    out: str = setting(REQUIRED, "folder of the run")
    config: str = setting("", "TOML file with any of these options, in tables as in config.toml")
    preset: str = setting("", "begin with a model of this size: toy, 10m, 124m, 350m, 1b")
    resume: bool = setting(False, "go on from the checkpoint in --out, with its settings")
    tokenizer: str = setting("", "tokenizer of the tokens (default: the one saved beside them)")
    device: str = DEVICE
    run: RunConfig = field(default_factory=RunConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    model: ModelOptions = field(default_factory=ModelOptions)


@dataclass(frozen=True)
class EvalOptions:
    """Say how well a model predicts a text: loss, perplexity and bits per byte.

    Example:
      tiny-llm eval --checkpoint runs/first --tokens other.bin
    """

    checkpoint: str = setting(REQUIRED, "folder of a run, or its checkpoint")
    tokens: str = setting(REQUIRED, "token file or folder of shards, made with the run's tokenizer")
    batch_size: int = setting(16, "sequences at a time")
    max_batches: int = setting(0, "stop after so many (0: at the end of the text)")
    precision: str = setting("fp32", "fp32, bf16 or fp16")
    attention: str = setting("", "attention backend (default: the one trained with)")
    json: bool = setting(False, "print JSON")
    device: str = DEVICE


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn."""

    max_new_tokens: int = setting(200, "where to end")
    temperature: float = setting(0.8, "divides the logits; 0 always takes the likeliest token")
    top_k: int | None = setting(None, "draw from the likeliest only (default: from all)")
    top_p: float = setting(1.0, "draw from the fewest likeliest that have this probability")
    repetition_penalty: float = setting(1.0, "above 1, makes tokens already there less likely")
    seed: int = setting(0, "decides the draws")
    decode: str = setting(
        "auto",
        "how a token is computed: eager, graph (a CUDA graph), compile (torch.compile, on a GPU in "
        "a graph), or auto (a graph where there can be one)",
    )


CHECKPOINT = setting(REQUIRED, "folder of a run, its checkpoint, or a Hugging Face folder")
CHAT_TEMPLATE = setting("", "file with a Jinja chat template (default: the checkpoint's, if any)")
PRECISION = setting(
    "", "fp32, bf16 or fp16: convert the weights, and compute in that (default: as saved)"
)


@dataclass(frozen=True)
class GenerateOptions:
    """Print a prompt and what the model makes of it, as it is drawn.

    Examples:
      tiny-llm generate --checkpoint runs/first --prompt "def "
      tiny-llm generate --checkpoint a-qwen3 --as-chat --prompt "Why?" --precision bf16
    """

    checkpoint: str = CHECKPOINT
    prompt: str = setting("", "text to continue")
    as_chat: bool = setting(
        False, "print the answer to the prompt, put to the model in its chat template"
    )
    chat_template: str = CHAT_TEMPLATE
    attention: str = setting("", "attention backend (default: a run's own, or auto)")
    precision: str = PRECISION
    device: str = DEVICE
    sampling: SamplingOptions = SamplingOptions()


@dataclass(frozen=True)
class ChatOptions:
    """Talk with a model: each line you type is answered; an empty line or Ctrl-D ends.

    With a chat template, the checkpoint's own or a file, the conversation is put into its form.
    Without one the model goes on with your text, as a small model trained on plain text will.

    Examples:
      tiny-llm chat --checkpoint runs/first --temperature 0.7
      tiny-llm chat --checkpoint a-qwen3 --system "Answer in one word." --precision bf16
    """

    checkpoint: str = CHECKPOINT
    system: str = setting("", "what the model is told before the conversation")
    chat_template: str = CHAT_TEMPLATE
    attention: str = setting("", "attention backend (default: a run's own, or auto)")
    precision: str = PRECISION
    device: str = DEVICE
    sampling: SamplingOptions = SamplingOptions()


@dataclass(frozen=True)
class InfoOptions:
    """Describe a checkpoint, a token file, shards, or this machine.

    Examples:
      tiny-llm info
      tiny-llm info runs/first tokens.bin
    """

    paths: Positional[tuple[str, ...]] = field(default=(), metadata={"help": "what to describe"})


@dataclass(frozen=True)
class AttentionOptions:
    """Explain which attention backend a request gets, and why not the others, without a GPU.

    Example:
      tiny-llm attention explain --device cuda --dtype bfloat16 --seqlen 8192 --head-dim 128
    """

    action: Positional[str] = field(default="explain", metadata={"help": "explain"})
    choice: str = setting("auto", "a backend's name, auto, prefer:flash,sdpa, or policy:FILE")
    num_heads: int = setting(8, "heads of the queries")
    num_kv_heads: int | None = setting(None, "heads of keys and values (default: num_heads)")
    head_dim: int = setting(64, "width of a head")
    seqlen: int = setting(1024, "keys")
    seqlen_q: int | None = setting(None, "queries (default: as many as keys)")
    window: int | None = setting(None, "sliding window in keys (default: none)")
    is_causal: bool = setting(True, "query i sees the keys up to its own position")
    dtype: str = setting("bfloat16", "float32, bfloat16, float16 or float64")
    device: str = setting("cuda", "cuda or cpu; it need not be here")
    capability: tuple[int, int] = setting((9, 0), "compute capability of the GPU")
    training: bool = setting(True, "whether gradients are needed")
    json: bool = setting(False, "print JSON")


FLAT = (OmitArgPrefixes,)
