"""Trains with Hugging Face's Trainer and 8-bit gradients; --exact: with whole gradients.

torchrun --nproc-per-node 2 examples/frameworks/hf_trainer.py
"""

import hashlib
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, HfArgumentParser, Trainer, TrainingArguments

import gradsync
from gradsync.compressors import QSGD
from gradsync.integrations.transformers import use
from gradsync.planner import CompressingPlanner

WORDS = 100


@dataclass
class Choice:
    exact: bool = False


class Sentences(Dataset):
    """Sentences of random words, each good or bad; a sentence has the label of most of its words."""

    def __init__(self, number: int, seed: int) -> None:
        self.words = torch.randint(WORDS, (number, 15), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = self.words[index]
        return {"input_ids": words, "labels": (words % 2).sum() // 8}


def main() -> None:
    parser = HfArgumentParser((TrainingArguments, Choice))
    parser.set_defaults(use_cpu=True, per_device_train_batch_size=16, gradient_accumulation_steps=2, max_grad_norm=0.5)
    parser.set_defaults(average_tokens_across_devices=False, logging_steps=128)
    parser.set_defaults(
        learning_rate=1e-3, num_train_epochs=12, save_strategy="no", report_to="none", disable_tqdm=True
    )
    arguments, choice = parser.parse_args_into_dataclasses()
    plan = None
    if not choice.exact:
        plan = CompressingPlanner(QSGD(levels=127), exact=("*.bias", "*LayerNorm*"), matrices_only=True)
    torch.manual_seed(arguments.seed)
    model = BertForSequenceClassification(
        BertConfig(vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
    )
    trainer = Trainer(model, arguments, train_dataset=Sentences(2048, seed=1), eval_dataset=Sentences(1024, seed=2))
    use(trainer, plan=plan)
    trainer.train()

    loss = trainer.evaluate()["eval_loss"]
    handle = gradsync.attachment_of(trainer.model_wrapped)
    if trainer.is_world_process_zero():
        if handle is not None:
            totals = handle.totals()
            print(f"{totals.steps} steps, {totals.sent_bytes / totals.steps / 1e3:.1f} kB sent in each")
            print("\n".join(handle.explain()))
        content = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
        print(f"held-out loss {loss:.4f}, parameters {hashlib.sha256(content).hexdigest()[:12]}")


if __name__ == "__main__":
    main()
