"""Scenarios of `test_transformers.py`, by names ("a", "a+b"), under torchrun; rank 0 prints what was found as JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import DistributedType
from accelerate.state import AcceleratorState
from findings import Told, apart, common, error_of, owed, tell
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
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


def new_model() -> nn.Module:
    """Returns a small BERT with dropout, the same one each time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model: nn.Module = BertForSequenceClassification(BertConfig(vocab_size=50, **sizes))
    return model


def new_trainer(
    folder: str = "unused",
    plan: Any = None,
    *,
    with_gradsync: bool = True,
    timeout: float | None = None,
    given: Mapping[str, Any] | None = None,
    **changed: Any,
) -> Trainer:
    """Returns a Trainer of a small BERT; `given`: to the Trainer itself, `changed`: in its arguments."""
    kind, chosen = changed.pop("kind", Trainer), {**(given or {})}
    if "model_init" not in chosen:
        chosen.setdefault("model", new_model())
    trainer: Trainer = kind(args=arguments(folder, **changed), train_dataset=Words(), **chosen)
    if with_gradsync:
        use(trainer, plan=plan, timeout=timeout)
    return trainer


def parameters(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in trainer.model.parameters()])


def trained(trainer: Trainer, **options: Any) -> Tensor:
    torch.manual_seed(1)  # of dropout: a Trainer sets it where it is made
    trainer.train(**options)
    return parameters(trainer)


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
    late = new_trainer(with_gradsync=False)
    late.train()
    twice = new_trainer()
    elsewhere, evaluated = new_trainer(kind=OtherTrainer), new_trainer()
    evaluated.evaluate(Words())
    in_shards = new_trainer(with_gradsync=False)
    state = in_shards.accelerator.state
    kind, state.distributed_type = state.distributed_type, DistributedType.FSDP
    sharded = error_of(lambda: use(in_shards))
    state.distributed_type = kind
    return {
        "sharded": sharded,
        "late": error_of(lambda: use(late)),
        "twice": error_of(lambda: use(twice)),
        "model": error_of(lambda: use(twice.model)),
        "elsewhere": error_of(elsewhere.train),
        "evaluated": error_of(evaluated.train),
        "inner": error_of(lambda: gradsync.attach(late.model)),
    }


class RunsOutOfMemory(TrainerCallback):  # type: ignore[misc]
    """Raises in the third step, once, what torch raises; only on some ranks."""

    def __init__(self, *ranks: int) -> None:
        self.ranks: tuple[int, ...] = ranks

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Raises RuntimeError."""
        if state.global_step == 2 and dist.get_rank() in self.ranks:
            self.ranks = ()
            raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")


class Fails(TrainerCallback):  # type: ignore[misc]
    """Raises an error of the user's on rank 1 alone."""

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Raises ValueError."""
        if state.global_step == 3 and dist.get_rank() == 1:
            raise ValueError("an error of the user's")


class Few(Words):
    """A few of the words, for evaluations during training."""

    def __len__(self) -> int:
        return 32


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
BEST = {**EVALUATED, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "load_best_model_at_end": True}


def compared(trainer_of: Callable[[bool], Trainer], times: int = 2) -> dict[str, Any]:
    """Trains `times` times without gradsync, and with it, and returns how far the parameters are from each other."""
    values, steps, trainer = [], [], None
    for ours in (False, True):
        AcceleratorState._reset_state()  # which keeps the precision of the last Accelerator
        trainer = trainer_of(ours)
        for _ in range(times):
            values.append(trained(trainer))
            handle = gradsync.attachment_of(trainer.model_wrapped)
            steps += [handle.totals().steps] if handle is not None else []
    assert trainer is not None
    return {
        "difference": max(float((values[i] - values[times + i]).abs().max()) for i in range(times)),
        "apart": max(map(apart, values)),
        "steps": steps,
        "batch": trainer._train_batch_size,
    }


def varied() -> dict[str, Any]:
    """Other ways of training, twice each."""

    def stopping(ours: bool) -> Trainer:
        given = {"callbacks": [EarlyStoppingCallback(1, 10.0)], "eval_dataset": Few()}
        return new_trainer(common(), with_gradsync=ours, given=given, **BEST)

    def smaller(ours: bool) -> Trainer:
        given = {"callbacks": [RunsOutOfMemory(0, 1)]}
        return new_trainer(with_gradsync=ours, given=given, auto_find_batch_size=True)

    return {
        "best": compared(stopping),
        "smaller batch": compared(smaller, times=1),
        "new model": compared(lambda ours: new_trainer(with_gradsync=ours, given={"model_init": new_model})),
        "bf16": compared(lambda ours: new_trainer(with_gradsync=ours, bf16=True), times=1),
    }


def alone() -> dict[str, Any]:
    """Errors on rank 1 alone, where the Trainer has no collectives of its own for which rank 0 would wait."""

    def told(callback: TrainerCallback, **changed: Any) -> str:
        quiet = {"average_tokens_across_devices": False, "ddp_broadcast_buffers": False}
        trainer = new_trainer(timeout=6.0, given={"callbacks": [callback]}, **quiet, **changed)
        error = error_of(trainer.train)
        dist.barrier()
        return error

    return {"memory": told(RunsOutOfMemory(1), auto_find_batch_size=True), "callback": told(Fails())}


def searched() -> dict[str, Any]:
    """A search for hyperparameters, and one that prunes."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    rates = (0.05, 0.1)
    values: list[Tensor] = []
    steps: list[int] = []

    class Notes(TrainerCallback):  # type: ignore[misc]
        def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
            values.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
            handle = gradsync.attachment_of(model)
            steps.extend([handle.totals().steps] if handle is not None else [])

    def search(*, ours: bool, pruner: Any) -> Any:
        given = {"model_init": new_model, "eval_dataset": Few(), "callbacks": [Notes()]}
        trainer = new_trainer(with_gradsync=ours, given=given, **{**EVALUATED, "eval_steps": 4})
        return trainer.hyperparameter_search(
            lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", rates)},
            n_trials=len(rates),
            backend="optuna",
            sampler=optuna.samplers.GridSampler({"learning_rate": rates}, seed=0),
            pruner=pruner,
        )

    found = [search(ours=ours, pruner=optuna.pruners.NopPruner()) for ours in (False, True)]
    trials = len(rates)
    return {
        "difference": max(float((values[i] - values[trials + i]).abs().max()) for i in range(trials)),
        "of trials": float((values[0] - values[1]).abs().max()) > 0,
        "steps": steps,
        "same best": found[0] == found[1],
        "pruned": error_of(lambda: search(ours=True, pruner=optuna.pruners.ThresholdPruner(upper=0.0))),
    }


