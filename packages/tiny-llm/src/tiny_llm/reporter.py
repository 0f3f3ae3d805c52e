"""What happens after each step of a run: progress, metrics, evaluation, samples, checkpoints."""

import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from tiny_llm.config import RunConfig
from tiny_llm.data import Tokens
from tiny_llm.distributed import Parallel
from tiny_llm.errors import FileError
from tiny_llm.evaluation import Evaluation, evaluate
from tiny_llm.generation import generate
from tiny_llm.loss import AUTOCAST
from tiny_llm.metrics import CURVE, MetricsLog, draw_loss_curve, read_metrics
from tiny_llm.saving import save_checkpoint
from tiny_llm.throughput import device_peak, flops_per_token, peak_memory
from tiny_llm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tiny_llm.run import Run

SAMPLE_TOKENS = 64


class Reporter:
    """Everything but the training itself; `on_step` goes to `train_steps`.

    Every process has one, because evaluating, sampling and saving a sharded model takes them all.
    Only the main one shows and writes anything.
    """

    def __init__(
        self,
        run: "Run",
        path: Path,
        tokens: Tokens,
        tokenizer: Tokenizer,
        held_out: Tokens | None,
        config: RunConfig,
        parallel: Parallel,
    ) -> None:
        self.run, self.path, self.config, self.parallel = run, path, config, parallel
        self.tokens, self.tokenizer, self.held_out = tokens, tokenizer, held_out
        model, training = run.model, run.config
        self.device = next(model.parameters()).device
        self.tokens_per_step = training.batch_size * training.seq_len
        # sharded parameters know their whole size
        flops = flops_per_token(model.config, model.num_parameters(), training.seq_len)
        peak = device_peak(self.device, training.precision)
        self.flops, self.peak = flops, peak and peak * parallel.world_size
        self.log: MetricsLog | None = None
        self.last_time = time.perf_counter()

    def __enter__(self) -> "Reporter":
        start, steps = self.run.start_step, self.run.config.steps
        if self.parallel.is_main:
            self.log = MetricsLog(
                self.path.parent, start_step=start, tensorboard=self.config.tensorboard
            )
        self.bar = tqdm(
            total=steps,
            initial=start,
            desc="train",
            unit="step",
            disable=not self.parallel.is_main,
        )
        self.last_time = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.bar.close()
        if self.log is not None:
            self.log.close()
            if kind is None:
                draw_loss_curve(read_metrics(self.log.path), self.path.with_name(CURVE))

    def on_step(self, step: int, loss: float) -> None:
        """Report a step and do what is due after it."""
        done, is_last = step + 1, step + 1 == self.run.config.steps
        speed = self.tokens_per_step / max(1e-9, time.perf_counter() - self.last_time)
        mfu = None if self.peak is None else speed * self.flops / self.peak
        self._show(loss, speed, mfu)
        result = sample = None
        if self.held_out is not None and (is_last or done % self.config.eval_every == 0):
            result = self._evaluate(self.held_out)
            self.note(f"step {done}: evaluation {result}")
        if self.config.sample_every and done % self.config.sample_every == 0:
            sample = self._sample()
            self.note(f"step {done}: sample {sample!r}")
        self._record(step, loss, speed, mfu, result, sample)
        if is_last or done % self.config.checkpoint_every == 0:
            self._save(done, is_last=is_last)
        # what came in between is not the training's time
        self.last_time = time.perf_counter()

    def note(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self.parallel.is_main:
            tqdm.write(text)

    def _show(self, loss: float, speed: float, mfu: float | None) -> None:
        shown = {
            "loss": f"{loss:.4f}",
            "tok/s": f"{speed:,.0f}",
            "MFU": "unknown" if mfu is None else f"{mfu:.1%}",
        }
        memory = peak_memory(self.device)
        if memory is not None:
            shown["GiB"] = f"{memory / 2**30:.1f}"
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update()

    def _record(
        self,
        step: int,
        loss: float,
        speed: float,
        mfu: float | None,
        result: Evaluation | None,
        sample: str | None,
    ) -> None:
        if self.log is None:
            return
        row: dict[str, float | str | None] = {
            "loss": loss,
            "learning_rate": self.run.optimizer.param_groups[0]["lr"],
            "tokens_per_second": speed,
            "mfu": mfu,
            "peak_memory_bytes": peak_memory(self.device),
            "sample": sample,
        }
        if result is not None:
            row["eval_loss"] = result.loss
            row["eval_perplexity"] = result.perplexity
            row["eval_bits_per_byte"] = result.bits_per_byte
        try:
            self.log.add(step, **row)
        except FileError as error:
            self.note(f"metrics of step {step + 1} are lost: {error}")

    def _evaluate(self, held_out: Tokens) -> Evaluation:
        training = self.run.config
        return evaluate(
            self.run.model,
            held_out,
            self.tokenizer,
            seq_len=training.seq_len,
            batch_size=max(1, training.batch_size // training.micro_batches),
            max_batches=self.config.eval_batches,
            precision=training.precision,
            chunk_tokens=training.loss_chunk,
            within_documents=training.within_documents,
            parallel=self.parallel,
        )

    def _sample(self) -> str:
        prompt = self.tokenizer.encode(self.config.sample_prompt)
        drawn = generate(
            self.run.model,
            prompt or [self.tokenizer.end_of_text],
            max_new_tokens=SAMPLE_TOKENS,
            temperature=0.8,
            # its own, so that sampling leaves the run's random state alone
            generator=torch.Generator().manual_seed(self.run.config.seed),
            stop_token=self.tokenizer.end_of_text,
        )
        # the attention was chosen for the training's precision
        dtype = AUTOCAST.get(self.run.config.precision)
        with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            return self.tokenizer.decode([*prompt, *drawn])

    def _save(self, step: int, *, is_last: bool) -> None:
        """Save a checkpoint; if that fails before the end, go on: the old one is still there."""
        failure: FileError | None = None
        try:
            save_checkpoint(
                self.path,
                model=self.run.model,
                optimizer=self.run.optimizer,
                training_config=self.run.config,
                step=step,
                tokens_checksum=self.tokens.checksum,
                scaler=self.run.scaler,
                attention=self.run.attention,
                parallel=self.parallel,
            )
        except FileError as error:
            failure = error
        saved = self.parallel.agree(failure is None)
        if not saved and is_last:
            raise failure or FileError("the main process could not save the last checkpoint")
        if failure is not None:
            self.note(f"step {step}: {failure}; going on, the checkpoint before is still there")
