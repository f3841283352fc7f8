"""Hugging Face's Trainer on a small Llama, as a script that knows nothing of any recorder.

Sentences differ in length: the labels of their padding are -100. Samples are the same at any number of ranks,
if --batch times ranks times --accumulate is.
"""

import argparse
import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SENTENCES, LENGTH, WORDS = 64, 16, 96


def sentences() -> list[dict[str, torch.Tensor]]:
    """Return sentences of random words, each of another length, padded."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(SENTENCES):
        length = int(torch.randint(4, LENGTH + 1, (1,), generator=generator))
        words = torch.randint(1, WORDS, (LENGTH,), generator=generator)
        mask = (torch.arange(LENGTH) < length).long()
        found.append(
            {
                "input_ids": words * mask,
                "attention_mask": mask,
                "labels": words.masked_fill(mask == 0, -100),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", required=True)
    parser.add_argument("--batch", type=int, default=8, help="samples of a rank in a microbatch")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--local-mean", action="store_true", help="the loss of a rank is its own mean")
    args = parser.parse_args()
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    arguments = TrainingArguments(
        output_dir=args.output_dir,
        max_steps=6,
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=args.accumulate,
        average_tokens_across_devices=not args.local_mean,
        learning_rate=1e-3,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        ddp_backend="gloo" if "WORLD_SIZE" in os.environ else None,
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=sentences()).train()


if __name__ == "__main__":
    main()