def adapted() -> dict[str, Any]:
    """LoRA of a model that is frozen otherwise: as with DDP, and resumed with residuals."""
    import peft

    def trainer_of(folder: str = "unused", plan: Any = None, **options: Any) -> Trainer:
        config = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
        model = peft.get_peft_model(new_model(), config)
        return new_trainer(folder, plan, given={"model": model}, **options)

    found, folder = compared(lambda ours: trainer_of(with_gradsync=ours), times=1), common()
    whole = trained(trainer_of(plan=LOSSY))
    trained(trainer_of(folder, LOSSY, save_strategy="steps", save_steps=4))
    dist.barrier()
    went_on = trained(trainer_of(folder, LOSSY), resume_from_checkpoint=str(Path(folder) / "checkpoint-4"))
    return {**found, "resumed": float((went_on - whole).abs().max())}


def compiled() -> dict[str, Any]:
    """A compiled model; an evaluation in a second `train()` makes the Trainer leave DDP out of the third."""

    def trainer_of(ours: bool) -> Trainer:
        given = {"eval_dataset": Few()}
        eager = {"torch_compile": True, "torch_compile_backend": "eager", **EVALUATED}
        last.append(new_trainer(with_gradsync=ours, given=given, **eager))
        return last[-1]

    last: list[Trainer] = []
    return {**compared(trainer_of), "third": error_of(last[-1].train)}


class Notices(TrainerCallback):  # type: ignore[misc]
    """Keeps what this rank owes when training begins and in a step."""

    def __init__(self, step: int) -> None:
        self.step, self.owed = step, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Keeps it before the step after `step`."""
        handle = gradsync.attachment_of(model)
        assert handle is not None
        if state.global_step == self.step:
            self.owed = owed(handle.state_dict())


def resized() -> dict[str, Any]:
    """Saves after four of eight steps on two ranks; goes on from there on three."""
    folder, notices = sys.argv[2], Notices(4)
    last = Path(folder) / "checkpoint-4"
    options = {"resume_from_checkpoint": str(last)} if last.exists() else {}
    dist.barrier()
    trainer = new_trainer(folder, LOSSY, given={"callbacks": [notices]}, save_strategy="steps", save_steps=4)
    values = trained(trainer, **options)
    handle = gradsync.attachment_of(trainer.model_wrapped)
    assert handle is not None
    return {"owed": notices.owed, "apart": apart(values), "steps": handle.totals().steps}


def dropped() -> dict[str, Any]:
    """Returns the warnings of one process that goes on from the checkpoint of several ranks."""
    last, told = Path(sys.argv[2]) / "checkpoint-4", Told()
    trainer = new_trainer(common(), LOSSY)
    trained(trainer, resume_from_checkpoint=str(last))
    return {"attached": gradsync.attachment_of(trainer.model_wrapped) is not None, "told": told.lines}


SCENARIOS = (equal, again, translated, resumed, refused, varied, alone, searched, adapted, compiled, resized, dropped)


def main() -> None:
    torch.set_num_threads(1)
    arguments("unused")  # which makes the process group
    known, names = {each.__name__: each for each in SCENARIOS}, sys.argv[1].split("+")
    found = {name: known[name]() for name in names}
    result = found if len(names) > 1 else found[names[0]]
    tell(result)


if __name__ == "__main__":
    main()
