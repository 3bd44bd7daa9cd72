"""Scenarios of `test_transformers.py`, by name, on 2 ranks under torchrun; rank 0 prints what was found as JSON."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

import gradsync
from gradsync.compressors import ErrorFeedback, TopK
from gradsync.integrations.transformers import use
from gradsync.planner import CompressingPlanner

STEPS = 8
LOSSY = CompressingPlanner(ErrorFeedback(TopK(0.05)), exact=("*.bias",), matrices_only=True)


class Words(Dataset[dict[str, Tensor]]):
    """Random words, and a label by their number of even ones; `translated`: the words backwards as labels."""

    def __init__(self, *, translated: bool = False) -> None:
        self.words = torch.randint(2, 50, (512, 7), generator=torch.Generator().manual_seed(1))
        self.translated = translated

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = self.words[index]
        return {"input_ids": words, "labels": words.flip(0) if self.translated else (words % 2).sum() // 4}


def arguments(folder: str, **changed: Any) -> Any:
    """Returns the arguments as `HfArgumentParser` makes them of a command line: accumulation over 2, and clipping."""
    line = ["--output_dir", folder, "--use_cpu", "--max_steps", str(STEPS), "--per_device_train_batch_size", "8"]
    line += ["--gradient_accumulation_steps", "2", "--max_grad_norm", "0.5", "--logging_steps", "4"]
    line += ["--report_to", "none", "--disable_tqdm", "true", "--save_strategy", "no", "--optim", "sgd"]
    kind = Seq2SeqTrainingArguments if changed.pop("translated", False) else TrainingArguments
    line += [each for name, value in changed.items() for each in (f"--{name}", str(value))]
    (parsed,) = HfArgumentParser(kind).parse_args_into_dataclasses(args=[*line, "--learning_rate", "0.1"])
    return parsed


def new_trainer(folder: str = "unused", plan: Any = None, *, with_gradsync: bool = True, **changed: Any) -> Trainer:
    """Returns a Trainer of a small BERT with dropout."""
    torch.manual_seed(0)
    config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    kind = changed.pop("kind", Trainer)
    trainer: Trainer = kind(BertForSequenceClassification(config), arguments(folder, **changed), train_dataset=Words())
    if with_gradsync:
        use(trainer, plan=plan)
    return trainer


def parameters(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in trainer.model.parameters()])


def trained(trainer: Trainer, **options: Any) -> Tensor:
    torch.manual_seed(1)  # of dropout: a Trainer sets it where it is made
    trainer.train(**options)
    return parameters(trainer)


def apart(values: Tensor) -> float:
    found = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(found, values)
    return max(float((each - found[0]).abs().max()) for each in found)


def common() -> str:
    """Returns a new folder that both ranks know."""
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    return str(box[0])


def equal() -> dict[str, Any]:
    theirs, ours = new_trainer(with_gradsync=False), new_trainer()
    start, plain, values = parameters(ours), trained(theirs), trained(ours)
    told = [sorted(each.evaluate(Words())) for each in (theirs, ours)]
    handle = gradsync.attachment_of(ours.model_wrapped)
    assert handle is not None
    logged = [each for each in ours.state.log_history if "loss" in each]
    return {
        "difference": float((values - plain).abs().max()),
        "apart": apart(values),
        "moved": float((values - start).abs().max()),
        "steps": handle.totals().steps,
        "evaluated": told[0] == told[1] and "epoch" in told[1],
        "logged": [sorted(name for name in each if name.startswith("gradsync/")) for each in logged],
    }


def again() -> dict[str, Any]:
    """`train()` a second time, after an evaluation; a trial of a search for hyperparameters has its own accelerator."""
    plain, ours = new_trainer(with_gradsync=False), new_trainer()
    for each in (plain, ours):
        trained(each)
        each.evaluate(Words())
    difference = float((trained(ours) - trained(plain)).abs().max())
    handle = gradsync.attachment_of(ours.model_wrapped)
    assert handle is not None
    of_a_trial = new_trainer()
    of_a_trial.create_accelerator_and_postprocess()
    of_a_trial.train()
    trial = gradsync.attachment_of(of_a_trial.model_wrapped)
    return {
        "difference": difference,
        "steps": handle.totals().steps,
        "of a trial": trial is not None and trial.totals().steps,
    }


def translated() -> dict[str, Any]:
    def values(*, with_gradsync: bool) -> tuple[Tensor, Trainer]:
        torch.manual_seed(0)
        sizes = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
        model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
        trainer = Seq2SeqTrainer(
            model,
            arguments("unused", translated=True, predict_with_generate=True, generation_max_length=7),
            train_dataset=Words(translated=True),
        )
        if with_gradsync:
            use(trainer)
        return trained(trainer), trainer

    (ours, trainer), (plain, _) = values(with_gradsync=True), values(with_gradsync=False)
    return {
        "difference": float((ours - plain).abs().max()),
        "attached": gradsync.attachment_of(trainer.model_wrapped) is not None,
        "predicted": len(trainer.predict(Words(translated=True)).predictions),
    }


def resumed() -> dict[str, Any]:
    whole, folder = trained(new_trainer(plan=LOSSY)), common()
    trained(new_trainer(folder, LOSSY, save_strategy="steps", save_steps=4))
    dist.barrier()
    checkpoint = Path(folder) / "checkpoint-4"
    went_on = trained(new_trainer(folder, LOSSY), resume_from_checkpoint=str(checkpoint))
    if dist.get_rank() == 1:
        (checkpoint / "gradsync" / "gradsync-rank-1-of-2.safetensors").unlink()
    dist.barrier()
    try:
        new_trainer(folder, LOSSY).train(resume_from_checkpoint=str(checkpoint))
        told = ""
    except (ValueError, RuntimeError) as error:
        told = str(error)
    dist.barrier()
    if dist.get_rank() == 0:
        for each in sorted((checkpoint / "gradsync").iterdir()):
            each.unlink()
        (checkpoint / "gradsync").rmdir()
    dist.barrier()
    begun_anew = trained(new_trainer(folder, LOSSY), resume_from_checkpoint=str(checkpoint))
    return {
        "difference": float((went_on - whole).abs().max()),
        "apart": apart(went_on),
        "told": told,
        "anew": [float((begun_anew - whole).abs().max()) > 0, apart(begun_anew)],
    }


class WrappedElsewhere(nn.Module):
    """Stands for a wrapper other than DDP."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class OtherTrainer(Trainer):  # type: ignore[misc]  # transformers is not typed here
    """Wraps the model itself, as for model parallelism of SageMaker."""

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return WrappedElsewhere(model)


def refused() -> dict[str, Any]:
    def error_of(function: Callable[[], Any]) -> str:
        try:
            function()
        except (TypeError, ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    late = new_trainer(with_gradsync=False)
    late.train()
    twice = new_trainer()
    elsewhere, evaluated = new_trainer(kind=OtherTrainer), new_trainer()
    evaluated.evaluate(Words())
    return {
        "late": error_of(lambda: use(late)),
        "twice": error_of(lambda: use(twice)),
        "model": error_of(lambda: use(twice.model)),
        "elsewhere": error_of(elsewhere.train),
        "evaluated": error_of(evaluated.train),
        "inner": error_of(lambda: gradsync.attach(late.model)),
    }


def main() -> None:
    torch.set_num_threads(1)
    scenarios = {"equal": equal, "again": again, "translated": translated, "resumed": resumed, "refused": refused}
    arguments("unused")  # which makes the process group
    result = scenarios[sys.argv[1]]()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, result)
    if dist.get_rank() == 0:
        print("FOUND", json.dumps(gathered))
    dist.barrier()  # gloo's threads let go of the tensors above, for which they need Python
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
